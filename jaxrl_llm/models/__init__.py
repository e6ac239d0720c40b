"""Decoders as pure functions. The only room that knows Flax."""

from jaxrl_llm.models.config import DTYPES, PRESETS, ModelConfig, preset
from jaxrl_llm.models.critic import Critic, make_critic
from jaxrl_llm.models.layers import KVCache
from jaxrl_llm.models.transformer import Model, make_model

__all__ = ["DTYPES", "PRESETS", "Critic", "KVCache", "Model", "ModelConfig", "make_critic", "make_model", "preset"]
