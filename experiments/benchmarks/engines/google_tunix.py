"""Worker for the vanilla sampler of google-tunix (`tunix.generate.sampler`) with its own Qwen3.

It uses the settings that suit tunix best: prompts padded to the longest and not to the next power
of two, a cache no longer than prompt and response, no echo, and top_p=1 and top_k=None, with which
it draws without sorting. The sampler takes text, so that ids are passed as numbers. It prefills
each prompt once per sample, because it knows no groups.
"""

import json
import pathlib
from typing import Any

import numpy as np

from experiments.benchmarks.engines.job import Job, read_prompts
from experiments.benchmarks.engines.worker import Engine, Generated, serve

NO_STOP = -1  # An id that no token has.


class IdTokenizer:
  """Tokenizer for text that consists of ids, with the interface of tunix's adapter."""

  def __init__(self, pad_id: int, eos_id: int):
    self._pad_id, self._eos_id = pad_id, eos_id

  def encode(self, text: str) -> list[int]:
    """Parses ids separated by spaces."""
    return [int(part) for part in text.split()]

  def decode(self, ids: list[int]) -> str:
    """Returns no text: the benchmark reads ids, so that no time should go into text."""
    del ids
    return ""

  def bos_id(self) -> None:
    """Returns None, because the prompts are complete."""

  def eos_id(self) -> int:
    """Returns the id that ends a response if the caller names no stop ids."""
    return self._eos_id

  def pad_id(self) -> int:
    """Returns the id that fills slots on the left."""
    return self._pad_id


def load_model(checkpoint: str, dtype: str) -> tuple[Any, dict[str, Any]]:
  """Loads tunix's Qwen3 with the weights of a checkpoint.

  Returns:
    The model, and the content of config.json.
  """
  import jax
  import jax.numpy as jnp
  from tunix.models.qwen3 import model as model_lib
  from tunix.models.qwen3 import params as params_lib

  raw = json.loads((pathlib.Path(checkpoint) / "config.json").read_text())
  if raw.get("model_type") != "qwen3":
    raise ValueError(
      f"{checkpoint}: found model_type {raw.get('model_type')!r}, expected 'qwen3', which this worker passes to tunix"
    )
  config = model_lib.ModelConfig(
    num_layers=raw["num_hidden_layers"],
    vocab_size=raw["vocab_size"],
    embed_dim=raw["hidden_size"],
    hidden_dim=raw["intermediate_size"],
    num_heads=raw["num_attention_heads"],
    head_dim=raw["head_dim"],
    num_kv_heads=raw["num_key_value_heads"],
    rope_theta=raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"],
    norm_eps=raw["rms_norm_eps"],
    use_tied_embedding=raw["tie_word_embeddings"],
    dtype=jnp.dtype(dtype),
    param_dtype=jnp.dtype(dtype),
  )
  mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  return params_lib.create_model_from_safe_tensors(checkpoint, config, mesh, dtype=jnp.dtype(dtype)), raw


def load(job: Job) -> Engine:
  """Loads the weights and the prompts, and makes the sampler."""
  from importlib import metadata

  import jax
  from tunix.generate import sampler as sampler_lib

  model, raw = load_model(job.checkpoint, job.dtype)
  config = model.config
  rows = read_prompts(job, vocab_size=config.vocab_size, max_positions=raw.get("max_position_embeddings"))
  longest = max(len(row) for row in rows)
  cache = sampler_lib.CacheConfig(
    longest + job.max_new_tokens, config.num_layers, config.num_kv_heads, config.head_dim
  )
  stop_ids = list(job.stop_ids) or [NO_STOP]
  sampler = sampler_lib.Sampler(model, IdTokenizer(job.pad_id, stop_ids[0]), cache)
  texts = [" ".join(map(str, row)) for row in rows for _ in range(job.group_size)]

  def generate(seed: int) -> Generated:
    output = sampler(
      texts,
      max_generation_steps=job.max_new_tokens,
      max_prompt_length=longest,
      return_logprobs=True,
      eos_tokens=stop_ids,
      temperature=job.temperature,
      top_p=job.top_p,
      top_k=job.top_k or None,
      seed=seed,
    )
    # Tunix's output ends before the stop token, which was drawn as well.
    lengths = np.array([min(len(row) + 1, job.max_new_tokens) for row in output.tokens])
    logprobs = np.concatenate([np.asarray(row) for row in output.logprobs])
    return Generated(lengths, float(np.mean(logprobs)) if len(logprobs) else float("nan"))

  versions = f"google-tunix {metadata.version('google-tunix')}, JAX {jax.__version__} on {jax.devices()[0].device_kind}"
  return Engine(versions, generate)


if __name__ == "__main__":
  serve(load)
