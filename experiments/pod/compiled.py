"""Compilation of one program for TPUs: the plan of its memory, its collectives, or the refusal."""

import re
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.pod import costs, hlo
from experiments.pod.kernels import Load
from experiments.pod.operations import Operations, count
from experiments.pod.topology import Topology


class Traffic(NamedTuple):
  """Collectives of one kind over the same mesh axes in one run of a program.

  Attributes:
    seconds: Least time for their bytes, in s.
    num_bytes: Bytes that they gather, reduce or exchange, as each chip counts them.
    times: Number of collectives.
  """

  seconds: float = 0.0
  num_bytes: float = 0.0
  times: float = 0.0

  def scaled(self, factor: float) -> "Traffic":
    """Returns the traffic of a part of the run."""
    return Traffic(*(x * factor for x in self))


class Compiled(NamedTuple):
  """Properties of a compiled program, for one chip, in bytes.

  Attributes:
    arguments: Size of the arguments.
    outputs: Size of the outputs.
    aliased: Size of the outputs that share memory with arguments.
    temporaries: Size of the temporaries, with the gaps that the compiler cannot fill.
    code: Size of the machine code; 0 if only the plan was made.
    seconds: Compilation time, in s.
    traffic: Collectives, by kind and mesh axes.
    refused: Message of the compiler if the program does not fit; None if it fits.
    text: Text of the optimised program.
    operations: Floating-point operations and memory traffic of the optimised program; None if it
      was refused.
    launches: The compiler's list of what the program launches on a GPU; empty for TPUs.
  """

  arguments: float
  outputs: float
  aliased: float
  temporaries: float
  code: float
  seconds: float
  traffic: dict[tuple[str, str], Traffic]
  refused: str | None = None
  text: str = ""
  operations: Operations | None = None
  launches: str = ""


class Reports(NamedTuple):
  """Reports that the compiler writes before it generates machine code.

  Attributes:
    usage: Report of the memory usage.
    buffers: Report of each buffer.
    text: Text of the program.
  """

  usage: str
  buffers: str
  text: str


def compile_for(
  jitted: Callable,
  arguments: tuple,
  mesh: Mesh,
  topology: Topology,
  *,
  unknown_trips: int = 1,
  only_planned: bool = False,
  load: Load | None = None,
) -> Compiled:
  """Compiles one program.

  Args:
    jitted: Program to compile.
    arguments: Abstract arguments with their shardings.
    mesh: Mesh of the program.
    topology: Chips to compile for.
    unknown_trips: Number of iterations of loops whose number is not in the program.
    only_planned: Whether to stop when memory is laid out and collectives are placed, without the
      chips' machine code, which takes minutes.
    load: Assumptions about the load of the program's kernels.
  """
  start, code = time.perf_counter(), 0.0
  with topology.lowering():
    lowered = jitted.trace(*arguments).lower(lowering_platforms=(topology.platform,))
  if topology.platform == "cuda":
    executable, launches = _for_gpu(lowered, topology.flags)
    text, sizes = executable.as_text(), executable.memory_analysis()
    return Compiled(
      float(sizes.argument_size_in_bytes),
      float(sizes.output_size_in_bytes),
      float(sizes.alias_size_in_bytes),
      float(sizes.temp_size_in_bytes),
      float(sizes.generated_code_size_in_bytes),
      time.perf_counter() - start,
      _traffic(topology, text, mesh, unknown_trips),
      text=text,
      operations=count(text, load=load, unknown_trips=unknown_trips),
      launches=launches,
    )
  try:
    reports, executable = _planned(lowered, topology.flags, wait=not only_planned)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    held = costs.bytes_on_chip(arguments)
    return Compiled(
      held,
      0.0,
      0.0,
      max(_requested_bytes(str(error)) - held, 0.0),
      0.0,
      time.perf_counter() - start,
      {},
      refused=str(error),
    )
  if executable is not None:
    # Only the code's size is taken from here: the temporaries of `memory_analysis()` count the gaps
    # of the plan's temporaries twice.
    code = float(executable.memory_analysis().generated_code_size_in_bytes)
  sizes = memory(reports)
  return Compiled(
    **sizes,
    code=code,
    seconds=time.perf_counter() - start,
    traffic=_traffic(topology, reports.text, mesh, unknown_trips),
    text=reports.text,
    operations=count(reports.text, load=load, unknown_trips=unknown_trips),
  )


def memory(reports: Reports) -> dict[str, float]:
  """Reads the bytes of a chip's memory: arguments, outputs, aliased outputs, and temporaries.

  Example:
    >>> buffers = '''
    ... allocation 0: size 40, parameter 0, shape |f32[10]| at ShapeIndex {}, maybe-live-out:
    ... allocation 1: size 8, parameter 1, shape |f32[2]| at ShapeIndex {}:
    ... allocation 2: size 16, maybe-live-out:
    ... allocation 3: size 5, color 1, preallocated-temp:
    ... '''
    >>> memory(Reports("Memory Space: default (color=0)\\nTotal bytes: 100 (100B)", buffers, ""))
    {'arguments': 48.0, 'outputs': 56.0, 'aliased': 40.0, 'temporaries': 36.0}
  """
  num_bytes = {"arguments": 0.0, "outputs": 0.0, "aliased": 0.0}
  # Newer compilers name a page of memory, too.
  for size, kind in re.findall(r"^allocation \d+: size (\d+), (?:page \d+, )?(.*)", reports.buffers, re.MULTILINE):
    if kind.startswith("color"):
      continue  # Not the chip's own memory, but that of its cores or of the host.
    is_argument, is_output = kind.startswith("parameter"), "maybe-live-out" in kind
    for name, counts in zip(num_bytes, (is_argument, is_output, is_argument and is_output), strict=True):
      num_bytes[name] += float(size) * counts
  total = float(re.search(r"Memory Space: default.*?\nTotal bytes: (\d+)", reports.usage, re.DOTALL).group(1))
  return num_bytes | {
    "temporaries": max(total - num_bytes["arguments"] - num_bytes["outputs"] + num_bytes["aliased"], 0.0)
  }


def _planned(lowered: Any, flags: Mapping[str, str], *, wait: bool) -> tuple[Reports, Any]:
  """Returns the compiler's reports as soon as they are complete, and the executable if `wait`.

  The compiler continues with the machine code by itself; the process need not wait for it.
  """
  folder, failed, made = Path(tempfile.mkdtemp()), [], []

  def compile_it() -> None:
    try:
      options = {**_options(flags), "xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
      made.append(lowered.compile(compiler_options=options))
    except Exception as error:  # Raised by the waiting loop below.
      failed.append(error)

  thread = threading.Thread(target=compile_it, daemon=True)
  thread.start()
  endings = ("-memory-usage-report.txt", "-buffer-assignment.txt", "_after_buffer_assignment.txt")
  while True:
    done = not thread.is_alive()
    if failed:
      shutil.rmtree(folder, ignore_errors=True)
      raise failed[0]
    paths = [path for ending in endings for path in folder.glob(f"*.jit_*after_optimizations{ending}")]
    if len(paths) == len(endings) and (done or not wait and time.time() - max(x.stat().st_mtime for x in paths) > 2):
      reports = Reports(*(path.read_text() for path in paths))
      # A busy machine may have written only a part so far.
      if is_whole(reports.text):
        shutil.rmtree(folder, ignore_errors=True)
        return reports, made[0] if wait else None
    if done:
      raise RuntimeError(f"the compiler wrote no plan to {folder}")
    time.sleep(0.2)


def _for_gpu(lowered: Any, flags: Mapping[str, str]) -> tuple[Any, str]:
  """Returns a program for GPUs, and the compiler's list of what it launches."""
  with tempfile.TemporaryDirectory() as folder:
    options = {**_options(flags), "xla_dump_to": folder}
    executable = lowered.compile(compiler_options=options)
    (path,) = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
    return executable, path.read_text()


def _options(flags: Mapping[str, str]) -> dict[str, Any]:
  """Returns flags as options of JAX, which passes booleans on as XLA reads them."""
  return {name: {"true": True, "false": False}.get(value, value) for name, value in flags.items()}


def is_whole(text: str) -> bool:
  """Returns whether the text of a compiled program has been written to its end.

  Example:
    >>> [is_whole(text) for text in ("HloModule f\\n\\nENTRY %main () -> f32[] {\\n}\\n\\n", "HloModule f\\n\\n%sum {\\n}\\n", "")]
    [True, False, False]
  """
  # The entry computation is the last one.
  return "ENTRY " in text and text.rstrip().endswith("}")


def _requested_bytes(message: str) -> float:
  """Returns the largest size in the compiler's refusal, in bytes."""
  sizes = [float(x) * 2.0 ** {"K": 10, "M": 20, "G": 30}[unit] for x, unit in re.findall(r"([\d.]+)([KMG])", message)]
  return max(sizes, default=0.0)


def _traffic(topology: Topology, text: str, mesh: Mesh, unknown_trips: int) -> dict[tuple[str, str], Traffic]:
  devices = list(mesh.devices.flat)
  coords = np.array([device.coords for device in devices])
  slices = np.array(topology.slices_of_devices(devices))
  chip, total = topology.chip, defaultdict(Traffic)
  for collective in hlo.collectives(text, num_devices=mesh.size, unknown_trips=unknown_trips):
    once = hlo.seconds(
      collective, coords, slices, topology.shape, wire=chip.wire_bytes_per_s, network=chip.network_bytes_per_s
    )
    key = (collective.kind, hlo.axes_of(collective.groups, dict(mesh.shape)))
    more = Traffic(once, float(collective.num_bytes), 1.0).scaled(collective.times)
    total[key] = Traffic(*map(sum, zip(total[key], more)))
  return dict(total)
