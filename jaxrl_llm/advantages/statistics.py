"""Statistics over the counted tokens of a whole batch: whitened advantages, and how well a critic explains the returns."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxrl_llm.advantages.inputs import at_least_zero, counted_tokens, divide, of_shape, real


def centred(
  x: Float[Array, "*shape"], counted: Bool[Array, "*shape"], axis: int | None = None
) -> tuple[Float[Array, "*shape"], Float[Array, "..."]]:
  """`x` less its mean over the counted entries, which alone are read, 0 elsewhere; and that mean, over one axis or over all.

  The mean keeps its axes, of length 1. Equal entries give exact zeros and their own value as the mean, because both are taken relative to
  the largest: the rounded mean of three times 0.1 is not 0.1. Without a counted entry the mean is −inf.

  Example:
    >>> [x.tolist() for x in centred(jnp.array([1., 3., jnp.nan]), jnp.array([True, True, False]))]
    [[-1.0, 1.0, 0.0], [2.0]]
  """
  largest = jnp.max(jnp.where(counted, x, -jnp.inf), axis=axis, keepdims=True, initial=-jnp.inf)
  below = jnp.where(counted, x - largest, 0)
  mean = jnp.sum(below, axis=axis, keepdims=True) / jnp.maximum(jnp.sum(counted, axis=axis, keepdims=True), 1)
  return jnp.where(counted, below - mean, 0), largest + mean


def whiten(x: ArrayLike, mask: ArrayLike, *, shift_mean: bool = True, eps: float = 1e-8) -> Float[Array, "..."]:
  """Brings the counted entries of the whole batch to mean 0 and variance 1.

  y = (x − mean x) / √(Var x + eps), with the unbiased variance

  Args:
    x: any shape, e.g. the advantages of all tokens [N, R] or of all samples [N].
    mask: the shape of x, 1 where an entry counts.
    shift_mean: False adds the mean again after scaling.
    eps: added to the variance, in squared units of x.

  Returns:
    y, 0 off the mask. Equal entries give exact zeros, or with `shift_mean=False` themselves; so does a single one. A NaN under the mask
    reaches all of them.

  Raises:
    ValueError: for a mask of another shape, and a negative eps.

  Example:
    >>> whiten(jnp.array([1., 3., 5., jnp.nan]), jnp.array([1, 1, 1, 0])).tolist()
    [-1.0, 0.0, 1.0, 0.0]

  Note:
    The formula is that of verl's `masked_whiten`, which has no answer for fewer than two entries and leaves numbers off the mask.
  """
  x = real("x", x, shape="that of mask")
  counted = counted_tokens(mask, "x", x)
  at_least_zero("eps", eps)
  y, mean = centred(x, counted)
  y = divide(y, jnp.sqrt(jnp.sum(jnp.square(y)) / jnp.maximum(jnp.sum(counted) - 1, 1) + eps))
  return y if shift_mean else jnp.where(counted, y + mean, 0)


def explained_variance(values: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> Float[Array, ""]:
  """How much of the returns' variance the critic's values explain.

  1 − Var(R̂ − V) / Var R̂

  Args:
    values: [N, R], the critic's values at rollout time, or any other shape.
    returns: the shape of values, the targets.
    mask: the shape of values, 1 where a token counts.

  Returns:
    1 for a perfect critic, 0 for a constant one, below 0 for one that is worse than a constant. Returns that do not vary leave nothing to
    explain and give 0. Finite for finite inputs; a NaN under the mask gives NaN.

  Raises:
    ValueError: for arrays of different shapes.

  Example:
    >>> explained_variance(jnp.array([0., 1.]), jnp.array([0., 2.]), jnp.ones(2)).tolist()
    0.75

  Note:
    verl divides by a variance of 0 and gets NaN.
  """
  values, returns = real("values", values, shape="that of returns"), real("returns", returns, shape="that of values")
  of_shape("returns", returns, "values", values)
  counted = counted_tokens(mask, "values", values)
  errors, _ = centred(returns - values, counted)
  returns, _ = centred(returns, counted)
  # In units of the largest deviation, because squares of small or of large returns leave float32's range.
  unit = jnp.max(jnp.abs(returns), initial=0)
  ratio = jnp.sum(jnp.square(divide(errors, unit))) / jnp.maximum(jnp.sum(jnp.square(divide(returns, unit))), jnp.finfo(returns.dtype).tiny)
  return jnp.where(unit == 0, 0, jnp.maximum(1 - ratio, jnp.finfo(ratio.dtype).min))
