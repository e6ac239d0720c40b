"""Deliberate faults: a run is killed, hangs or computes nonsense at a chosen place. Off by default.

`JAXRL_FAULT=PHASE:STEP:KIND[@PROCESS][,...]`, for instance `JAXRL_FAULT=update:3:kill` or
`JAXRL_FAULT=rollout:2:hang@1,reward:5:nan`.
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
"""Environment variable that requests faults."""

PHASES = (
  "warm_start", "weight_sync", "rollout", "reward", "old_logprobs", "advantages", "update", "other", "eval", "save", "manifest", "saved",
)  # fmt: skip
"""Phases in which a fault may strike, at their beginning. `save` comes before anything of a
checkpoint is written, `manifest` between its arrays and its manifest, `saved` after both; the step
of these three is the checkpoint's number."""

ACTS = ("kill", "term", "interrupt", "pause", "hang", "fail")
"""SIGKILL, SIGTERM or SIGINT to this process, a wait of three seconds, an endless wait, an
OSError."""

VALUES: Mapping[str, float] = {"nan": float("nan"), "inf": float("inf"), "huge": 1e38}
"""Replacements for numbers: the sampler's log-probabilities (`rollout`), rewards (`reward`),
advantages (`update`)."""

_PAUSE_SECONDS = 3.0  # JAX checks for a SIGTERM once a second.

POISONED = ("rollout", "reward", "update")
"""Phases in which values can be replaced."""


class Fault(NamedTuple):
  """A planned fault.

  Attributes:
    phase: One of `PHASES`.
    step: Number of the step, from 1, or of the checkpoint.
    kind: One of `ACTS`, or of `VALUES` in a phase of `POISONED`.
    process: Index of the process in which it strikes.
  """

  phase: str
  step: int
  kind: str
  process: int = 0


def parse_faults(text: str) -> tuple[Fault, ...]:
  """Parses faults, written as in the environment variable.

  Raises:
    ValueError: If the notation is wrong, or a phase or kind does not exist.

  Example:
    >>> parse_faults("update:3:kill,rollout:2:hang@1")[1]
    Fault(phase='rollout', step=2, kind='hang', process=1)
  """
  return tuple(_read(part.strip()) for part in text.split(",") if part.strip())


def _read(part: str) -> Fault:
  where, _, process = part.partition("@")
  phase, step, kind = [*where.split(":"), "", "", ""][:3]
  if where.count(":") != 2 or not step.isdecimal() or not (process.isdecimal() or "@" not in part):
    raise ValueError(f"{VARIABLE}: found {part!r}, expected PHASE:STEP:KIND or PHASE:STEP:KIND@PROCESS, as in update:3:kill")
  for name, value, known in (("phase", phase, PHASES), ("kind", kind, (*ACTS, *VALUES))):
    if value not in known:
      hint = did_you_mean(value, known)
      raise ValueError(f"{VARIABLE}: found the {name} {value!r} in {part!r}, expected one of {', '.join(known)}{hint}")
  if kind in VALUES and phase not in POISONED:
    raise ValueError(
      f"{VARIABLE}: found {part!r}, expected one of {', '.join(POISONED)}, the phases whose values can be replaced"
    )
  return Fault(phase, int(step), kind, int(process or 0))


def from_environment() -> tuple[Fault, ...]:
  """Returns the faults that the environment requests of this process; raises as `parse_faults`."""
  return tuple(fault for fault in parse_faults(os.environ.get(VARIABLE, "")) if fault.process == jax.process_index())


def strike(faults: Sequence[Fault], phase: str, step: int) -> None:
  """Triggers the faults planned in this process for the beginning of a phase; usually none.

  Raises:
    OSError: If a planned fault is "fail".
  """
  for fault in faults:
    if (fault.phase, fault.step) != (phase, step) or fault.kind not in ACTS:
      continue
    if fault.kind in ("hang", "pause"):
      threading.Event().wait(None if fault.kind == "hang" else _PAUSE_SECONDS)
    elif fault.kind == "fail":
      raise OSError(f"{VARIABLE}: a deliberate failure in {phase}, step {step}")
    else:
      os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT}[fault.kind])


def poison(faults: Sequence[Fault], phase: str, step: int, values: Any) -> Any:
  """Corrupts an array's first sequence if such a fault is planned; else returns it unchanged.

  Args:
    faults: Faults of this process.
    phase: One of `POISONED`.
    step: Number of the step, from 1.
    values: JAX or NumPy array, or a nested list, which becomes a NumPy array; sequences lie along
      its first axis.
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
