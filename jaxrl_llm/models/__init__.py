"""Decoders as pure functions. The only room that knows Flax."""

from jaxrl_llm.models.config import DTYPES, Experts, Lora, ModelConfig, RopeScaling
from jaxrl_llm.models.critic import Critic, make_critic
from jaxrl_llm.models.layers import KVCache
from jaxrl_llm.models.lora import merge
from jaxrl_llm.models.presets import PRESETS, preset
from jaxrl_llm.models.transformer import Model, make_model

__all__ = [
  "DTYPES", "PRESETS", "Critic", "Experts", "KVCache", "Lora", "Model", "ModelConfig", "RopeScaling", "make_critic", "make_model",
  "merge", "preset",
]  # fmt: skip
