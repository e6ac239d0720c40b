"""Collectives of a compiled program and the number of times that each runs, read from its text."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_SHAPE = re.compile(r"\b(\w+)\[([\d,]*)\]")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
CALLED = re.compile(
  r"(?:calls|to_apply|body|condition|async_computation|true_computation|false_computation)=%?([\w.\-]+)"
  r"|(?:branch|called)_computations=\{([^}]*)\}"
)
"""Names of the computations that an instruction runs, one by one or as a list of branches."""

_OFTEN = 1_000_003  # Iterations by which loops of an unknown number are recognised.


class Collective(NamedTuple):
  """A collective operation of a program.

  Attributes:
    kind: Kind of the collective, one of `KINDS`.
    num_bytes: Size of the whole array that a group of chips gathers, reduces or exchanges, as each
      chip counts it.
    groups: Chips that work together, as numbers in the program's order.
    times: Number of times that it runs.
  """

  kind: str
  num_bytes: int
  groups: tuple[tuple[int, ...], ...]
  times: int


def collectives(text: str, *, num_devices: int, unknown_trips: int = 1) -> list[Collective]:
  """Reads the collectives of a compiled program.

  Args:
    text: Text of the program, `compiled.as_text()`.
    num_devices: Number of devices of the program.
    unknown_trips: Number of iterations of loops whose number is not in the program.

  Example:
    >>> text = '''
    ... %body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
    ...   %g = f32[8]{0} all-gather(%x), channel_id=1, replica_groups=[1,2]<=[2], dimensions={0}
    ... }
    ... ENTRY %main (a: f32[4]) -> f32[8] {
    ...   %w = (s32[], f32[8]) while(%t), body=%body, backend_config={"known_trip_count":{"n":"48"}}
    ... }
    ... '''
    >>> collectives(text, num_devices=2)
    [Collective(kind='all-gather', num_bytes=32, groups=((0, 1),), times=48)]
  """
  all_collectives: list[Collective] = []
  chains: set[tuple[str, ...]] = set()
  for line, times, (*loops, name) in instructions(text, unknown_trips=unknown_trips):
    shape, operation = _OPERATION.match(line).groups()
    kind = operation.removesuffix("-start")
    # A collective that overlaps with other work appears in each fusion of that work, from its start
    # to its end, and the work between may be a loop. Several may share a channel.
    chain = re.search(r'(channel_id=\d+).*(chain_id="\d+)', line)
    if chain and any((*chain.groups(), loop) in chains for loop in loops):
      continue
    if chain:
      chains.add((*chain.groups(), loops[-1]))
    if kind in KINDS:
      all_collectives.append(_collective(line, kind, shape, operation, times, num_devices, name))
    elif operation == "send" and (between := _between_slices(line, shape, times, num_devices)):
      all_collectives.append(between)
  return [x for x in all_collectives if len(x.groups[0]) > 1]


def instructions(text: str, *, unknown_trips: int = 1) -> Iterator[tuple[str, int, tuple[str, ...]]]:
  """Lists what a program runs, computations that an instruction calls included.

  Args:
    text: Text of the program, `compiled.as_text()`.
    unknown_trips: Number of iterations of loops whose number is not in the program.

  Returns:
    Each instruction's line, the number of times that it runs, and the names of the entry and of the
    bodies of the loops around it, followed by that of its own computation.
  """
  bodies, entry = computations(text)

  def visit(name: str, times: int, loops: tuple[str, ...]) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    for line in bodies.get(name, ()):
      if not (match := _OPERATION.match(line)):
        continue
      yield line, times, (*loops, name)
      is_loop = match.group(2) == "while"
      turns = times * trips(line, bodies, unknown_trips) if is_loop else times
      for called, branches in CALLED.findall(line):
        for each in [called] if called else [x.strip().lstrip("%") for x in branches.split(",")]:
          yield from visit(each, turns, (*loops, each) if is_loop else loops)

  return visit(entry, 1, (entry,))


def largest_in_loops(text: str, *, num_devices: int, depth: int = 1) -> int:
  """Returns the bytes of the largest collective in loops whose number of iterations is unknown.

  Args:
    text: Text of the program, `compiled.as_text()`.
    num_devices: Number of devices of the program.
    depth: Number of such loops, one inside the other, that are around the collective.
  """
  inside = [x for x in collectives(text, num_devices=num_devices, unknown_trips=_OFTEN) if x.times >= _OFTEN**depth]
  return max((x.num_bytes for x in inside), default=0)


_COPY = re.compile(r"= (\w+\[[\d,]*\])\S* (?:copy|transpose)\(")
SHORT = {"bfloat16": "bf16", "float32": "f32", "int8": "s8"}
"""Names of dtypes in the text of a program."""


def copies(text: str, shapes: Collection[str]) -> list[str]:
  """Returns the lines of a program that copy an array of one of some shapes.

  Args:
    text: Text of the program, `compiled.as_text()`.
    shapes: Shapes with their dtypes, such as "bf16[4,128]".

  Example:
    >>> copies("%c = bf16[4,128]{1,0} copy(%x)\\n%d = bf16[4,64]{1,0} copy(%y)", ["bf16[4,128]"])
    ['%c = bf16[4,128]{1,0} copy(%x)']
  """
  matches = ((line, _COPY.search(line)) for line in text.splitlines())
  return [line.strip() for line, match in matches if match and match.group(1) in shapes]


def casts_in_loops(text: str, shape: str, *, depth: int = 1) -> list[str]:
  """Returns the lines of loops, fused or not, that convert an array to a shape with its dtype.

  Args:
    text: Text of the program, `compiled.as_text()`.
    shape: Shape of the result, such as "bf16[4,128]".
    depth: Least number of loops, one inside the other, around the line.
  """
  is_cast = re.compile(rf"= {re.escape(shape)}\S* convert\(")
  # The entry and the computation itself are listed besides the loops.
  return [line.strip() for line, _, around in instructions(text) if len(around) - 2 >= depth and is_cast.search(line)]


def stored_together(text: str, shapes: Collection[str]) -> int:
  """Returns the fewest neighbouring bytes that a program writes when it updates one of some arrays.

  Args:
    text: Text of the program, `compiled.as_text()`.
    shapes: Shapes of the arrays with their dtypes, such as "bf16[4,128]".

  Returns:
    The length of the runs of neighbouring numbers of the smallest update in place, in bytes; 0 if
    there is none.

  Example:
    >>> text = '''
    ... %f (a: bf16[4,128], b: bf16[4,1]) -> bf16[4,128] {
    ...   %b = bf16[4,1]{1,0} parameter(1)
    ...   %c = bf16[1,128]{1,0} parameter(2)
    ...   %d = bf16[4,128]{1,0} dynamic-update-slice(%a, %b, %i, %i)
    ...   %e = bf16[4,128]{1,0} dynamic-update-slice(%a, %c, %i, %i)
    ... }'''
    >>> stored_together(text, ["bf16[4,128]"])
    2
  """
  runs = []
  for lines in computations(text)[0].values():
    sizes = {x.group(1): x.group(2) for x in (re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]*)\]", line) for line in lines) if x}
    for line in lines:
      match = re.search(r"= ((\w+)\[([\d,]*)\])\{([\d,]*)\S* dynamic-update-slice\([^,]*, %([\w.\-]+)", line)
      if match is None or match.group(1) not in shapes:
        continue
      whole, part = (_numbers(x) for x in (match.group(3), sizes[match.group(5)]))
      run = BYTES[match.group(2)]
      for axis in _numbers(match.group(4)):
        run *= part[axis]
        if part[axis] < whole[axis]:
          break
      runs.append(run)
  return min(runs, default=0)


def copies_by_depth(text: str, shapes: Collection[str]) -> dict[int, int]:
  """Counts the copies of arrays of some shapes by the loops of unknown length around them.

  Args:
    text: Text of the program, `compiled.as_text()`.
    shapes: Shapes with their dtypes, as in `copies`.

  Returns:
    Number of copies in one iteration of the innermost loop, by the number of loops; 0 is outside of
    all of them.
  """
  counts: Counter[int] = Counter()
  for line, times, _ in instructions(text, unknown_trips=_OFTEN):
    if copies(line, shapes):
      depth = int(math.log(times, _OFTEN) + 1e-9)
      counts[depth] += round(times / _OFTEN**depth)
  return dict(sorted(counts.items()))


def computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Splits a program into the lines of its computations, and names the first one to run."""
  bodies, entry, lines = {}, "", None
  for line in text.splitlines():
    match = _COMPUTATION.match(line)
    if match and " = " not in line.split("(", 1)[0]:
      lines = bodies.setdefault(match.group(1), [])
      entry = match.group(1) if line.startswith("ENTRY") else entry
    # The text of a kernel may contain lines that begin with braces, too.
    elif line.rstrip() == "}":
      lines = None
    elif lines is not None:
      lines.append(line)
  return bodies, entry


def trips(line: str, bodies: Mapping[str, Sequence[str]], unknown: int) -> int:
  """Reads the number of iterations of a loop.

  It stands beside the loop, or it follows from the one constant with which the loop's condition
  compares a counter, and from the constant that the body adds to this counter.

  Args:
    line: Text of the loop's instruction.
    bodies: Lines of the program's computations.
    unknown: Number to return if the program does not say it.
  """
  if match := re.search(r"known_trip_count\D*?(\d+)", line):
    return int(match.group(1))
  condition, body = (_text(line, bodies, kind) for kind in ("condition", "body"))
  constants = re.findall(r"[su]32\[\]\S* constant\((\d+)\)", condition)
  if len(constants) != 1 or not re.search(r"compare\(.*direction=LT", condition):
    return unknown
  return -(-int(constants[0]) // _increment(condition, body))


def _text(line: str, bodies: Mapping[str, Sequence[str]], kind: str) -> str:
  name = re.search(kind + r"=%?([\w.\-]+)", line)
  return "\n".join(bodies.get(name.group(1), ()) if name else ())


def _increment(condition: str, body: str) -> int:
  """Returns what one iteration adds to the counter of a loop: 1, or more if XLA has unrolled it."""
  counter = re.search(r"get-tuple-element\(.*index=(\d+)", condition)
  outputs = re.search(r"ROOT .*[ )]tuple\(([^)]*)\)", body)
  if not counter or not outputs:
    return 1
  name = outputs.group(1).split(",")[int(counter.group(1))].split("%")[-1].strip()
  added = re.search(rf"%{re.escape(name)} = \S+ add\(%[\w.\-]+, %([\w.\-]+)\)", body)
  value = added and re.search(rf"%{re.escape(added.group(1))} = \S+ constant\((\d+)\)", body)
  return int(value.group(1)) if value else 1


def _size(shape: str) -> list[int]:
  sizes = [(dtype, [int(x) for x in dims.split(",") if x]) for dtype, dims in _SHAPE.findall(shape)]
  return [BYTES[dtype] * math.prod(dims) for dtype, dims in sizes if dtype in BYTES]


def _collective(line: str, kind: str, shape: str, operation: str, times: int, num_devices: int, computation: str) -> Collective:
  groups = _groups(line, num_devices) if kind != "collective-permute" else _pairs(line)
  sizes = _size(shape)
  if operation.endswith("-start") and len(sizes) > 1 and kind in ("all-gather", "collective-permute"):
    sizes = sizes[1:2]  # The shape is (operand, result, ...) if the collective runs asynchronously.
  num_bytes = sum(sizes)
  if kind == "reduce-scatter":
    num_bytes *= len(groups[0])
  if kind == "all-reduce" and "all-reduce-scatter" in computation:
    # The TPU's compiler writes it as a fusion that keeps one part of the sum.
    kind = "reduce-scatter"
  return Collective(kind, num_bytes, groups, times)


def _between_slices(line: str, shape: str, times: int, num_devices: int) -> Collective | None:
  """Reads a collective over the network, which the program contains as a transfer to the host.

  Slices are consecutive in the mesh.
  """
  kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', line)
  last = re.search(r'_xla_megascale_target="[^"]*\{0:(\d+)\}"', line)
  if not kind or not last:
    return None
  size = int(last.group(1)) + 1
  groups = tuple(tuple(range(chip, num_devices, size)) for chip in range(size))
  return Collective(kind.group(1).lower().replace("_", "-"), max(_size(shape), default=0), groups, times)


def _groups(line: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
  match = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", line)
  if match:
    return tuple(tuple(int(x) for x in group.split(",")) for group in re.findall(r"\{([\d, ]+)\}", match.group(1)))
  if match := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line):
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match.group(1))}
    across = re.findall(r"'(\w+)'", match.group(2))
    iota = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", line)
    order = (np.arange(num_devices) if not iota else _iota(*iota.groups(), num_devices)).reshape(tuple(sizes.values()))
    order = np.moveaxis(order, [list(sizes).index(name) for name in across], range(-len(across), 0))
    return tuple(map(tuple, order.reshape(-1, math.prod(sizes[name] for name in across)).tolist()))
  match = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
  if not match:
    return (tuple(range(num_devices)),)
  order = _iota(match.group(2), match.group(3), num_devices)
  return tuple(map(tuple, order.reshape(_numbers(match.group(1))).tolist()))


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(int(x) for x in text.split(","))


def _iota(sizes: str, permutation: str | None, num_devices: int) -> np.ndarray:
  order = np.arange(num_devices).reshape(_numbers(sizes))
  return order.transpose(_numbers(permutation)) if permutation else order


def _pairs(line: str) -> tuple[tuple[int, ...], ...]:
  pairs = re.findall(r"\{(\d+),(\d+)\}", line.partition("source_target_pairs=")[2].partition("}}")[0] + "}")
  return tuple((int(a), int(b)) for a, b in pairs if a != b) or ((0,),)


def axes_of(groups: Sequence[Sequence[int]], mesh_shape: Mapping[str, int]) -> str:
  """Returns the mesh axes that a collective spans, as in "fsdp" or "fsdp+expert".

  Args:
    groups: Numbers of the chips of each group, in the mesh's order.
    mesh_shape: Sizes of the mesh's axes.

  Example:
    >>> axes_of([(0, 2), (1, 3)], {"fsdp": 2, "tensor": 2})
    'fsdp'
  """
  places = np.array(np.unravel_index(np.array(groups[0]), tuple(mesh_shape.values())))
  varying = [axis for axis, row in zip(mesh_shape, places, strict=True) if len(set(row.tolist())) > 1]
  return "+".join(varying)


def seconds(
  collective: Collective,
  coords: np.ndarray,
  slices: np.ndarray,
  shape: Sequence[int],
  *,
  wire: float,
  network: float,
) -> float:
  """Bounds the time of one run of a collective from below, by the bytes that each chip receives.

  A ring along a whole dimension of the torus has two wires per chip; along a part of it, one wire.
  Between slices the network counts instead.

  Args:
    collective: Collective to time.
    coords: Coordinates of each chip in its torus, [N, 3].
    slices: Number of each chip's slice, [N].
    shape: Number of chips along each dimension of the torus; empty for a switch.
    wire: Bandwidth of one wire in one direction, in bytes/s.
    network: Bandwidth of a chip to other slices, in bytes/s.
  """
  group = np.array(collective.groups[0])
  size = len(group)
  share = (size - 1) / size
  moved = collective.num_bytes * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(collective.kind, share)
  if len(set(slices[group].tolist())) > 1:
    num = len(set(slices[group].tolist()))
    inside = size // num
    # The slices reduce inside first; only the part that a chip is left with crosses the network.
    return moved / wire / 2 * (inside > 1) + collective.num_bytes / max(inside, 1) * 2 * (num - 1) / num / network
  if not shape:
    return moved / wire  # A switch joins all.
  wires, hops = 0, 0.0
  for dimension, length in enumerate(shape):
    places = len(set(coords[group, dimension].tolist()))
    if places > 1:
      wraps = places == length and length > 2
      wires += 2 if wraps else 1
      hops += places / (4 if wraps else 3)
  if wires == 0:
    return 0.0  # Devices of one chip, whose link is unknown.
  if collective.kind in ("all-to-all", "ragged-all-to-all"):
    moved *= hops  # Data for a distant chip passes the chips in between.
  return moved / (wire * wires)
