"""The softmax over keys, part by part: the one order of sums in which plain programs attend.

A query's scores are computed for blocks of keys that begin at the start of its sequence, one block
after the other. Two programs in this order get the same bits, unless a product of another size adds
in an order of its own.
"""

from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.kernels.precision import in_parts, precision_of
from jaxrl_llm.kernels.types import Partial
from jaxrl_llm.kernels.visibility import MASKED

CPU_BLOCK = 64
"""Number of keys of a block on a CPU, few enough to stay in its cache."""

_LEAST_WIDTH = 16
"""Least number of columns of a product that a CPU adds up in one order for any number of rows."""


def nothing_of(q: Float[Array, "*queries C"]) -> Partial:
  """Returns the part of no keys, which changes no sum."""
  zeros = jnp.zeros(q.shape, jnp.float32)
  return Partial(jnp.full(q.shape[:-1], MASKED, jnp.float32), zeros[..., 0], zeros)


def joined(before: Partial | None, scores: Float[Array, "*queries S"], mix: Callable[[Array], Array]) -> Partial:
  """Adds a block of keys to a part.

  Args:
    before: Part of the keys before them; None if there are none.
    scores: Scores of the block, `MASKED` for keys that are not seen.
    mix: Function from the weights of the block, [*queries S], to its Σ weight·v.

  References:
    FlashAttention-2, arXiv:2307.08691, 2023.

  Example:
    >>> v = jnp.array([[1.0], [3.0]])
    >>> part = joined(None, jnp.log(jnp.array([[0.5, 0.5]])), lambda w: w @ v)
    >>> mean_of(part).tolist()
    [[2.0]]
  """
  # Any number in its place gives the same softmax, so no gradient flows through the maximum.
  top = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
  top = top if before is None else jnp.maximum(before.top, top)
  weights = jnp.exp(scores - top[..., None])
  total, mixed = jnp.sum(weights, axis=-1), mix(weights)
  if before is None:
    return Partial(top, total, mixed)
  shrink = jnp.exp(before.top - top)
  return Partial(top, before.total * shrink + total, before.mix * shrink[..., None] + mixed)


def mean_of(part: Partial, total: Float[Array, "*queries"] | None = None) -> Float[Array, "*queries C"]:
  """Returns Σ weight·v / Σ weight of a part, or of its sums with another total."""
  # By the reciprocal, as XLA computes some of these quotients, and not others.
  return part.mix * (1 / (part.total if total is None else total))[..., None]


def scored(q: Float[Array, "*batch R C"], k: Float[Array, "*batch S C"]) -> Float[Array, "*batch R S"]:
  """Computes the scores q·k / √C of queries and keys in float32."""
  scores = jnp.einsum("...rc,...sc->...rs", q, k, precision=precision_of(q, k), preferred_element_type=jnp.float32)
  return scores * q.shape[-1] ** -0.5


def mixed(weights: Float[Array, "*batch R S"], v: Float[Array, "*batch S C"]) -> Float[Array, "*batch R C"]:
  """Computes Σ weight·v in float32, of weights that are rounded no further than to 16 bits."""
  width, parts = v.shape[-1], in_parts(weights, v.dtype)
  weights = jnp.concatenate(parts, axis=-2)
  v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, max(_LEAST_WIDTH - width, 0))])
  mix = jnp.einsum("...rs,...sc->...rc", weights, v, precision=precision_of(weights, v), preferred_element_type=jnp.float32)
  return reduce(jnp.add, jnp.split(mix[..., :width], len(parts), axis=-2))
