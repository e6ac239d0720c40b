"""What a checkpoint holds of a run's arrays, and how the rest is made again."""

from typing import Any

from jaxtyping import PRNGKeyArray

from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.run.experiment import Experiment
from jaxrl_llm.types import TrainState

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
