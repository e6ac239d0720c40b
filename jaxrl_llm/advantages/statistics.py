"""Statistics over the counted tokens of a whole batch: whitening and explained variance."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxrl_llm.advantages.inputs import at_least_zero, counted_tokens, divide, of_shape, real


def centred(
  x: Float[Array, "*shape"], counted: Bool[Array, "*shape"], axis: int | None = None
) -> tuple[Float[Array, "*shape"], Float[Array, "..."]]:
  """Returns `x` minus its mean over the counted entries, and that mean.

  Only counted entries are read; the others become 0. The mean is over one axis or over all, and
  keeps its axes with length 1. Equal entries give exact zeros and their own value as the mean,
  because both are computed relative to the largest entry: the rounded mean of three values of 0.1
  is not 0.1. Without a counted entry the mean is −inf.

  Example:
    >>> [x.tolist() for x in centred(jnp.array([1., 3., jnp.nan]), jnp.array([True, True, False]))]
    [[-1.0, 1.0, 0.0], [2.0]]
  """
  largest = jnp.max(jnp.where(counted, x, -jnp.inf), axis=axis, keepdims=True, initial=-jnp.inf)
  below = jnp.where(counted, x - largest, 0)
  mean = jnp.sum(below, axis=axis, keepdims=True) / jnp.maximum(jnp.sum(counted, axis=axis, keepdims=True), 1)
  return jnp.where(counted, below - mean, 0), largest + mean


def whiten(x: ArrayLike, mask: ArrayLike, *, shift_mean: bool = True, eps: float = 1e-8) -> Float[Array, "..."]:
  """Normalises the counted entries of the whole batch to mean 0 and variance 1.

  y = (x − mean x) / √(Var x + eps), with the unbiased variance

  Args:
    x: Array of any shape, such as the advantages of all tokens [N, R] or of all samples [N].
    mask: 1 if an entry counts, in the shape of x.
    shift_mean: Whether to shift the mean to 0. False adds the mean back after scaling.
    eps: Constant added to the variance, in squared units of x.

  Returns:
    y, which is 0 outside the mask. Equal entries, or a single entry, give exact zeros, or their own
    value if `shift_mean=False`. A NaN inside the mask reaches all counted entries.

  Raises:
    ValueError: If the mask has another shape, or eps is negative.

  Example:
    >>> whiten(jnp.array([1., 3., 5., jnp.nan]), jnp.array([1, 1, 1, 0])).tolist()
    [-1.0, 0.0, 1.0, 0.0]

  Note:
    The formula is that of verl's `masked_whiten`, which does not handle fewer than two entries and
    leaves nonzero values outside the mask.
  """
  x = real("x", x, shape="that of mask")
  counted = counted_tokens(mask, "x", x)
  at_least_zero("eps", eps)
  y, mean = centred(x, counted)
  y = divide(y, jnp.sqrt(jnp.sum(jnp.square(y)) / jnp.maximum(jnp.sum(counted) - 1, 1) + eps))
  return y if shift_mean else jnp.where(counted, y + mean, 0)


def explained_variance(values: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> Float[Array, ""]:
  """Returns the fraction of the returns' variance that the critic's values explain.

  1 − Var(R̂ − V) / Var R̂

  Args:
    values: Critic's values at rollout time, [N, R] or any other shape.
    returns: Value targets, in the shape of values.
    mask: 1 if a token counts, in the shape of values.

  Returns:
    1 for a perfect critic, 0 for a constant one, below 0 for one that is worse than a constant.
    Constant returns have no variance to explain and give 0. The result is finite for finite inputs;
    a NaN inside the mask gives NaN.

  Raises:
    ValueError: If the shapes differ.

  Example:
    >>> explained_variance(jnp.array([0., 1.]), jnp.array([0., 2.]), jnp.ones(2)).tolist()
    0.75

  Note:
    For constant returns, verl divides by 0 and gets NaN.
  """
  values, returns = real("values", values, shape="that of returns"), real("returns", returns, shape="that of values")
  of_shape("returns", returns, "values", values)
  counted = counted_tokens(mask, "values", values)
  errors, _ = centred(returns - values, counted)
  returns, _ = centred(returns, counted)
  # Use the largest deviation as the unit, because squares of very small or large returns leave the
  # range of float32.
  unit = jnp.max(jnp.abs(returns), initial=0)
  ratio = jnp.sum(jnp.square(divide(errors, unit))) / jnp.maximum(jnp.sum(jnp.square(divide(returns, unit))), jnp.finfo(returns.dtype).tiny)
  return jnp.where(unit == 0, 0, jnp.maximum(1 - ratio, jnp.finfo(ratio.dtype).min))
