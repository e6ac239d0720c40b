"""Partial rollouts: groups that a step does not wait for continue in the next step.

With 3 prompts to learn from and 1 to spare, a step ends when any 3 of the 4 groups in the sampler
are complete:

  step 0:  a ───┤  b ──────────  c ─────┤  d ─┤          learns from a, c, d; b continues
  step 1:  b ──────┤  e ──┤  f ────────  g ────┤         learns from b, e, g; f continues

So no step waits for the longest response, yet none is truncated, dropped or drawn twice. A step
learns from the oldest complete groups and carries all others, complete or not. A carried response
keeps the log-probabilities of the policies that drew its parts, and ratios and corrections use
these.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int, Integer

from jaxrl_llm.sampler import Partial, Requests, no_partial, to_partial
from jaxrl_llm.types import Rollouts, StopReason


class Groups(NamedTuple):
  """Prompts, oldest first, with their responses so far: n groups of G sequences.

  Attributes:
    examples: One task row per prompt.
    partial: The n·G responses, as NumPy arrays.
    steps: RL step in which each group was begun.
  """

  examples: list[Mapping[str, Any]]
  partial: Partial
  steps: list[int]


def no_groups(max_new_tokens: int, routes: tuple[int, int] | None = None) -> Groups:
  """Returns an empty set of groups, as carried into the first step.

  Responses have R tokens, and routes of shape (L, K) if the sampler records them.

  Example:
    >>> no_groups(8).partial.tokens.shape
    (0, 8)
  """
  return Groups([], no_partial(0, max_new_tokens, routes), [])


def join(carried: Groups, examples: Sequence[Mapping[str, Any]], *, step: int, group_size: int) -> Groups:
  """Joins the groups carried into a step and, behind them, the new prompts that it begins."""
  routing = carried.partial.routing
  new = no_partial(
    len(examples) * group_size, carried.partial.tokens.shape[1], None if routing is None else routing.shape[2:]
  )
  both = jax.tree.map(lambda *x: np.concatenate(x), carried.partial, new)
  return Groups([*carried.examples, *examples], both, [*carried.steps, *[step] * len(examples)])


def requests(groups: Groups, *, num_groups: int) -> Requests:
  """Makes the sampler's requests, with the same shapes in every step.

  The sampler stops once `num_groups` groups are complete.
  """
  return Requests(partial=groups.partial, enough_groups=np.int32(num_groups))


def take(groups: Groups, rollouts: Rollouts, *, num_groups: int) -> tuple[Int[np.ndarray, " m"], Groups]:
  """Separates the groups that a step learns from and those that it carries.

  Args:
    groups: Groups that the sampler was given.
    rollouts: Rollouts that it returned, on the host.
    num_groups: Number of groups that the step learns from.

  Returns:
    The rows to learn from, in whole groups with the oldest first, and the other groups, also oldest
    first.

  Raises:
    ValueError: If fewer than `num_groups` groups are complete.
  """
  used, kept, indices = separate(np.asarray(rollouts.reasons), len(groups.examples), num_groups=num_groups)
  so_far = jax.tree.map(lambda x: np.asarray(x)[kept], to_partial(rollouts))
  return used, Groups([groups.examples[i] for i in indices], so_far, [groups.steps[i] for i in indices])


def separate(
  reasons: Integer[np.ndarray, " N"], total: int, *, num_groups: int
) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, " k"], Int[np.ndarray, " g"]]:
  """Returns the rows of the first complete groups, the rows of the others, and these groups.

  Args:
    reasons: Stop reason of each row.
    total: Number of groups of the rows.
    num_groups: Number of groups to learn from.

  Raises:
    ValueError: If fewer than `num_groups` groups are complete.
  """
  rows = np.arange(len(reasons)).reshape(total, -1)
  complete = np.all(reasons[rows] != StopReason.UNFINISHED, axis=1)
  if complete.sum() < num_groups:
    raise ValueError(f"rollouts: found {complete.sum()} complete groups of {total}, expected {num_groups} or more to learn from")
  used = complete & (np.cumsum(complete) <= num_groups)
  return rows[used].reshape(-1), rows[~used].reshape(-1), np.flatnonzero(~used)


def metrics(groups: Groups, rollouts: Rollouts, rows: Int[np.ndarray, " m"], *, step: int) -> dict[str, float]:
  """Returns metrics of the age of the rollouts that a step learns from.

  Args:
    groups: Groups that the sampler was given.
    rollouts: Rollouts that it returned, on the host.
    rows: Rows that `take` returned for them.
    step: Current RL step.
  """
  return age_metrics(groups.steps, rows, len(rollouts.tokens) // len(groups.examples), step=step) | {
    # Only carried tokens are from older weights: the rest was drawn with this step's.
    "rollout/carried_tokens": float(groups.partial.lengths[rows].sum() / rollouts.mask[rows].sum()),
  }


def age_metrics(steps: Sequence[int], rows: Int[np.ndarray, " m"], group_size: int, *, step: int) -> dict[str, float]:
  """Returns metrics of the age of the groups that a step learns from, in RL steps.

  `steps` has the step in which each group began, and `rows` are those of whole groups.

  Example:
    >>> age_metrics([3, 5, 5], np.array([0, 1, 4, 5]), 2, step=5)
    {'rollout/carried_groups': 1.0, 'rollout/max_age': 2.0}
  """
  ages = step - np.array(steps)[rows[::group_size] // group_size]
  return {"rollout/carried_groups": float(np.sum(ages > 0)), "rollout/max_age": float(ages.max())}


def to_json(groups: Groups) -> dict[str, Any]:
  """Converts groups to lists without padding, for a checkpoint's record.

  JSON restores a float32 bit for bit.
  """
  padded = {
    name: x for name, x in groups.partial._asdict().items() if x is not None and name not in ("lengths", "reasons")
  }
  sequences = [
    {"reason": int(groups.partial.reasons[row]), **{name: x[row, :length].tolist() for name, x in padded.items()}}
    for row, length in enumerate(groups.partial.lengths)
  ]
  return {"examples": [dict(example) for example in groups.examples], "sequences": sequences, "steps": groups.steps}


def from_json(saved: Mapping[str, Any], empty: Groups) -> Groups:
  """Inverts `to_json`; `empty` is the result of `no_groups` with the run's settings."""
  sequences, like = saved["sequences"], empty.partial
  partial = no_partial(len(sequences), like.tokens.shape[1], None if like.routing is None else like.routing.shape[2:])
  for row, sequence in enumerate(sequences):
    partial.reasons[row], partial.lengths[row] = sequence["reason"], len(sequence["tokens"])
    for name, values in sequence.items():
      if name != "reason" and values:
        getattr(partial, name)[row, : len(values)] = values
  return Groups(list(saved["examples"]), partial, list(saved["steps"]))
