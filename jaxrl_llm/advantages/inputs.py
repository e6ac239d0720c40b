"""Input checks of the estimators: real numbers in at least float32, whole groups, matching shapes.

Every error message is one line.
"""

import numbers
from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float


def real(name: str, x: ArrayLike | Sequence, *, shape: str, ndim: int | None = None) -> Float[Array, "..."]:
  """Returns real numbers as a float32 array, or as float64 if they are float64.

  Integers and booleans are accepted. `name` and `shape`, the shape in words, are for error
  messages. If `ndim` is None, any number of axes is accepted.

  Raises:
    ValueError: If the numbers are complex, or the number of axes is not `ndim`.

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
  """Returns `x`, or raises a ValueError if its shape is not that of `other`."""
  if x.shape != other.shape:
    raise ValueError(f"{name}: found shape {x.shape}, expected {other.shape}, the shape of {other_name}")
  return x


def counted_tokens(mask: ArrayLike, other_name: str, other: Array) -> Bool[Array, "..."]:
  """Returns the mask as booleans, True if a token counts."""
  return of_shape("mask", jnp.asarray(mask), other_name, other) > 0


def booleans(name: str, x: ArrayLike, other_name: str, other: Array) -> Bool[Array, "..."]:
  """Returns `x`, or raises a ValueError if it has another shape than `other` or no booleans."""
  x = of_shape(name, jnp.asarray(x), other_name, other)
  if x.dtype != bool:
    raise ValueError(f"{name}: found {x.dtype}, expected bool")
  return x


def whole_number(name: str, x: int, *, low: int, high: int | None = None, because: str = "") -> int:
  """Returns `x`, or raises a ValueError if it is not an integer from `low` to `high`."""
  if isinstance(x, bool) or not isinstance(x, numbers.Integral) or x < low or (high is not None and x > high):
    limits = f">= {low}" if high is None else f"from {low} to {high}"
    raise ValueError(f"{name}: found {x!r}, expected a whole number {limits}{because}")
  return int(x)


def at_least_zero(name: str, x: float) -> None:
  """Raises a ValueError if `x` is negative or NaN."""
  if not x >= 0:
    raise ValueError(f"{name}: found {x!r}, expected a number >= 0")


def fraction(name: str, x: float) -> None:
  """Raises a ValueError if `x` is not from 0 to 1."""
  if not 0 <= x <= 1:
    raise ValueError(f"{name}: found {x!r}, expected a number from 0 to 1")


def whole_groups(name: str, num_samples: int, group_size: int, shape: tuple[int, ...], expected: str) -> None:
  """Raises a ValueError if `num_samples` do not fall into groups of `group_size`."""
  whole_number("group_size", group_size, low=1)
  if num_samples % group_size:
    raise ValueError(f"{name}: found shape {shape}, expected {expected} with N a multiple of group_size = {group_size}")


def divide(x: Float[Array, "..."], scale: Float[Array, "..."]) -> Float[Array, "..."]:
  """Returns x / scale, or x itself if the scale is 0.

  A scale of 0 implies that x is 0 as well, unless it is NaN.
  """
  return x / jnp.where(scale == 0, 1, scale)
