"""The weights of a run's checkpoint, without its optimizer state."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_llm.types import Params
from jaxrl_llm.workdir import checkpoint


def read_params(path: Path, abstract_params: Params) -> tuple[Params, dict[str, Any]]:
  """Reads the weights and the record of one checkpoint.

  A run that is still writing others is not disturbed.

  Args:
    path: Folder of the checkpoint.
    abstract_params: The saved weights as shapes, dtypes and shardings.

  Raises:
    ValueError: If the checkpoint cannot be read, or holds other weights.
  """
  if trouble := checkpoint.problem(path):
    raise ValueError(f"checkpoint {path} is damaged: {trouble}; name another one: WORKDIR@NUMBER")
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
