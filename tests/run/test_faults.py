"""Deliberate faults: parsed, refused in one line, and triggered in their phase."""

import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.run.observe import faults

WRONG = {
  "update:3": ["'update:3'", "PHASE:STEP:KIND"],
  "update:x:kill": ["'update:x:kill'", "PHASE:STEP:KIND"],
  "update:3:kill@": ["'update:3:kill@'", "@PROCESS"],
  "updat:3:kill": ["the phase 'updat'", "did you mean 'update'?"],
  "update:3:kil": ["the kind 'kil'", "did you mean 'kill'?"],
  "eval:3:nan": ["'eval:3:nan'", "rollout, reward, update, the phases"],
}


@pytest.mark.parametrize("text", WRONG)
def test_bad_notation_is_refused_in_one_line(text):
  with pytest.raises(ValueError, match=faults.VARIABLE) as caught:
    faults.parse_faults(text)
  assert all(part in str(caught.value) for part in WRONG[text]) and "\n" not in str(caught.value), caught.value


def test_off_by_default(monkeypatch):
  monkeypatch.delenv(faults.VARIABLE, raising=False)
  assert faults.from_environment() == ()
  monkeypatch.setenv(faults.VARIABLE, "update:3:fail, save:8:kill@1")
  assert faults.from_environment() == (faults.Fault("update", 3, "fail"),), "the other fault is for another process"


def test_a_fault_strikes_only_in_its_phase_and_step():
  planned = faults.parse_faults("update:3:fail")
  for phase, step in (("update", 2), ("rollout", 3)):
    faults.strike(planned, phase, step)
  with pytest.raises(OSError, match="a deliberate failure in update, step 3"):
    faults.strike(planned, "update", 3)


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("term", signal.SIGTERM), ("interrupt", signal.SIGINT)])
def test_signals_go_to_this_process(kind, number, monkeypatch):
  sent = []
  monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
  faults.strike(faults.parse_faults(f"save:8:{kind}"), "save", 8)
  assert sent == [(os.getpid(), number)]


@pytest.mark.parametrize("make", [np.ones, jnp.ones])
@pytest.mark.parametrize("kind", faults.VALUES)
def test_poison_replaces_the_first_sequence(make, kind):
  planned, values = faults.parse_faults(f"update:2:{kind}"), make((3, 4))
  assert faults.poison(planned, "update", 1, values) is values and faults.poison(planned, "reward", 2, values) is values
  poisoned = np.asarray(faults.poison(planned, "update", 2, values))
  np.testing.assert_array_equal(poisoned[0], np.full(4, faults.VALUES[kind], poisoned.dtype))
  np.testing.assert_array_equal(poisoned[1:], 1)
  np.testing.assert_array_equal(np.asarray(values), 1)
