"""Decoders as pure functions, and their checkpoints. The only package that depends on Flax."""

from jaxrl_llm.kernels.types import KeyValues
from jaxrl_llm.models.cache import CACHE_DTYPES, Cache, View
from jaxrl_llm.models.config import DTYPES, Experts, Lora, ModelConfig, RopeScaling
from jaxrl_llm.models.critic import Critic, make_critic
from jaxrl_llm.models.files.loading import load, load_params, logits, read_config
from jaxrl_llm.models.files.saving import save_hf
from jaxrl_llm.models.linear import lower_precision
from jaxrl_llm.models.lora import merge, reference, trainable
from jaxrl_llm.models.model import Model, make_model
from jaxrl_llm.models.presets import PRESETS, preset
from jaxrl_llm.models.reward_model import RewardModel, load_reward_params, make_reward_model, read_reward_config, save_reward_model

__all__ = [
  "CACHE_DTYPES", "DTYPES", "PRESETS", "Cache", "Critic", "Experts", "KeyValues", "Lora", "Model", "ModelConfig", "RewardModel",
  "RopeScaling", "View", "load", "load_params", "load_reward_params", "logits", "lower_precision", "make_critic", "make_model",
  "make_reward_model", "merge", "preset", "read_config", "read_reward_config", "reference", "save_hf", "save_reward_model", "trainable",
]  # fmt: skip
