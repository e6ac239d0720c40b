"""Learning rates of the phases of a training, over the updates that each makes."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import optax


class Phase(NamedTuple):
  """Updates of the policy, or of a reward model, with one schedule.

  Attributes:
    section: Section of the config with `learning_rate`, `warmup_steps` and `schedule`.
    first_step: Number of steps of the training before its first update.
    updates_per_step: Number of updates of a step.
    num_updates: Number of its updates.
  """

  section: str
  first_step: int
  updates_per_step: int
  num_updates: int


def phases(fields: Mapping[str, Any]) -> list[Phase]:
  """Returns the phases of a training in order: a warm start, if there is one, and the rest.

  While a critic is trained alone, the policy makes no update.

  Args:
    fields: Fields of the config by path.

  Example:
    >>> phases({"num_steps": 4, "learner.updates_per_rollout": 2, "critic.value_warmup_steps": 3})
    [Phase(section='learner', first_step=3, updates_per_step=2, num_updates=2)]
  """
  warm, alone = fields.get("warm_start.num_steps", 0), fields.get("critic.value_warmup_steps") or 0
  per_step = fields.get("learner.updates_per_rollout", 1)
  made = [Phase("warm_start", 0, 1, warm), Phase("learner", warm + alone, per_step, policy_updates(fields["num_steps"], per_step, alone))]
  return [phase for phase in made if phase.num_updates > 0]


def policy_updates(num_steps: int, updates_per_step: int, alone: int | None) -> int:
  """Returns the number of the policy's updates, if the first `alone` steps train a critic alone."""
  return (num_steps - (alone or 0)) * updates_per_step


def phase_schedule(fields: Mapping[str, Any], section: str, num_updates: int) -> optax.Schedule:
  """Makes the schedule of `num_updates` updates by the settings of a section."""
  rate, warmup, decays = (fields[f"{section}.{name}"] for name in ("learning_rate", "warmup_steps", "schedule"))
  return make_schedule(learning_rate=rate, warmup_steps=warmup, decay_steps=decay_steps(decays, warmup, num_updates))


def decay_steps(schedule: str, warmup_steps: int, num_updates: int) -> int:
  """Returns the number of updates over which a rate falls to 0; 0 if it stays constant."""
  return max(num_updates - warmup_steps, 1) if schedule == "linear" else 0


def unfinished_warm_ups(fields: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each phase that ends with its warm-up, or before."""
  for phase in phases(fields):
    warmup, rate = (fields[f"{phase.section}.{name}"] for name in ("warmup_steps", "learning_rate"))
    if warmup >= phase.num_updates:
      last = float(phase_schedule(fields, phase.section, phase.num_updates)(phase.num_updates - 1))
      yield (
        f"learning rate: still climbs in the last update, to {last:.3g} ({phase.section}.learning_rate={rate:.3g}), because "
        f"{phase.section}.warmup_steps={warmup} is not below the number of updates, {phase.num_updates}"
      )


def rate_change(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> str | None:
  """Returns a line about a learning rate that a change of the config moves.

  Args:
    old: Fields of the config before the change, by path.
    new: Fields after it.
    step: Number of steps that the training has made, those of a warm start included.

  Example:
    >>> settings = {"learner.learning_rate": 1.0, "learner.warmup_steps": 0, "learner.schedule": "linear"}
    >>> rate_change(settings | {"num_steps": 4}, settings | {"num_steps": 8}, 4)
    'learning rate: 0.25 in the last update, 0.5 in the next one, by the new settings'
  """
  upcoming = [phase for phase in phases(new) if step < phase.first_step + phase.num_updates // phase.updates_per_step]
  if not upcoming:
    return None
  phase = upcoming[0]
  done = (step - phase.first_step) * phase.updates_per_step
  before = [x for x in phases(old) if x.section == phase.section]
  if done <= 0 or not before:
    return None
  was, now = phase_schedule(old, phase.section, before[0].num_updates), phase_schedule(new, phase.section, phase.num_updates)
  if abs(float(was(done)) - float(now(done))) <= 1e-6 * float(now(done)):
    return None
  return f"learning rate: {float(was(done - 1)):.3g} in the last update, {float(now(done)):.3g} in the next one, by the new settings"


def make_schedule(*, learning_rate: float, warmup_steps: int, decay_steps: int = 0) -> optax.Schedule:
  """Makes a schedule that rises linearly, then stays constant or falls linearly.

  Args:
    learning_rate: Rate after warm-up.
    warmup_steps: Number of updates that climb to it; 0 starts at it.
    decay_steps: Number of updates after warm-up over which the rate falls to 0; 0 keeps it.

  Example:
    >>> schedule = make_schedule(learning_rate=4.0, warmup_steps=2, decay_steps=4)
    >>> [float(schedule(update)) for update in range(6)]
    [2.0, 4.0, 4.0, 3.0, 2.0, 1.0]
  """
  # The first update already has a positive rate: a rate of 0 would waste it.
  climb = optax.linear_schedule(learning_rate / max(warmup_steps, 1), learning_rate, max(warmup_steps - 1, 1))
  rest = optax.linear_schedule(learning_rate, 0.0, decay_steps) if decay_steps else optax.constant_schedule(learning_rate)
  return optax.join_schedules([climb, rest], [warmup_steps])
