"""Device programs of a reward model's training: the update, and the rewards of held-out pairs."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.devices.compilation import compiled_for
from jaxrl_llm.learner.needs import abstract_batch
from jaxrl_llm.learner.programs import phase_optimizer, place_state, rows_at_once
from jaxrl_llm.learner.train_step import TrainStepFn, init_state, make_train_step
from jaxrl_llm.models import ModelConfig, RewardModel, load_reward_params, make_reward_model
from jaxrl_llm.objectives.bradley_terry import bradley_terry, pair_rewards
from jaxrl_llm.types import Params, PolicyOutputs, TrainBatch, TrainState


class RewardModelPrograms(NamedTuple):
  """The programs of a reward model's training.

  A program compiles when it first runs, for every declared bucket at once, and never again.

  Attributes:
    model: Pure functions of the params.
    abstract_state: Shapes, dtypes and shardings of a state.
    init: Function `(key) -> state` that makes a state with the first weights.
    step: Update function of a state.
    margins: Function `(params, batch) -> r_c − r_r`, evaluated at every token of each pair.
  """

  model: RewardModel
  abstract_state: TrainState
  init: Callable[[Array], TrainState]
  step: TrainStepFn
  margins: Callable[[Params, TrainBatch], Float[Array, "B T"]]


def make_programs(config: ConfigDict, mesh: Mesh, shape: ModelConfig) -> RewardModelPrograms:
  """Makes the programs of a config that `reward_model.check` has checked.

  It allocates nothing on the devices and compiles nothing yet.

  Raises:
    ValueError: If the mesh does not divide a weight.
  """
  learner = config.learner
  model = make_reward_model(shape, mesh=mesh)
  optimizer, schedule = phase_optimizer(config, learner, config.num_steps)
  abstract_state = place_state(mesh, model, optimizer, offload=learner.offload_optimizer)
  shardings = jax.tree.map(lambda x: x.sharding, abstract_state)
  objective = bradley_terry(center_coef=config.objective.center_coef)

  def outputs(params: Params, batch: TrainBatch) -> PolicyOutputs:
    rewards = model.token_rewards(params, batch.tokens, batch.positions, batch.segments)
    return PolicyOutputs(logprobs=jnp.zeros_like(rewards), values=rewards)

  def margins(params: Params, batch: TrainBatch) -> Float[Array, "B T"]:
    chosen, rejected = pair_rewards(outputs(params, batch).values, batch)
    return chosen - rejected

  step = make_train_step(
    outputs, objective, optimizer, learning_rate=schedule, rows_at_once=rows_at_once(config, mesh), name="reward_model"
  )
  jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, mesh_lib.replicated(mesh)))
  batches = [of_step(abstract_batch(mesh, rows, learner.row_tokens)) for rows in learner.row_buckets]
  fresh = jax.jit(partial(init_state, optimizer=optimizer), out_shardings=shardings, donate_argnums=0)
  first = jax.jit(model.init, out_shardings=shardings.params)
  if config.model.path is not None:
    first = lambda key: load_reward_params(config.model.path, model, key=key)
  return RewardModelPrograms(
    model=model,
    abstract_state=abstract_state,
    init=lambda key: fresh(first(key)),
    step=compiled_for(jitted, [(abstract_state, batch) for batch in batches]),
    margins=compiled_for(jax.jit(margins, out_shardings=mesh_lib.token_sharding(mesh)), [(abstract_state.params, x) for x in batches]),
  )


def of_step(batch: TrainBatch) -> TrainBatch:
  """Returns the batch with only the arrays that a reward model's update reads."""
  names = ("tokens", "positions", "segments", "mask", "advantages", "old_logprobs")
  return TrainBatch(**{name: getattr(batch, name) for name in names})
