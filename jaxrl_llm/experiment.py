"""An experiment put together from its config: task, mesh, model, objective, and the programs compiled for them."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree
from ml_collections import ConfigDict

from jaxrl_llm import mesh as mesh_lib
from jaxrl_llm import objectives, policy, rewards, routing, tasks
from jaxrl_llm.compiling import compiled_for
from jaxrl_llm.config_check import given, row_problems
from jaxrl_llm.credit import Credit, Evidence, make_credit
from jaxrl_llm.models import Critic, Model, make_critic, make_model, trainable
from jaxrl_llm.needs import abstract_batch, needed_by_critic, needed_by_score, needed_by_step, needed_by_warm_start, scores_needed
from jaxrl_llm.objectives.base import critic_objective
from jaxrl_llm.objectives.corrected import corrected
from jaxrl_llm.partial_rollouts import Groups
from jaxrl_llm.route_programs import RoutePrograms, make_route_programs
from jaxrl_llm.sampler import SampleFn, StreamFn, make_filter
from jaxrl_llm.sampling import make_samplers
from jaxrl_llm.tasks import Task
from jaxrl_llm.tasks.pipeline import encode_demonstrations, max_prompt_tokens
from jaxrl_llm.train_step import (
  TrainStepFn,
  critic_outputs,
  init_state,
  make_optimizer,
  make_train_step,
  partition,
  policy_outputs,
  routed_outputs,
)
from jaxrl_llm.types import Objective, Params, TrainBatch, TrainState
from jaxrl_llm.weight_sync import WeightSync, make_weight_sync

Optimizer = tuple[optax.GradientTransformation, optax.Schedule]


class CriticPrograms(NamedTuple):
  """What a run with a critic has in addition.

  Attributes:
    init: `(key, policy's params) -> state` of the critic.
    abstract_state: as `Experiment.abstract_state`.
    score: `(params, batch) -> values [B T]`.
    step: the critic's update.
  """

  init: Callable[[PRNGKeyArray, Params], TrainState]
  abstract_state: TrainState
  score: Callable[[Params, TrainBatch], Float[Array, "B T"]]
  step: TrainStepFn


class Scores(NamedTuple):
  """What a pass over packed rows returns.

  Attributes:
    logprobs: log-probability of each token under the sampling distribution.
    routing: the experts that each token visited, replayed routes included; None for a dense model.
  """

  logprobs: Float[Array, "B T"]
  routing: Int[Array, "B T L K"] | None = None


class Experiment(NamedTuple):
  """What a run is made of. Programs compile when they first run, for every declared bucket at once, and never again.

  Attributes:
    task: problems, demonstrations, tokenizer.
    mesh: devices of the learner.
    sampler_mesh: devices of the sampler: the learner's, or others.
    sync: what moves weights from the one to the other; None where they are the same.
    model: pure functions of the params.
    objective: what RL minimises.
    rewards: terms of the reward in training.
    init: `(key) -> state`, sharded, at step 0 of the warm start.
    restart: `(params) -> state` with a fresh optimizer, for RL.
    abstract_state: shapes, dtypes and shardings of a state.
    sample: the sampler of training rollouts; reads weights that lie on the sampler's devices.
    stream: likewise, sequence by sequence as they finish; None where nobody asks.
    eval_sample: the sampler of evaluations, likewise.
    carried: what training rollouts go on with in the first step: nothing yet; None where every step waits for all groups.
    warm_step: the supervised update.
    rl_step: the RL update.
    score: `(params, batch) -> Scores` under the sampling distribution.
    trainable: the params tree with True where a weight is trained.
    routes: what looks at the routes of a mixture of experts; None for a dense model.
    needs: the scores that anybody reads, such as `old_logprobs`, `ref_logprobs`, `values`; the loop computes these and no others.
    credit: from rewards and scores to advantages and value targets.
    critic: its programs; None for a method without a critic.
  """

  task: Task
  mesh: Mesh
  sampler_mesh: Mesh
  sync: WeightSync | None
  model: Model
  objective: Objective
  rewards: list[rewards.WeightedReward]
  init: Callable[[PRNGKeyArray], TrainState]
  restart: Callable[[Params], TrainState]
  abstract_state: TrainState
  sample: SampleFn
  stream: StreamFn | None
  eval_sample: SampleFn
  carried: Groups | None
  warm_step: TrainStepFn
  rl_step: TrainStepFn
  score: Callable[[Params, TrainBatch], Scores]
  trainable: PyTree
  routes: RoutePrograms | None
  needs: frozenset[str]
  credit: Callable[[Evidence], Credit]
  critic: CriticPrograms | None


def make_rewards(task: Task, config: ConfigDict) -> list[rewards.WeightedReward]:
  """The task's rewards; the one for the form of an answer and DAPO's length penalty where the config asks for them."""
  terms = [rewards.WeightedReward(name, rewards.make(name)) for name in task.rewards]
  if config.reward.form_weight:
    if task.form_reward is None:
      raise ValueError(f"config.reward.form_weight={config.reward.form_weight}: task {task.name} has no reward for the form, expected 0")
    terms.append(rewards.WeightedReward(task.form_reward, rewards.make(task.form_reward), config.reward.form_weight))
  if config.reward.overlong_buffer:
    penalty = rewards.soft_overlong(config.rollout.max_new_tokens, config.reward.overlong_buffer)
    terms.append(rewards.WeightedReward("soft_overlong", penalty))
  return terms


def make_objective(config: ConfigDict) -> Objective:
  """The objective, with the corrections that the config asks for."""
  return corrected(objectives.make(config.objective.name, **given(config.objective, "name")), **given(config.correction))


def kl_coef_in_loss(config: ConfigDict) -> float:
  """The objective's `kl_coef`, its default included; 0 where it has none."""
  if config.objective.kl_coef is not None:
    return config.objective.kl_coef
  parameters = inspect.signature(objectives.OBJECTIVES[config.objective.name]).parameters
  return parameters["kl_coef"].default if "kl_coef" in parameters else 0.0


def build(config: ConfigDict) -> Experiment:
  """Puts an experiment together; allocates nothing on the devices.

  Args:
    config: checked, see `config_check`.

  Raises:
    ValueError: what cannot be known before the devices are: too few of them, a size they do not divide, a damaged dataset.
  """
  mesh, sampler_mesh = mesh_lib.make_meshes(**config.mesh)
  if problems := list(row_problems(config, mesh_lib.num_row_shards(mesh), mesh_lib.num_row_shards(sampler_mesh))):
    raise ValueError("\n".join(problems))
  task = tasks.make(config.task.name, levels=config.task.levels, data_dir=config.task.data_dir, tokenizer=policy.tokenizer(config))
  shape = policy.model_config(config, vocab_size=task.tokenizer.vocab_size)
  check_lengths(task, config, max_positions=shape.max_positions)
  model = make_model(shape, mesh=mesh)
  sampling_model = make_model(shape._replace(dtype=config.model.sampler_dtype or shape.dtype), mesh=sampler_mesh)
  objective = make_objective(config)
  imitation = objective if config.objective.name == "sft" else objectives.make("sft")
  needs = scores_needed(config, objective)
  if "step_rewards" in needs and task.step_rewards is None:
    raise ValueError(f"config.advantage.estimator: found {config.advantage.estimator!r}, but task {task.name} has no verifier of steps")

  learner, warm = config.learner, config.warm_start
  (optimizer, schedule), (warm_optimizer, warm_schedule) = make_optimizers(config)
  trained = trainable(shape, model.logical_axes)
  abstract_state = place_state(mesh, model, optimizer, trainable=trained)
  shardings = jax.tree.map(lambda x: x.sharding, abstract_state)
  sync, sampled_params = None, abstract_state.params
  if sampler_mesh != mesh:
    sync = make_weight_sync(
      abstract_state.params, model.logical_axes, learner=mesh, sampler=sampler_mesh, dtype=sampling_model.config.dtype, trainable=trained
    )
    sampled_params = sync.arrived
  router_coefs = {name: coef for name, coef in (("balance", config.moe.balance_coef), ("z", config.moe.z_coef)) if coef}
  route_shape = (shape.num_layers, shape.experts.top_k) if shape.experts and config.moe.replay else None
  batch_of = partial(abstract_batch, mesh, row_tokens=learner.row_tokens, routes=route_shape)

  def outputs_of(filter_logits):
    if shape.experts is None:
      return partial(policy_outputs, model.logits, filter_logits)
    return partial(routed_outputs, model.forward, filter_logits, router_losses=tuple(router_coefs))

  def update(objective, optimizer, schedule, filter_logits, buckets, *, is_rl: bool) -> TrainStepFn:
    step = make_train_step(
      outputs_of(filter_logits),
      objective,
      optimizer,
      learning_rate=schedule,
      num_micro_batches=learner.micro_batches,
      trainable=trained,
      router_coefs=router_coefs,
    )
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, mesh_lib.replicated(mesh)))
    batches = [batch_of(rows) for rows in buckets]
    adaptive_kl = config.kl.target is not None
    batches = [needed_by_step(x, objective.needs, adaptive_kl=adaptive_kl) if is_rl else needed_by_warm_start(x) for x in batches]
    return compiled_for(jitted, [(abstract_state, batch) for batch in batches])

  filter_logits = make_filter(temperature=config.rollout.temperature, top_k=config.rollout.top_k, top_p=config.rollout.top_p)
  records_routes = shape.experts is not None and (config.moe.replay == "R3" or config.moe.measure_every > 0)
  samplers = make_samplers(config, sampling_model, task.tokenizer, sampled_params, records_routes=records_routes)

  def score(params: Params, batch: TrainBatch) -> Scores:
    outputs = outputs_of(filter_logits)(params, batch)
    routes = None if outputs.live_routing is None else routing.replayed(batch.routing, outputs.live_routing).astype(jnp.int16)
    return Scores(outputs.logprobs, routes)

  score_routes = route_shape if config.moe.replay == "R3" else None  # R2's are what this pass finds.
  score_batches = [needed_by_score(abstract_batch(mesh, rows, learner.row_tokens, routes=score_routes)) for rows in learner.row_buckets]
  make_params = policy.first_params(config, model, shardings.params)
  start = jax.jit(partial(init_state, optimizer=warm_optimizer, trainable=trained), out_shardings=shardings, donate_argnums=0)
  return Experiment(
    task=task,
    mesh=mesh,
    sampler_mesh=sampler_mesh,
    sync=sync,
    model=model,
    objective=objective,
    rewards=make_rewards(task, config),
    init=lambda key: start(make_params(key)),
    # Params are donated: RL goes on in the memory of the warm start.
    restart=jax.jit(partial(init_state, optimizer=optimizer, trainable=trained), out_shardings=shardings, donate_argnums=0),
    abstract_state=abstract_state,
    **samplers._asdict(),
    warm_step=update(imitation, warm_optimizer, warm_schedule, make_filter(), warm.row_buckets, is_rl=False),
    rl_step=update(objective, optimizer, schedule, filter_logits, learner.row_buckets, is_rl=True),
    score=compiled_for(
      jax.jit(score, out_shardings=mesh_lib.row_sharding(mesh)), [(abstract_state.params, batch) for batch in score_batches]
    ),
    trainable=trained,
    routes=shape.experts and make_route_programs(mesh, model, learner, replays=bool(config.moe.replay), records=records_routes),
    needs=needs,
    credit=make_credit(config.advantage.estimator, config.rollout.group_size, **given(config.advantage, "estimator")),
    critic=make_critic_programs(config, mesh, make_critic(shape, mesh=mesh), objective) if "values" in needs else None,
  )


def make_critic_programs(config: ConfigDict, mesh: Mesh, critic: Critic, objective: Objective) -> CriticPrograms:
  """The critic's optimizer, update and scoring pass.

  Args:
    config: checked.
    mesh: devices.
    critic: pure functions of its params.
    objective: whose `value_loss` it is trained on.
  """
  learner = config.learner
  phase = learner.copy_and_resolve_references()
  phase.learning_rate = config.critic.learning_rate or learner.learning_rate
  optimizer, schedule = phase_optimizer(config, phase, config.num_steps * learner.updates_per_rollout)
  abstract_state = place_state(mesh, critic, optimizer)
  shardings = jax.tree.map(lambda x: x.sharding, abstract_state)

  def init(key: PRNGKeyArray, policy: Params) -> TrainState:
    params = critic.init(key) if config.critic.init == "scratch" else critic.from_policy(policy)
    return init_state(params, optimizer)

  outputs_fn = partial(critic_outputs, critic.values)
  step = make_train_step(
    outputs_fn, critic_objective(objective), optimizer, learning_rate=schedule, num_micro_batches=learner.micro_batches, name="critic"
  )
  batches = [abstract_batch(mesh, rows, learner.row_tokens) for rows in learner.row_buckets]
  jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, mesh_lib.replicated(mesh)))
  score = jax.jit(lambda params, batch: outputs_fn(params, batch).values)
  return CriticPrograms(
    init=jax.jit(init, out_shardings=shardings),
    abstract_state=abstract_state,
    score=compiled_for(score, [(abstract_state.params, needed_by_score(batch)) for batch in batches]),
    step=compiled_for(jitted, [(abstract_state, needed_by_critic(batch)) for batch in batches]),
  )


def make_optimizers(config: ConfigDict) -> tuple[Optimizer, Optimizer]:
  """Optimizer and schedule of RL and of the warm start; their states have the same shape, so one checkpoint format holds either."""
  learner, warm = config.learner, config.warm_start
  rl = phase_optimizer(config, learner, config.num_steps * learner.updates_per_rollout)
  return rl, phase_optimizer(config, warm, warm.num_steps)


def phase_optimizer(config: ConfigDict, phase: ConfigDict, num_updates: int) -> Optimizer:
  """Optimizer and schedule of one phase: AdamW's constants are the learner's in all of them.

  Args:
    config: all of it.
    phase: a section with `learning_rate`, `warmup_steps` and `schedule`.
    num_updates: optimizer updates of the phase.
  """
  learner = config.learner
  adamw = dict(weight_decay=learner.weight_decay, b1=learner.b1, b2=learner.b2, max_grad_norm=learner.max_grad_norm)
  decay = decay_steps(phase, num_updates)
  return make_optimizer(learning_rate=phase.learning_rate, warmup_steps=phase.warmup_steps, decay_steps=decay, **adamw)


def place_state(
  mesh: Mesh, model: Model | Critic, optimizer: optax.GradientTransformation, *, trainable: PyTree | None = None
) -> TrainState:
  """A train state as shapes, dtypes and shardings.

  Args:
    mesh: devices.
    model: whose params the state holds.
    optimizer: of the update.
    trainable: see `init_state`.

  Raises:
    ValueError: a weight that the mesh does not divide.
  """
  params = jax.eval_shape(model.init, jax.random.key(0))
  state = jax.eval_shape(partial(init_state, optimizer=optimizer, trainable=trainable), params)
  shardings = mesh_lib.param_shardings(mesh, model.logical_axes, params)
  shardings = mesh_lib.state_shardings(mesh, optimizer, state, shardings, trained=partition(shardings, trainable)[0])
  return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, shardings)


def decay_steps(config: ConfigDict, num_updates: int) -> int:
  """Updates over which a learning rate falls to 0 after its warm-up; 0 where the schedule keeps it constant."""
  return max(num_updates - config.warmup_steps, 1) if config.schedule == "linear" else 0


def check_lengths(task: Task, config: ConfigDict, *, max_positions: int | None = None) -> None:
  """Refuses prompts and demonstrations that the declared shapes do not hold, before anything is trained.

  Raises:
    ValueError: names the setting, the longest example's length and the fix.
  """
  longest = max(max_prompt_tokens(source, task.tokenizer) for source in (task.train, task.test))
  if longest > max(config.rollout.prompt_buckets):
    raise ValueError(
      f"config.rollout.prompt_buckets={config.rollout.prompt_buckets}: task {task.name} has a prompt of {longest} tokens, expected at most "
      f"{max(config.rollout.prompt_buckets)}; add a bucket of at least {longest}"
    )
  budget = max(config.rollout.prompt_buckets) + config.rollout.max_new_tokens
  if max_positions is not None and budget > max_positions:
    raise ValueError(
      f"config.rollout.max_new_tokens={config.rollout.max_new_tokens}: sequences may reach {budget} tokens, expected at most the model's "
      f"{max_positions}; lower it to {max(max_positions - max(config.rollout.prompt_buckets), 0)}"
    )
  if not config.warm_start.num_steps:
    return
  if not len(task.demonstrations):
    raise ValueError(
      f"config.warm_start.num_steps={config.warm_start.num_steps}: task {task.name} has no demonstrations to imitate, expected 0"
    )
  demonstrated = max(len(p) + len(r) for p, r in encode_demonstrations(task.demonstrations, task.tokenizer))
  if demonstrated > budget:
    raise ValueError(
      f"config.rollout.max_new_tokens={config.rollout.max_new_tokens}: a demonstration has {demonstrated} tokens with its prompt, "
      f"expected at most {budget}; raise it to at least {demonstrated - max(config.rollout.prompt_buckets)}"
    )
