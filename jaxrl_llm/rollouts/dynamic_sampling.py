"""Dynamic sampling: an RL step learns only from groups that carry a signal.

If all samples of a prompt earn the same reward, every group-relative advantage is zero and nothing
is learned from them. A step therefore draws again, with new prompts, until its batch is full of
groups with a signal or the maximum number of rounds is reached. Other groups then fill the rest, so
that the batch size never changes.

A group carries a signal if the run's own estimator gives one of its samples an advantage other than
0 (`with_signal`). Dynamic sampling asks this of the rewards without the terms that only shape them:
a group of wrong answers stays one, whatever their lengths. `group/frac_reward_zero_std` asks it of
all rewards. A divergence in the reward is left out of both, because it tells every two samples
apart.

The groups that fill the rest are learned from as in a run without dynamic sampling. If a term
shapes the reward, that term alone then moves their samples.

References:
  DAPO: an open-source LLM reinforcement learning system at scale, arXiv:2503.14476, 2025, section
  3.2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_llm.advantages.estimators import Credit, Evidence
from jaxrl_llm.rewards.outcome import mapped
from jaxrl_llm.rollouts import trajectories
from jaxrl_llm.rollouts.batch import Batch
from jaxrl_llm.types import Rollouts


def differs(rewards: Float[np.ndarray, " N"], valid: Bool[np.ndarray, " N"], *, group_size: int) -> Bool[np.ndarray, " n"]:
  """Returns whether the samples of each group earned different rewards.

  Rewards are compared exactly, not by a deviation above some threshold.

  Args:
    rewards: Reward of each sample; G consecutive ones per prompt.
    valid: True for samples that have a reward. The others are not compared.
    group_size: Number of samples per prompt (G).

  Example:
    >>> differs(np.float32([0.1, 0.1, 0.1, 0, 1, 0]), np.ones(6, bool), group_size=3).tolist()
    [False, True]
  """
  highest = np.where(valid, rewards, -np.inf).reshape(-1, group_size).max(axis=1)
  lowest = np.where(valid, rewards, np.inf).reshape(-1, group_size).min(axis=1)
  return highest > lowest


def with_signal(batch: Batch, compare: Callable[[Evidence], Credit] | None, *, shaped: bool, **options: Any) -> Bool[np.ndarray, " n"]:
  """Returns which groups of a batch carry a signal.

  Args:
    batch: Batch that says which sequences are learned from.
    compare: Credit assignment of the run's estimator, without whitening; None for an estimator that
      does not compare the samples of a prompt, for which their rewards are compared.
    shaped: Whether to include the terms that only shape the reward.
    **options: Other arguments of `trajectories.evidence`.
  """
  evidence = trajectories.evidence(batch, shaped=shaped, **options)
  if compare is None:
    return differs(evidence.rewards, evidence.valid, group_size=batch.group_size)
  advantages = np.asarray(compare(evidence).advantages)
  return np.any(advantages.reshape(-1, batch.group_size * advantages.shape[1]) != 0, axis=1)


def fill(batches: Sequence[Batch], signals: Sequence[Bool[np.ndarray, " n"]], *, num_groups: int) -> tuple[Batch, dict[str, float]]:
  """Selects the groups that carry a signal, in the order drawn; others only fill up the batch.

  Args:
    batches: Rounds of one step, drawn by one policy.
    signals: Groups of each round that carry a signal.
    num_groups: Number of groups that the step learns from; the rounds have at least as many.

  Returns:
    The batch, and the counters `group/rounds`, `group/drawn`, `group/mixed` and `group/filled_up`
    (groups in the batch without a signal).
  """
  group_size = batches[0].group_size
  mixed = np.concatenate(signals)
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
