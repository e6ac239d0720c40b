"""The policy's weights on the sampler's devices, from any source."""

import jax

from jaxrl_llm.config import policy
from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.run.setup.checkpoint_params import read_params
from jaxrl_llm.run.setup.experiment import Experiment
from jaxrl_llm.run.setup.saved_state import INIT
from jaxrl_llm.run.setup.source import Source
from jaxrl_llm.types import Params


def restore(experiment: Experiment, source: Source) -> tuple[Params, int]:
  """Restores the weights of a source.

  No optimizer state is read from a checkpoint, and a run that is still writing others is not
  disturbed.

  Args:
    experiment: Experiment that samples.
    source: Checked source; see `source.find`.

  Returns:
    The params on the sampler's devices, and the number of RL steps behind them, 0 if no run has
    trained them.

  Raises:
    ValueError: If a checkpoint cannot be read, or holds other weights than the config describes.
  """
  abstract, config = experiment.learner.abstract_state.params, experiment.config
  make_params = policy.first_params(config, experiment.learner.model, jax.tree.map(lambda x: x.sharding, abstract))
  first = lambda: make_params(jax.random.fold_in(jax.random.key(config.seed), INIT))
  if source.kind != "run":
    params, rl_steps = first(), 0
  else:
    adapters, trainable = experiment.learner.model.config.lora is not None, experiment.learner.trainable
    saved = partition(abstract, trainable)[0] if adapters else abstract
    params, record = read_params(source.path / "checkpoints" / str(source.step), saved)
    rl_steps = record["rl_steps"]
    if adapters:
      params = combine(params, partition(first(), trainable)[1])
  if experiment.drawing.sync is not None:
    params = experiment.drawing.sync.move(params, None, rl_steps).params
  return params, rl_steps
