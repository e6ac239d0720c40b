"""Programs that compile once, for all of their declared shapes, and a count that proves it."""

import contextlib
import ctypes
import ctypes.util
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax


class ShapeError(ValueError):
  """A program was called with a shape that nobody had declared."""


class Compiled(NamedTuple):
  """A jitted function and the shapes that it is for; see `compiled_for`.

  Attributes:
    jitted: the function.
    signatures: its arguments in each of their shapes, abstract: what `jitted.trace(*signature)` takes, to compile it without running it.
    programs: by shape; empty before the first call.
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
      raise ShapeError(f"{name}: found a batch of shape {_shape(args)}, expected one of those that were declared: {known}")
    return program(*args)


def compiled_for(jitted: Callable, signatures: Sequence[tuple]) -> Compiled:
  """`jitted` for a declared set of shapes, all compiled at the first call: later ones can only run.

  `signatures` are its arguments in each of their shapes, abstract; the second argument tells the shapes apart.
  """
  return Compiled(jitted, tuple(signatures), {})


def give_back_memory() -> None:
  """Returns to the system what a compiler has freed: glibc keeps it, hundreds of MB after a train step. Does nothing without glibc."""
  name = ctypes.util.find_library("c")
  if name and hasattr(libc := ctypes.CDLL(name), "malloc_trim"):
    libc.malloc_trim(0)


def _shape(args: Sequence[Any]) -> tuple[int, ...]:
  return jax.tree.leaves(args[1])[0].shape


_declaring: list[bool] = []


@contextlib.contextmanager
def declared() -> Iterator[None]:
  """What compiles inside was declared beforehand, or compiles once in a run, whenever that is: no `CompileCounter` calls it out."""
  _declaring.append(True)
  try:
    yield
  finally:
    _declaring.pop()


class CompileCounter:
  """Counts the programs that XLA has compiled, or loaded from its cache, since the counter was made; once the run is warm, names them.

  A run is warm when it has passed each of its parts once. Programs of `compiled_for` are expected even then: they compile for all of their
  shapes at their first call, and never again.

  Args:
    parts: that a run passes; None never gets warm.

  Attributes:
    count: of all programs.
    unexpected: of those that were compiled in a warm run.

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
    """The run has been through one of its parts, with all that this compiles."""
    self._missing.discard(part)

  def culprits(self) -> list[str]:
    """What was compiled in the warm run since the last call: function and argument shapes."""
    found, self._culprits = self._culprits, []
    return found

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
_arguments: dict[str, Sequence[Any]] = {}  # What each function was last compiled for.


@functools.cache
def _listen_to_names() -> None:
  """Has JAX say what it compiles, the record that `jax.log_compiles` shows, without showing it."""
  logger = logging.getLogger("jax._src.interpreters.pxla")
  shown = logger.getEffectiveLevel()

  def read(record: logging.LogRecord) -> bool:
    """A filter and no handler: it sees every record, and lets none through that would not have been shown anyway."""
    if str(record.msg).startswith("Compiling ") and isinstance(record.args, tuple) and len(record.args) > 1:
      _arguments[str(record.args[0])] = record.args[1]
    return record.levelno >= shown

  logger.addFilter(read)
  logger.setLevel(logging.DEBUG)
