"""The arrays of a run that a checkpoint holds, and how the rest is rebuilt."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.run.setup.experiment import Experiment
from jaxrl_llm.types import Params, TrainState

# Streams of randomness. A step folds its own number into its stream. No key is carried over, so a
# resumed run draws what an unbroken one does.
INIT, ROLLOUT, EVAL, TEST_SET, CRITIC = range(5)


def keeps_reference(experiment: Experiment) -> bool:
  """Returns whether the run holds a frozen copy of its policy.

  Adapters leave the base unchanged, so with them the base is its own reference.
  """
  is_read = "ref_logprobs" in experiment.needs or bool(experiment.config.teacher.frozen)
  return is_read and experiment.learner.model.config.lora is None


def saved_part(experiment: Experiment, state: TrainState) -> TrainState:
  """Returns what a checkpoint holds of a state: all but a frozen base.

  The base stays where the run found it.
  """
  if experiment.learner.model.config.lora is None:
    return state
  return state._replace(params=partition(state.params, experiment.learner.trainable)[0])


def whole_state(experiment: Experiment, saved: TrainState, key: PRNGKeyArray) -> TrainState:
  """Rebuilds a state from its saved part, for a run that began with this key."""
  if experiment.learner.model.config.lora is None:
    return saved
  base = partition(experiment.init(key).params, experiment.learner.trainable)[1]
  return saved._replace(params=combine(saved.params, base))


def abstract_arrays(experiment: Experiment) -> dict[str, Any]:
  """Returns the arrays of a checkpoint, as shapes, dtypes and shardings."""
  arrays: dict[str, Any] = {"state": saved_part(experiment, experiment.learner.abstract_state)}
  if keeps_reference(experiment):
    arrays["reference"] = experiment.learner.abstract_state.params
  if experiment.learner.critic is not None:
    arrays["critic"] = experiment.learner.critic.abstract_state
  return arrays


def fresh_state(experiment: Experiment, key: PRNGKeyArray) -> tuple[TrainState, Params | None, TrainState | None]:
  """Makes the first policy of a run with this key, its frozen copy and the critic.

  Each of the last two is None if the run has none.
  """
  state = experiment.init(jax.random.fold_in(key, INIT))
  reference = copy(state.params) if keeps_reference(experiment) else None
  critic = experiment.learner.critic
  return state, reference, critic and critic.init(jax.random.fold_in(key, CRITIC), state.params)


def restored_state(
  experiment: Experiment, arrays: dict[str, Any], key: PRNGKeyArray
) -> tuple[TrainState, Params | None, TrainState | None]:
  """Rebuilds policy, frozen copy and critic from the arrays of a checkpoint."""
  state = whole_state(experiment, arrays["state"], jax.random.fold_in(key, INIT))
  return state, arrays.get("reference"), arrays.get("critic")


def copy(params: Params) -> Params:
  """Copies weights into memory of their own, which no donation can take."""
  return jax.tree.map(jnp.copy, params)
