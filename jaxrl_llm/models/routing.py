"""Routings (the experts that each token visits) as arrays `[B T L K]`, and their metrics.

L counts all layers of the model. Layers without experts and slots without a recorded route hold -1:
there the live router decides.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.types import Metrics

LIVE = -1
"""Value in place of an expert's index that leaves the choice to the live router."""


def recorded(routing: Int[Array, "*batch K"]) -> Bool[Array, "*batch"]:
  """Returns which routes can be replayed; a route with any -1 in it is chosen live."""
  return jnp.all(routing >= 0, axis=-1)


def replayed(routing: Int[Array, "*batch K"] | None, live: Int[Array, "*batch K"]) -> Int[Array, "*batch K"]:
  """Returns the experts to visit: the recorded ones if there are any, else the live router's."""
  if routing is None:
    return live
  return jnp.where(recorded(routing)[..., None], routing.astype(live.dtype), live)


def overlap(a: Int[Array, "*batch L K"], b: Int[Array, "*batch L K"]) -> Float[Array, "*batch L"]:
  """Computes |A ∩ B| / K of two routings.

  It is 1 for the same experts in any order, and 0 if either routing is not recorded.

  Example:
    >>> overlap(jnp.array([[0, 1]]), jnp.array([[1, 2]])).tolist()
    [0.5]
  """
  same = (a[..., :, None] == b[..., None, :]) & (a[..., :, None] >= 0)
  return jnp.sum(same, axis=(-1, -2), dtype=jnp.float32) / a.shape[-1]


def expert_change(a: Int[Array, "B T L K"], b: Int[Array, "B T L K"]) -> Float[Array, "B T"]:
  """Computes 1 − |A ∩ B| / K, the mean over the layers recorded in both; 0 if there are none.

  References:
    Group sequence policy optimization, arXiv:2507.18071, 2025, section 5.3.
  """
  both = recorded(a) & recorded(b)
  changed = jnp.sum(jnp.where(both, 1 - overlap(a, b), 0), axis=-1)
  return changed / jnp.maximum(jnp.sum(both, axis=-1), 1)


def fallback(routing: Int[Array, "B T L K"], sparse_layers: tuple[int, ...]) -> Float[Array, "B T"]:
  """Returns the fraction of a token's routes for which replay falls back on the live router.

  These are the routes that were not recorded.
  """
  return 1 - jnp.mean(recorded(routing)[..., jnp.array(sparse_layers)], axis=-1)


def usage(routing: Int[Array, "B T L K"], mask: Float[Array, "B T"], *, num_experts: int, sparse_layers: tuple[int, ...]) -> Metrics:
  """Measures how evenly the counted tokens, those with mask 1, use the experts.

  Returns:
    `moe/load_max`: load of the busiest expert in multiples of an even share, mean over layers, from
    1 to E/K. `moe/load_entropy`: entropy of the loads over log E, mean over layers; 1 is even.
    `moe/unused`: fraction of experts that no counted token visited.
  """
  routes = routing[..., jnp.array(sparse_layers), :]
  counted = jnp.broadcast_to(mask[..., None, None], routes.shape)
  layers = jnp.broadcast_to(jnp.arange(len(sparse_layers))[:, None], routes.shape)
  counts = jnp.zeros((len(sparse_layers), num_experts)).at[layers, jnp.maximum(routes, 0)].add(counted * (routes >= 0))
  loads = counts / jnp.maximum(jnp.sum(counts, axis=-1, keepdims=True), 1)
  entropy = -jnp.sum(jax.scipy.special.xlogy(loads, loads), axis=-1) / jnp.log(num_experts)
  return {
    "moe/load_max": jnp.mean(jnp.max(loads, axis=-1)) * num_experts,
    "moe/load_entropy": jnp.mean(entropy),
    "moe/unused": jnp.mean(counts == 0),
  }


def travelled(segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
  """Returns 1 for tokens whose routes affect a later token, else 0.

  These are all tokens except padding (segment 0) and the last token of each sequence.

  Example:
    >>> travelled(jnp.array([[1, 1, 2, 2, 0]])).tolist()
    [[1.0, 0.0, 1.0, 0.0, 0.0]]
  """
  following = jnp.roll(segments, -1, axis=1).at[:, -1].set(0)
  return ((segments > 0) & (segments == following)).astype(jnp.float32)


def comparison(a: Int[Array, "B T L K"], b: Int[Array, "B T L K"], segments: Int[Array, "B T"]) -> Float[Array, ""]:
  """Averages `expert_change` over the tokens whose routes matter and are recorded in both."""
  both = jnp.any(recorded(a) & recorded(b), axis=-1) * travelled(segments)
  return jnp.sum(expert_change(a, b) * both) / jnp.maximum(jnp.sum(both), 1)


def replay_metrics(routing: Int[Array, "B T L K"], segments: Int[Array, "B T"], *, sparse_layers: tuple[int, ...]) -> Metrics:
  """Returns the size of the routing in megabytes, and the fraction of routes chosen live."""
  counts = travelled(segments)
  fallbacks = jnp.sum(fallback(routing, sparse_layers) * counts) / jnp.maximum(jnp.sum(counts), 1)
  return {"moe/replay_fallback": fallbacks, "moe/replay_mb": jnp.float32(routing.size * routing.dtype.itemsize / 1e6)}
