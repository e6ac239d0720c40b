"""Precision of matrix products.

By default, TPUs round float32 matrices to bfloat16 before they multiply them, and recent GPUs round
them to TensorFloat32. Here, a product of float32 arrays is a product in float32; bfloat16 arrays
make it faster. Every product states its precision, with `precision_of`. JAX's global default would
also change the products of other code, and a context manager would have to surround every trace.
CPUs ignore the precision.
"""

import contextlib

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float


def precision_of(*operands: ArrayLike) -> jax.lax.Precision | None:
  """Returns the precision of a product: HIGHEST if all operands are float32, else None.

  None is JAX's default. A product of a bfloat16 array and a float32 gradient is one in bfloat16, as
  exact as the product that it is the gradient of.

  Example:
    >>> x, weight = jnp.ones((2, 3)), jnp.ones((3, 4))
    >>> precision_of(x, weight).name, precision_of(x, weight.astype("bfloat16"))
    ('HIGHEST', None)

  References:
    https://docs.jax.dev/en/latest/jax.lax.html#jax.lax.Precision
  """
  return jax.lax.Precision.HIGHEST if all(x.dtype == jnp.float32 for x in operands) else None


def dot(x: Array, y: Array, axes_x: int | tuple[int, ...], axes_y: int | tuple[int, ...]) -> Float[Array, "..."]:
  """Contracts one or several axes of two arrays, with sums and results in float32.

  Example:
    >>> dot(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16), 1, 1).dtype.name
    'float32'
  """
  contracted = tuple((axes,) if isinstance(axes, int) else axes for axes in (axes_x, axes_y))
  return jax.lax.dot_general(x, y, (contracted, ((), ())), precision=precision_of(x, y), preferred_element_type=jnp.float32)


def in_parts(x: Float[Array, "*shape"], dtype: DTypeLike) -> tuple[Float[Array, "*shape"], ...]:
  """Splits float32 numbers into parts of a dtype, whose sum has a relative error of at most 2^-17.

  The products of both bfloat16 parts are nearly as exact as one product in float32, and faster.

  Args:
    x: Finite numbers.
    dtype: Dtype of the parts: float32, for x itself, or bfloat16, for two parts.

  Example:
    >>> high, low = in_parts(jnp.array([0.7, -3.1415927]), jnp.bfloat16)
    >>> high.tolist(), (high.astype("float32") + low.astype("float32")).tolist()
    ([0.69921875, -3.140625], [0.7000007629394531, -3.1415939331054688])
  """
  if dtype == x.dtype:
    return (x,)
  # By its bits: XLA may leave out a conversion to bfloat16 and back, and the second part with it.
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  high = jax.lax.bitcast_convert_type((bits + jnp.uint32(0x8000)) & jnp.uint32(0xFFFF0000), jnp.float32)
  return high.astype(dtype), (x - high).astype(dtype)


def default_precision_of(*operands: ArrayLike) -> contextlib.AbstractContextManager:
  """Returns a context in which the operands' precision is the default.

  It is for functions of JAX that multiply matrices but take no precision.
  """
  return contextlib.nullcontext() if precision_of(*operands) is None else jax.default_matmul_precision("highest")
