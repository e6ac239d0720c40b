"""Programs that compile once for all of their declared shapes, and a counter that proves it."""

import contextlib
import ctypes
import ctypes.util
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax


class ShapeError(ValueError):
  """An error that says that a program was called with a shape that was not declared."""


class Compiled(NamedTuple):
  """A jitted function with its declared shapes; see `compiled_for`.

  Attributes:
    jitted: Jitted function.
    signatures: Abstract arguments, one tuple per declared shape. `jitted.trace(*signature)`
      compiles without running.
    programs: Compiled programs by shape; empty before the first call.
  """

  jitted: Callable
  signatures: tuple[tuple, ...]
  programs: dict[tuple[int, ...], Callable]

  def __call__(self, *args: Any) -> Any:
    if not self.programs:
      with declared():
        self.programs.update({_shape(abstract): self.jitted.lower(*abstract).compile() for abstract in self.signatures})
      give_back_memory()
    if (program := self.programs.get(_shape(args))) is None:
      name, known = getattr(self.jitted, "__name__", "a program"), ", ".join(map(str, sorted(self.programs)))
      raise ShapeError(f"{name}: found a batch of shape {_shape(args)}, expected one of the declared shapes: {known}")
    return program(*args)


def compiled_for(jitted: Callable, signatures: Sequence[tuple]) -> Compiled:
  """Restricts a jitted function to a declared set of shapes.

  The first call compiles it for all of them; later calls never compile.

  Args:
    jitted: Jitted function.
    signatures: Abstract arguments, one tuple per shape. The first array of the second argument
      tells the shapes apart.
  """
  return Compiled(jitted, tuple(signatures), {})


def give_back_memory() -> None:
  """Returns the memory that a compiler has freed to the operating system.

  glibc would keep it, hundreds of MB after a train step. Without glibc this does nothing.
  """
  name = ctypes.util.find_library("c")
  if name and hasattr(libc := ctypes.CDLL(name), "malloc_trim"):
    libc.malloc_trim(0)


def _shape(args: Sequence[Any]) -> tuple[int, ...]:
  return jax.tree.leaves(args[1])[0].shape


_declaring: list[bool] = []


@contextlib.contextmanager
def declared() -> Iterator[None]:
  """Marks the compilations inside the block as expected, so that no `CompileCounter` reports them.

  It is for programs that were declared beforehand, or that compile once at any time in a run.
  """
  _declaring.append(True)
  try:
    yield
  finally:
    _declaring.pop()


class CompileCounter:
  """A counter of the programs that XLA compiles, or loads from its cache, from now on.

  Once the run is warm, it also names them. A run is warm when it has passed each of its parts once.
  Programs of `compiled_for` are expected even then: they compile for all of their shapes at their
  first call, and never again.

  Args:
    *parts: Names of the parts of a run; without any the run never gets warm.

  Attributes:
    count: Number of programs compiled.
    unexpected: Number of programs compiled in a warm run.

  Example:
    >>> import jax.numpy as jnp
    >>> counter = CompileCounter("step")
    >>> unruly = jax.jit(lambda x: x + 1)
    >>> _ = unruly(jnp.zeros(2))
    >>> counter.passed("step")
    >>> threes = jnp.zeros(3)
    >>> _ = counter.culprits(), unruly(threes)
    >>> counter.culprits()
    ['jit(<lambda>) for float32[3]']
  """

  def __init__(self, *parts: str):
    self.count = self.unexpected = 0
    self._missing, self._culprits = set(parts) or {""}, []
    _listen_to_names()
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def passed(self, part: str) -> None:
    """Notes that the run has passed one of its parts, and has compiled what it needs."""
    self._missing.discard(part)

  def culprits(self) -> list[str]:
    """Returns the programs compiled in the warm run since the last call: function and shapes."""
    culprits, self._culprits = self._culprits, []
    return culprits

  def _listen(self, event: str, duration: float, **about: Any) -> None:
    if event != "/jax/core/compile/backend_compile_duration":
      return
    self.count += 1
    if not self._missing and not _declaring:
      self.unexpected += 1
      name = str(about.get("fun_name", "a program"))
      shapes = ", ".join(getattr(x, "str_short", x.__str__)() for x in _arguments.get(name, ()))
      self._culprits.append(f"{name} for {shapes if len(shapes) <= _MAX_CHARS else shapes[:_MAX_CHARS] + ' ...'}" if shapes else name)


_MAX_CHARS = 300
_arguments: dict[str, Sequence[Any]] = {}  # By function, the arguments of its last compilation.


@functools.cache
def _listen_to_names() -> None:
  """Reads the names and arguments of compiled programs from JAX's log.

  These are the records that `jax.log_compiles` shows; here they are not shown.
  """
  logger = logging.getLogger("jax._src.interpreters.pxla")
  shown = logger.getEffectiveLevel()

  def read(record: logging.LogRecord) -> bool:
    """Notes a compilation, and returns whether the record would have been shown anyway.

    It is a filter because a filter, unlike a handler, can also keep a record from being shown.
    """
    if str(record.msg).startswith("Compiling ") and isinstance(record.args, tuple) and len(record.args) > 1:
      _arguments[str(record.args[0])] = record.args[1]
    return record.levelno >= shown

  logger.addFilter(read)
  logger.setLevel(logging.DEBUG)
