"""Copies of tokens for the experts that they visit, and sums over the copies of each token.

Both are linear, and each is the transpose of the other, so the gradient of a gather is a gather
too. JAX's own would be a scatter, which accelerators do slowly.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import grouped_tpu
from jaxrl_llm.kernels.precision import precision_of

BLOCK = 128
"""Tokens that `sums_by_blocks` sums at a time, the width of a TPU's matrix unit."""

ROWS_PER_TILE = 256
"""Rows that `sums_by_blocks` multiplies at a time, about as many as a block of tokens has."""


class Copies(NamedTuple):
  """Copies of N tokens in M rows; each token has K copies, not all of which are in a row.

  Attributes:
    tokens: Token of each row. Arbitrary after the first `num` rows.
    places: Row of each copy, those of a token one after the other; `num` or more for none.
    num: Number of rows that hold a copy. They come first.
  """

  tokens: Int[Array, " M"]
  places: Int[Array, " NK"]
  num: Int[Array, ""]


Sums = Callable[[Float[Array, "M ..."], Copies, int], Float[Array, "N ..."]]
"""Function that sums the copies of each token, given the number of tokens."""


def sums_for(platform: str, *, interpret: bool = False) -> Sums:
  """Returns the function that sums the copies of each token on a platform.

  It sums in float32 and ignores the rows that hold no copy, even if they are not finite.

  Args:
    platform: Platform of the devices: tpu, or another one.
    interpret: Whether to emulate the kernel of a TPU, slowly, on other devices.
  """
  return partial(sums_by_blocks, interpret=interpret) if platform == "tpu" else sums_by_place


def sums_by_place(rows: Float[Array, "M ..."], copies: Copies, num_tokens: int) -> Float[Array, "N ..."]:
  """Gathers the K copies of each token and sums them.

  XLA for CPUs and GPUs gathers while it sums. On TPUs it writes all N·K gathered rows, which is
  more than necessary if most copies are in no row.

  Example:
    >>> copies = Copies(tokens=jnp.array([1, 0, 1]), places=jnp.array([1, 3, 0, 2]), num=jnp.array(3))
    >>> sums_by_place(jnp.array([1.0, 2.0, 4.0]), copies, 2).tolist()
    [2.0, 5.0]
  """
  gathered = rows[jnp.minimum(copies.places, len(rows) - 1)].reshape(num_tokens, -1, *rows.shape[1:])
  is_here = (copies.places < copies.num).reshape(num_tokens, -1, *[1] * (rows.ndim - 1))
  # Rows without a copy are arbitrary. Here, XLA fuses the mask into the sum.
  return jnp.sum(jnp.where(is_here, gathered, 0), axis=1, dtype=jnp.float32).astype(rows.dtype)


def sums_by_blocks(rows: Float[Array, "M D"], copies: Copies, num_tokens: int, *, interpret: bool = False) -> Float[Array, "N D"]:
  """Brings the rows into the order of tokens, and multiplies each block of them by a 0-1 matrix.

  The rows of `BLOCK` tokens lie one after the other then, and the matrix says which of them each
  token sums. A TPU writes no more rows than M, and its product of 128 tokens costs about a
  twentieth of an expert's three products of width 768.
  """
  numbers = jnp.arange(len(rows), dtype=jnp.int32)
  order = jnp.where(numbers < copies.num, copies.tokens.astype(jnp.int32), num_tokens)
  tokens, order = jax.lax.sort((order, numbers), num_keys=1)
  is_here = (copies.places < copies.num).astype(jnp.int32)
  blocks = -(-num_tokens // BLOCK)
  sizes = jnp.sum(jnp.pad(is_here, (0, len(is_here) // num_tokens * (blocks * BLOCK - num_tokens))).reshape(blocks, -1), axis=1)
  which = (tokens[:, None] % BLOCK == jnp.arange(BLOCK)).astype(rows.dtype)
  with jax.named_scope("token_sums"):
    sums = grouped_tpu.of_matrices(which, rows[order], sizes, few=ROWS_PER_TILE, interpret=interpret)
  return sums.reshape(blocks * BLOCK, -1)[:num_tokens].astype(rows.dtype)


def sums_by_product(rows: Float[Array, "M D"], copies: Copies, num_tokens: int) -> Float[Array, "N D"]:
  """Multiplies all rows by a 0-1 matrix, which says which of them each token sums.

  For the few tokens of a decoding step, this is cheaper than a sort.
  """
  is_here = jnp.arange(len(rows)) < copies.num
  which = is_here & (copies.tokens == jnp.arange(num_tokens)[:, None])
  rows = jnp.where(is_here[:, None], rows, 0)
  which = which.astype(rows.dtype)
  return jnp.matmul(which, rows, precision=precision_of(which, rows), preferred_element_type=jnp.float32).astype(rows.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def copied(x: Float[Array, "N ..."], copies: Copies, sums: Sums) -> Float[Array, "M ..."]:
  """Returns the token of each row; its gradient sums the copies of each token with `sums`."""
  return x[copies.tokens]


def _copied_bwd(sums: Sums, saved: tuple[Array, Copies], ct: Array) -> tuple[Array, None]:
  like, copies = saved
  return sums(ct, copies, len(like)), None


# The slice tells the number of tokens without keeping them.
copied.defvjp(lambda x, copies, sums: (copied(x, copies, sums), (x.reshape(len(x), -1)[:, :0], copies)), _copied_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def summed(rows: Float[Array, "M ..."], copies: Copies, num_tokens: int, sums: Sums) -> Float[Array, "N ..."]:
  """Returns the sum over the copies of each token; its gradient copies that of the token."""
  return sums(rows, copies, num_tokens)


summed.defvjp(
  lambda rows, copies, num_tokens, sums: (sums(rows, copies, num_tokens), copies),
  lambda num_tokens, sums, copies, ct: (ct[copies.tokens], None),
)
