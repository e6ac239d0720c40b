"""Weights of linear maps in 8 bits, for decoding steps, whose time goes into reading weights."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.precision import precision_of

FORMATS = {"int8": (jnp.int8, 127.0), "float8": (jnp.float8_e4m3fn, 448.0)}
"""Type and largest value of each format."""

class Quantized(NamedTuple):
  """A weight in 8 bits: values · scale, with one scale per output.

  Attributes:
    values: Weight divided by its scales, with the axes of the weight.
    scale: Largest magnitude of each output's weights over that of the format, with the axes of the
      weight that are no inputs.
  """

  values: Int[Array, "..."] | Float[Array, "..."]
  scale: Float[Array, "..."]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the weight."""
    return self.values.shape

  @property
  def ndim(self) -> int:
    """Number of axes of the weight."""
    return self.values.ndim


def quantize(weight: Float[Array, "..."], inputs: tuple[int, ...], name: str) -> Quantized:
  """Rounds a weight to 8 bits.

  Args:
    weight: Weight of a linear map.
    inputs: Axes that a product sums over.
    name: Format, one of `FORMATS`: "int8", with an error of at most scale / 2, or "float8", which
      has 3 bits of mantissa, so that the error is relative to each weight.

  Returns:
    The rounded weight. An output whose weights are all zero has a scale of 1.

  Example:
    >>> rounded = quantize(jnp.array([[1.0, -0.5], [0.25, 0.1]]), (0,), "int8")
    >>> rounded.values.tolist(), (rounded.scale * 127).tolist()
    ([[127, -127], [32, 25]], [1.0, 0.5])

  References:
    LLM.int8(), arXiv:2208.07339, 2022; FP8 formats for deep learning, arXiv:2209.05433, 2022.
  """
  dtype, largest = FORMATS[name]
  weight = weight.astype(jnp.float32)
  top = jnp.max(jnp.abs(weight), axis=inputs)
  scale = jnp.where(top > 0, top / largest, 1.0)
  values = weight / jnp.expand_dims(scale, inputs)
  return Quantized((jnp.round(values) if name == "int8" else values).astype(dtype), scale)


def matmul(x: Float[Array, "..."], weight: Quantized, ins: int = 1) -> Float[Array, "..."]:
  """Contracts the last `ins` axes of `x` with the first ones of a weight in 8 bits.

  The values are converted to the dtype of `x` where they are multiplied, and the scales apply to
  the sums in float32. So memory is read 8 bits at a time, and products are as exact as others.
  """
  values = weight.values.astype(x.dtype)
  y = jnp.tensordot(x, values, ins, precision=precision_of(x, values), preferred_element_type=jnp.float32)
  return (y * weight.scale).astype(x.dtype)
