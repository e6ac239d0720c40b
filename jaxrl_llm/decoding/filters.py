"""Logits filters of the sampler, the engine and the learner: temperature, top-k and top-p."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

FilterFn = Callable[..., Float[Array, "*batch V"]]
"""`(logits, keep=None, temperatures=None) -> filtered logits`; `keep` holds ids never removed."""

# Finite, so that gradients of a removed logit are 0, never NaN; exp(-1e30 - max) is exactly 0.
REMOVED = -1e30

LEAST_TEMPERATURE = 1e-5
"""Temperatures below this are 0, because logits divided by them could overflow."""

# Smallest normal float32: as a top-p, it keeps the likeliest token alone, as any below it would.
_LEAST_MASS = float(jnp.finfo(jnp.float32).tiny)

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
  """Makes `filter_logits` with checked settings that are part of the program.

  Returns:
    `(logits, keep=None, temperatures=None) -> filtered logits`; `temperatures` replace
    `temperature` row by row.

  Raises:
    ValueError: If a setting is out of range.

  Example:
    >>> logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    >>> jax.nn.softmax(make_filter(top_k=2)(logits)).round(3).tolist()
    [0.625, 0.375, 0.0]
    >>> jax.nn.softmax(make_filter(temperature=0)(logits)).tolist()
    [1.0, 0.0, 0.0]
  """
  check_filter(temperature, top_k, top_p, section="rollout.")

  def filter_fn(
    logits: Float[Array, "*batch V"], keep: Int[Array, "*batch"] | None = None, temperatures: Float[Array, "*batch"] | None = None
  ) -> Float[Array, "*batch V"]:
    divisors = temperature if temperatures is None else temperatures
    return filter_logits(logits, temperature=divisors, top_k=top_k, top_p=top_p, keep=keep)

  return filter_fn


def filter_logits(
  logits: Float[Array, "*batch V"],
  *,
  temperature: float | Float[Array, "*batch"] = 1.0,
  top_k: int | Int[Array, "*batch"] = 0,
  top_p: float | Float[Array, "*batch"] = 1.0,
  keep: Int[Array, "*batch"] | None = None,
) -> Float[Array, "*batch V"]:
  """Maps logits to those of the sampling distribution.

  A setting is a number, which is part of the program, or an array with an entry for each row, which
  is data. A filter that no row asks for costs nothing, and a number that asks for none leaves
  nothing in the program.

  Args:
    logits: Logits of the model.
    temperature: Divisor of the logits; 0 keeps only the likeliest token (the first in case of a
      tie), regardless of the other settings. Numbers below `LEAST_TEMPERATURE` count as 0, and so
      do those of an array that are none, since a program cannot raise.
    top_k: Number of likeliest tokens to keep, including ties with the last; 0 keeps all.
    top_p: Probability that the smallest set of likeliest tokens to keep, after top-k, must reach; 1
      keeps all.
    keep: Ids that are never removed. The learner passes the drawn token, because the current policy
      may rank it outside its own set, where its log-probability would be -inf.

  Example:
    >>> logits, settings = jnp.log(jnp.array([[0.5, 0.3, 0.2]] * 3)), jnp.array([[0, 1, 1], [1, 1, 0.4]])
    >>> filtered = filter_logits(logits, temperature=settings[0], top_k=jnp.array([0, 2, 0]), top_p=settings[1])
    >>> jax.nn.softmax(filtered).round(3).tolist()
    [[1.0, 0.0, 0.0], [0.625, 0.375, 0.0], [1.0, 0.0, 0.0]]

  Note:
    The choice of kept tokens consists of comparisons and has no gradient. The gradient flows
    through the kept logits.
  """
  size, is_static = logits.shape[-1], lambda setting: isinstance(setting, int | float)
  by_row = lambda setting: setting if is_static(setting) else setting[..., None]
  temperature, top_k, top_p = map(by_row, (temperature, top_k, top_p))
  scaled = logits.astype(jnp.float32)
  if is_static(temperature):
    greedy = temperature < LEAST_TEMPERATURE
    scaled = scaled if greedy or temperature == 1 else scaled / temperature
  else:
    greedy = ~(temperature >= LEAST_TEMPERATURE)
    scaled = scaled / jnp.where(greedy, 1, temperature)
  top_p = max(top_p, _LEAST_MASS) if is_static(top_p) else jnp.maximum(top_p, _LEAST_MASS)
  is_ranked, is_nucleus = (top_k > 0) & (top_k < size), top_p < 1
  if not is_static(top_k):
    ranks = jnp.where(is_ranked, top_k, size)
    threshold = lambda logits: _rank_threshold(logits, ranks)
  elif is_ranked and is_static(top_p):  # The k likeliest serve for both.
    is_nucleus, threshold = False, lambda logits: _top_k_threshold(logits, top_k, top_p)
  else:
    threshold = lambda logits: _top_k_threshold(logits, top_k, 1)
  filters = (
    (is_ranked, lambda logits: logits >= threshold(logits)),
    (is_nucleus, lambda logits: _nucleus(logits, top_p)),
    (greedy, _is_argmax),  # The likeliest token passes the others.
  )
  filtered = scaled
  for asked, kept in filters[2:] if greedy is True else filters:
    only = lambda x, kept=kept: jnp.where(kept(jax.lax.stop_gradient(x)), x, REMOVED)
    if asked is True:
      filtered = only(filtered)
    elif asked is not False:
      filtered = jax.lax.cond(jnp.any(asked), lambda x, only=only, asked=asked: jnp.where(asked, only(x), x), lambda x: x, filtered)
  if keep is None or filtered is scaled:
    return filtered
  return jnp.where(jnp.arange(size) == keep[..., None], scaled, filtered)


def _rank_threshold(logits: Float[Array, "*batch V"], ranks: Int[Array, "*batch 1"]) -> Float[Array, "*batch 1"]:
  """Returns the logit of the given rank of each row, from 1, without sorting the vocabulary.

  Floats are ordered like integers once the bits of negative ones are inverted. The result is the
  largest number that at least `ranks` logits reach, found bit by bit as in `_nucleus`.
  """
  top = jnp.uint32(1 << 31)
  bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
  order = jnp.where(bits >= top, ~bits, bits | top)

  def refine(i, low: Integer[Array, "*batch 1"]) -> Integer[Array, "*batch 1"]:
    trial = low | (top >> i.astype(jnp.uint32))
    return jnp.where(jnp.sum(order >= trial, axis=-1, keepdims=True) >= ranks, trial, low)

  low = jax.lax.fori_loop(0, 32, refine, jnp.zeros(ranks.shape, jnp.uint32))
  return jax.lax.bitcast_convert_type(jnp.where(low >= top, low ^ top, ~low), jnp.float32)


def _is_argmax(logits: Float[Array, "*batch V"]) -> Bool[Array, "*batch V"]:
  # Two plain reductions take a quarter of the time of `argmax`, which reduces pairs.
  ids, size = jnp.arange(logits.shape[-1]), logits.shape[-1]
  first = jnp.min(jnp.where(logits == jnp.max(logits, axis=-1, keepdims=True), ids, size), axis=-1, keepdims=True)
  return ids == first


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
