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
from jax.typing import ArrayLike


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


def default_precision_of(*operands: ArrayLike) -> contextlib.AbstractContextManager:
  """Returns a context in which the operands' precision is the default.

  It is for functions of JAX that multiply matrices but take no precision.
  """
  return contextlib.nullcontext() if precision_of(*operands) is None else jax.default_matmul_precision("highest")
