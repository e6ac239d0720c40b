"""Rotary position embedding, with Llama 3's stretched frequencies."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.config import RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Float[Array, " half"]:
  """θ^(-2i/C) for each pair of a head's dimensions, in radians a token.

  Args:
    head_dim: width of a head (C).
    theta: base.
    scaling: Llama 3's; None is none.

  References:
    RoFormer, arXiv:2104.09864, 2021; The Llama 3 herd of models, arXiv:2407.21783, 2024.
  """
  half = head_dim // 2
  plain = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  if scaling is None:
    return plain
  wavelengths = 2 * math.pi / plain
  turns = scaling.original_max_positions / wavelengths  # Of a pair within the first training's context.
  # 0 where few turns were seen (divide in full), 1 where many were (leave alone).
  keep = jnp.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
  return plain * (keep + (1 - keep) / scaling.factor)


def rope(
  x: Float[Array, "B T h C"], positions: Int[Array, "B T"], theta: float, scaling: RopeScaling | None = None
) -> Float[Array, "B T h C"]:
  """Rotates the pair (i, i + C/2) of position p by p·f_i: half-split layout, angles in float32.

  Args:
    x: queries or keys.
    positions: of the tokens in their sequences.
    theta: base of the frequencies.
    scaling: see `frequencies`.
  """
  half = x.shape[-1] // 2
  angles = positions[..., None, None].astype(jnp.float32) * frequencies(x.shape[-1], theta, scaling)
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
