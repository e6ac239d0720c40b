"""Where a run is: told once, at the beginning of each phase, to the clock, the profiler, the watchdog and the faults that are planned."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.run import faults as faults_lib
from jaxrl_llm.run.profiling import Profiler
from jaxrl_llm.run.watchdog import Watchdog
from jaxrl_llm.workdir.summary import Clock


class Phases:
  """The phases of a run, one after the other.

  Args:
    clock: that books the time of each.
    profiler: that shows them.
    watchdog: that ends a run which stands still in one.
    faults: planned in this process.

  Attributes:
    step: number of the step that the run is in, from 1.
    timing: seconds of the step's phases so far, as metrics.
  """

  def __init__(self, clock: Clock, profiler: Profiler, watchdog: Watchdog, faults: Sequence[faults_lib.Fault] = ()):
    self._clock, self._profiler, self._watchdog, self._faults = clock, profiler, watchdog, faults
    self._name = "other"
    self.step, self.timing = 0, {}

  def begin_step(self, step: int, name: str) -> None:
    """Begins a step.

    Args:
      step: from 1.
      name: of its first phase.
    """
    self.end()
    self.step, self.timing = step, {}
    self._begin(name, step, None)

  def begin(self, name: str, step: int | None = None, *, waits_for: Callable[[], str] | None = None) -> None:
    """Begins a phase, and ends the one before: its time is in `timing` now.

    Args:
      name: as in `timing_s/*` of the metrics.
      step: its number; None is that of the step.
      waits_for: says what the phase waits for.
    """
    self.end()
    self._begin(name, self.step if step is None else step, waits_for)

  def _begin(self, name: str, step: int, waits_for: Callable[[], str] | None) -> None:
    self._name = name
    self._profiler.phase(name)
    self._watchdog.look_at(name, step, waits_for)
    self.strike(name, step)

  def end(self) -> dict[str, float]:
    """Ends the phase, and gives the time that it took; what follows is "other"."""
    timing, self._name = self._clock.lap(self._name), "other"
    for name, seconds in timing.items():
      self.timing[name] = self.timing.get(name, 0.0) + seconds
    return timing

  def strike(self, place: str, step: int) -> None:
    """Lets a fault happen that is planned for a place within a phase, and mostly nothing."""
    faults_lib.strike(self._faults, place, step)

  def poison(self, place: str, values: Any) -> Any:
    """Replaces values where a fault is planned, and mostly none."""
    return faults_lib.poison(self._faults, place, self.step, values)
