"""Checkpoints: all of a run's state in one atomic Orbax step, so that params, optimizer, data position and counters cannot disagree."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp


def open_checkpoints(directory: Path, *, keep: int) -> ocp.CheckpointManager:
  """The checkpoints of a run.

  Args:
    directory: made if it is missing; what an interrupted save left behind is cleared away.
    keep: how many of the newest steps stay on disk.

  Note:
    Saves are synchronous. On CPU a device array shares its memory with the host, and the next step donates it: an asynchronous
    writer could read the next step's bytes.
  """
  options = ocp.CheckpointManagerOptions(
    max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True, create=True
  )
  return ocp.CheckpointManager(directory.absolute(), options=options)


def save(manager: ocp.CheckpointManager, step: int, arrays: Any, record: dict[str, Any]) -> None:
  """Writes one step; it becomes visible by one rename, or not at all.

  Args:
    manager: from `open_checkpoints`.
    step: number of the checkpoint; grows from save to save.
    arrays: a pytree of arrays: params, optimizer state, counters on the device, keys.
    record: everything else, as JSON: iterator states, counters, what the summary needs.

  Raises:
    RuntimeError: there is a checkpoint of that step.
  """
  args = ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record))
  if not manager.save(step, args=args):  # Orbax drops a step that is there already, without a word.
    raise RuntimeError(f"checkpoint {Path(manager.directory) / str(step)} exists already and was not written again")


def restore_latest(manager: ocp.CheckpointManager, abstract_arrays: Any) -> tuple[Any, dict[str, Any]] | None:
  """The newest step, or None where there is none.

  Args:
    manager: from `open_checkpoints`.
    abstract_arrays: the pytree that was saved, as `jax.ShapeDtypeStruct`s with the shardings to restore to.

  Returns:
    The arrays and the record.

  Raises:
    ValueError: a checkpoint that cannot be read, or that holds other shapes than the run asks for.
  """
  step = manager.latest_step()
  if step is None:
    return None
  args = ocp.args.Composite(arrays=ocp.args.StandardRestore(abstract_arrays), record=ocp.args.JsonRestore())
  try:
    restored = manager.restore(step, args=args)
  except Exception as error:  # Orbax raises at least five unrelated types for a damaged step.
    reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    path = Path(manager.directory) / str(step)
    raise ValueError(f"checkpoint {path} cannot be restored ({reason}); delete that folder to go on from the step before") from error
  return restored["arrays"], restored["record"]
