"""The phases of a run: each is told, as it begins, to the clock, the profiler, the watchdog and the faults that are planned."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.run import faults as faults_lib
from jaxrl_llm.run.profiling import Profiler
from jaxrl_llm.run.watchdog import Watchdog
from jaxrl_llm.workdir.summary import Clock


class Phase(NamedTuple):
  """What a run does in a phase.

  Attributes:
    doing: A noun phrase for messages.
    program: The program of a `Footprint` that runs on the devices; None if none of them does.
  """

  doing: str
  program: str | None = None


PHASES: Mapping[str, Phase] = {
  "start": Phase("making the first state"),
  "warm_start": Phase("the update of the warm start", "update"),
  "weight_sync": Phase("the weight sync", "weight sync"),
  "rollout": Phase("the sampler", "sampling"),
  "reward": Phase("the rewards or a refill of the batch", "sampling"),
  "old_logprobs": Phase("the pass for log-probabilities", "logprobs"),
  "advantages": Phase("the advantages"),
  "update": Phase("the update", "update"),
  "eval": Phase("the evaluation", "sampling"),
  "checkpoint": Phase("saving a checkpoint"),
  "other": Phase("the end of a step"),
}
"""What a run does, by the name of its phase in `timing_s/*` of the metrics; "start" comes before all phases."""


class Phases:
  """The phases of a run, one after the other. A context manager: the watchdog watches within it, and a profile ends with it.

  Attributes:
    now: name of the phase that the run is in, one of `PHASES`.
    step: number of the step that the run is in, from 1.
    timing: seconds of the step's phases so far, as metrics.
  """

  def __init__(self, clock: Clock, profiler: Profiler, watchdog: Watchdog, faults: Sequence[faults_lib.Fault] = ()):
    self.clock, self.profiler, self._watchdog, self._faults = clock, profiler, watchdog, faults
    self.now, self.step, self.timing = "other", 0, {}

  def __enter__(self) -> "Phases":
    """Has the watchdog watch."""
    self._watchdog.__enter__()
    return self

  def __exit__(self, *error) -> None:
    """Ends the watch and the profile."""
    self._watchdog.__exit__(*error)
    self.profiler.close()

  def begin_step(self, step: int, name: str) -> None:
    """Begins a step, from 1, with the phase of that name."""
    self.end()
    self.step, self.timing = step, {}
    self._begin(name, step)

  def begin(self, name: str, step: int | None = None, *, waits_for: Callable[[], str] | None = None) -> None:
    """Begins a phase, and ends the one before: its time is in `timing` now.

    Args:
      name: one of `PHASES`.
      step: its number; None is that of the step.
      waits_for: says what the phase waits for.
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
    """Ends the phase, and gives the time that it took; what follows is "other"."""
    timing, self.now = self.clock.lap(self.now), "other"
    for name, seconds in timing.items():
      self.timing[name] = self.timing.get(name, 0.0) + seconds
    return timing

  def strike(self, place: str, step: int) -> None:
    """Lets a fault happen that is planned for a place within a phase, and mostly nothing."""
    faults_lib.strike(self._faults, place, step)

  def poison(self, place: str, values: Any) -> Any:
    """Replaces values where a fault is planned, and mostly none."""
    return faults_lib.poison(self._faults, place, self.step, values)
