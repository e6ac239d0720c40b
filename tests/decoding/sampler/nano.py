"""Small models whose distributions are neither flat nor a single token, and prompts for them."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import Experts, make_model, preset

PAD = 256
LENGTHS = (6, 3, 1, 4, 2, 6, 5, 3)
CONFIGS = {
  "dense": preset("nano", vocab_size=264),
  "window": preset("nano-window", vocab_size=264),
  "moe": preset("nano-moe", vocab_size=264)._replace(experts=Experts(8, 2, 16, layers=(1,))),
}


class Chain(NamedTuple):
  """The part of `models.Model` that the sampler calls; its logits are a token's row of a table."""

  prefill: Callable = lambda table, tokens, mask, dtype: (jnp.zeros(()), None)
  decode: Callable = lambda table, tokens, positions, cache, **_: (table[tokens], cache + 1, None)
  config: SimpleNamespace = SimpleNamespace(dtype="float32", experts=None, exact=False)
  mesh: jax.sharding.Mesh | None = None
  grow: Callable = lambda cache, *_, **__: cache
  resume: Callable = lambda table, tokens, mask, cache: cache
  map_prompts: Callable = lambda function, cache: cache
  decoding_weights: Callable = lambda table: table
  whole_rows: Callable = lambda x: x


def weights_of(model, scale=0.2):
  rng = np.random.default_rng(0)
  neutral = 0 if model.config.centred_norms else 1
  draw = lambda path, p: jnp.asarray(neutral * (path[-1].key == "scale") + scale * rng.standard_normal(p.shape), jnp.float32)
  return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0)))


@functools.cache
def built(kind="dense", **axes):
  """Returns a model and its weights, on one device or on a mesh with these axes."""
  mesh = mesh_lib.make_mesh(**axes) if axes else None
  model = make_model(CONFIGS[kind], mesh=mesh)
  params = weights_of(model)
  return model, params if mesh is None else jax.device_put(params, mesh_lib.param_shardings(mesh, model.logical_axes, params))


def prompts_of(lengths=LENGTHS, width=6):
  """Returns prompts of these lengths, padded on the left, and their mask."""
  rng = np.random.default_rng(1)
  prompts, mask = np.full((len(lengths), width), PAD, np.int32), np.zeros((len(lengths), width), bool)
  for row, length in enumerate(lengths):
    prompts[row, width - length :], mask[row, width - length :] = rng.integers(256, size=length), True
  return jnp.asarray(prompts), jnp.asarray(mask)
