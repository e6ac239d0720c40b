"""What the estimators take: real numbers in float32 at least, whole groups, one shape with the mask. Every refusal is one line."""

import numbers
from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float


def real(name: str, x: ArrayLike | Sequence, *, shape: str, ndim: int | None = None) -> Float[Array, "..."]:
  """Real numbers, whole ones and booleans included, as an array of float32, or of float64 where it is one.

  Messages say the name and, in words, the shape; without `ndim` any number of axes is taken.

  Raises:
    ValueError: for complex numbers, and for another number of axes.

  Example:
    >>> real("kl", jnp.ones(3), shape="[N, R]", ndim=2)
    Traceback (most recent call last):
      ...
    ValueError: kl: found shape (3,), expected [N, R]
  """
  x = jnp.asarray(x)
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    raise ValueError(f"{name}: found {x.dtype}, expected real numbers")
  if ndim is not None and x.ndim != ndim:
    raise ValueError(f"{name}: found shape {x.shape}, expected {shape}")
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def of_shape(name: str, x: Array, other_name: str, other: Array) -> Array:
  """`x`, or a ValueError where its shape is not that of `other`."""
  if x.shape != other.shape:
    raise ValueError(f"{name}: found shape {x.shape}, expected {other.shape}, the shape of {other_name}")
  return x


def counted_tokens(mask: ArrayLike, other_name: str, other: Array) -> Bool[Array, "..."]:
  """True where a token counts."""
  return of_shape("mask", jnp.asarray(mask), other_name, other) > 0


def whole_number(name: str, x: int, *, low: int, high: int | None = None, because: str = "") -> int:
  """`x`, or a ValueError where it is no whole number from `low` to `high`."""
  if isinstance(x, bool) or not isinstance(x, numbers.Integral) or x < low or (high is not None and x > high):
    limits = f">= {low}" if high is None else f"from {low} to {high}"
    raise ValueError(f"{name}: found {x!r}, expected a whole number {limits}{because}")
  return int(x)


def at_least_zero(name: str, x: float) -> None:
  """A ValueError where `x` is negative or NaN."""
  if not x >= 0:
    raise ValueError(f"{name}: found {x!r}, expected a number >= 0")


def fraction(name: str, x: float) -> None:
  """A ValueError where `x` is not from 0 to 1."""
  if not 0 <= x <= 1:
    raise ValueError(f"{name}: found {x!r}, expected a number from 0 to 1")


def whole_groups(name: str, num_samples: int, group_size: int, shape: tuple[int, ...], expected: str) -> None:
  """A ValueError where `num_samples` do not fall into groups of `group_size`."""
  whole_number("group_size", group_size, low=1)
  if num_samples % group_size:
    raise ValueError(f"{name}: found shape {shape}, expected {expected} with N a multiple of group_size = {group_size}")


def divide(x: Float[Array, "..."], scale: Float[Array, "..."]) -> Float[Array, "..."]:
  """x / scale, and x itself where the scale is 0: there x is 0 too, unless it is NaN."""
  return x / jnp.where(scale == 0, 1, scale)
