"""Faults on purpose: a run that is killed, hangs or computes nonsense at a place that is named beforehand. Off unless asked for.

`JAXRL_FAULT=PHASE:STEP:KIND[@PROCESS][,...]`, as in `JAXRL_FAULT=update:3:kill` or `JAXRL_FAULT=rollout:2:hang@1,reward:5:nan`.
"""

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.messages import did_you_mean

VARIABLE = "JAXRL_FAULT"
"""The environment variable that asks for faults."""

PHASES = (
  "warm_start", "weight_sync", "rollout", "reward", "old_logprobs", "advantages", "update", "other", "eval", "save", "manifest", "saved",
)  # fmt: skip
"""Where a fault may strike: where the phase begins. `save` is before anything of a checkpoint is written, `manifest` when its arrays are
there and its manifest is not, `saved` when all is; the step of these three is the checkpoint's number."""

ACTS = ("kill", "term", "interrupt", "pause", "hang", "fail")
"""SIGKILL, SIGTERM or SIGINT to this process, a wait of three seconds or without end, an OSError."""

VALUES: Mapping[str, float] = {"nan": float("nan"), "inf": float("inf"), "huge": 1e38}
"""What takes the place of numbers: log-probabilities of the sampler (`rollout`), rewards (`reward`), advantages (`update`)."""

_PAUSE_SECONDS = 3.0  # JAX looks once a second whether there was a SIGTERM.

POISONED = ("rollout", "reward", "update")


class Fault(NamedTuple):
  """One fault.

  Attributes:
    phase: one of `PHASES`.
    step: from 1, or the number of a checkpoint.
    kind: one of `ACTS`, or of `VALUES` in a phase of `POISONED`.
    process: in which process of the run.
  """

  phase: str
  step: int
  kind: str
  process: int = 0


def planned(text: str) -> tuple[Fault, ...]:
  """The faults that a text asks for, written as in the variable.

  Raises:
    ValueError: another notation, or a phase or kind that does not exist.

  Example:
    >>> planned("update:3:kill,rollout:2:hang@1")[1]
    Fault(phase='rollout', step=2, kind='hang', process=1)
  """
  return tuple(_read(part.strip()) for part in text.split(",") if part.strip())


def _read(part: str) -> Fault:
  where, _, process = part.partition("@")
  phase, step, kind = [*where.split(":"), "", "", ""][:3]
  if where.count(":") != 2 or not step.isdecimal() or not (process.isdecimal() or "@" not in part):
    raise ValueError(f"{VARIABLE}: found {part!r}, expected PHASE:STEP:KIND or PHASE:STEP:KIND@PROCESS, as in update:3:kill")
  for name, found, known in (("phase", phase, PHASES), ("kind", kind, (*ACTS, *VALUES))):
    if found not in known:
      hint = did_you_mean(found, known)
      raise ValueError(f"{VARIABLE}: found the {name} {found!r} in {part!r}, expected one of {', '.join(known)}{hint}")
  if kind in VALUES and phase not in POISONED:
    raise ValueError(f"{VARIABLE}: found {part!r}; values are replaced in {', '.join(POISONED)} only")
  return Fault(phase, int(step), kind, int(process or 0))


def from_environment() -> tuple[Fault, ...]:
  """The faults that the environment asks of this process. Raises as `planned` does."""
  return tuple(fault for fault in planned(os.environ.get(VARIABLE, "")) if fault.process == jax.process_index())


def strike(faults: Sequence[Fault], phase: str, step: int) -> None:
  """Does what is planned in this process for the beginning of a phase, and mostly nothing.

  Raises:
    OSError: for "fail".
  """
  for fault in faults:
    if (fault.phase, fault.step) != (phase, step) or fault.kind not in ACTS:
      continue
    if fault.kind in ("hang", "pause"):
      threading.Event().wait(None if fault.kind == "hang" else _PAUSE_SECONDS)
    elif fault.kind == "fail":
      raise OSError(f"{VARIABLE}: a failure in {phase}, step {step}, on purpose")
    else:
      os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT}[fault.kind])


def poison(faults: Sequence[Fault], phase: str, step: int, values: Any) -> Any:
  """An array whose first sequence has numbers that no run should have, where that is planned; else the array.

  Args:
    faults: of this process.
    phase: one of `POISONED`.
    step: from 1.
    values: an array of JAX or NumPy, or a nested list, which becomes NumPy's; sequences lie along its first axis.
  """
  for fault in faults:
    if (fault.phase, fault.step) == (phase, step) and fault.kind in VALUES:
      bad = VALUES[fault.kind]
      if isinstance(values, jax.Array):
        first = jnp.arange(values.shape[0]).reshape(-1, *[1] * (values.ndim - 1)) == 0
        values = jnp.where(first, jnp.asarray(bad, values.dtype), values)
      else:
        values = np.array(values)
        values[0] = bad
  return values
