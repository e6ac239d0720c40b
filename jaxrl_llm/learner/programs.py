"""The learner's programs: updates, log-probability passes and the critic's programs.

They are built from a config, a mesh and the shape of a model, with abstract arguments to compile
for. They need no task, data or device. A mesh of absent chips suffices, which proves that a run
fits a pod before one is available.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree
from ml_collections import ConfigDict

from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.devices.compilation import compiled_for
from jaxrl_llm.devices.offload import check_offload
from jaxrl_llm.learner.gradient_noise import Projection, make_measurement
from jaxrl_llm.learner.needs import abstract_batch, needed_by_critic, needed_by_logprobs, needed_by_step, needed_by_warm_start
from jaxrl_llm.learner.route_programs import RoutePrograms, make_route_programs
from jaxrl_llm.learner.schedules import decay_steps, policy_updates
from jaxrl_llm.learner.teacher_programs import Advise, TeacherPrograms, abstract_params, make_advise, make_teacher_programs
from jaxrl_llm.learner.token_scores import TokenScores, make_token_scores
from jaxrl_llm.learner.train_step import (
  Losses,
  TrainStepFn,
  critic_outputs,
  init_state,
  make_losses,
  make_optimizer,
  make_train_step,
  map_micro_batches,
  policy_outputs,
)
from jaxrl_llm.models import Critic, Model, ModelConfig, RewardModel, make_critic, make_model, routing, trainable
from jaxrl_llm.models.image_slots import Room
from jaxrl_llm.models.params import partition
from jaxrl_llm.objectives.base import critic_objective
from jaxrl_llm.objectives.distillation import gkd
from jaxrl_llm.objectives.divergence import comparer
from jaxrl_llm.objectives.sft import sft
from jaxrl_llm.types import Objective, Params, Patches, PolicyOutputs, TrainBatch, TrainState

_PROJECTED = 1 << 16
"""Dimensions to which the sums of larger gradients are projected, where their noise is measured."""

Optimizer = tuple[optax.GradientTransformation, optax.Schedule]


class CriticPrograms(NamedTuple):
  """Additional programs of a run with a critic.

  Attributes:
    init: `(key, policy's params) -> state` of the critic.
    abstract_state: Shapes, dtypes and shardings of the critic's state.
    values: `(params, batch) -> values [B T]`.
    step: The critic's update.
  """

  init: Callable[[PRNGKeyArray, Params], TrainState]
  abstract_state: TrainState
  values: Callable[[Params, TrainBatch], Float[Array, "B T"]]
  step: TrainStepFn


class Logprobs(NamedTuple):
  """Result of a log-probability pass over packed rows.

  Attributes:
    logprobs: Log-probability of each token under the sampling distribution.
    routing: Experts that each token visited, replayed routes included; None for a dense model.
    entropy: Entropy of that distribution at each token, in nats; None if nothing reads it.
    score_norm: Squared norm of the gradient of the log-probability in the logits; None if nothing
      reads it.
  """

  logprobs: Float[Array, "B T"]
  routing: Int[Array, "B T L K"] | None = None
  entropy: Float[Array, "B T"] | None = None
  score_norm: Float[Array, "B T"] | None = None


class Programs(NamedTuple):
  """Programs of the learner; each compiles once, on its first run, for all declared buckets.

  Attributes:
    model: Pure functions of the params.
    trainable: Params tree with True for each weight that is trained.
    abstract_state: Shapes, dtypes and shardings of a state.
    start: `(params) -> state` with a fresh optimizer, for the warm start; the params are donated.
    restart: `(params) -> state` with a fresh optimizer, for RL; the params are donated.
    warm_step: Supervised update.
    rl_step: RL update; with `teacher.gkd_coef`, the only teacher's params are a third argument.
    losses: The loss that `rl_step` minimises, and its gradient, not jitted.
    logprobs: `(params, batch) -> Logprobs` under the sampling distribution.
    token_scores: `(params, batch) -> TokenScores` of a batch for `rl_step` without adaptive
      coefficients.
    routes: Programs for the routes of a mixture of experts; None for a dense model.
    features: `(params, patches) -> features [I S F D]` of `pictures_at_once` pictures by a frozen
      tower; None if the tower is trained or there are no pictures.
    critic: Programs of the critic; None for a method without a critic.
    teachers: Programs of each teacher by name, "" for the only one.
    advise: Program that adds a teacher's advantages to a batch; None without a teacher.
    gradient_noise: `(params, batch) -> metrics` of the gradients of single responses; None if they
      are not measured.
  """

  model: Model
  trainable: PyTree
  abstract_state: TrainState
  start: Callable[[Params], TrainState]
  restart: Callable[[Params], TrainState]
  warm_step: TrainStepFn
  rl_step: TrainStepFn
  losses: Losses
  logprobs: Callable[[Params, TrainBatch], Logprobs]
  token_scores: Callable[[Params, TrainBatch], TokenScores]
  routes: RoutePrograms | None
  features: Callable[[Params, Patches], Float[Array, "I S F D"]] | None
  critic: CriticPrograms | None
  teachers: Mapping[str, TeacherPrograms] = MappingProxyType({})
  advise: Advise | None = None
  gradient_noise: Callable[[Params, TrainBatch], dict[str, float]] | None = None


def make_programs(
  config: ConfigDict,
  mesh: Mesh,
  shape: ModelConfig,
  objective: Objective,
  *,
  needs: frozenset[str],
  teachers: Mapping[str, ModelConfig] = MappingProxyType({}),
) -> Programs:
  """Makes the learner's programs; compiles nothing yet, and neither allocates on nor needs devices.

  Args:
    config: Checked config.
    mesh: Mesh of the learner.
    shape: Shape of the model.
    objective: Objective that RL minimises.
    needs: Optional fields of a batch that the run computes, from `needs.fields_needed`.
    teachers: Shape of each teacher by name. The policy itself, if it is the teacher, is none.

  Raises:
    ValueError: If the mesh does not divide a weight.
  """
  learner, warm = config.learner, config.warm_start
  model = make_model(shape, mesh=mesh)
  (optimizer, schedule), (warm_optimizer, warm_schedule) = make_optimizers(config)
  trained = trainable(shape, model.logical_axes)
  abstract_state = place_state(mesh, model, optimizer, trainable=trained, offload=learner.offload_optimizer)
  shardings = jax.tree.map(lambda x: x.sharding, abstract_state)
  filter_logits = make_filter(temperature=config.rollout.temperature, top_k=config.rollout.top_k, top_p=config.rollout.top_p)
  imitation = objective if objective.imitates else sft()
  at_once = rows_at_once(config, mesh)

  def loss_of(objective: Objective, filter_logits, *, compared: TeacherPrograms | None = None) -> dict[str, Any]:
    """Returns the settings of `make_losses`."""
    options, streams = {}, []
    if compared is not None:
      beta = 1.0 if config.teacher.gkd_beta is None else config.teacher.gkd_beta
      compare = comparer(beta=beta, temperature=config.teacher.temperature)
      options = dict(teacher_fn=compared.model.teacher, comparer=compare) | ({"teaches_itself": True} if teaches_itself(config) else {})
      streams = [gkd(config.teacher.gkd_coef)]
    outputs = outputs_fn(config, model, filter_logits, learns_entropy="entropy" in objective.needs, **options)
    settings = dict(rows_at_once=at_once, router_coefs=router_coefs(config), streams=streams, echo_coef=learner.echo_coef)
    return dict(outputs_fn=outputs, objective=objective) | settings

  def update(optimizer, schedule, batches: list[TrainBatch], others: Sequence[Params] = (), **of_loss: Any) -> TrainStepFn:
    step = make_train_step(optimizer=optimizer, learning_rate=schedule, trainable=trained, **of_loss)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, mesh_lib.replicated(mesh)))
    return compiled_for(jitted, [(abstract_state, batch, *others) for batch in batches])

  batch_of = partial(abstract_batch, mesh, row_tokens=learner.row_tokens, shares=learner.share_prompts, room=room_in_rows(config, shape))
  options, replays = step_options(config), bool(config.moe.replay)
  packed = [batch_of(rows, routes=replayed_routes(config, shape)) for rows in learner.row_buckets]
  if learner.skip_zero_advantages:
    packed = [batch._replace(importance=batch.mask) for batch in packed]
  rl_batches = [needed_by_step(batch, objective.needs, **options) for batch in packed]
  shown_batches = [needed_by_step(batch, objective.needs, adaptive_kl=False) for batch in packed]
  of_teachers = {name: make_model(of_teacher, mesh=mesh) for name, of_teacher in teachers.items()}
  of_teachers = {name: (made, abstract_params(mesh, made)) for name, made in of_teachers.items()}
  if config.teacher.path == "self":
    of_teachers = {"": (model, abstract_state.params)}
  read = packed
  if of_teachers and config.teacher.privileged is not None:
    read = [batch_of(rows, row_tokens=config.teacher.row_tokens) for rows in config.teacher.row_buckets]
  num_trained = sum(x.size for x in jax.tree.leaves(partition(abstract_state.params, trained)[0]))
  of_score = dict(temperature=config.teacher.temperature, rows_at_once=at_once)
  taught = {name: make_teacher_programs(mesh, *made, read, **of_score) for name, made in of_teachers.items()}
  token_scores = make_token_scores(outputs_fn(config, model, filter_logits), objective, rows_at_once=at_once)
  compared = taught.get("") if config.teacher.gkd_coef else None
  others = [] if compared is None or teaches_itself(config) else [compared.abstract_params]
  of_rl = loss_of(objective, filter_logits, compared=compared)
  # Params are donated: RL reuses the memory of the warm start.
  fresh = lambda optimizer: jax.jit(partial(init_state, optimizer=optimizer, trainable=trained), out_shardings=shardings, donate_argnums=0)
  return Programs(
    model=model,
    trainable=trained,
    abstract_state=abstract_state,
    start=fresh(warm_optimizer),
    restart=fresh(optimizer),
    warm_step=update(
      warm_optimizer,
      warm_schedule,
      [needed_by_warm_start(batch_of(rows)) for rows in warm.row_buckets or ()],
      **loss_of(imitation, make_filter()),
    ),
    rl_step=update(optimizer, schedule, rl_batches, others, **of_rl),
    losses=make_losses(**of_rl),
    logprobs=make_logprobs(config, mesh, model, abstract_state.params, filter_logits, needs=needs),
    token_scores=compiled_for(
      jax.jit(token_scores, out_shardings=mesh_lib.token_sharding(mesh)), [(abstract_state.params, batch) for batch in shown_batches]
    ),
    routes=make_route_programs(mesh, model, learner, replays=replays, records=records_routes(config, shape)) if shape.experts else None,
    features=make_features(config, mesh, model, abstract_state.params),
    critic=make_critic_programs(config, mesh, make_critic(shape, mesh=mesh), objective) if "values" in needs else None,
    teachers=taught,
    advise=make_advise(mesh, packed, coef=config.teacher.opd_coef, advice=config.teacher.advice) if taught else None,
    gradient_noise=make_measurement(
      outputs_fn(config, model, filter_logits, learns_entropy="entropy" in objective.needs),
      objective,
      trainable=trained,
      num_rows=max(learner.row_buckets),
      num_sequences=-(-config.rollout.num_prompts * config.rollout.group_size // learner.updates_per_rollout),
      group_size=config.rollout.group_size,
      projection=Projection(_PROJECTED) if num_trained > _PROJECTED else None,
    )
    if config.log.gradient_noise_every
    else None,
  )


def step_options(config: ConfigDict) -> dict[str, bool]:
  """Returns what the RL update reads beside the objective's needs.

  The result holds arguments of `needed_by_step`.
  """
  adaptive = {"adaptive_kl": config.kl.target is not None, "adaptive_entropy": config.entropy.target is not None}
  taught = config.teacher.gkd_coef > 0 and config.teacher.privileged is not None
  return adaptive | {"echoes": config.learner.echo_coef > 0, "taught": taught}


def teaches_itself(config: ConfigDict) -> bool:
  """Returns whether the teacher's weights are those of the policy at every moment."""
  return config.teacher.path == "self" and not config.teacher.frozen


def rows_at_once(config: ConfigDict, mesh: Mesh) -> int | None:
  """Returns the number of rows that all devices take at a time; None for all rows of a batch.

  How many micro-batches an update has then follows from its bucket of rows.
  """
  per_device = config.learner.rows_per_device
  return None if per_device is None else per_device * mesh_lib.num_row_shards(mesh)


def outputs_fn(
  config: ConfigDict, model: Model, filter_logits: Callable, *, learns_entropy: bool = False, **of_teacher: Any
) -> Callable[..., PolicyOutputs]:
  """Makes `(params, batch) -> PolicyOutputs` for updates and log-probability passes.

  See `policy_outputs`. With its settings of a teacher, the teacher's params are a third argument.
  """
  losses = tuple(router_coefs(config)) if model.config.experts else ()
  return partial(policy_outputs, model.logprobs, filter_logits, learns_entropy=learns_entropy, router_losses=losses, **of_teacher)


def make_logprobs(
  config: ConfigDict, mesh: Mesh, model: Model, params: Params, filter_logits: Callable, *, needs: frozenset[str] = frozenset()
) -> Callable[[Params, TrainBatch], Logprobs]:
  """Makes the log-probability pass over packed rows, for log π_old and log π_ref.

  `params` are abstract. `needs` with `old_entropy` adds the entropy at each token, with
  `old_score_norm` the squared norm of the gradient in its logits.
  """
  learner, outputs_of, at_once = config.learner, outputs_fn(config, model, filter_logits), rows_at_once(config, mesh)

  def logprobs(params: Params, batch: TrainBatch) -> Logprobs:
    return map_micro_batches(partial(logprobs_of_micro_batch, params), batch, at_once)

  def logprobs_of_micro_batch(params: Params, batch: TrainBatch) -> Logprobs:
    outputs = outputs_of(params, batch)
    routes = None if outputs.live_routing is None else routing.replayed(batch.routing, outputs.live_routing).astype(jnp.int16)
    entropy, score_norm = outputs.entropy if "old_entropy" in needs else None, outputs.score_norm if "old_score_norm" in needs else None
    return Logprobs(outputs.logprobs, routes, entropy, score_norm)

  # R2's routes are those that this pass records.
  routes = replayed_routes(config, model.config) if config.moe.replay == "R3" else None
  room = room_in_rows(config, model.config)
  batch_of = partial(abstract_batch, mesh, row_tokens=learner.row_tokens, routes=routes, shares=learner.share_prompts, room=room)
  batches = [needed_by_logprobs(batch_of(rows)) for rows in learner.row_buckets]
  return compiled_for(jax.jit(logprobs, out_shardings=mesh_lib.token_sharding(mesh)), [(params, batch) for batch in batches])


def room_in_rows(config: ConfigDict, shape: ModelConfig) -> Room | None:
  """Returns the room for pictures in the rows of an update; None if the prompts show none."""
  return Room(shape, config.learner.row_images, config.model.image_tokens) if config.learner.row_images else None


def make_features(
  config: ConfigDict, mesh: Mesh, model: Model, params: Params
) -> Callable[[Params, Patches], Float[Array, "I S F D"]] | None:
  """Makes the pass of a frozen tower over pictures, which are split over the mesh as rows are.

  `params` are abstract.
  """
  room = room_in_rows(config, model.config)
  if room is None or model.config.train_tower:
    return None
  place = partial(jax.ShapeDtypeStruct, sharding=mesh_lib.row_sharding(mesh))
  patches = jax.tree.map(lambda x: place(x.shape, x.dtype), room.patches(pictures_at_once(room, mesh)))
  return compiled_for(jax.jit(model.features, out_shardings=mesh_lib.row_sharding(mesh)), [(params, patches)])


def pictures_at_once(room: Room, mesh: Mesh) -> int:
  """Returns the number of pictures that a frozen tower sees in one call."""
  per_device = _PATCHES_AT_ONCE // (room.tokens * room.config.vision.merge_size**2)
  return min(max(per_device, 1), _PICTURES_AT_ONCE) * mesh_lib.num_row_shards(mesh)


_PATCHES_AT_ONCE, _PICTURES_AT_ONCE = 2**14, 16
"""Most patches and most pictures that a device sees at a time, but for a single larger picture."""


def router_coefs(config: ConfigDict) -> dict[str, float]:
  """Returns the non-zero weights of the router losses."""
  return {name: coef for name, coef in (("balance", config.moe.balance_coef), ("z", config.moe.z_coef)) if coef}


def replayed_routes(config: ConfigDict, shape: ModelConfig) -> tuple[int, int] | None:
  """Returns the layers and the experts per token of replayed routes; None without replay."""
  return (shape.num_layers, shape.experts.top_k) if shape.experts and config.moe.replay else None


def records_routes(config: ConfigDict, shape: ModelConfig) -> bool:
  """Returns whether rollouts record the experts that their tokens visited."""
  return shape.experts is not None and (config.moe.replay == "R3" or config.moe.measure_every > 0)


def make_critic_programs(config: ConfigDict, mesh: Mesh, critic: Critic, objective: Objective) -> CriticPrograms:
  """Makes the critic's optimizer, its update on the objective's `value_loss` and its value pass."""
  learner = config.learner
  phase = learner.copy_and_resolve_references()
  phase.learning_rate = config.critic.learning_rate or learner.learning_rate
  optimizer, schedule = phase_optimizer(config, phase, config.num_steps * learner.updates_per_rollout)
  abstract_state = place_state(mesh, critic, optimizer, offload=learner.offload_optimizer)
  shardings = jax.tree.map(lambda x: x.sharding, abstract_state)

  def init(key: PRNGKeyArray, policy: Params) -> TrainState:
    params = critic.init(key) if config.critic.init == "scratch" else critic.from_policy(policy)
    return init_state(params, optimizer)

  outputs_fn = partial(critic_outputs, critic.values)
  step = make_train_step(
    outputs_fn, critic_objective(objective), optimizer, learning_rate=schedule, rows_at_once=rows_at_once(config, mesh), name="critic"
  )
  batches = [abstract_batch(mesh, rows, learner.row_tokens, shares=learner.share_prompts) for rows in learner.row_buckets]
  jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, mesh_lib.replicated(mesh)))
  values = jax.jit(lambda params, batch: outputs_fn(params, batch).values)
  return CriticPrograms(
    init=jax.jit(init, out_shardings=shardings),
    abstract_state=abstract_state,
    values=compiled_for(values, [(abstract_state.params, needed_by_logprobs(batch)) for batch in batches]),
    step=compiled_for(jitted, [(abstract_state, needed_by_critic(batch, objective.needs)) for batch in batches]),
  )


def make_optimizers(config: ConfigDict) -> tuple[Optimizer, Optimizer]:
  """Returns the optimizer and schedule of RL, and those of the warm start.

  Their states have the same shape, so that one checkpoint format holds either.
  """
  learner, warm = config.learner, config.warm_start
  num_updates = policy_updates(config.num_steps, learner.updates_per_rollout, config.critic.value_warmup_steps)
  return phase_optimizer(config, learner, num_updates), phase_optimizer(config, warm, warm.num_steps)


def phase_optimizer(config: ConfigDict, phase: ConfigDict, num_updates: int) -> Optimizer:
  """Returns the optimizer and schedule of one phase.

  Args:
    config: Config whose learner section holds AdamW's constants for all phases.
    phase: Section with `learning_rate`, `warmup_steps` and `schedule`.
    num_updates: Number of updates of the phase.
  """
  learner = config.learner
  adamw = dict(weight_decay=learner.weight_decay, b1=learner.b1, b2=learner.b2, max_grad_norm=learner.max_grad_norm)
  adamw |= dict(moments_dtype=learner.moments_dtype, offload=learner.offload_optimizer)
  decay = decay_steps(phase.schedule, phase.warmup_steps, num_updates)
  return make_optimizer(learning_rate=phase.learning_rate, warmup_steps=phase.warmup_steps, decay_steps=decay, **adamw)


def place_state(
  mesh: Mesh,
  model: Model | Critic | RewardModel,
  optimizer: optax.GradientTransformation,
  *,
  trainable: PyTree | None = None,
  offload: bool = False,
) -> TrainState:
  """Returns the train state of a model as shapes, dtypes and shardings.

  With `offload` the moments are placed in host memory.

  Raises:
    ValueError: If the mesh does not divide a weight, or the state is offloaded from devices without
      memory of their own.
  """
  if offload:
    check_offload(mesh_lib.platform_of(mesh))
  params = jax.eval_shape(model.init, jax.random.key(0))
  state = jax.eval_shape(partial(init_state, optimizer=optimizer, trainable=trainable), params)
  shardings = mesh_lib.param_shardings(mesh, model.logical_axes, params)
  shardings = mesh_lib.state_shardings(mesh, optimizer, state, shardings, trained=partition(shardings, trainable)[0], offload=offload)
  return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, shardings)
