"""Batches of an objective from plain arrays."""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.types import PolicyOutputs, TrainBatch


def as_batch(arrays):
  """Converts arrays by name, such as those of `make_batch`, to `(PolicyOutputs, TrainBatch)`."""
  ids = jnp.ones(arrays["mask"].shape, jnp.int32)
  arrays = dict.fromkeys(("tokens", "positions", "segments"), ids) | {name: jnp.asarray(x) for name, x in arrays.items()}
  fields_of = lambda kind: {name: x for name, x in arrays.items() if name in kind._fields}
  return PolicyOutputs(**fields_of(PolicyOutputs)), TrainBatch(**fields_of(TrainBatch))


def with_junk(arrays):
  """Replaces the values outside the mask, which no result may depend on."""
  junk = np.resize([1e4, -np.inf, np.nan, np.inf, -1e4], arrays["mask"].shape)
  return {name: x if name in ("mask", "segments") else np.where(arrays["mask"] > 0, x, junk) for name, x in arrays.items()}
