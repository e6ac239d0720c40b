"""The bed: running sums modulo 10, a transformer of 33 thousand weights that imitates an unreliable teacher, and RL of it in seconds."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims.running_sums import (
  END,
  ERROR_RATE,
  PAD,
  PROMPT_TOKENS,
  RESPONSE_TOKENS,
  VOCAB_SIZE,
  graded,
  problems,
  prompts_of,
  rectangle,
  workings,
)
from jaxrl_llm import objectives
from jaxrl_llm.advantages import group_advantages, leave_one_out_advantages, whiten
from jaxrl_llm.models import ModelConfig, lower_precision, make_model, preset
from jaxrl_llm.sampler import make_filter, make_sampler
from jaxrl_llm.train_step import init_state, make_optimizer, make_train_step, policy_outputs
from jaxrl_llm.types import Metrics, Objective, Params, Rollouts, TrainBatch, TrainState

WARM_CHECK = 50  # Steps of imitation between two looks at how good it is.

ADVANTAGES: dict[str, Callable] = {
  "group": group_advantages,
  "centred": functools.partial(group_advantages, normalize_std=False),
  "leave_one_out": leave_one_out_advantages,
  "whitened": lambda rewards, group_size: whiten(leave_one_out_advantages(rewards, group_size), np.ones(len(rewards))),
}
"""By name: `(rewards, group size) -> advantages`."""


class Sizes(NamedTuple):
  """How large the bed is.

  Attributes:
    d_model: width of the two layers.
    d_ff: width of their feed-forward part.
    warm_steps: of imitation, at most.
    warm_rows: demonstrations of a step.
    warm_rate: learning rate of it.
    warm_accuracy: fraction of the responses to training problems that must be right for the imitation to end.
    num_prompts: of a mini-batch.
    group_size: responses to each prompt.
    updates: of the policy in all, however many there are for each rollout batch.
    evaluations: over a trial, evenly spread.
    eval_prompts: held-out problems of an evaluation.
    end_prompts: of the last one.
  """

  d_model: int = 48
  d_ff: int = 64
  warm_steps: int = 3000
  warm_rows: int = 64
  warm_rate: float = 5e-3
  warm_accuracy: float = 0.3
  num_prompts: int = 4
  group_size: int = 8
  updates: int = 192
  evaluations: int = 6
  eval_prompts: int = 64
  end_prompts: int = 256


SMOKE = Sizes(
  d_model=16, d_ff=16, warm_steps=2, warm_rows=8, warm_accuracy=0.0, num_prompts=2, group_size=4, updates=4, evaluations=2, eval_prompts=4,
  end_prompts=4,
)  # fmt: skip
"""Shows that everything runs, and measures nothing worth having."""


class Arm(NamedTuple):
  """What is trained, and how.

  Attributes:
    objective: a key of `objectives.OBJECTIVES`.
    settings: of it, as pairs, so that an arm can be a key.
    advantages: a key of `ADVANTAGES`.
    per_rollout: updates of one rollout batch; the batch has as many mini-batches.
    learning_rate: of Adam.
    dtype: that the sampler computes in.
    temperature: that the sampler draws at; the learner's is 1.
    recompute: the old log-probabilities are the learner's own; otherwise those that the sampler reports.
    correction: a key of `CORRECTIONS`.
  """

  objective: str
  settings: tuple[tuple[str, float | str], ...] = ()
  advantages: str = "group"
  per_rollout: int = 1
  learning_rate: float = 1e-3
  dtype: str = "float32"
  temperature: float = 1.0
  recompute: bool = False
  correction: str = "none"


def _corrections() -> dict[str, Callable[[Objective], Objective]]:
  from jaxrl_llm.objectives import corrections

  return {
    "none": lambda objective: objective,
    "tis": functools.partial(corrections.tis, cap=2.0),
    "tis5": functools.partial(corrections.tis, cap=5.0),
    "mis": functools.partial(corrections.mis, cap=2.0),
  }


CORRECTIONS = _corrections()
"""What is done about the sampler's mismatch, by name."""


class Bed(NamedTuple):
  """A model and its compiled programs, shared by all seeds and arms.

  Attributes:
    sizes: how large it is.
    init: `(key) -> params`.
    warm_step: `(state, batch) -> (state, metrics)`, supervised.
    warm_state: `(params) -> state` for `warm_step`.
    sampler: `(dtype, temperature) -> (params, prompts, key) -> Rollouts`.
    new_state: `(params) -> state` for the steps of `step`.
    step: `(objective, settings, correction) -> (state, batch, learning rate) -> (state, metrics)`.
    score: `(params, batch) -> log-probabilities`, the learner's own.
  """

  sizes: Sizes
  init: Callable[[jax.Array], Params]
  warm_step: Callable
  warm_state: Callable[[Params], TrainState]
  sampler: Callable[[str, float], Callable[..., Rollouts]]
  new_state: Callable[[Params], TrainState]
  step: Callable[..., Callable[[TrainState, TrainBatch, float], tuple[TrainState, Metrics]]]
  score: Callable[[Params, TrainBatch], jax.Array]


def model_config(sizes: Sizes) -> ModelConfig:
  """The model: two layers of attention with four heads."""
  return preset("nano", vocab_size=VOCAB_SIZE)._replace(d_model=sizes.d_model, head_dim=sizes.d_model // 4, d_ff=sizes.d_ff)


@functools.cache
def make_bed(sizes: Sizes) -> Bed:
  """Builds the model once; a program compiles at first use."""
  config = model_config(sizes)
  model = make_model(config)
  outputs_fn = functools.partial(policy_outputs, model.score, make_filter())
  adam = dict(learning_rate=sizes.warm_rate, warmup_steps=20, weight_decay=0.0, b1=0.9, b2=0.99)
  warm, schedule = make_optimizer(**adam, max_grad_norm=1.0)
  warm_step = jax.jit(make_train_step(outputs_fn, objectives.make("sft"), warm, learning_rate=schedule), donate_argnums=0)

  # The rate is an input of the program, and not a constant in it: a sweep compiles nothing.
  inner = optax.inject_hyperparams(optax.adam)(learning_rate=0.0, b1=0.9, b2=0.99)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), inner)

  @functools.cache
  def step(name: str, settings: tuple, correction: str) -> Callable:
    objective = CORRECTIONS[correction](objectives.make(name, **dict(settings)))

    train_step = make_train_step(outputs_fn, objective, optimizer, learning_rate=lambda count: 0.0)

    @jax.jit
    def update(state: TrainState, batch: TrainBatch, learning_rate: float) -> tuple[TrainState, Metrics]:
      clip, inner = state.opt_state
      inner = inner._replace(hyperparams=inner.hyperparams | {"learning_rate": learning_rate})
      return train_step(state._replace(opt_state=(clip, inner)), batch)

    return update

  @functools.cache
  def sampler(dtype: str, temperature: float) -> Callable[..., Rollouts]:
    sample = make_sampler(
      make_model(config._replace(dtype=dtype)), group_size=sizes.group_size, max_new_tokens=RESPONSE_TOKENS, stop_ids=(END,), pad_id=PAD,
      temperature=temperature, slots=256,
    )  # fmt: skip
    lower = (lambda params: lower_precision(params, dtype)) if dtype != "float32" else (lambda params: params)
    return jax.jit(lambda params, prompts, key: sample(lower(params), prompts, jnp.ones(prompts.shape, bool), key))

  score = jax.jit(lambda params, batch: outputs_fn(params, batch).logprobs)
  return Bed(sizes, model.init, warm_step, lambda params: init_state(params, warm), sampler, lambda params: init_state(params, optimizer),
    step, score)  # fmt: skip


@functools.lru_cache(maxsize=8)
def warm_params(sizes: Sizes, seed: int) -> Params:
  """Weights that imitate the teacher, from scratch, up to `warm_accuracy`: the same for all arms of a seed."""
  bed, rng = make_bed(sizes), np.random.default_rng([seed, 0])
  state = bed.warm_state(bed.init(jax.random.key(seed)))
  for step in range(1, sizes.warm_steps + 1):
    chosen = problems("train", sizes.warm_rows, rng)
    responses = workings(chosen, error_rate=ERROR_RATE, rng=rng)
    state, _ = bed.warm_step(state, rectangle(prompts_of(chosen), responses, responses != PAD))
    if step % WARM_CHECK == 0:
      rollout = draw(bed, state.params, problems("train", sizes.eval_prompts, rng), jax.random.key(step), Arm("reinforce"))
      if rollout.rewards.mean() >= sizes.warm_accuracy:
        return jax.device_get(state.params)
  if sizes.warm_accuracy > 0:
    raise RuntimeError(f"seed {seed}: found fewer than {sizes.warm_accuracy:.0%} right after {sizes.warm_steps} steps of imitation")
  return jax.device_get(state.params)


class Rollout(NamedTuple):
  """A rollout batch.

  Attributes:
    batch: with advantages and old log-probabilities.
    rewards: 1 where a response is right.
    tokens_mean: of a response.
  """

  batch: TrainBatch
  rewards: np.ndarray
  tokens_mean: float


def draw(bed: Bed, params: Params, chosen: np.ndarray, key: jax.Array, arm: Arm) -> Rollout:
  """Samples a rollout batch."""
  rollouts = jax.device_get(bed.sampler(arm.dtype, arm.temperature)(params, prompts_of(chosen), key))
  rewards = graded(chosen, rollouts.tokens, rollouts.mask, rollouts.stopped)
  batch = rectangle(np.repeat(prompts_of(chosen), bed.sizes.group_size, axis=0), rollouts.tokens, rollouts.mask)
  advantages = np.asarray(ADVANTAGES[arm.advantages](rewards, bed.sizes.group_size), np.float32)[:, None] * batch.mask
  drawn_at = np.pad(rollouts.logprobs, ((0, 0), (PROMPT_TOKENS, 0)))
  batch = batch._replace(advantages=advantages, old_logprobs=drawn_at, sampler_logprobs=drawn_at)
  if arm.recompute:
    batch = batch._replace(old_logprobs=np.asarray(bed.score(params, batch)))
  return Rollout(batch, rewards, float(rollouts.mask.sum(axis=1).mean()))


def held_out(bed: Bed, params: Params, count: int) -> list[int]:
  """Of each of some test problems how many of its G samples are right, in float32 at temperature 1: always the same problems and keys."""
  chosen = problems("test", count, np.random.default_rng(0))
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
"""What is kept of each update: its name here and in the metrics. An objective without a clip has no clipped fraction."""


def trial(sizes: Sizes, seed: int, arm: Arm) -> dict:
  """Trains one arm from the seed's warm start.

  Returns:
    `right`: of each held-out problem how many of G samples are right at the end, and `samples`, G; `curve`: held-out accuracy from the
    start on, evenly spaced; `rewards` and `lengths` of each rollout batch; and each update's `METRICS`, None for one that is not finite.
  """
  bed, params = make_bed(sizes), warm_params(sizes, seed)
  state, step = bed.new_state(params), bed.step(arm.objective, arm.settings, arm.correction)
  rng, key, size = np.random.default_rng([seed, 1]), jax.random.key(seed), sizes.num_prompts * sizes.group_size
  train = problems("train", sizes.updates * sizes.num_prompts, rng)  # The same for all arms of a seed, in the same order.
  rewards, lengths, metrics, curve = [], [], [], [_accuracy(held_out(bed, params, sizes.eval_prompts), sizes)]
  for update in range(sizes.updates):
    index = update % arm.per_rollout
    if index == 0:
      chosen = train[update * sizes.num_prompts : (update + arm.per_rollout) * sizes.num_prompts]
      rollout = draw(bed, state.params, chosen, jax.random.fold_in(key, update), arm)
      rewards.append(float(rollout.rewards.mean()))
      lengths.append(rollout.tokens_mean)
    batch = jax.tree.map(lambda x, start=index * size: x[start : start + size], rollout.batch)
    state, found = step(state, batch, arm.learning_rate)
    metrics.append({name: found[key] for name, key in METRICS.items() if key in found})
    if (update + 1) % (sizes.updates // sizes.evaluations) == 0 and update + 1 < sizes.updates:
      curve.append(_accuracy(held_out(bed, state.params, sizes.eval_prompts), sizes))
  right = held_out(bed, state.params, sizes.end_prompts)
  metrics = jax.device_get(metrics)
  columns = {name: [_finite(row[name]) for row in metrics] for name in metrics[0]}
  ends = {"samples": sizes.group_size, "right": right, "curve": [*curve, _accuracy(right, sizes)]}
  return ends | {"rewards": rewards, "lengths": lengths} | columns


def _accuracy(right: Sequence[int], sizes: Sizes) -> float:
  return float(np.mean(right)) / sizes.group_size


def _finite(x: float) -> float | None:
  return float(x) if np.isfinite(x) else None


def collapse(rewards: Sequence[float], columns: Mapping[str, Sequence[float | None]], *, per_rollout: int) -> str:
  """Which sign of a collapse a trial shows, "" of none: "not finite", "entropy", "reward" or "gradient", the first of them.

  - a gradient norm that is not finite;
  - entropy below 5 % of that of the first update;
  - the moving average of the reward (over about 30 updates) stays below half of its largest value for 30 updates;
  - a gradient norm above 10 times the running median, from the 30th update on.

  Args:
    rewards: of each rollout batch.
    columns: `grad_norm` and `entropy` of each update.
    per_rollout: updates of a rollout batch.
  """
  norms, entropy = columns["grad_norm"], columns["entropy"]
  if any(x is None for x in [*norms, *entropy]):
    return "not finite"
  if min(entropy) < 0.05 * entropy[0]:
    return "entropy"
  average, best, below = rewards[0], rewards[0], 0
  for reward in rewards:
    average += min(1.0, per_rollout / 30) * (reward - average)
    best = max(best, average)
    below = below + per_rollout if average < best / 2 else 0
    if below >= 30:
      return "reward"
  jumps = (norms[i] > 10 * np.median(norms[:i]) for i in range(30, len(norms)))
  return "gradient" if any(jumps) else ""
