"""Operations and memory traffic of the kernels in a compiled program, by their shapes."""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxrl_llm.kernels import columns_tpu, flash, grouped_tpu
from jaxrl_llm.models.copies import ROWS_PER_TILE


class Array(NamedTuple):
  """An array of a compiled program.

  Attributes:
    sizes: Sizes of its axes.
    num_bytes: Size in bytes.
    is_here: Whether it is in the chip's memory, not in that of its cores or of the host.
  """

  sizes: tuple[int, ...]
  num_bytes: int
  is_here: bool


class Load(NamedTuple):
  """What the shapes of a program's kernels do not say.

  Attributes:
    grouped_rows: Number of rows in all groups of a grouped product if the load of the experts is
      even. Rows after the last group are not computed. None if all rows are in groups.
  """

  grouped_rows: int | None = None


def operations_of(name: str, scope: str, operands: Sequence[Array], load: Load) -> tuple[str, float | None]:
  """Returns the kind of a kernel and its operations; None if they are not known.

  Args:
    name: Name of the instruction.
    scope: Names under which JAX made the kernel; empty for none.
    operands: Operands of the kernel.
    load: Assumptions about the load.

  Example:
    >>> rows, matrices = Array((100, 6), 1200, True), Array((4, 6, 5), 240, True)
    >>> operations_of("ragged-dot-none.3", "", [rows, matrices], Load(grouped_rows=40))
    ('ragged-dot', 2400.0)
    >>> operations_of("new_kernel.3", "", [rows], Load())
    ('new_kernel', None)
  """
  kind = next((x for x in _KERNELS if x in f"{name} {scope}"), None)
  return (kind, _KERNELS[kind](operands, load)) if kind else (re.sub(r"[.\d]+$", "", name), None)


def bytes_of(
  name: str, scope: str, attributes: str, operands: Sequence[Array], result: Array, load: Load
) -> float | None:
  """Counts the bytes that a kernel reads and writes if these are a part of its operands.

  A grouped product reads its rows once for each tile of columns, and no rows after the last group.
  The kernel that writes columns of a cache reads and writes the tiles that hold them. Returns None
  for other kernels.

  Args:
    name: Name of the instruction.
    scope: Names under which JAX made the kernel; empty for none.
    attributes: Text of the instruction's attributes.
    operands: Operands of the kernel.
    result: Result of the kernel.
    load: Assumptions about the load.

  Example:
    >>> rows, matrices, result = Array((100, 6), 1200, True), Array((4, 6, 5), 240, True), Array((100, 5), 1000, True)
    >>> bytes_of("ragged-dot-none.3", "", 'ragged_dot_tiling="8,6,3"', [rows, matrices], result, Load(grouped_rows=40))
    1600.0
  """
  kind = next((x for x in _KERNELS if x in f"{name} {scope}"), None)
  if kind == "write_columns":
    arrays = [x for x in operands[1 + len(operands) // 2 :] if x.is_here]
    return 2.0 * sum(x.num_bytes / max(x.sizes) * columns_tpu.LANES for x in arrays)
  if kind not in ("ragged-dot", "token_sums", "tgmm"):
    return None
  if kind == "ragged-dot":
    return _moved_by_products(attributes, operands[-2:], result, load)
  rows, others = [x for x in operands if len(x.sizes) == 2][-2:]
  (num_rows, width), hidden, itemsize = rows.sizes, others.sizes[1], rows.num_bytes // math.prod(rows.sizes)
  few = ROWS_PER_TILE if kind == "token_sums" else None
  _, wide, tall = grouped_tpu.tiling(num_rows, width, hidden, result.sizes[0], itemsize, few=few)
  sums = result.num_bytes * result.is_here + sum(x.num_bytes * x.is_here for x in operands if len(x.sizes) == 3)
  reads = rows.num_bytes * rows.is_here * -(-hidden // tall) + others.num_bytes * others.is_here * -(-width // wide)
  return sums + reads * _share(num_rows, load)


def _moved_by_products(attributes: str, operands: Sequence[Array], result: Array, load: Load) -> float:
  rows, matrices = operands
  num_matrices, width, hidden = matrices.sizes
  match = re.search(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"', attributes)
  few, wide, tall = map(int, match.groups()) if match else (rows.sizes[0], width, hidden)
  share = _share(rows.sizes[0], load)
  # A matrix stays on the chip while its rows pass, unless it arrives in parts.
  often = 1.0 if wide >= width else 1 + share * rows.sizes[0] / few / num_matrices
  of_rows = rows.num_bytes * rows.is_here * -(-hidden // tall) + result.num_bytes * result.is_here
  return share * of_rows + often * matrices.num_bytes * matrices.is_here


def _share(num_rows: int, load: Load) -> float:
  return min(1.0, (load.grouped_rows or num_rows) / num_rows)


def _grouped(operands: Sequence[Array], load: Load) -> float:
  """Counts a product of groups of rows with matrices."""
  rows, matrices = (x.sizes for x in operands[-2:])
  return 2.0 * min(rows[0], load.grouped_rows or rows[0]) * rows[1] * matrices[2]


def _summed(operands: Sequence[Array], load: Load) -> float:
  """Counts sums of products of rows, to which a later call adds the rows that were left."""
  rows, others = [x.sizes for x in operands if len(x.sizes) == 2][-2:]
  is_later = any(len(x.sizes) == 3 for x in operands)
  grouped = rows[0] if load.grouped_rows is None else load.grouped_rows - rows[0] * is_later
  return 2.0 * min(rows[0], max(grouped, 0)) * rows[1] * others[1]


def _flash(products: int) -> Callable[[Sequence[Array], Load], float]:
  def flops(operands: Sequence[Array], load: Load) -> float:
    """Counts products of the blocks that the queries of causal rows see."""
    (batch, heads, length, width), keys = [x.sizes for x in operands if len(x.sizes) == 4][:2]
    size = flash.block(keys[2])
    blocks = keys[2] / size
    pairs = blocks * (blocks + 1) / 2 * size**2 * length / keys[2]
    return 2.0 * products * batch * heads * width * pairs

  return flops


def _decoding(operands: Sequence[Array], load: Load) -> float:
  """Counts both products of queries and a cache in which all columns are read."""
  queries, keys = [x.sizes for x in operands if len(x.sizes) == 4][:2]
  return 4.0 * math.prod(queries) * keys[-1]


_KERNELS: dict[str, Callable[[Sequence[Array], Load], float]] = {
  "ragged-dot-metadata": lambda operands, load: 0.0,
  "ragged-dot": _grouped,
  "token_sums": _summed,
  "tgmm": _summed,
  # Scores and the mix of values; backward the scores, their cotangents, and three gradients.
  "flash_forward": _flash(2),
  "flash_backward": _flash(5),
  "ragged_decode_attention": _decoding,
  "write_columns": lambda operands, load: 0.0,
}
"""Operations of kernels by a part of their names."""
