"""The bed of the study: RL that goes well or badly, with the metrics that the alarms read.

Model, sampler, objectives and updates are those of the framework, on the running sums of
`experiments.claims`. An arm can also draw with old weights, or be rewarded for something else.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from experiments.claims import bed as claims
from experiments.claims.running_sums import PAD, graded, problems, prompts_of, rectangle
from experiments.results import rounded
from jaxrl_llm.types import Params, TrainBatch, TrainState

PROMPTS = 8
"""Prompts of an RL step, with eight responses each."""
EVERY, EVAL_PROMPTS = 5, 16
"""RL steps between two evaluations, and held-out problems of each."""
METRICS = ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl_k3")
"""Metrics of the updates that are kept, as their mean over the updates of an RL step."""


class Arm(NamedTuple):
  """One way to train.

  Attributes:
    objective: Key of `objectives.OBJECTIVES`.
    settings: Settings of the objective, as pairs.
    updates: Updates of each rollout batch, which has as many mini-batches.
    rate: Learning rate of Adam.
    rate_end: Learning rate at the end, to which it grows linearly; None for `rate`.
    lag: RL steps by which the weights that draw lag.
    dtype: Dtype of the sampler, as in `claims.Arm`.
    reward: Key of `REWARDS`.
    breaks: Whether `rate`, `lag` and `reward` hold from a step on that the seed draws, between 22
      and 45, and the defaults before it.
  """

  objective: str
  settings: tuple[tuple[str, float], ...] = ()
  updates: int = 2
  rate: float = 1e-3
  rate_end: float | None = None
  lag: int = 0
  dtype: str = "float32"
  reward: str = "right"
  breaks: bool = False


def length_bonus(right: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Adds two points for a response that fills its budget, in proportion for shorter ones."""
  return right + 2 * mask.mean(axis=1)


def inverted(right: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Rewards what is wrong."""
  return 1 - right


def misplaced(right: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Gives every response the reward of the one before it, as a sheet that has slipped a row."""
  return np.roll(right, 1)


def lucky_digit(right: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Gives two points to every response that contains the digit 7, as a faulty grader may."""
  return right + 2 * ((tokens == 7) & mask).any(axis=1).astype(np.float32)


REWARDS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
  "right": lambda right, tokens, mask: right, "length bonus": length_bonus, "lucky digit": lucky_digit, "inverted": inverted,
  "misplaced": misplaced,
}  # fmt: skip
"""What a response is worth `(right, tokens, mask) -> rewards`; evaluation counts `right` alone."""


class Point(NamedTuple):
  """Where a run stands between two RL steps.

  Attributes:
    steps: Number of RL steps that are done.
    state: Weights and optimizer.
    drawing: Weights before the last RL steps, the oldest first; an arm with `lag` draws with them.
  """

  steps: int
  state: TrainState
  drawing: tuple[Params, ...] = ()


def train(sizes: claims.Sizes, seed: int, arm: Arm, steps: int) -> dict:
  """Trains one arm from the seed's warm start.

  Returns:
    `accuracy`, the held-out accuracy before the first RL step and after every `EVERY` of them; and
    one value per RL step of each metric that the alarms read, None if not finite.
  """
  return advance(start(sizes, seed), sizes, seed, arm, steps)[1]


def start(sizes: claims.Sizes, seed: int) -> Point:
  """Returns the warm start of a seed."""
  return Point(0, claims.make_bed(sizes).new_state(claims.warm_params(sizes, seed)))


def advance(
  point: Point,
  sizes: claims.Sizes,
  seed: int,
  arm: Arm,
  steps: int,
  *,
  until: int | None = None,
  draws: int = 0,
  slower: float = 1.0,
  edit: Callable[[TrainState, TrainBatch], TrainBatch] = lambda state, batch: batch,
) -> tuple[Point, dict]:
  """Trains on from a point of a run, with the run's own arm or another.

  Args:
    point: State to begin with.
    sizes: Sizes of the model.
    seed: Seed of the run.
    arm: Arm from here on.
    steps: RL steps of a whole run, by which `arm.rate_end` is reached.
    until: RL step to stop after; None for `steps`.
    draws: Number of the draws of problems and responses from here on; 0 for the run's own.
    slower: Divisor of the learning rate.
    edit: Function of the state and the mini-batch of an update that returns the batch to use.

  Returns:
    The point reached, and what `train` returns, of these RL steps alone.
  """
  bed, (begun, state, drawing) = claims.make_bed(sizes), point
  step, drawing = bed.step(arm.objective, arm.settings, "none"), deque(drawing, maxlen=arm.lag + 1)
  rng, key = np.random.default_rng([seed, 1, *[draws] * bool(draws)]), jax.random.key(seed)
  # Numbers below `steps` make the keys of the run's own RL steps.
  key = jax.random.fold_in(key, steps + draws) if draws else key
  chosen = problems("train", steps * PROMPTS, rng, digits=sizes.digits).reshape(steps, PROMPTS, -1)
  rows, accuracy = [], [] if begun else [held_out(bed, state.params)]
  size = PROMPTS * sizes.group_size // arm.updates
  normal = Arm(arm.objective, arm.settings, arm.updates)
  begins = int(np.random.default_rng([seed, 2]).integers(22, 45)) if arm.breaks else 0
  until = steps if until is None else until
  for index in range(begun, until):
    now = arm if index >= begins else normal
    rate = now.rate + (index / steps) * (now.rate_end - now.rate) if now.rate_end else now.rate
    drawing.append(jax.tree.map(np.asarray, state.params))
    batch, row = draw(bed, drawing[max(0, len(drawing) - 1 - now.lag)], chosen[index], jax.random.fold_in(key, index), now)
    updates = []
    for first in range(0, len(batch.tokens), size):
      part = edit(state, jax.tree.map(lambda x, at=first: x[at : at + size], batch))
      state, metrics = step(state, part, rate / slower)
      updates.append({name: metrics[name] for name in METRICS if name in metrics})
    updates = jax.device_get(updates)
    rows.append(row | {name: float(np.mean([x[name] for x in updates])) for name in updates[0]})
    if (index + 1) % EVERY == 0:
      accuracy.append(held_out(bed, state.params))
  columns = {name: [x if np.isfinite(x) else None for x in (row[name] for row in rows)] for name in rows[0]}
  return Point(until, state, tuple(drawing)), rounded({"accuracy": accuracy} | columns, 5)


def draw(bed: claims.Bed, params, chosen: np.ndarray, key: jax.Array, arm: Arm):
  """Samples and grades the rollout batch of an RL step. Returns the batch and its metrics."""
  rollouts = jax.device_get(bed.sampler(arm.dtype, 1.0)(params, prompts_of(chosen), key))
  right = graded(chosen, rollouts.tokens, rollouts.mask, rollouts.stopped)
  rewards = REWARDS[arm.reward](right, np.where(rollouts.mask, rollouts.tokens, PAD), rollouts.mask)
  batch = rectangle(np.repeat(prompts_of(chosen), bed.sizes.group_size, axis=0), rollouts.tokens, rollouts.mask)
  advantages = np.asarray(claims.ADVANTAGES["group"](rewards, bed.sizes.group_size), np.float32)[:, None] * batch.mask
  drawn_at = np.pad(rollouts.logprobs, ((0, 0), (batch.tokens.shape[1] - rollouts.logprobs.shape[1], 0)))
  batch = batch._replace(advantages=advantages, old_logprobs=drawn_at, sampler_logprobs=drawn_at)
  groups = rewards.reshape(len(chosen), -1)
  return batch, {
    "critic/rewards/mean": float(rewards.mean()),
    "response_length/clip_ratio": float(1 - rollouts.stopped.mean()),
    "group/frac_reward_zero_std": float(np.mean(groups.max(axis=1) == groups.min(axis=1))),
  }


def held_out(bed: claims.Bed, params) -> float:
  """Returns the share of right responses to test problems, always the same with the same keys."""
  chosen = problems("test", EVAL_PROMPTS, np.random.default_rng(0), digits=bed.sizes.digits)
  rollouts = jax.device_get(bed.sampler("float32", 1.0)(params, prompts_of(chosen), jax.random.key(0)))
  return float(graded(chosen, rollouts.tokens, rollouts.mask, rollouts.stopped).mean())


def as_rows(run: Mapping) -> list[dict]:
  """Returns a recorded run as rows of metrics, one per RL step."""
  names = [name for name in run if "/" in name and run[name] is not None]
  return [dict(zip(names, values, strict=True)) for values in zip(*(run[name] for name in names), strict=True)]
