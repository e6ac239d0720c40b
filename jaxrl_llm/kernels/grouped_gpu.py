"""Products of groups of rows with a matrix for each group, for GPUs, in kernels lowered to Triton.

XLA has no kernel of its own for `jax.lax.ragged_dot` on GPUs, and multiplies all rows, masked, by
each matrix, at least for the gradient of the matrices. Here, each tile of rows is multiplied by the
matrix of its group alone. Tiles begin where groups do, so that none holds rows of two groups. No
two programs write the same memory, so that results are the same bits in every run.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.precision import dot


class Tiles(NamedTuple):
  """Sizes of a kernel's tiles, all powers of two of at least 16, as Triton's products need.

  Attributes:
    rows: Rows of the result.
    columns: Columns of the result.
    depth: Terms of the sum that are multiplied at once.
    warps: Number of warps of a program.
    stages: Number of tiles that are read ahead, and the one that is computed.
  """

  rows: int
  columns: int
  depth: int
  warps: int
  stages: int


def tiles_of(num_rows: int, num_columns: int, depth: int, dtype: DTypeLike) -> Tiles:
  """Returns the tiles for a result of so many rows and columns, and sums of so many terms.

  Example:
    >>> tiles_of(1152, 768, 2048, jnp.bfloat16)
    Tiles(rows=128, columns=128, depth=64, warps=8, stages=3)
    >>> tiles_of(2, 6, 4, jnp.float32)
    Tiles(rows=16, columns=16, depth=16, warps=4, stages=2)
  """
  most = _MOST[jnp.dtype(dtype).itemsize]
  sizes = [max(16, min(tile, 1 << (size - 1).bit_length())) for tile, size in zip(most, (num_rows, num_columns, depth), strict=False)]
  return Tiles(*sizes, most.warps if sizes[0] * sizes[1] >= 128 * 64 else 4, most.stages)


_MOST = {2: Tiles(128, 128, 64, 8, 3), 4: Tiles(64, 64, 32, 8, 2)}
"""Largest tiles by the bytes of a number. Triton 3.9 compiles them without spilled registers."""


class _Rows(NamedTuple):
  """Tiles of rows. Those that start and end at 0 have nothing to do.

  Attributes:
    groups: Group of each tile. Rows after the last group form one more.
    starts: First row of each tile.
    ends: End of the group of each tile.
  """

  groups: Int[Array, " N"]
  starts: Int[Array, " N"]
  ends: Int[Array, " N"]


def _tiled(sizes: Int[Array, " E"], num_rows: int, tile: int) -> _Rows:
  """Divides groups of rows into tiles, as many as any sizes can need."""
  sizes = jnp.append(sizes, num_rows - jnp.sum(sizes)).astype(jnp.int32)
  counts, ends = -(-sizes // tile), jnp.cumsum(sizes)
  index, after = jnp.arange(num_rows // tile + len(sizes), dtype=jnp.int32), jnp.cumsum(counts)
  groups = jnp.sum(index[:, None] >= after, axis=1, dtype=jnp.int32)
  is_used, at = groups < len(sizes), jnp.minimum(groups, len(sizes) - 1)
  starts = (ends - sizes)[at] + (index - (after - counts)[at]) * tile
  return _Rows(groups, *(jnp.where(is_used, x, 0).astype(jnp.int32) for x in (starts, ends[at])))


def products(
  rows: Float[Array, "M A"], matrices: Float[Array, "E ..."], sizes: Int[Array, " E"], *, contracted: int, interpret: bool = False
) -> Float[Array, "M B"]:
  """Contracts each group of rows with an axis of its matrix, 1 or 2; 0 after the last group.

  Args:
    rows: Rows, the groups one after the other.
    matrices: Matrix of each group.
    sizes: Number of rows in each group.
    contracted: Axis of the matrices.
    interpret: Whether to emulate the kernel.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as pltriton

  (num_rows, depth), num_columns = rows.shape, matrices.shape[3 - contracted]
  tiles = tiles_of(-(-num_rows // len(matrices)), num_columns, depth, rows.dtype)
  at, across = _tiled(sizes, num_rows, tiles.rows), -(-num_columns // tiles.columns)
  shape = (num_rows, num_columns)
  if interpret:
    of_matrices = (0, *(tiles.depth if axis == contracted else tiles.columns for axis in (1, 2)))
    rows, matrices = _with_margin(rows, (tiles.rows, tiles.depth)), _with_margin(matrices, of_matrices)
    shape = (num_rows + tiles.rows, num_columns + tiles.columns)
  out = pl.pallas_call(
    partial(_products, tiles=tiles, across=across, size=(num_columns, depth), num_groups=len(sizes), contracted=contracted),
    grid=(len(at.groups) * across,),
    out_shape=jax.ShapeDtypeStruct(shape, rows.dtype),
    interpret=interpret,
    name="grouped_products",
    compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
  )(*at, rows, matrices)
  return out[:num_rows, :num_columns]


def _products(
  groups_ref, starts_ref, ends_ref, rows_ref, matrices_ref, out_ref,
  *, tiles: Tiles, across: int, size: tuple[int, int], num_groups: int, contracted: int,
):  # fmt: skip
  from jax.experimental import pallas as pl

  # The programs of one tile of rows, and of one group, follow each other, so that they find rows
  # and matrices in the GPU's cache.
  index, (num_columns, depth) = jax.lax.div(pl.program_id(0), across), size
  group, start, end = groups_ref[index], starts_ref[index], ends_ref[index]
  column = jax.lax.rem(pl.program_id(0), across) * tiles.columns
  here, is_row = pl.ds(start, tiles.rows), (start + jnp.arange(tiles.rows) < end)[:, None]
  columns, is_column = _range(column, tiles.columns, num_columns)

  def step(i, total):
    terms, is_term = _range(i * tiles.depth, tiles.depth, depth)
    x = _load(rows_ref, (here, terms), is_row, _on(is_term, 1))
    place = (group, terms, columns) if contracted == 1 else (group, columns, terms)
    y = _load(matrices_ref, place, _on(is_term, contracted - 1), _on(is_column, 2 - contracted))
    return total + dot(x, y, 1, contracted - 1)

  num_steps = jnp.where(group < num_groups, jnp.int32(pl.cdiv(depth, tiles.depth)), jnp.int32(0))
  total = jax.lax.fori_loop(0, num_steps, step, jnp.zeros((tiles.rows, tiles.columns), jnp.float32))
  _store(out_ref, (here, columns), total, is_row, _on(is_column, 1))


def of_matrices(
  rows: Float[Array, "M D"], ct: Float[Array, "M F"], sizes: Int[Array, " E"], *, interpret: bool = False
) -> Float[Array, "E D F"]:
  """Computes rowsᵀ·ct of each group, summed in float32; rows after the last group count nothing.

  Args:
    rows: Rows, the groups one after the other.
    ct: Cotangents of the products of the rows.
    sizes: Number of rows in each group.
    interpret: Whether to emulate the kernel.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as pltriton

  size, num_groups = (rows.shape[1], ct.shape[1]), len(sizes)
  tiles = tiles_of(*size, -(-len(rows) // num_groups), rows.dtype)
  down, across = -(-size[0] // tiles.rows), -(-size[1] // tiles.columns)
  ends, shape = jnp.cumsum(sizes).astype(jnp.int32), (num_groups, *size)
  if interpret:
    rows, ct = _with_margin(rows, (tiles.depth, tiles.rows)), _with_margin(ct, (tiles.depth, tiles.columns))
    shape = (num_groups, size[0] + tiles.rows, size[1] + tiles.columns)
  out = pl.pallas_call(
    partial(_of_matrices, tiles=tiles, down=down, across=across, size=size),
    grid=(num_groups * down * across,),
    out_shape=jax.ShapeDtypeStruct(shape, rows.dtype),
    interpret=interpret,
    name="grouped_sums",
    compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
  )(ends - sizes.astype(jnp.int32), ends, rows, ct)
  return out[:, : size[0], : size[1]]


def _of_matrices(starts_ref, ends_ref, rows_ref, ct_ref, out_ref, *, tiles: Tiles, down: int, across: int, size):
  from jax.experimental import pallas as pl

  program = pl.program_id(0)
  group = jax.lax.div(program, down * across)
  start, end = starts_ref[group], ends_ref[group]
  above, is_above = _range(jax.lax.rem(jax.lax.div(program, across), down) * tiles.rows, tiles.rows, size[0])
  beside, is_beside = _range(jax.lax.rem(program, across) * tiles.columns, tiles.columns, size[1])

  def step(i, total):
    first = start + i * tiles.depth
    here, is_term = pl.ds(first, tiles.depth), (first + jnp.arange(tiles.depth) < end)[:, None]
    x = _load(rows_ref, (here, above), is_term, _on(is_above, 1))
    y = _load(ct_ref, (here, beside), is_term, _on(is_beside, 1))
    return total + dot(x, y, 0, 0)

  total = jax.lax.fori_loop(0, pl.cdiv(end - start, tiles.depth), step, jnp.zeros((tiles.rows, tiles.columns), jnp.float32))
  _store(out_ref, (group, above, beside), total, _on(is_above, 0), _on(is_beside, 1))


def _range(start, tile: int, size: int) -> tuple:
  """Returns a tile of an axis, and which of it lies within the axis; None if all of every tile."""
  from jax.experimental import pallas as pl

  is_inside = None if size % tile == 0 else start + jnp.arange(tile) < size
  return pl.ds(pl.multiple_of(start, tile), tile), is_inside


def _on(mask: Array | None, axis: int) -> Array | None:
  """Lays a mask along an axis of two."""
  return None if mask is None else jnp.expand_dims(mask, 1 - axis)


def _both(*masks: Array | None) -> Array | None:
  given = [mask for mask in masks if mask is not None]
  return None if not given else given[0] if len(given) == 1 else given[0] & given[1]


def _load(ref, place: tuple, *masks: Array | None) -> Array:
  from jax.experimental.pallas import triton as pltriton

  mask = _both(*masks)
  return ref[place] if mask is None else pltriton.load(ref.at[place], mask=mask, other=0)


def _store(ref, place: tuple, value: Array, *masks: Array | None) -> None:
  from jax.experimental.pallas import triton as pltriton

  pltriton.store(ref.at[place], value.astype(ref.dtype), mask=_both(*masks))


def _with_margin(x: Array, margins: tuple[int, ...]) -> Array:
  """Appends NaNs to each axis, where the emulator, unlike a GPU, would clamp a tile's position."""
  return jnp.pad(x, [(0, margin) for margin in margins], constant_values=jnp.nan)
