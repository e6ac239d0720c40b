"""Rotary position embedding, with Llama 3's scaling, and with three positions per token."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.config import RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Float[Array, " half"]:
  """Returns θ^(-2i/C) for each pair i of a head's C dimensions, in radians per token.

  References:
    RoFormer, arXiv:2104.09864, 2021; The Llama 3 herd of models, arXiv:2407.21783, 2024.
  """
  half = head_dim // 2
  plain = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  if scaling is None:
    return plain
  wavelengths = 2 * math.pi / plain
  # Turns of each pair within the original context.
  turns = scaling.original_max_positions / wavelengths
  # 0 if training saw few turns (divide in full), 1 if it saw many (keep).
  keep = jnp.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
  return plain * (keep + (1 - keep) / scaling.factor)


class Rotation(NamedTuple):
  """Sines and cosines of the angles p·f_i by which position p rotates pair i, in float32."""

  sin: Float[Array, "B T 1 half"]
  cos: Float[Array, "B T 1 half"]


def rotation(
  positions: Int[Array, "B T *axes"],
  head_dim: int,
  theta: float,
  scaling: RopeScaling | None = None,
  sections: tuple[int, int, int] | None = None,
) -> Rotation:
  """Computes the rotation of each position in its sequence; see `frequencies`.

  Args:
    positions: Position of each token, or its three positions in time, height and width.
    head_dim: Width of a head.
    theta: Base of the frequencies.
    scaling: Scaling of the frequencies; None if not scaled.
    sections: Numbers of frequencies for time, height and width; only read with three positions.

  References:
    Qwen3-VL technical report (interleaved MRoPE), arXiv:2511.21631, 2025.
  """
  if positions.ndim == 3:
    positions = positions[..., jnp.asarray(axes_of_frequencies(head_dim // 2, sections))]
  else:
    positions = positions[..., None]
  angles = positions[:, :, None].astype(jnp.float32) * frequencies(head_dim, theta, scaling)
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
