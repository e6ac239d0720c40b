"""The bed of the study.

It is running sums modulo 10, a transformer of 33 thousand weights that imitates an unreliable
teacher, and rollout batches of it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims.running_sums import (
  END,
  ERROR_RATE,
  FEWEST_DIGITS,
  MOST_DIGITS,
  PAD,
  VOCAB_SIZE,
  graded,
  problems,
  prompts_of,
  rectangle,
  response_tokens,
  workings,
)
from jaxrl_llm import objectives
from jaxrl_llm.advantages import group_advantages, leave_one_out_advantages, whiten
from jaxrl_llm.learner.train_step import init_state, make_optimizer, make_train_step, policy_outputs
from jaxrl_llm.models import Experts, Model, ModelConfig, lower_precision, make_model, preset
from jaxrl_llm.sampler import make_filter, make_sampler
from jaxrl_llm.types import Metrics, Objective, Params, PolicyOutputs, Rollouts, TrainBatch, TrainState

WARM_CHECK = 50  # Steps of imitation between two looks at how good it is.

ADVANTAGES: dict[str, Callable] = {
  "group": group_advantages,
  "centred": functools.partial(group_advantages, normalize_std=False),
  "leave_one_out": leave_one_out_advantages,
  "whitened": lambda rewards, group_size: whiten(leave_one_out_advantages(rewards, group_size), np.ones(len(rewards))),
}
"""By name: `(rewards, group size) -> advantages`."""


class Sizes(NamedTuple):
  """Sizes of the bed.

  Attributes:
    d_model: Width of the two layers.
    d_ff: Width of their feed-forward part, or of the experts that a token visits together.
    num_experts: Number of experts of a layer of a mixture of experts.
    top_k: Experts that a token visits.
    warm_steps: Warm steps of imitation, at most.
    warm_rows: Demonstrations of a step.
    warm_rate: Learning rate of it.
    warm_accuracy: Fraction of the responses to training problems that must be right for the
      imitation to end.
    num_prompts: Number of prompts of a mini-batch.
    group_size: Responses to each prompt.
    updates: Updates of the policy in all, however many there are for each rollout batch.
    evaluations: Over a trial, evenly spread.
    eval_prompts: Held-out problems of an evaluation.
    end_prompts: End prompts of the last one.
    digits: Fewest and most of a problem.
    error_rate: Error rate of the teacher, for each sum.
  """

  d_model: int = 48
  d_ff: int = 64
  num_experts: int = 8
  top_k: int = 2
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
  digits: tuple[int, int] = (FEWEST_DIGITS, MOST_DIGITS)
  error_rate: float = ERROR_RATE


SMOKE = Sizes(
  d_model=16, d_ff=16, warm_steps=2, warm_rows=8, warm_accuracy=0.0, num_prompts=2, group_size=4, updates=4, evaluations=2, eval_prompts=4,
  end_prompts=4,
)  # fmt: skip
"""Shows that everything runs, and measures nothing worth having."""


class Arm(NamedTuple):
  """Arm of a study: what is trained, and how.

  Attributes:
    objective: A key of `objectives.OBJECTIVES`.
    settings: Settings of it, as pairs, so that an arm can be a key.
    advantages: A key of `ADVANTAGES`.
    per_rollout: Updates of one rollout batch; the batch has as many mini-batches.
    learning_rate: Learning rate of Adam.
    dtype: Dtype that the sampler computes in; "float8" computes in float32 with weights that were
      rounded to `FLOAT8`.
    temperature: Temperature that the sampler draws at; the learner's is 1.
    recompute: The old log-probabilities are the learner's own; otherwise those that the sampler
      reports.
    correction: A key of `CORRECTIONS`.
    model: One of `MODELS`.
    replay: "none", or "R2": updates visit the experts that the learner's router chose at π_old.
      With a mixture of experts and `recompute`.
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
  model: str = "dense"
  replay: str = "none"


MODELS = ("dense", "experts", "all experts")
"""A mixture of experts, and its control in which a token visits all of the experts there are.

As many active weights, nothing to route.
"""


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
    sizes: Sizes of the model and of its training.
    init: `(key) -> params`.
    warm_step: `(state, batch) -> (state, metrics)`, supervised.
    warm_state: `(params) -> state` for `warm_step`.
    sampler: `(dtype, temperature) -> (params, prompts, key) -> Rollouts`.
    new_state: `(params) -> state` for the steps of `step`.
    step: `(objective, settings, correction) -> (state, batch, learning rate) -> (state, metrics)`.
    score: `(params, batch) -> PolicyOutputs`, the learner's own.
  """

  sizes: Sizes
  init: Callable[[jax.Array], Params]
  warm_step: Callable
  warm_state: Callable[[Params], TrainState]
  sampler: Callable[[str, float], Callable[..., Rollouts]]
  new_state: Callable[[Params], TrainState]
  step: Callable[..., Callable[[TrainState, TrainBatch, float], tuple[TrainState, Metrics]]]
  score: Callable[[Params, TrainBatch], PolicyOutputs]


def model_config(sizes: Sizes, model: str = "dense") -> ModelConfig:
  """Returns one of `MODELS`.

  Two layers of attention with four heads, as many active weights in each.
  """
  config = preset("nano", vocab_size=VOCAB_SIZE)._replace(d_model=sizes.d_model, head_dim=sizes.d_model // 4, d_ff=sizes.d_ff)
  if model == "dense":
    return config
  num_experts = {"experts": sizes.num_experts, "all experts": sizes.top_k}[model]
  return config._replace(experts=Experts(num_experts, sizes.top_k, sizes.d_ff // sizes.top_k))


@functools.cache
def make_bed(sizes: Sizes, model: str = "dense") -> Bed:
  """Builds one of `MODELS` once; a program compiles at first use."""
  config = model_config(sizes, model)
  model = make_model(config)
  outputs_fn = functools.partial(policy_outputs, model.logprobs, make_filter())
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
    model, lower = lowered(config, dtype)
    sample = make_sampler(
      model, group_size=sizes.group_size,
      max_new_tokens=response_tokens(sizes.digits[1]), stop_ids=(END,), pad_id=PAD, temperature=temperature, slots=256,
    )  # fmt: skip
    return jax.jit(lambda params, prompts, key: sample(lower(params), prompts, jnp.ones(prompts.shape, bool), key))

  score = jax.jit(outputs_fn)
  return Bed(sizes, model.init, warm_step, lambda params: init_state(params, warm), sampler, lambda params: init_state(params, optimizer),
    step, score)  # fmt: skip


FLOAT8 = jnp.float8_e5m2
"""Two bits of mantissa: with e4m3's three so small a model hardly differs (k3 1e-4 nats a token).

So it does as large ones do.
"""


def rounded_to_float8(params: Params) -> Params:
  """Returns the same matrices through float8, with one scale for each array.

  An inference engine would quantise them in this way.
  """

  def rounded(path, x: jax.Array) -> jax.Array:
    if path[-1].key in ("scale", "router"):
      return x
    scale = jnp.max(jnp.abs(x)) / float(jnp.finfo(FLOAT8).max)
    return (x / scale).astype(FLOAT8).astype(x.dtype) * scale

  return jax.tree_util.tree_map_with_path(rounded, params)


def lowered(config: ModelConfig, dtype: str) -> tuple[Model, Callable[[Params], Params]]:
  """Returns the model of a sampler in a dtype of `Arm`.

  Also returns the function that makes its weights of the learner's.
  """
  if dtype == "float8":
    return make_model(config), rounded_to_float8
  return make_model(config._replace(dtype=dtype)), functools.partial(lower_precision, dtype=dtype)


class StartFailed(RuntimeError):
  """Imitation has not reached the accuracy at which RL begins.

  The seed has no policy to train, in any arm.
  """


@functools.lru_cache(maxsize=32)  # Of one study: every seed of every model.
def warm_params(sizes: Sizes, seed: int, model: str = "dense") -> Params:
  """Returns the weights that imitate the teacher, from scratch, up to `warm_accuracy`.

  They are the same for all arms of a seed and a model.
  """
  bed, rng = make_bed(sizes, model), np.random.default_rng([seed, 0])
  state = bed.warm_state(bed.init(jax.random.key(seed)))
  for step in range(1, sizes.warm_steps + 1):
    chosen = problems("train", sizes.warm_rows, rng, digits=sizes.digits)
    responses = workings(chosen, error_rate=sizes.error_rate, rng=rng)
    state, _ = bed.warm_step(state, rectangle(prompts_of(chosen), responses, responses != PAD))
    if step % WARM_CHECK == 0:
      shown = problems("train", sizes.eval_prompts, rng, digits=sizes.digits)
      rollout = draw(bed, state.params, shown, jax.random.key(step), Arm("reinforce"))
      if rollout.rewards.mean() >= sizes.warm_accuracy:
        return jax.device_get(state.params)
  if sizes.warm_accuracy > 0:
    raise StartFailed(f"seed {seed}: found fewer than {sizes.warm_accuracy:.0%} right after {sizes.warm_steps} steps of imitation")
  return jax.device_get(state.params)


class Rollout(NamedTuple):
  """A rollout batch.

  Attributes:
    batch: Batch with advantages and old log-probabilities.
    rewards: 1 where a response is right.
    tokens_mean: Tokens mean of a response.
    routes: The experts that the learner's router chose at π_old, [N, T, L, K]; None without
      experts, or where nothing is recomputed.
  """

  batch: TrainBatch
  rewards: np.ndarray
  tokens_mean: float
  routes: np.ndarray | None = None


def draw(bed: Bed, params: Params, chosen: np.ndarray, key: jax.Array, arm: Arm) -> Rollout:
  """Samples a rollout batch."""
  rollouts = jax.device_get(bed.sampler(arm.dtype, arm.temperature)(params, prompts_of(chosen), key))
  rewards = graded(chosen, rollouts.tokens, rollouts.mask, rollouts.stopped)
  batch = rectangle(np.repeat(prompts_of(chosen), bed.sizes.group_size, axis=0), rollouts.tokens, rollouts.mask)
  advantages = np.asarray(ADVANTAGES[arm.advantages](rewards, bed.sizes.group_size), np.float32)[:, None] * batch.mask
  drawn_at = np.pad(rollouts.logprobs, ((0, 0), (batch.tokens.shape[1] - rollouts.logprobs.shape[1], 0)))
  batch = batch._replace(advantages=advantages, old_logprobs=drawn_at, sampler_logprobs=drawn_at)
  routes = None
  if arm.recompute:
    own = jax.device_get(bed.score(params, batch))
    batch, routes = batch._replace(old_logprobs=own.logprobs), own.live_routing
  if arm.replay == "R2":
    batch = batch._replace(routing=routes.astype(np.int16))
  return Rollout(batch, rewards, float(rollouts.mask.sum(axis=1).mean()), routes)
