"""Test bed of the claims: running sums modulo 10, a small model and its compiled programs.

The model is a transformer of 33 thousand weights. It imitates an unreliable teacher before RL.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims import fibonacci, running_sums
from experiments.claims.running_sums import END, ERROR_RATE, FEWEST_DIGITS, MOST_DIGITS, PAD, VOCAB_SIZE, rectangle
from jaxrl_llm import objectives
from jaxrl_llm.advantages import (
  group_advantages,
  gtpo_advantages,
  leave_one_out_advantages,
  maxrl_advantages,
  role_advantages,
  whiten,
)
from jaxrl_llm.advantages.estimators import Credit, Evidence, make_credit
from jaxrl_llm.decoding.sampler import make_filter, make_sampler, seeded
from jaxrl_llm.learner.train_step import init_state, make_optimizer, make_train_step, policy_outputs
from jaxrl_llm.models import Experts, Model, ModelConfig, lower_precision, make_model, preset
from jaxrl_llm.objectives.corrected import corrected, parse_term
from jaxrl_llm.types import Metrics, Objective, Params, PolicyOutputs, Rollouts, TrainBatch, TrainState

WARM_CHECK = 50  # Imitation steps between two measurements of the accuracy.

ADVANTAGES: dict[str, Callable] = {
  "group": group_advantages,
  "centred": functools.partial(group_advantages, normalize_std=False),
  "leave_one_out": leave_one_out_advantages,
  "maxrl": maxrl_advantages,
  "whitened": lambda rewards, group_size: whiten(leave_one_out_advantages(rewards, group_size), np.ones(len(rewards))),
}
"""Functions `(rewards, group size) -> advantages`, by name.

Two more are no function of these: "gtpo" also reads the entropies of π_old, and "rae" carries a
running mean of the rewards from batch to batch (`credit`). Any other name is an estimator of the
package or of another module.
"""


class Task(NamedTuple):
  """Task of the bed.

  Attributes:
    problems: Function `(split, count, rng, *, digits) -> problems`.
    prompts_of: Function from problems to prompts of one length.
    workings: Function `(problems, *, error_rate, rng)` that writes the responses of a teacher.
    graded: Function `(problems, tokens, mask, stopped) -> rewards`.
    budget: Function from the most digits to the most tokens of a response.
    stop_ids: Tokens that end a response.
  """

  problems: Callable[..., np.ndarray]
  prompts_of: Callable[[np.ndarray], np.ndarray]
  workings: Callable[..., np.ndarray]
  graded: Callable[..., np.ndarray]
  budget: Callable[[int], int]
  stop_ids: tuple[int, ...]


def _task(module: ModuleType, budget: Callable[[int], int], *stop_ids: int) -> Task:
  return Task(module.problems, module.prompts_of, module.workings, module.graded, budget, stop_ids)


TASKS = {"sums": _task(running_sums, running_sums.response_tokens, END), "fibonacci": _task(fibonacci, lambda most: most)}
"""Tasks by name: sums of given digits, and Fibonacci numbers for responses of any length."""


class Sizes(NamedTuple):
  """Sizes of the bed.

  Attributes:
    num_layers: Number of layers.
    d_model: Width of the layers.
    d_ff: Width of their feed-forward part, or total width of the experts that a token visits.
    num_experts: Number of experts per layer of a mixture of experts.
    top_k: Number of experts that a token visits.
    warm_steps: Largest number of imitation steps.
    warm_rows: Number of demonstrations per imitation step.
    warm_rate: Learning rate of the imitation.
    warm_accuracy: Fraction of the responses to training problems that must be right for the
      imitation to end.
    num_prompts: Number of prompts per mini-batch.
    group_size: Number of responses per prompt (G).
    updates: Total number of policy updates, whatever their number per rollout batch.
    evaluations: Number of evaluations after the start of a trial, evenly spaced.
    eval_prompts: Number of held-out problems per evaluation.
    end_prompts: Number of held-out problems of the last evaluation.
    digits: Fewest and most digits of a problem, or tokens of a response to "fibonacci".
    error_rate: Probability that the teacher gets a sum wrong.
    task: Key of `TASKS`.
  """

  num_layers: int = 2
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
  task: str = "sums"

  def problems(self, split: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws problems of the task."""
    return TASKS[self.task].problems(split, count, rng, digits=self.digits)


SMOKE = Sizes(
  d_model=16, d_ff=16, warm_steps=2, warm_rows=8, warm_accuracy=0.0, num_prompts=2, group_size=4, updates=4, evaluations=2, eval_prompts=4,
  end_prompts=4,
)  # fmt: skip
"""Tiny sizes that show that everything runs. The measurements are meaningless."""


class Arm(NamedTuple):
  """Arm of a study: what is trained, and how.

  Attributes:
    objective: Key of `objectives.OBJECTIVES`.
    settings: Settings of the objective, as pairs, so that an arm can be hashed.
    advantages: Key of `ADVANTAGES`, "gtpo", "rae", or an estimator with its settings, as in
      "my_module:mine:scale=2", that reads rewards and masks alone.
    per_rollout: Number of updates per rollout batch, which has as many mini-batches.
    learning_rate: Learning rate of Adam.
    dtype: Dtype in which the sampler computes; "float8" and "int8" compute in float32 with weights
      rounded to one of `ROUNDINGS`, and "float8 x 0.5" with weights that have half of its error.
    temperature: Temperature at which the sampler draws; the learner's is 1.
    recompute: Whether the old log-probabilities are the learner's own instead of those that the
      sampler reports.
    correction: Key of `CORRECTIONS`, or a correction with its settings, as in "tis:cap=3.0".
    model: One of `MODELS`.
    replay: Routes that updates follow: "none" for those of the router, or "R2" for the experts that
      the learner's router chose at π_old. "R2" needs a mixture of experts and `recompute`.
    frozen: Part of the weights that RL does not train: those with this name in their path, such as
      "router"; empty if all are trained.
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
  frozen: str = ""


MODELS = ("dense", "experts", "all experts")
"""Dense model, mixture of experts, and a control in which a token visits every expert.

The control has as many active weights as the mixture, but nothing to route.
"""


def _corrections() -> dict[str, Callable[[Objective], Objective]]:
  from jaxrl_llm.objectives import corrections, selections

  return {
    "none": lambda objective: objective,
    "tis": functools.partial(corrections.tis, cap=2.0),
    "tis5": functools.partial(corrections.tis, cap=5.0),
    "mis": functools.partial(corrections.mis, cap=2.0),
    "top_entropy": selections.top_entropy,
  }


CORRECTIONS = _corrections()
"""Corrections for the mismatch of sampler and learner, and selections of tokens, by name."""


class Bed(NamedTuple):
  """Model and its compiled programs, shared by all seeds and arms.

  Attributes:
    sizes: Sizes of the model and of its training.
    init: Initializer `(key) -> params`.
    warm_step: Supervised step `(state, batch) -> (state, metrics)`.
    warm_state: Function `(params) -> state` that makes the state of `warm_step`.
    sampler: Function `(dtype, temperature)` that makes a sampler `(params, prompts, key) ->
      Rollouts`.
    new_state: Function `(params) -> state` that makes the state of an RL step.
    step: Function `(objective, settings, correction, frozen)` that makes an RL step `(state, batch,
      learning rate) -> (state, metrics)`.
    score: Function `(params, batch) -> PolicyOutputs` of the learner.
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
  """Returns the config of one of `MODELS`.

  All have attention with four heads, and the same number of active weights but for the router.
  """
  config = preset("nano", vocab_size=VOCAB_SIZE)._replace(
    num_layers=sizes.num_layers, d_model=sizes.d_model, head_dim=sizes.d_model // 4, d_ff=sizes.d_ff
  )
  if model == "dense":
    return config
  num_experts = {"experts": sizes.num_experts, "all experts": sizes.top_k}[model]
  return config._replace(experts=Experts(num_experts, sizes.top_k, sizes.d_ff // sizes.top_k))


@functools.cache
def make_bed(sizes: Sizes, model: str = "dense") -> Bed:
  """Builds one of `MODELS`, once for equal sizes. Programs compile at first use."""
  config = model_config(sizes, model)
  model = make_model(config)
  outputs_fn = functools.partial(policy_outputs, model.logprobs, make_filter())
  adam = dict(learning_rate=sizes.warm_rate, warmup_steps=20, weight_decay=0.0, b1=0.9, b2=0.99)
  warm, schedule = make_optimizer(**adam, max_grad_norm=1.0)
  warm_step = jax.jit(make_train_step(outputs_fn, objectives.make("sft"), warm, learning_rate=schedule), donate_argnums=0)

  # The rate is an input of the program rather than a constant, so a sweep does not recompile it.
  inner = optax.inject_hyperparams(optax.adam)(learning_rate=0.0, b1=0.9, b2=0.99)
  make_chain = lambda frozen: optax.chain(optax.clip_by_global_norm(1.0), inner, without(frozen))

  @functools.cache
  def step(name: str, settings: tuple, correction: str, frozen: str = "") -> Callable:
    objective = objectives.make(name, **dict(settings))
    objective = CORRECTIONS[correction](objective) if correction in CORRECTIONS else corrected(objective, [correction])
    train_step = make_train_step(outputs_fn, objective, make_chain(frozen), learning_rate=lambda count: 0.0)

    @jax.jit
    def update(state: TrainState, batch: TrainBatch, learning_rate: float) -> tuple[TrainState, Metrics]:
      clip, inner, last = state.opt_state
      inner = inner._replace(hyperparams=inner.hyperparams | {"learning_rate": learning_rate})
      return train_step(state._replace(opt_state=(clip, inner, last)), batch)

    return update

  @functools.cache
  def sampler(dtype: str, temperature: float) -> Callable[..., Rollouts]:
    (model, lower), task = lowered(config, dtype), TASKS[sizes.task]
    sample = make_sampler(
      model, group_size=sizes.group_size,
      max_new_tokens=task.budget(sizes.digits[1]), stop_ids=task.stop_ids, pad_id=PAD, temperature=temperature, slots=256,
    )  # fmt: skip
    asked = lambda prompts, key: (prompts, jnp.ones(prompts.shape, bool), seeded(key, len(prompts) * sizes.group_size))
    return jax.jit(lambda params, prompts, key: sample(lower(params), *asked(prompts, key)))

  score = jax.jit(outputs_fn)
  return Bed(sizes, model.init, warm_step, lambda params: init_state(params, warm), sampler,
    lambda params: init_state(params, make_chain("")), step, score)  # fmt: skip


def without(frozen: str) -> optax.GradientTransformation:
  """Leaves the weights with a name in their path as they are; an empty name freezes none."""

  def update(updates: Params, params: Params) -> Params:
    del params
    is_frozen = lambda path: bool(frozen) and any(frozen == str(getattr(key, "key", "")) for key in path)
    return jax.tree_util.tree_map_with_path(lambda path, x: jnp.zeros_like(x) if is_frozen(path) else x, updates)

  return optax.stateless(update)


FLOAT8 = jnp.float8_e5m2
"""Float8 with two bits of mantissa.

With the three bits of e4m3, so small a sampler hardly differs from the learner (k3 of 1e-4 nats
per token). With two bits it differs as the samplers of large models do.
"""


ROUNDINGS: dict[str, tuple[float, Callable[[jax.Array], jax.Array]]] = {
  "float8": (float(jnp.finfo(FLOAT8).max), lambda x: x.astype(FLOAT8)),
  "int8": (127.0, jnp.round),
}
"""Types of 8 bits: their largest number, and what rounds to them."""


def rounded_to_8_bits(params: Params, kind: str, share: float = 1.0) -> Params:
  """Rounds the matrices to one of `ROUNDINGS`, with one scale per array, as an engine would.

  Args:
    params: Weights of the learner.
    kind: Key of `ROUNDINGS`.
    share: Share of the error of the rounding that the result has. It sets the divergence of the
      sampler, which grows as its square.
  """
  largest, to_type = ROUNDINGS[kind]

  def rounded(path, x: jax.Array) -> jax.Array:
    if path[-1].key in ("scale", "router"):
      return x
    scale = jnp.max(jnp.abs(x)) / largest
    near = to_type(x / scale).astype(x.dtype) * scale
    return near if share == 1 else x + share * (near - x)

  return jax.tree_util.tree_map_with_path(rounded, params)


def lowered(config: ModelConfig, dtype: str) -> tuple[Model, Callable[[Params], Params]]:
  """Builds a sampler's model in a dtype of `Arm`.

  Returns:
    The model, and the function that converts the learner's weights to the sampler's.
  """
  kind, _, share = dtype.partition(" x ")
  if kind in ROUNDINGS:
    return make_model(config), functools.partial(rounded_to_8_bits, kind=kind, share=float(share or 1))
  return make_model(config._replace(dtype=dtype)), functools.partial(lower_precision, dtype=dtype)


class StartFailed(RuntimeError):
  """Failure of the imitation to reach the accuracy at which RL begins.

  The seed then has no policy to train, in any arm.
  """


def warm_params(sizes: Sizes, seed: int, model: str = "dense") -> Params:
  """Trains a model from scratch to imitate the teacher, up to `warm_accuracy`.

  The weights are the same for all arms of a seed and a model, whatever the sizes of RL.

  Raises:
    StartFailed: If the model has not reached `warm_accuracy` after `warm_steps` steps.
  """
  return _imitated(sizes._replace(num_prompts=0, updates=0, evaluations=0, end_prompts=0), seed, model)


@functools.lru_cache(maxsize=32)  # All arms of a seed follow one another within a block.
def _imitated(sizes: Sizes, seed: int, model: str) -> Params:
  """Trains a model to imitate the teacher; see `warm_params`."""
  bed, rng, task = make_bed(sizes, model), np.random.default_rng([seed, 0]), TASKS[sizes.task]
  state = bed.warm_state(bed.init(jax.random.key(seed)))
  for step in range(1, sizes.warm_steps + 1):
    chosen = sizes.problems("train", sizes.warm_rows, rng)
    responses = task.workings(chosen, error_rate=sizes.error_rate, rng=rng)
    state, _ = bed.warm_step(state, rectangle(task.prompts_of(chosen), responses, responses != PAD))
    if step % WARM_CHECK == 0:
      shown = sizes.problems("train", sizes.eval_prompts, rng)
      rollout = draw(bed, state.params, shown, jax.random.key(step), Arm("reinforce"))
      if rollout.rewards.mean() >= sizes.warm_accuracy:
        return jax.device_get(state.params)
  if sizes.warm_accuracy > 0:
    raise StartFailed(
      f"seed {seed}: found fewer than {sizes.warm_accuracy:.0%} of the responses right after {sizes.warm_steps} steps of imitation"
    )
  return jax.device_get(state.params)


class Rollout(NamedTuple):
  """Rollout batch.

  Attributes:
    batch: Batch with advantages and old log-probabilities.
    rewards: Rewards, 1 for a right response and 0 for a wrong one, [N].
    tokens_mean: Mean length of the responses, in tokens.
    routes: Experts that the learner's router chose at π_old, [N, T, L, K]; None for a dense model
      or if nothing is recomputed.
    baseline: Running mean of the rewards after the batch, of the estimator "rae".
  """

  batch: TrainBatch
  rewards: np.ndarray
  tokens_mean: float
  routes: np.ndarray | None = None
  baseline: float = 0.0


def draw(bed: Bed, params: Params, chosen: np.ndarray, key: jax.Array, arm: Arm, *, baseline: float = 0.0) -> Rollout:
  """Samples a rollout batch of an arm and grades it.

  `baseline` is the running mean of the rewards of earlier batches, which the estimator "rae" reads.
  """
  task = TASKS[bed.sizes.task]
  prompts = task.prompts_of(chosen)
  rollouts = jax.device_get(bed.sampler(arm.dtype, arm.temperature)(params, prompts, key))
  rewards = task.graded(chosen, rollouts.tokens, rollouts.mask, rollouts.stopped)
  batch = rectangle(np.repeat(prompts, bed.sizes.group_size, axis=0), rollouts.tokens, rollouts.mask)
  drawn_at = np.pad(rollouts.logprobs, ((0, 0), (batch.tokens.shape[1] - rollouts.logprobs.shape[1], 0)))
  batch = batch._replace(old_logprobs=drawn_at, sampler_logprobs=drawn_at)
  routes, entropies = None, arm.advantages == "gtpo" or arm.correction == "top_entropy"
  if arm.recompute or entropies:
    own = jax.device_get(bed.score(params, batch))
  if entropies:
    batch = batch._replace(old_entropy=own.entropy)
  advantages, baseline = credit(arm, rewards, batch, bed.sizes.group_size, baseline)
  batch = batch._replace(advantages=advantages, old_entropy=batch.old_entropy if arm.correction == "top_entropy" else None)
  if arm.recompute:
    batch, routes = batch._replace(old_logprobs=own.logprobs), own.live_routing
  if arm.replay == "R2":
    batch = batch._replace(routing=routes.astype(np.int16))
  return Rollout(batch, rewards, float(rollouts.mask.sum(axis=1).mean()), routes, baseline)


def credit(arm: Arm, rewards: np.ndarray, batch: TrainBatch, group_size: int, baseline: float) -> tuple[np.ndarray, float]:
  """Computes the advantages of a rollout batch, [N, T], and the running mean after it."""
  if arm.advantages == "rae":  # One role, which is paid at its last token.
    ends = np.asarray(batch.mask) * np.cumsum(batch.mask, axis=1) == batch.mask.sum(axis=1, keepdims=True)
    ends &= batch.mask > 0
    advantages, after = role_advantages(rewards[:, None] * ends, ends, batch.mask, np.float32([baseline]))
    return np.asarray(advantages, np.float32), float(after[0])
  if arm.advantages == "gtpo":
    return np.asarray(gtpo_advantages(rewards, batch.old_entropy, batch.mask, group_size), np.float32), baseline
  if arm.advantages not in ADVANTAGES:
    evidence = Evidence(rewards, rewards[None], batch.mask)
    return np.asarray(_estimator(arm.advantages, group_size)(evidence).advantages, np.float32), baseline
  return np.asarray(ADVANTAGES[arm.advantages](rewards, group_size), np.float32)[:, None] * batch.mask, baseline


@functools.cache
def _estimator(text: str, group_size: int) -> Callable[[Evidence], Credit]:
  name, settings = parse_term(text)
  return make_credit(name, group_size, **settings)
