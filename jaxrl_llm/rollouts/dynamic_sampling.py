"""Dynamic sampling: an RL step learns only from groups whose samples earned different rewards.

If all samples of a prompt earn the same reward, every group-relative advantage is zero and nothing
is learned from them. A step therefore draws again, with new prompts, until its batch is full of
mixed groups or the maximum number of rounds is reached. Groups without a difference then fill the
rest, so that the batch size never changes.

References:
  DAPO: an open-source LLM reinforcement learning system at scale, arXiv:2503.14476, 2025, section
  3.2.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_llm.rewards.outcome import mapped
from jaxrl_llm.rollouts.batch import Batch
from jaxrl_llm.types import Rollouts


def differs(verdicts: Float[np.ndarray, " N"], valid: Bool[np.ndarray, " N"], *, group_size: int) -> Bool[np.ndarray, " n"]:
  """Returns whether the samples of each group earned different rewards.

  Rewards are compared exactly, not by a deviation above some threshold.

  Args:
    verdicts: Reward of each sample without shaping terms; G consecutive ones per prompt.
    valid: True for samples that have a reward. The others are not compared.
    group_size: Number of samples per prompt (G).

  Example:
    >>> differs(np.float32([0.1, 0.1, 0.1, 0, 1, 0]), np.ones(6, bool), group_size=3).tolist()
    [False, True]
  """
  highest = np.where(valid, verdicts, -np.inf).reshape(-1, group_size).max(axis=1)
  lowest = np.where(valid, verdicts, np.inf).reshape(-1, group_size).min(axis=1)
  return highest > lowest


def fill(batches: Sequence[Batch], *, num_groups: int) -> tuple[Batch, dict[str, float]]:
  """Selects the groups that differ, in the order drawn; others only fill up the batch.

  Args:
    batches: Rounds of one step, drawn by one policy.
    num_groups: Number of groups that the step learns from; the rounds have at least as many.

  Returns:
    The batch, and the counters `group/rounds`, `group/drawn`, `group/mixed` and `group/filled_up`
    (groups in the batch without a difference).
  """
  group_size = batches[0].group_size
  mixed = np.concatenate([differs(batch.graded.verdicts, batch.graded.valid, group_size=group_size) for batch in batches])
  others = np.flatnonzero(~mixed)[: max(num_groups - int(mixed.sum()), 0)]
  chosen = np.sort(np.concatenate([np.flatnonzero(mixed)[:num_groups], others]))
  counters = {"rounds": len(batches), "drawn": len(mixed), "mixed": int(mixed.sum()), "filled_up": len(others)}
  rows = (chosen[:, None] * group_size + np.arange(group_size)).reshape(-1)
  return select(join(batches), rows), {f"group/{name}": float(x) for name, x in counters.items()}


def join(batches: Sequence[Batch]) -> Batch:
  """Joins rollout batches; prompts are padded to the widest."""
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
  """Selects the given sequences, which must form whole groups."""
  pick = lambda items: [items[i] for i in rows]
  return batch._replace(
    rollouts=jax.tree.map(lambda x: x[rows], batch.rollouts),
    completions=pick(batch.completions),
    examples=pick(batch.examples),
    graded=mapped(lambda x: x[rows], batch.graded),
    counted=batch.counted[rows],
  )


def _widened(rollouts: Rollouts, width: int) -> Rollouts:
  """Pads prompts and their routes on the left to the given width."""
  missing = width - rollouts.prompts.shape[1]
  left = lambda x, value: np.pad(x, ((0, 0), (missing, 0), *[(0, 0)] * (x.ndim - 2)), constant_values=value)
  routing = None if rollouts.routing is None else left(rollouts.routing, -1)
  return rollouts._replace(prompts=left(rollouts.prompts, 0), prompt_mask=left(rollouts.prompt_mask, False), routing=routing)
