"""Which groups an RL step learns from: those whose samples were not all worth the same (dynamic sampling).

Where all samples of a prompt earn the same reward, every group-relative advantage is zero, and nothing is learned from them. So a step
draws again, with new prompts, until its batch is full of groups that differ or it has drawn as often as it may; then groups without a
difference fill the rest, so that the size of the batch never changes.

References:
  DAPO: an open-source LLM reinforcement learning system at scale, arXiv:2503.14476, 2025, section 3.2.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_llm.rewards.outcome import mapped
from jaxrl_llm.rollouts.batch import Batch
from jaxrl_llm.types import Rollouts


def differs(verdicts: Float[np.ndarray, " N"], valid: Bool[np.ndarray, " N"], *, group_size: int) -> Bool[np.ndarray, " n"]:
  """Whether the samples of a group earned different rewards: compared exactly, not by a deviation above some threshold.

  Args:
    verdicts: Reward of each sample without the terms that only shape it; G consecutive ones per prompt.
    valid: True for samples that have a reward; the others are not compared.
    group_size: Number of samples per prompt (G).

  Example:
    >>> differs(np.float32([0.1, 0.1, 0.1, 0, 1, 0]), np.ones(6, bool), group_size=3).tolist()
    [False, True]
  """
  highest = np.where(valid, verdicts, -np.inf).reshape(-1, group_size).max(axis=1)
  lowest = np.where(valid, verdicts, np.inf).reshape(-1, group_size).min(axis=1)
  return highest > lowest


def fill(batches: Sequence[Batch], *, num_groups: int) -> tuple[Batch, dict[str, float]]:
  """One batch of the groups that differ, in the order in which they were drawn; of others only as many as it takes to fill it.

  Args:
    batches: The rounds of one step, drawn by one policy.
    num_groups: Number of groups that the step learns from; the rounds have at least as many.

  Returns:
    The batch, and counters: `group/rounds`, `group/drawn`, `group/mixed` and `group/filled_up` (groups in it without a difference).
  """
  group_size = batches[0].group_size
  mixed = np.concatenate([differs(batch.graded.verdicts, batch.graded.valid, group_size=group_size) for batch in batches])
  others = np.flatnonzero(~mixed)[: max(num_groups - int(mixed.sum()), 0)]
  chosen = np.sort(np.concatenate([np.flatnonzero(mixed)[:num_groups], others]))
  counters = {"rounds": len(batches), "drawn": len(mixed), "mixed": int(mixed.sum()), "filled_up": len(others)}
  rows = (chosen[:, None] * group_size + np.arange(group_size)).reshape(-1)
  return select(join(batches), rows), {f"group/{name}": float(x) for name, x in counters.items()}


def join(batches: Sequence[Batch]) -> Batch:
  """Joins rollout batches; prompts get the width of the widest."""
  if len(batches) == 1:
    return batches[0]
  width = max(batch.rollouts.prompts.shape[1] for batch in batches)
  whole = [_widened(batch.rollouts, width) for batch in batches]
  flat = lambda name: [x for batch in batches for x in getattr(batch, name)]
  return Batch(
    rollouts=jax.tree.map(lambda *x: np.concatenate(x), *whole),
    completions=flat("completions"),
    examples=flat("examples"),
    graded=mapped(lambda *x: np.concatenate(x), *(batch.graded for batch in batches)),
    group_size=batches[0].group_size,
    counted=np.concatenate([batch.counted for batch in batches]),
  )


def select(batch: Batch, rows: Int[np.ndarray, " m"]) -> Batch:
  """Keeps the given sequences, in whole groups."""
  pick = lambda items: [items[i] for i in rows]
  return batch._replace(
    rollouts=jax.tree.map(lambda x: x[rows], batch.rollouts),
    completions=pick(batch.completions),
    examples=pick(batch.examples),
    graded=mapped(lambda x: x[rows], batch.graded),
    counted=batch.counted[rows],
  )


def _widened(rollouts: Rollouts, width: int) -> Rollouts:
  """With prompts padded on the left, and their routes with them."""
  missing = width - rollouts.prompts.shape[1]
  left = lambda x, value: np.pad(x, ((0, 0), (missing, 0), *[(0, 0)] * (x.ndim - 2)), constant_values=value)
  routing = None if rollouts.routing is None else left(rollouts.routing, -1)
  return rollouts._replace(prompts=left(rollouts.prompts, 0), prompt_mask=left(rollouts.prompt_mask, False), routing=routing)
