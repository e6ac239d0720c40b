"""The phases of a run: each second is booked once, and profiler and watchdog are notified."""

import time

import numpy as np
import pytest

from jaxrl_llm.run.observe import faults
from jaxrl_llm.run.observe.phases import Phases
from jaxrl_llm.run.observe.profiling import Profiler
from jaxrl_llm.run.observe.watchdog import Watchdog
from jaxrl_llm.workdir import summary


class Told(Profiler, Watchdog):
  """Stand-in for a profiler and a watchdog that records their calls."""

  def __init__(self):
    self.phases, self.looks = [], []

  def phase(self, name):
    self.phases.append(name)

  def look_at(self, *args):
    self.looks.append(args)


def make(planned=""):
  told, clock = Told(), summary.Clock()
  return Phases(clock, told, told, faults.parse_faults(planned)), told, clock


def test_every_second_is_booked_once():
  phases, told, clock = make()
  phases.begin_step(3, "rollout")
  time.sleep(0.02)
  waits_for = lambda: "two answers"
  phases.begin("reward", waits_for=waits_for)
  time.sleep(0.01)
  phases.begin("other")
  assert set(phases.timing) == {"timing_s/rollout", "timing_s/reward"}
  assert phases.timing["timing_s/rollout"] >= 0.02 and phases.timing["timing_s/reward"] >= 0.01
  assert told.phases == ["rollout", "reward", "other"]
  assert told.looks == [("rollout", 3, None), ("reward", 3, waits_for), ("other", 3, None)]
  phases.begin("eval", 8)
  assert set(phases.end()) == {"timing_s/eval"} and told.looks[-1] == ("eval", 8, None)
  phases.begin_step(4, "rollout")
  assert phases.timing == {} and phases.step == 4
  seconds = {"rollout": 1.0}
  clock.settle(seconds)
  assert seconds["rollout"] >= 1.02 and seconds["other"] >= 0


def test_faults_strike_at_the_beginning_of_a_phase():
  phases, _, _ = make("reward:2:fail,manifest:12:fail")
  phases.begin_step(1, "reward")
  phases.begin_step(2, "rollout")
  with pytest.raises(OSError, match="reward, step 2"):
    phases.begin("reward")
  with pytest.raises(OSError, match="manifest, step 12"):
    phases.strike("manifest", 12)


def test_poison_applies_only_to_its_step():
  phases, _, _ = make("update:2:inf")
  values = np.ones((2, 2))
  phases.begin_step(1, "update")
  assert phases.poison("update", values) is values
  phases.begin_step(2, "update")
  assert phases.poison("update", values).tolist() == [[float("inf")] * 2, [1, 1]]
