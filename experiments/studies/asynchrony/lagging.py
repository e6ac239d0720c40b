"""What a lag costs, on the small bed of the claims: rollouts from the weights of η steps ago.

The processes of an asynchronous run lag by what their speeds make of it. Here every rollout batch
lags by exactly η RL steps (fewer at the beginning), and a trial takes seconds, so that many paired
seeds can tell small differences.
"""

from collections import deque

import jax
import numpy as np

from experiments.claims.bed import Arm, Sizes, draw, make_bed, warm_params
from experiments.claims.trial import held_out


def train(sizes: Sizes, seed: int, arm: Arm, lag: int) -> dict:
  """Trains one arm from the seed's warm start.

  Args:
    sizes: Sizes of the bed.
    seed: Seed of the warm start, the problems and the draws, all of which arms share.
    arm: Arm; its `per_rollout` updates are an RL step. With `recompute`, log π_old is that of the
      learner before the step, and otherwise that of the weights that drew.
    lag: Number of RL steps by which the weights that draw lag.

  Returns:
    `right`, the number of right responses to each held-out problem; `samples`, the number of
    responses to each; `kl`, the divergence k3 between learner and sampler at the start of a step,
    mean over the second half of the run, in nats a token.
  """
  bed, params = make_bed(sizes, arm.model), warm_params(sizes, seed, arm.model)
  state, step = bed.new_state(params), bed.step(arm.objective, arm.settings, arm.correction)
  rng, size = np.random.default_rng([seed, 1]), sizes.num_prompts * sizes.group_size
  train = sizes.problems("train", sizes.updates * sizes.num_prompts, rng)
  weights, moved = deque(maxlen=lag + 1), []
  for first in range(0, sizes.updates, arm.per_rollout):
    weights.append(jax.tree.map(np.asarray, state.params))
    chosen = train[first * sizes.num_prompts : (first + arm.per_rollout) * sizes.num_prompts]
    drawn = draw(bed, weights[0], chosen, jax.random.fold_in(jax.random.key(seed), first), arm._replace(recompute=False)).batch
    now = jax.device_get(bed.score(state.params, drawn))
    gap = np.where(drawn.mask > 0, now.logprobs - drawn.sampler_logprobs, 0)
    moved.append(float(np.sum((np.exp(gap) - 1 - gap) * drawn.mask) / np.sum(drawn.mask)))
    if arm.recompute:
      drawn = drawn._replace(old_logprobs=now.logprobs)
    for index in range(arm.per_rollout):
      batch = jax.tree.map(lambda x, start=index * size: x[start : start + size], drawn)
      state, _ = step(state, batch, arm.learning_rate)
  right = held_out(bed, state.params, sizes.end_prompts)
  return {"samples": sizes.group_size, "right": "".join(map(str, right)), "kl": float(np.mean(moved[len(moved) // 2 :]))}
