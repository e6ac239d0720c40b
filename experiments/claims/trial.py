"""Trials: RL of the bed's model by one arm, and the first sign of instability in it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.bed import Arm, Bed, Sizes, draw, make_bed, warm_params
from jaxrl_llm.models import routing
from jaxrl_llm.types import Params, TrainBatch


def held_out(bed: Bed, params: Params, count: int) -> list[int]:
  """Counts the right responses among the G samples of each of `count` test problems.

  Samples are drawn in float32 at temperature 1, always with the same problems and keys.
  """
  chosen = bed.sizes.problems("test", count, np.random.default_rng(0))
  rollout = draw(bed, params, chosen, jax.random.key(count), Arm("reinforce"))
  return rollout.rewards.reshape(count, -1).sum(axis=1).astype(int).tolist()


METRICS = {
  "entropy": "actor/entropy",
  "grad_norm": "actor/grad_norm",
  "kl": "actor/ppo_kl_k3",
  "clipped": "actor/pg_clipfrac",
  "gate": "gate/mean",
  "gap": "rollout_corr/k3_kl",
}
"""Metrics that a trial keeps of each update: their names here and in the learner's metrics.

An objective without a clip has no clipped fraction.
"""


def train(sizes: Sizes, seed: int, arm: Arm, *, samples: int = 0) -> dict:
  """Trains one arm from the seed's warm start.

  Args:
    sizes: Sizes of the bed.
    seed: Seed of the warm start and the problems.
    arm: Arm to train.
    samples: Number that selects the responses: another number draws other responses to the same
      problems.

  Returns:
    `right`, the number of right responses to each held-out problem at the end; `samples`, the
    number of responses to each problem (G); `curve`, the held-out accuracy at evenly spaced times
    from the start to the end; `rewards` and `lengths` of each rollout batch, and for a mixture of
    experts the numbers of `staleness` before the batch's last update; the `METRICS` of each update,
    None if not finite.
  """
  bed, params = make_bed(sizes, arm.model), warm_params(sizes, seed, arm.model)
  state, step = bed.new_state(params), bed.step(arm.objective, arm.settings, arm.correction, arm.frozen)
  rng, size = np.random.default_rng([seed, 1]), sizes.num_prompts * sizes.group_size
  key = jax.random.fold_in(jax.random.key(seed), samples) if samples else jax.random.key(seed)
  # All arms of a seed see the same problems in the same order.
  train = sizes.problems("train", sizes.updates * sizes.num_prompts, rng)
  batches, metrics, baseline, curve = [], [], 0.0, [_accuracy(held_out(bed, params, sizes.eval_prompts), sizes)]
  for update in range(sizes.updates):
    index = update % arm.per_rollout
    if index == 0:
      chosen = train[update * sizes.num_prompts : (update + arm.per_rollout) * sizes.num_prompts]
      rollout = draw(bed, state.params, chosen, jax.random.fold_in(key, update), arm, baseline=baseline)
      baseline = rollout.baseline
      batches.append({"rewards": float(rollout.rewards.mean()), "lengths": rollout.tokens_mean})
    batch, routes = jax.tree.map(lambda x, start=index * size: x[start : start + size], (rollout.batch, rollout.routes))
    if index == arm.per_rollout - 1 and routes is not None:
      batches[-1] |= staleness(bed, state.params, batch, routes)
    state, step_metrics = step(state, batch, arm.learning_rate)
    metrics.append({name: step_metrics[key] for name, key in METRICS.items() if key in step_metrics})
    if (update + 1) % (sizes.updates // sizes.evaluations) == 0 and update + 1 < sizes.updates:
      curve.append(_accuracy(held_out(bed, state.params, sizes.eval_prompts), sizes))
  right = held_out(bed, state.params, sizes.end_prompts)
  metrics = jax.device_get(metrics)
  columns = {name: [_finite(row[name]) for row in rows] for rows in (batches, metrics) for name in rows[0]}
  return {"samples": sizes.group_size, "right": right, "curve": [*curve, _accuracy(right, sizes)]} | columns


def staleness(bed: Bed, params: Params, batch: TrainBatch, routes: np.ndarray) -> dict[str, float]:
  """Measures how far the policy is from π_old on a mini-batch of a mixture of experts.

  Args:
    bed: Model and its programs.
    params: Weights of the policy.
    batch: Mini-batch with the routes that an update would replay.
    routes: Routes that π_old chose.

  Returns:
    `log_r` and `log_r_replayed`, the standard deviations of the tokens' log-ratios in nats, with
    the router's own experts and with those of π_old; `max_r`, the largest ratio of the first kind;
    `change`, the fraction of the activated experts that the router no longer chooses. All are of
    the same weights, so that they say what replaying does however the policy came there.
  """
  counted = batch.mask > 0
  own = jax.device_get(bed.score(params, batch._replace(routing=np.full_like(routes, routing.LIVE, np.int16))))
  replayed = jax.device_get(bed.score(params, batch._replace(routing=routes.astype(np.int16))))
  log_r, log_r_replayed = ((outputs.logprobs - batch.old_logprobs)[counted] for outputs in (own, replayed))
  change = np.asarray(routing.expert_change(jnp.asarray(routes), jnp.asarray(own.live_routing)))
  return {
    "log_r": float(np.std(log_r)), "log_r_replayed": float(np.std(log_r_replayed)), "max_r": float(np.exp(np.max(log_r))),
    "change": float(np.mean(change[counted])),
  }  # fmt: skip


def _accuracy(right: Sequence[int], sizes: Sizes) -> float:
  return float(np.mean(right)) / sizes.group_size


def _finite(x: float) -> float | None:
  return float(x) if np.isfinite(x) else None


class Sign(NamedTuple):
  """First sign of instability in a trial.

  Attributes:
    update: Update at which it appears, from 1.
    kind: Name of the sign: "not finite", "entropy", "reward" or "gradient".
  """

  update: int
  kind: str


def first_sign(rewards: Sequence[float], columns: Mapping[str, Sequence[float | None]], *, per_rollout: int) -> Sign | None:
  """Returns the first sign of instability in a trial.

  If several signs appear at one update, the first in this list counts:

  - a gradient norm or an entropy that is not finite;
  - an entropy below 5 % of that at the first update;
  - a moving average of the reward (over about 30 updates) that stays below half of its largest
    value for 30 updates; the first of these updates counts;
  - a gradient norm above 10 times the running median, from the 31st update on.

  Args:
    rewards: Mean reward of each rollout batch.
    columns: Columns `grad_norm` and `entropy`, with one value per update.
    per_rollout: Updates per rollout batch.

  Note:
    A sign describes a trial and is no endpoint. Held-out accuracy alone decides whether a trial has
    collapsed (`judging.collapsed`). Of 739 trials, the 356 with a jump of the gradient end as high
    as those without any sign (79 and 75 %), and entropy goes to 0 if a task is solved.
  """
  norms, entropy = columns["grad_norm"], columns["entropy"]
  signs = [Sign(i + 1, "not finite") for i, pair in enumerate(zip(norms, entropy, strict=True)) if None in pair][:1]
  whole = signs[0].update - 1 if signs else len(norms)
  signs += [Sign(i + 1, "entropy") for i in range(whole) if entropy[i] < 0.05 * entropy[0]][:1]
  average, best, below = rewards[0], rewards[0], 0
  for index, reward in enumerate(rewards):
    average += min(1.0, per_rollout / 30) * (reward - average)
    best = max(best, average)
    below = below + per_rollout if average < best / 2 else 0
    if below >= 30:
      signs.append(Sign((index + 1) * per_rollout - below + 1, "reward"))
      break
  signs += [Sign(i + 1, "gradient") for i in range(30, whole) if norms[i] > 10 * np.median(norms[:i])][:1]
  return min(signs, key=lambda sign: sign.update, default=None)
