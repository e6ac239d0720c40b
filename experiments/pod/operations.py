"""Floating-point operations and memory traffic of a compiled program, read from its text.

XLA's own counts leave out kernels and count the body of a loop once. Here, loops count as often as
they iterate, and kernels by the shapes of their operands. Elementwise operations count no
operations, but their memory traffic.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from experiments.pod import hlo
from experiments.pod.kernels import Array, Load, bytes_of, operations_of

UNUSUAL = "overflow"
"""Scope of a branch that no even load takes; see `jax.named_scope`."""

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)", re.DOTALL)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_WINDOW = {"pad": "0_0", "stride": "1", "lhs_dilate": "1", "rhs_dilate": "1"}
_FREE = frozenset(
  "parameter constant tuple get-tuple-element bitcast while conditional call after-all copy-done partition-id replica-id "
  "async-start async-update async-done call-start call-done optimization-barrier".split()
)
_ENTERED = ("while", "conditional", "call", "async-start", "call-start")


class Operations(NamedTuple):
  """Operations of one chip in one run of a program.

  Attributes:
    flops: Floating-point operations of products and kernels.
    num_bytes: Bytes that instructions read from and write to a chip's memory, not that of its
      cores. More than what is necessary: an operand counts once per reader. Grouped products count
      the rows in groups, once for each tile of columns.
    by_kind: Floating-point operations of XLA's products ("products") and of each kind of kernel.
    unknown: Names of kernels whose operations are not known.
  """

  flops: float
  num_bytes: float
  by_kind: dict[str, float]
  unknown: tuple[str, ...]

  def scaled(self, factor: float) -> "Operations":
    """Returns the operations of a fraction or a multiple of the program."""
    by_kind = {name: factor * flops for name, flops in self.by_kind.items()}
    return self._replace(flops=factor * self.flops, num_bytes=factor * self.num_bytes, by_kind=by_kind)


class _Instruction(NamedTuple):
  name: str
  arrays: tuple[Array, ...]
  operation: str
  operands: tuple[str, ...]
  line: str  # What follows the operands.
  number: int  # Number of a parameter.
  is_root: bool


def count(text: str, *, load: Load | None = None, unknown_trips: int = 1) -> Operations:
  """Counts the operations of a compiled program.

  A conditional counts its most expensive branch, without those under the scope `UNUSUAL`. Kernels
  of attention count the blocks of causal rows that hold one sequence each.

  Args:
    text: Text of the program, `compiled.as_text()`.
    load: Assumptions about the load of the kernels.
    unknown_trips: Number of iterations of loops whose number is not in the program.

  Example:
    >>> text = '''
    ... %body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
    ...   %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
    ...   %w = f32[4,4]{1,0:T(8,128)S(1)} constant({...})
    ...   %y = f32[8,4]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
    ... }
    ... ENTRY %main (a: f32[8,4]) -> f32[8,4] {
    ...   %t = (s32[], f32[8,4]) while(%a), body=%body, config={"known_trip_count":{"n":"48"}}
    ... }
    ... '''
    >>> operations = count(text)
    >>> operations.flops == 48 * 2 * 8 * 4 * 4, operations.num_bytes == 48 * 2 * 8 * 4 * 4
    (True, True)
  """
  lines, entry = hlo.computations(text)
  bodies = {name: list(_instructions(body)) for name, body in lines.items()}
  totals: dict[str, tuple[dict[str, float], float]] = {}
  unknown: set[str] = set()
  load = load or Load()

  def of(name: str, is_fused: bool) -> tuple[dict[str, float], float]:
    key = f"{name} fused" if is_fused else name
    if key not in totals:
      totals[key] = ({}, 0.0)
      totals[key] = visit(name, is_fused)
    return totals[key]

  def visit(name: str, is_fused: bool) -> tuple[dict[str, float], float]:
    flops, num_bytes = defaultdict(float), 0.0
    arrays = {x.name: x.arrays for x in bodies.get(name, ())}
    for each in bodies.get(name, ()):
      if each.operation in ("convolution", "dot"):
        flops["products"] += _product(each, arrays)
      elif kernel := _kernel(each, arrays, load):
        flops[kernel[0]] += kernel[1] or 0.0
        unknown.update([kernel[0]] if kernel[1] is None else [])
      if not is_fused:
        num_bytes += _moved(each, arrays, bodies, load)
      if each.operation == "fusion" or each.operation in _ENTERED:
        more, more_bytes = called(each, is_fused or each.operation == "fusion")
        for kind, amount in more.items():
          flops[kind] += amount
        num_bytes += more_bytes
    return dict(flops), num_bytes

  def called(each: _Instruction, is_fused: bool) -> tuple[dict[str, float], float]:
    names = _names(each.line)
    if each.operation == "conditional":
      usual = [x for x in names if not _is_unusual(bodies.get(x, ()))] or names
      branches = [of(x, is_fused) for x in usual]
      return max(branches, key=lambda x: sum(x[0].values()))[0], max((x[1] for x in branches), default=0.0)
    times = hlo.trips(each.line, lines, unknown_trips) if each.operation == "while" else 1
    total, num_bytes = defaultdict(float), 0.0
    for x in names:
      more, more_bytes = of(x, is_fused)
      for kind, amount in more.items():
        total[kind] += times * amount
      num_bytes += times * more_bytes
    return total, num_bytes

  by_kind, num_bytes = of(entry, False)
  return Operations(sum(by_kind.values()), num_bytes, by_kind, tuple(sorted(unknown)))


def readers(text: str, num_entries: int) -> list[str]:
  """Returns the names of the instructions that read whole arrays of so many entries.

  Those inside fusions do not count, nor do views and parts of an array.

  Example:
    >>> text = '''
    ... ENTRY %main (a: f32[8,4]) -> f32[] {
    ...   %a = f32[8,4]{1,0} parameter(0)
    ...   %s = f32[2,4]{1,0} slice(%a), slice={[0:2], [0:4]}
    ...   %b = f32[32]{0} bitcast(%a)
    ...   %n = f32[32]{0} negate(%b)
    ... }
    ... '''
    >>> readers(text, 32)
    ['n']
  """
  lines, _ = hlo.computations(text)
  bodies = {name: list(_instructions(body)) for name, body in lines.items()}
  fused = {name for body in bodies.values() for each in body if each.operation == "fusion" for name in _names(each.line)}
  reading = []
  for name, body in bodies.items():
    arrays = {x.name: x.arrays for x in body}
    for each in () if name in fused else body:
      if each.operation in _FREE or each.operation in ("dynamic-slice", "slice", "gather"):
        continue
      inside = bodies.get(_names(each.line)[0], ()) if each.operation == "fusion" else ()
      sizes = [[math.prod(x.sizes) for x in shape[:1]] for shape in _operands(each, arrays)]
      if any(size == [num_entries] and (not inside or _read(inside, i, bodies) == math.inf) for i, size in enumerate(sizes)):
        reading.append(each.name)
  return reading


def _instructions(lines: Sequence[str]) -> Iterator[_Instruction]:
  """Reads the instructions of a computation; the attributes of one may go on over several lines."""
  whole: list[str] = []
  for line in lines:
    if re.match(r"^\s*(?:ROOT )?%?[\w.\-]+ = ", line):
      whole.append(line)
    elif whole:
      whole[-1] += line
  for line in whole:
    if match := _INSTRUCTION.match(line):
      name, shape, operation, operands, rest = match.groups()
      names = tuple(re.findall(r"%([\w.\-#]+)", operands))
      number = int(operands) if operation == "parameter" else 0
      yield _Instruction(name, _arrays(shape), operation, names, rest, number, line.lstrip().startswith("ROOT"))


def _arrays(shape: str) -> tuple[Array, ...]:
  arrays = []
  for dtype, sizes, layout in _ARRAY.findall(shape):
    numbers = tuple(int(x) for x in sizes.split(",") if x)
    arrays.append(Array(numbers, hlo.BYTES.get(dtype, 0) * math.prod(numbers), not re.search(r"S\([1-9]\d*\)", layout)))
  return tuple(arrays)


def _operands(each: _Instruction, arrays: Mapping[str, tuple[Array, ...]]) -> list[tuple[Array, ...]]:
  """Looks up the shapes of operands; `name#2` is an element of a tuple."""
  shapes = []
  for operand in each.operands:
    name, *places = operand.split("#")
    whole = arrays.get(name, ())
    shapes.append(whole[int(places[0]) :][:1] if places else whole)
  return shapes


def _names(line: str) -> list[str]:
  calls = hlo.CALLED.findall(line)
  return [x.strip().lstrip("%") for called, branches in calls for x in ([called] if called else branches.split(","))]


def _is_unusual(body: Sequence[_Instruction]) -> bool:
  return any(re.search(rf'op_name="[^"]*\b{UNUSUAL}\b', each.line) for each in body)


def _product(each: _Instruction, arrays: Mapping[str, tuple[Array, ...]]) -> float:
  """Counts a product, which may be written as a convolution.

  A convolution counts the positions of its window that are inside the input alone. XLA for TPUs
  writes batch dimensions as windows, of which one position is inside.
  """
  (out, *_), (left, *_), (right, *_) = each.arrays, *_operands(each, arrays)[:2]
  if each.operation == "dot":
    axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.line)
    contracted = [left.sizes[int(x)] for x in (axes.group(1) if axes else "").split(",") if x]
    return 2.0 * math.prod(out.sizes) * math.prod(contracted)
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.line).groups()
  size = lambda array, part, letter: array.sizes[labels[part].index(letter)]
  flops = 2.0 * size(out, 2, "b") * size(out, 2, "f") * size(right, 1, "i")
  window = dict(re.findall(r"(\w+)=([\dx_\-]+)", (re.search(r"window=\{([^}]*)\}", each.line) or [""])[0]))
  fields = {name: window[name].split("x") if name in window else [default] * 9 for name, default in _WINDOW.items()}
  for place, axis in enumerate(sorted(set(labels[2]) - {"b", "f"})):
    low = int(fields["pad"][place].split("_")[0])
    stride, spread, gap = (int(fields[name][place]) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    most = (size(left, 0, axis) - 1) * spread
    positions = (o * stride + k * gap - low for o in range(size(out, 2, axis)) for k in range(size(right, 1, axis)))
    flops *= sum(0 <= x <= most and x % spread == 0 for x in positions)
  return flops


def _is_kernel(each: _Instruction) -> bool:
  return each.operation == "custom-call" and 'custom_call_target="tpu_custom_call"' in each.line


def _kernel(each: _Instruction, arrays: Mapping[str, tuple[Array, ...]], load: Load) -> tuple[str, float | None] | None:
  """Returns the kind of a kernel and its operations, None if they are not known, as on GPUs."""
  if each.operation == "custom-call" and "xla.gpu.triton" in each.line:
    return each.name, None
  if not _is_kernel(each):
    return None
  operands = [array for shape in _operands(each, arrays) for array in shape[:1]]
  return operations_of(each.name, _scope(each), operands, load)


def _scope(each: _Instruction) -> str:
  scope = re.search(r'op_name="([^"]*)"', each.line)
  return scope.group(1) if scope else ""


def _moved(
  each: _Instruction, arrays: Mapping[str, tuple[Array, ...]], bodies: Mapping[str, Sequence[_Instruction]], load: Load
) -> float:
  """Counts the bytes that an instruction reads and writes; of a slice, those of the slice alone."""
  operands = _operands(each, arrays)
  if each.operation in _FREE or each.operation.endswith("-done"):
    return 0.0
  if _is_kernel(each):
    of_kernel = bytes_of(each.name, _scope(each), each.line, [x for shape in operands for x in shape[:1]], each.arrays[0], load)
    if of_kernel is not None:
      return of_kernel
  if each.operation == "copy-start":
    return _here(each.arrays[:2])
  if each.operation == "fusion":
    (name,) = _names(each.line)[:1]
    body = bodies.get(name, ())
    reads = (_here(x) and _read(body, number, bodies) for number, x in enumerate(operands))
    return sum(_here(x) if read == math.inf else read for x, read in zip(operands, reads, strict=True)) + _written(each, body)
  if each.operation in ("dynamic-slice", "slice", "gather"):
    return (1 + bool(_here(operands[0]))) * _here(each.arrays)
  if each.operation == "dynamic-update-slice":
    return _here(operands[1]) + _whole(operands[1]) * bool(_here(each.arrays))
  if each.operation.endswith("-start"):  # Its shape holds its operands and results.
    return _here(each.arrays)
  return _here(each.arrays) + sum(map(_here, operands))


def _here(arrays: Sequence[Array]) -> float:
  return float(sum(x.num_bytes for x in arrays if x.is_here))


def _whole(arrays: Sequence[Array]) -> float:
  return float(sum(x.num_bytes for x in arrays))


def _read(body: Sequence[_Instruction], number: int, bodies: Mapping[str, Sequence[_Instruction]]) -> float:
  """Counts the bytes that a fusion reads of a parameter, infinity for the whole of it."""
  names = {x.name for x in body if x.operation == "parameter" and x.number == number}
  total = 0.0
  for x in body:
    for place, name in enumerate(x.operands):
      if name not in names:
        continue
      if x.operation == "bitcast":
        names.add(x.name)
      elif x.operation == "fusion":
        total += _read(bodies.get(_names(x.line)[0], ()), place, bodies)
      elif x.operation in ("dynamic-slice", "slice", "gather") and place == 0:
        total += _whole(x.arrays)
      elif x.operation != "dynamic-update-slice" or place:
        return math.inf
  return total


def _written(each: _Instruction, body: Sequence[_Instruction]) -> float:
  """Counts the bytes that a fusion writes; of an array that it updates in place, the new part."""
  inside = {x.name: x for x in body}
  root = next((x for x in body if x.is_root), None)
  outs = [root] if root is None or root.operation != "tuple" else [inside.get(name) for name in root.operands]
  total = 0.0
  for out, array in zip(outs, each.arrays, strict=False):
    while out and out.operation == "bitcast":
      out = inside.get(out.operands[0])
    is_part = out and out.operation == "dynamic-update-slice" and out.operands[1] in inside
    total += array.is_here * (_whole(inside[out.operands[1]].arrays) if is_part else array.num_bytes)
  return total
