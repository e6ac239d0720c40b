"""What a program launches on a GPU, read from the compiler's list of thunks."""

import re
from typing import NamedTuple

_THUNK = re.compile(r"^(\s*)\d+: (k\w+)\s+(?:\[[^\]]*\]\s*)?([\w.\-]*)")
_LOOP, _GRAPH = "kWhile", "kCommandBuffer"
# They launch nothing themselves.
_OTHERS = frozenset({"kAsyncStart", "kAsyncDone", "kConditional", "kDynamicSliceFusion", "kSequential", "kWaitForStreams"})


class Launch(NamedTuple):
  """A kernel or copy.

  Attributes:
    name: Name of the kernel; "kCopy" and others without a name have that of their kind.
    in_graph: Whether it is part of a command buffer, which is launched as one.
  """

  name: str
  in_graph: bool


class Loop(NamedTuple):
  """A loop of a program, or the program itself.

  Attributes:
    launches: What one iteration launches, without the loops inside, with the loop's condition.
    loops: Loops inside, in order.
  """

  launches: list[Launch]
  loops: "list[Loop]"

  def names(self) -> set[str]:
    """Returns the names of what an iteration launches by itself."""
    return {launch.name for launch in self.launches}

  def deepest(self) -> "Loop":
    """Returns the loop inside of which no other is, the first of several."""
    return self.loops[0].deepest() if self.loops else self


def parse(text: str) -> Loop:
  """Reads the list of thunks of a program.

  Example:
    >>> text = '''
    ... 000: kCustomKernel [source | sink] start grid: [1, 1, 1]
    ... 001: kWhile [prev=000 (1) | sink]
    ... condition:
    ...     002: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
    ...   body:
    ...     000: kCommandBuffer [source | sink]
    ...         003: kCustomKernel [source | sink] gemm_fusion grid: [8, 1, 1]
    ...         004: kCopy         [source | sink] kCopy
    ... 005: kCustomKernel [prev=001 (1) | sink] end grid: [1, 1, 1]
    ... '''
    >>> program = parse(text)
    >>> [launch.name for launch in program.launches], [tuple(launch) for launch in program.loops[0].launches]
    (['start', 'end'], [('loop_and_fusion', False), ('gemm_fusion', True), ('kCopy', True)])
  """
  program = Loop([], [])
  # Loops and command buffers around a line, with the indentation of their own lines.
  around: list[tuple[int, Loop | None]] = []
  for line in text.splitlines():
    match = _THUNK.match(line)
    if match is None:
      continue
    indent, kind, name = len(match.group(1)), match.group(2), match.group(3)
    while around and around[-1][0] >= indent:
      around.pop()
    here = next((loop for _, loop in reversed(around) if loop is not None), program)
    if kind == _LOOP:
      here.loops.append(Loop([], []))
      around.append((indent, here.loops[-1]))
    elif kind == _GRAPH:
      around.append((indent, None))
    elif kind not in _OTHERS:
      here.launches.append(Launch(name or kind, bool(around) and around[-1][1] is None))
  return program
