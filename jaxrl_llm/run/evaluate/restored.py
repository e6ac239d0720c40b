"""The policy's weights on the sampler's devices, from any source."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from jaxrl_llm.config import policy
from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.run.evaluate.source import Source
from jaxrl_llm.run.experiment import Experiment
from jaxrl_llm.run.saved_state import INIT
from jaxrl_llm.types import Params
from jaxrl_llm.workdir import checkpoint


def restore(experiment: Experiment, config: ConfigDict, source: Source) -> tuple[Params, int]:
  """Restores the weights of a source.

  No optimizer state is read from a checkpoint, and a run that is still writing others is not
  disturbed.

  Args:
    experiment: Experiment built from the config.
    config: Config of the experiment.
    source: Checked source; see `source.find`.

  Returns:
    The params on the sampler's devices, and the number of RL steps behind them, 0 if no run has
    trained them.

  Raises:
    ValueError: If a checkpoint cannot be read, or holds other weights than the config describes.
  """
  abstract = experiment.learner.abstract_state.params
  make_params = policy.first_params(config, experiment.learner.model, jax.tree.map(lambda x: x.sharding, abstract))
  first = lambda: make_params(jax.random.fold_in(jax.random.key(config.seed), INIT))
  if source.kind != "run":
    params, rl_steps = first(), 0
  else:
    adapters, trainable = experiment.learner.model.config.lora is not None, experiment.learner.trainable
    saved = partition(abstract, trainable)[0] if adapters else abstract
    params, record = _read(source.path / "checkpoints" / str(source.step), saved)
    rl_steps = record["rl_steps"]
    if adapters:
      params = combine(params, partition(first(), trainable)[1])
  if experiment.sync is not None:
    params = experiment.sync.move(params, None, rl_steps).params
  return params, rl_steps


def _read(path: Path, abstract_params: Params) -> tuple[Params, dict[str, Any]]:
  if trouble := checkpoint.problem(path):
    raise ValueError(f"checkpoint {path} is damaged: {trouble}; name another one: --checkpoint=WORKDIR@NUMBER")
  item = {"state": {"params": abstract_params}}
  arrays = ocp.args.PyTreeRestore(item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True)
  try:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
      restored = checkpointer.restore(
        path.absolute(), args=ocp.args.Composite(arrays=arrays, record=ocp.args.JsonRestore())
      )
  except Exception as error:  # Orbax raises at least five unrelated types for a damaged step.
    reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    raise ValueError(
      f"checkpoint {path} cannot be restored ({reason}); is it damaged, or from a run of another model?"
    ) from error
  params = restored["arrays"]["state"]["params"]
  # For what a checkpoint lacks, a partial restore returns the abstract value unchanged.
  if lacking := [jax.tree_util.keystr(p) for p, x in jax.tree_util.tree_leaves_with_path(params) if not isinstance(x, jax.Array)]:
    raise ValueError(f"checkpoint {path}: found no {lacking[0]}, expected the weights that the config describes")
  return params, restored["record"]
