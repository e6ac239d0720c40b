"""What a checkpoint holds of a run's arrays, and how the rest is made again."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.run.experiment import Experiment
from jaxrl_llm.types import Params, TrainState

# Streams of randomness. A step folds its own number into its stream: nothing is carried, so a resumed run draws what an unbroken one does.
INIT, ROLLOUT, EVAL, TEST_SET, CRITIC = range(5)


def keeps_reference(experiment: Experiment) -> bool:
  """Whether the run holds a frozen copy of its policy. Adapters leave the base as it is, so there it is its own reference."""
  return "ref_logprobs" in experiment.needs and experiment.learner.model.config.lora is None


def saved_part(experiment: Experiment, state: TrainState) -> TrainState:
  """What a checkpoint holds of a state: all of it, but a frozen base, which lies where the run found it."""
  if experiment.learner.model.config.lora is None:
    return state
  return state._replace(params=partition(state.params, experiment.learner.trainable)[0])


def whole_state(experiment: Experiment, saved: TrainState, key: PRNGKeyArray) -> TrainState:
  """The state of which `saved` is the saved part.

  Args:
    experiment: of the run.
    saved: as a checkpoint holds it.
    key: that the run began with.
  """
  if experiment.learner.model.config.lora is None:
    return saved
  base = partition(experiment.init(key).params, experiment.learner.trainable)[1]
  return saved._replace(params=combine(saved.params, base))


def abstract_arrays(experiment: Experiment) -> dict[str, Any]:
  """The arrays of a checkpoint, as shapes, dtypes and shardings."""
  arrays: dict[str, Any] = {"state": saved_part(experiment, experiment.learner.abstract_state)}
  if keeps_reference(experiment):
    arrays["reference"] = experiment.learner.abstract_state.params
  if experiment.learner.critic is not None:
    arrays["critic"] = experiment.learner.critic.abstract_state
  return arrays


class Trained(NamedTuple):
  """The arrays of a run.

  Attributes:
    state: The policy with its optimizer.
    reference: A frozen copy of the policy; None if no loss reads it, or adapters leave the base as it is.
    critic: The critic with its optimizer; None for a method without one.
  """

  state: TrainState
  reference: Params | None
  critic: TrainState | None


def fresh_state(experiment: Experiment, key: PRNGKeyArray) -> Trained:
  """Makes the arrays that a run begins with.

  Args:
    experiment: The experiment.
    key: The key of the run.
  """
  state = experiment.init(jax.random.fold_in(key, INIT))
  reference = copy(state.params) if keeps_reference(experiment) else None
  critic = experiment.learner.critic
  return Trained(state, reference, critic and critic.init(jax.random.fold_in(key, CRITIC), state.params))


def restored_state(experiment: Experiment, arrays: dict[str, Any], key: PRNGKeyArray) -> Trained:
  """Makes the arrays that a run goes on with.

  Args:
    experiment: The experiment.
    arrays: The arrays of a checkpoint, see `abstract_arrays`.
    key: The key of the run.
  """
  state = whole_state(experiment, arrays["state"], jax.random.fold_in(key, INIT))
  return Trained(state, arrays.get("reference"), arrays.get("critic"))


def copy(params: Params) -> Params:
  """The same weights in memory of their own, which no donation can take."""
  return jax.tree.map(jnp.copy, params)
