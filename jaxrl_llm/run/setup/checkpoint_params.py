"""The weights of a run's checkpoint, with or without its optimizer state."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_llm.types import Params, TrainState
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
  state, record = _read(path, {"params": abstract_params})
  return state["params"], record


def read_state(path: Path, abstract_state: TrainState) -> TrainState:
  """Reads the policy's state of one checkpoint, as `read_params` reads its weights.

  Args:
    path: Folder of the checkpoint.
    abstract_state: The saved state as shapes, dtypes and shardings.

  Raises:
    ValueError: If the checkpoint cannot be read, or holds another state.
  """
  return _read(path, abstract_state)[0]


def _read(path: Path, abstract: Any) -> tuple[Any, dict[str, Any]]:
  """Reads the arrays of a policy's state that a tree names, and the record."""
  if trouble := checkpoint.problem(path):
    raise ValueError(f"checkpoint {path} is damaged: {trouble}; name another one: WORKDIR@NUMBER")
  item = {"state": abstract}
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
  state = restored["arrays"]["state"]
  # For what a checkpoint lacks, a partial restore returns the abstract value unchanged.
  if lacking := [jax.tree_util.keystr(p) for p, x in jax.tree_util.tree_leaves_with_path(state) if not isinstance(x, jax.Array)]:
    raise ValueError(f"checkpoint {path}: found no {lacking[0]}, expected the weights that the config describes")
  return state, restored["record"]
