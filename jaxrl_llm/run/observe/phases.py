"""The phases of a run, which drive its clock, profiler, watchdog and planned faults."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.run.observe import faults as faults_lib
from jaxrl_llm.run.observe.profiling import Profiler
from jaxrl_llm.run.observe.watchdog import Watchdog
from jaxrl_llm.workdir.summary import Clock


class Phase(NamedTuple):
  """A phase of a run.

  Attributes:
    doing: Noun phrase for messages.
    program: Program of a `Footprint` that runs on the devices; None if none of them does.
  """

  doing: str
  program: str | None = None


PHASES: Mapping[str, Phase] = {
  "start": Phase("the initialisation"),
  "warm_start": Phase("the update of the warm start", "update"),
  "weight_sync": Phase("the weight sync", "weight sync"),
  "rollout": Phase("the sampler", "sampling"),
  "reward": Phase("the rewards or a refill of the batch", "sampling"),
  "old_logprobs": Phase("the pass for log-probabilities", "logprobs"),
  "advantages": Phase("the advantages"),
  "update": Phase("the update", "update"),
  "eval": Phase("the evaluation", "sampling"),
  "checkpoint": Phase("the save of a checkpoint"),
  "other": Phase("the end of a step"),
}
"""Phases by their name in `timing_s/*` of the metrics; "start" comes before all others."""


class Phases:
  """The phases of a run, one after the other.

  It is a context manager: the watchdog is active inside its block, and a profile ends with it.

  Attributes:
    now: Name of the current phase, one of `PHASES`.
    step: Number of the current step, from 1.
    timing: Seconds of the current step's phases so far, as metrics.
  """

  def __init__(self, clock: Clock, profiler: Profiler, watchdog: Watchdog, faults: Sequence[faults_lib.Fault] = ()):
    self.clock, self.profiler, self._watchdog, self._faults = clock, profiler, watchdog, faults
    self.now, self.step, self.timing = "other", 0, {}

  def __enter__(self) -> "Phases":
    """Starts the watchdog."""
    self._watchdog.__enter__()
    return self

  def __exit__(self, *error) -> None:
    """Stops the watchdog and the profiler."""
    self._watchdog.__exit__(*error)
    self.profiler.close()

  def begin_step(self, step: int, name: str) -> None:
    """Begins a step, from 1, with the named phase."""
    self.end()
    self.step, self.timing = step, {}
    self._begin(name, step)

  def begin(self, name: str, step: int | None = None, *, waits_for: Callable[[], str] | None = None) -> None:
    """Begins a phase and ends the previous one, whose time is then in `timing`.

    Args:
      name: One of `PHASES`.
      step: Number of the phase's step; None means the current step.
      waits_for: Function that says what the phase waits for.
    """
    self.end()
    self._begin(name, self.step if step is None else step, waits_for)

  def _begin(self, name: str, step: int, waits_for: Callable[[], str] | None = None) -> None:
    if name not in PHASES:
      raise KeyError(f"found the phase {name!r}, expected one of {', '.join(PHASES)}")
    self.now = name
    self.profiler.phase(name)
    self._watchdog.look_at(name, step, waits_for)
    self.strike(name, step)

  def end(self) -> dict[str, float]:
    """Ends the phase and returns the time that it took; the current phase is then "other"."""
    timing, self.now = self.clock.lap(self.now), "other"
    for name, seconds in timing.items():
      self.timing[name] = self.timing.get(name, 0.0) + seconds
    return timing

  def strike(self, place: str, step: int) -> None:
    """Triggers the faults planned for a place within a phase; usually none."""
    faults_lib.strike(self._faults, place, step)

  def poison(self, place: str, values: Any) -> Any:
    """Replaces values if a fault is planned; otherwise returns them unchanged."""
    return faults_lib.poison(self._faults, place, self.step, values)
