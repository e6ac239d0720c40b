"""Logits filters shared by sampler and learner: temperature, top-k and top-p."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

FilterFn = Callable[..., Float[Array, "*batch V"]]
"""`(logits, keep=None, temperatures=None) -> filtered logits`; `keep` holds ids never removed."""

# Finite, so that gradients of a removed logit are 0, never NaN; exp(-1e30 - max) is exactly 0.
REMOVED = -1e30

# Number of bits of a float32 in [0, 2): the sign bit and the highest exponent bit are 0.
_BITS_BELOW_TWO = 30


def check_filter(temperature: float, top_k: int, top_p: float, *, section: str = "") -> None:
  """Checks settings of `make_filter`.

  Raises:
    ValueError: If a setting is out of range. One line, which names it behind `section`.
  """
  if not (math.isfinite(temperature) and temperature >= 0):
    raise ValueError(f"{section}temperature: found {temperature}, expected 0 (the likeliest token) or a number above 0")
  if top_k < 0:
    raise ValueError(f"{section}top_k: found {top_k}, expected 0 (keep all) or a positive number of tokens")
  if not 0 < top_p <= 1:
    raise ValueError(f"{section}top_p: found {top_p}, expected a number in (0, 1]")


def make_filter(*, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> FilterFn:
  """Makes the function that maps logits to those of the sampling distribution.

  Args:
    temperature: Divisor of the logits; 0 keeps only the likeliest token (the first in case of a
      tie), regardless of the other settings.
    top_k: Number of likeliest tokens to keep, including ties with the last; 0 keeps all.
    top_p: Probability that the smallest set of likeliest tokens to keep, after top-k, must reach; 1
      keeps all.

  Returns:
    `filter_logits(logits, keep=None, temperatures=None)`. `keep` holds ids `[*batch]` that are
    never removed. The learner passes the drawn token, because the current policy may rank it
    outside its own set, where its log-probability would be -inf. `temperatures` are numbers
    `[*batch]` that replace `temperature` row by row. Values that are not above 0 count as 0, since
    a jitted program cannot raise.

  Raises:
    ValueError: If a setting is out of range.

  Example:
    >>> logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    >>> jax.nn.softmax(make_filter(top_k=2)(logits)).round(3).tolist()
    [0.625, 0.375, 0.0]
    >>> jax.nn.softmax(make_filter(temperature=0)(logits)).tolist()
    [1.0, 0.0, 0.0]

  Note:
    The choice of kept tokens consists of comparisons and has no gradient. The gradient flows
    through the kept logits.
  """
  check_filter(temperature, top_k, top_p, section="rollout.")

  def filter_logits(
    logits: Float[Array, "*batch V"], keep: Int[Array, "*batch"] | None = None, temperatures: Float[Array, "*batch"] | None = None
  ) -> Float[Array, "*batch V"]:
    logits = logits.astype(jnp.float32)
    if temperatures is not None:
      greedy = ~(temperatures > 0)[..., None]
      logits = logits / jnp.where(greedy, 1, temperatures[..., None])
      # Greedy rows need no other filter, because the likeliest token passes them all.
      kept = jnp.where(greedy, _is_argmax(logits), _kept(logits, top_k, top_p))
    elif temperature == 0:
      kept = _is_argmax(logits)
    else:
      logits = logits if temperature == 1 else logits / temperature
      if not 0 < top_k < logits.shape[-1] and top_p == 1:
        return logits
      kept = _kept(logits, top_k, top_p)
    if keep is not None:
      kept |= jnp.arange(logits.shape[-1]) == keep[..., None]
    return jnp.where(kept, logits, REMOVED)

  return filter_logits


def filter_rows(
  logits: Float[Array, "B V"], temperatures: Float[Array, " B"], top_ks: Int[Array, " B"], top_ps: Float[Array, " B"]
) -> Float[Array, "B V"]:
  """Filters each row with settings of its own; see `make_filter`.

  The settings are data, not part of the program. A filter that no row asks for costs nothing.

  Example:
    >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]] * 3))
    >>> filtered = filter_rows(logits, jnp.array([0.0, 1.0, 1.0]), jnp.array([0, 2, 0]), jnp.array([1.0, 1.0, 0.4]))
    >>> jax.nn.softmax(filtered).round(3).tolist()
    [[1.0, 0.0, 0.0], [0.625, 0.375, 0.0], [1.0, 0.0, 0.0]]
  """
  greedy = ~(temperatures > 0)[:, None]
  logits = logits.astype(jnp.float32) / jnp.where(greedy, 1, temperatures[:, None])
  only = lambda kept: lambda logits: jnp.where(kept(logits), logits, REMOVED)
  ranks = jnp.where((top_ks > 0) & (top_ks < logits.shape[-1]), top_ks, logits.shape[-1])[:, None]
  filters = (
    (ranks < logits.shape[-1], lambda logits: logits >= _rank_threshold(logits, ranks)),
    (top_ps[:, None] < 1, lambda logits: _nucleus(logits, top_ps[:, None])),
    (greedy, _is_argmax),
  )
  for wanted, kept in filters:
    within = only(lambda logits, wanted=wanted, kept=kept: ~wanted | kept(logits))
    logits = jax.lax.cond(jnp.any(wanted), within, lambda logits: logits, logits)
  return logits


def _rank_threshold(logits: Float[Array, "B V"], ranks: Int[Array, "B 1"]) -> Float[Array, "B 1"]:
  """Returns the logit of the given rank of each row, from 1, without sorting the vocabulary.

  Floats are ordered like integers once the bits of negative ones are inverted. The result is the
  largest number that at least `ranks` logits reach, found bit by bit as in `_nucleus`.
  """
  top = jnp.uint32(1 << 31)
  bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
  order = jnp.where(bits >= top, ~bits, bits | top)

  def refine(i, low: Integer[Array, "B 1"]) -> Integer[Array, "B 1"]:
    trial = low | (top >> i.astype(jnp.uint32))
    return jnp.where(jnp.sum(order >= trial, axis=-1, keepdims=True) >= ranks, trial, low)

  low = jax.lax.fori_loop(0, 32, refine, jnp.zeros(ranks.shape, jnp.uint32))
  return jax.lax.bitcast_convert_type(jnp.where(low >= top, low ^ top, ~low), jnp.float32)


def _is_argmax(logits: Float[Array, "*batch V"]) -> Bool[Array, "*batch V"]:
  # Two plain reductions take a quarter of the time of `argmax`, which reduces pairs.
  ids, size = jnp.arange(logits.shape[-1]), logits.shape[-1]
  first = jnp.min(jnp.where(logits == jnp.max(logits, axis=-1, keepdims=True), ids, size), axis=-1, keepdims=True)
  return ids == first


def _kept(logits: Float[Array, "*batch V"], top_k: int, top_p: float) -> Bool[Array, "*batch V"]:
  logits = jax.lax.stop_gradient(logits)
  if 0 < top_k < logits.shape[-1]:
    return logits >= _top_k_threshold(logits, top_k, top_p)
  return _nucleus(logits, top_p) if top_p < 1 else jnp.ones(logits.shape, bool)


def _top_k_threshold(logits: Float[Array, "*batch V"], top_k: int, top_p: float) -> Float[Array, "*batch 1"]:
  """Returns the lowest logit that top-k and then top-p keep.

  The k likeliest logits determine it, except for the number of others that tie with the k-th.
  """
  # The barrier hides from the compiler which of the k are used: it would otherwise sort the whole
  # vocabulary.
  ranked = jax.lax.optimization_barrier(jax.lax.top_k(logits, top_k)[0])
  if top_p == 1:
    return ranked[..., -1:]
  ties = jnp.sum(logits >= ranked[..., -1:], axis=-1, keepdims=True) - top_k
  masses = jnp.exp(ranked - ranked[..., :1])
  total = jnp.sum(masses, axis=-1, keepdims=True) + ties * masses[..., -1:]
  # A token stays while the mass ranked strictly above it has not reached p, so the likeliest always
  # stays.
  in_nucleus = jnp.cumsum(masses, axis=-1) - masses < top_p * total
  return jnp.min(jnp.where(in_nucleus, ranked, jnp.inf), axis=-1, keepdims=True)


def _nucleus(logits: Float[Array, "*batch V"], top_p: float | Float[Array, "*batch 1"]) -> Bool[Array, "*batch V"]:
  """Returns which tokens have less than mass p above them, without sorting the vocabulary.

  kept = {v : Σ_{u : p_u > p_v} p_u < top_p} = {v : p_v > x}

  Here x is the largest float with Σ_{u : p_u > x} p_u ≥ top_p. Non-negative floats are ordered like
  their bits, so x is found bit by bit. Each bit takes one masked sum over the vocabulary, and the
  result is exact.
  """
  masses = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))  # At most 1, so below 2.
  wanted = top_p * jnp.sum(masses, axis=-1, keepdims=True)
  as_float = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32)

  def refine(i, bits: Int[Array, "*batch 1"]) -> Int[Array, "*batch 1"]:
    trial = bits | (1 << (_BITS_BELOW_TWO - 1 - i))
    above = jnp.sum(jnp.where(masses > as_float(trial), masses, 0), axis=-1, keepdims=True)
    return jnp.where(above >= wanted, trial, bits)

  bits = jax.lax.fori_loop(0, _BITS_BELOW_TWO, refine, jnp.zeros(wanted.shape, jnp.int32))
  return masses > as_float(bits)
