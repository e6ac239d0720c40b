"""Learning rates of a phase, over the updates that it makes."""

import optax


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
