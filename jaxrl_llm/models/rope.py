"""Rotary position embedding, with scaled frequencies, and with three positions per token."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.config import Linear, RopeScaling, Yarn

Scaling = RopeScaling | Linear | Yarn | None


def frequencies(head_dim: int, theta: float, scaling: Scaling = None) -> Float[Array, " half"]:
  """Returns θ^(-2i/C) for each pair i of a head's C dimensions, scaled, in radians per token.

  References:
    RoFormer, arXiv:2104.09864, 2021; for the scalings see the classes of `config`.

  Example:
    >>> frequencies(4, 100.0).round(3).tolist(), frequencies(4, 100.0, Linear(8.0)).round(3).tolist()
    ([1.0, 0.1...], [0.125, 0.01...])
  """
  half = head_dim // 2
  plain = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  if scaling is None:
    return plain
  if isinstance(scaling, Linear):
    return plain / scaling.factor
  if isinstance(scaling, Yarn):
    return _yarn(plain, theta, scaling)
  wavelengths = 2 * math.pi / plain
  # Turns of each pair within the original context.
  turns = scaling.original_max_positions / wavelengths
  # 0 if training saw few turns (divide in full), 1 if it saw many (keep).
  keep = jnp.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
  return plain * (keep + (1 - keep) / scaling.factor)


def _yarn(plain: Float[Array, " half"], theta: float, scaling: Yarn) -> Float[Array, " half"]:
  """Divides the frequencies that turn rarely in the original context."""
  half = len(plain)
  # The pair, as a real number, that turns so many times in the original context.
  pair = lambda turns: half * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / math.log(theta)
  low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, 2 * half - 1)
  keep = 1 - jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / max(high - low, 1e-3), 0, 1)
  return plain * (keep + (1 - keep) / scaling.factor)


class Rotation(NamedTuple):
  """Sines and cosines of the angles p·f_i by which position p rotates pair i, in float32."""

  sin: Float[Array, "B T 1 half"]
  cos: Float[Array, "B T 1 half"]


def rotation(
  positions: Int[Array, "B T *axes"],
  frequencies: Float[Array, " half"],
  sections: tuple[int, int, int] | None = None,
) -> Rotation:
  """Computes the rotation of each position in its sequence.

  Args:
    positions: Position of each token, or its three positions in time, height and width.
    frequencies: Radians per token of each pair; see `frequencies`.
    sections: Numbers of frequencies for time, height and width; only read with three positions.

  References:
    Qwen3-VL technical report (interleaved MRoPE), arXiv:2511.21631, 2025.
  """
  if positions.ndim == 3:
    positions = positions[..., jnp.asarray(axes_of_frequencies(len(frequencies), sections))]
  else:
    positions = positions[..., None]
  angles = positions[:, :, None].astype(jnp.float32) * frequencies
  return Rotation(jnp.sin(angles), jnp.cos(angles))


def axes_of_frequencies(num: int, sections: tuple[int, int, int]) -> list[int]:
  """Returns which position rotates each frequency: 0 for time, 1 for height, 2 for width.

  Height and width take every third of the first frequencies, so that each gets fast and slow ones.

  Example:
    >>> axes_of_frequencies(8, (4, 2, 2))
    [0, 1, 2, 0, 1, 2, 0, 0]
  """
  return [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(num)]


def rope(x: Float[Array, "B T h C"], rotated: Rotation) -> Float[Array, "B T h C"]:
  """Rotates each pair (i, i + C/2) of queries or keys at position p by p·f_i.

  The layout is half-split, and the angles are in float32.
  """
  half = x.shape[-1] // 2
  sin, cos = rotated
  a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
