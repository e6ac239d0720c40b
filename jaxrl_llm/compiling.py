"""Programs that compile once, for all of their declared shapes, and a count that proves it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def compiled_for(jitted: Callable, signatures: Sequence[tuple]) -> Callable:
  """`jitted` for a declared set of shapes, all compiled at the first call: later ones can only run.

  Args:
    jitted: a jitted function; its second argument tells the shapes apart.
    signatures: its arguments in each of their shapes, abstract.
  """
  programs: dict[tuple, Callable] = {}

  def call(*args: Any) -> Any:
    if not programs:
      programs.update({_shape(abstract): jitted.lower(*abstract).compile() for abstract in signatures})
    return programs[_shape(args)](*args)

  return call


def _shape(args: Sequence[Any]) -> tuple[int, ...]:
  return jax.tree.leaves(args[1])[0].shape


class CompileCounter:
  """Counts the programs that XLA has compiled, or loaded from its cache, since the counter was made."""

  def __init__(self):
    self.count = 0
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def _listen(self, event: str, duration: float, **_: Any) -> None:
    self.count += event == "/jax/core/compile/backend_compile_duration"
