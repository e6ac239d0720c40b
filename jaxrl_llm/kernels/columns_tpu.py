"""The kernel that writes a token of each row to a column of its own, for TPUs.

XLA would do this by a scatter, for which it lays keys and values out anew, all of them in each
layer and step. The kernel reads and writes the tiles that hold the columns, in place.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_llm.kernels.types import KeyValues

LANES = 128
"""Tokens per tile of the keys and of all scales."""

_ROWS = 32
"""Tokens per tile of the values: the tile of 8-bit numbers, a multiple of those of all others."""


def fits(held: KeyValues) -> bool:
  """Returns whether tiles divide the tokens and the width of the heads."""
  *_, columns, width = held.v.shape
  return columns % LANES == 0 and width % LANES == 0


def put(held: KeyValues, new: KeyValues, columns: Int[Array, " B"], *, interpret: bool = False) -> KeyValues:
  """Writes a new token of each row (S = 1) to its column, on one device.

  A row writes nothing if its column is beyond the last one.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  arrays, tokens = ([x for x in each if x is not None] for each in (held, new))
  # The value of a key's token lies along the lanes, not along an axis of size 1.
  tokens = [x.squeeze((3, 2)[i]) if i < 2 else x for i, x in enumerate(tokens)]
  last = held.v.shape[2] - 1

  def tile(i: int, x: Array) -> pl.BlockSpec:
    axis, size = ((3, LANES), (2, _ROWS), (2, LANES), (2, LANES))[i]
    shape = (1, *x.shape[1:axis], size, *x.shape[axis + 1 :])
    return pl.BlockSpec(shape, lambda row, at: (row, *(jnp.minimum(at[row], last) // size if j == axis else 0 for j in range(1, x.ndim))))

  of_row = lambda x: pl.BlockSpec((1, *x.shape[1:]), lambda row, _: (row, *[0] * (x.ndim - 1)))
  tiles = [tile(i, x) for i, x in enumerate(arrays)]
  written = pl.pallas_call(
    partial(_kernel, last=last),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1, grid=(len(columns),), in_specs=[*map(of_row, tokens), *tiles], out_specs=tiles
    ),
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
    input_output_aliases={1 + len(tokens) + i: i for i in range(len(arrays))},
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    interpret=interpret,
    name="write_columns",
  )(columns, *tokens, *arrays)
  return KeyValues(*written)


def _kernel(columns_ref, *refs, last: int):
  from jax.experimental import pallas as pl

  num = len(refs) // 3
  column = columns_ref[pl.program_id(0)]
  for i, (new_ref, held_ref, out_ref) in enumerate(zip(refs[:num], refs[num : 2 * num], refs[2 * num :], strict=True)):
    held, new, axis = held_ref[0], new_ref[0], 1 if i else 2
    wide = jnp.int32 if held.dtype == jnp.int8 else jnp.float32
    if i == 0:
      new = jnp.swapaxes(jnp.broadcast_to(new.astype(wide)[:, None], (held.shape[0], held.shape[2], held.shape[1])), 1, 2)
    elif i == 1:
      new = new.astype(wide)[:, None]
    offset = jnp.where(column <= last, jax.lax.rem(column, held.shape[axis]), -1)
    is_here = jax.lax.broadcasted_iota(jnp.int32, held.shape, axis) == offset
    out_ref[0] = jnp.where(is_here, new, held.astype(wide)).astype(held.dtype)
