"""The bed: that of `experiments/ablations/routing_replay`, smaller, trained by three objectives until it collapses or the trial ends.

The sampler computes in float32, as the learner does, so that what moves the ratios is the updates alone. The dense control has the same
layers with two experts, of which a token visits both: as many active parameters and nothing to route.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.ablations.ratio_lab.measures import sequence_clip
from experiments.ablations.routing_replay import bed as beds
from experiments.ablations.routing_replay import measures
from experiments.claims.moe_stability import survival
from jaxrl_llm import objectives
from jaxrl_llm.models import make_model
from jaxrl_llm.sampler import make_filter
from jaxrl_llm.train_step import make_train_step, policy_outputs
from jaxrl_llm.types import Metrics, Params, TrainBatch, TrainState

SIZES = beds.Sizes(num_layers=2, d_model=48, num_prompts=16, num_minibatches=1, warm_steps=250)
SMOKE = beds.SMOKE._replace(num_prompts=4, num_minibatches=1)

GSPO_LOW, GSPO_HIGH = sequence_clip(16)
"""GSPO's band for responses of 16 tokens, about their mean length here: the paper's, times √(4096/16)."""

OBJECTIVES = {
  "grpo": lambda: objectives.make("grpo", **beds.CLIP, kl_coef=0.0),
  "gspo": lambda: objectives.make("gspo", clip_low=GSPO_LOW, clip_high=GSPO_HIGH),
  "sapo": lambda: objectives.make("sapo"),
}


class Arm(NamedTuple):
  """One way to train.

  Attributes:
    model: "experts" or "dense".
    objective: a key of `OBJECTIVES`.
    replay: "none", or "R2", the learner's own routes at π_old.
    updates: of a rollout batch (N).
    rate: of Adam, after warm-up.
  """

  model: str
  objective: str
  replay: str
  updates: int
  rate: float


def bed_of(sizes: beds.Sizes, model: str) -> beds.Bed:
  """The bed with a mixture of experts, or its dense control."""
  return beds.make_bed(sizes if model == "experts" else sizes._replace(num_experts=sizes.top_k))


@functools.cache
def make_update(sizes: beds.Sizes, model: str, objective: str) -> Callable[[TrainState, TrainBatch, float], tuple[TrainState, Metrics]]:
  """An update of the policy that replays `batch.routing`; its optimizer is that of the bed, whose `new_state` it takes."""
  model = make_model(bed_of(sizes, model).config)
  outputs_fn = functools.partial(policy_outputs, model.score, make_filter())
  adam = optax.inject_hyperparams(optax.adam)(learning_rate=0.0, b1=0.9, b2=0.99)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
  update = jax.jit(make_train_step(outputs_fn, OBJECTIVES[objective](), optimizer, learning_rate=lambda count: 0.0))

  def step(state: TrainState, batch: TrainBatch, learning_rate: float) -> tuple[TrainState, Metrics]:
    clip, inner = state.opt_state
    inner = inner._replace(hyperparams=inner.hyperparams | {"learning_rate": jnp.float32(learning_rate)})
    return update(state._replace(opt_state=(clip, inner)), batch)

  return step


def train(sizes: beds.Sizes, params: Params, seed: int, arm: Arm, *, rollouts: int, warmup: int) -> list[dict]:
  """Trains one arm until it has collapsed for good, at most for some rollout batches.

  Args:
    sizes: of the bed.
    params: weights after the warm start.
    seed: of problems and samples, which all arms of a seed share.
    arm: how to train.
    rollouts: the most rollout batches.
    warmup: rollout batches over which the learning rate climbs: whatever N, all arms are then as far.

  Returns:
    A row a rollout batch: `reward`, `entropy` (nats a token) and `tokens` of it; `grad_norm`, the largest of its updates, before the
    clip of the norm; `finite`, whether all of its losses were; and before its last update, on responses that no update has seen, `std_z`
    and `max_r` of the ratios as the objective sees them, and `change`, the fraction of the activated experts that the updates have changed.
  """
  bed, update = bed_of(sizes, arm.model), make_update(sizes, arm.model, arm.objective)
  key, problems = jax.random.key(seed), beds.problem_batches(bed, seed)
  state, done, rows = bed.new_state(params), 0, []
  for index in range(rollouts):
    rollout = beds.draw(bed, state.params, next(problems), jax.random.fold_in(key, index))
    live = rollout.batch
    old = bed.score(state.params, live)
    batch = live._replace(old_logprobs=np.asarray(old.logprobs))
    if arm.replay == "R2":
      batch = batch._replace(routing=np.asarray(old.visited, np.int16))
    row = {"rollout": index + 1, "reward": float(rollout.rewards.mean()), "tokens": float(live.mask.sum(axis=1).mean())}
    row |= {"entropy": float(np.sum(old.entropy * live.mask) / live.mask.sum())}
    norms, finite = [], True
    for number in range(arm.updates):
      done += 1
      mine = beds.piece(batch, number, arm.updates)
      if number == arm.updates - 1:
        row |= _staleness(bed, state.params, mine, np.asarray(old.visited)[-len(mine.tokens) :])
      state, metrics = update(state, mine, arm.rate * min(1.0, done / (warmup * arm.updates)))
      norms.append(float(metrics["actor/grad_norm"]))
      finite = finite and bool(np.isfinite(float(metrics["actor/loss"])))
    rows.append(row | {"grad_norm": max(norms), "finite": finite})
    if survival.collapse(rows) is not None:
      break
  return rows


def _staleness(bed: beds.Bed, params: Params, batch: TrainBatch, visited: np.ndarray) -> dict[str, float]:
  """How far the policy is from π_old on a mini-batch, and how many experts are not those of π_old, were they chosen live."""
  now = bed.score(params, batch)
  spread = measures.ratio_spread(now.logprobs - batch.old_logprobs, batch.mask)
  change = float(np.mean(measures.change_by_layer(visited, np.asarray(now.live), batch.segments)))
  return {"std_z": spread["std_log_r"], "max_r": spread["max_r"], "change": change}
