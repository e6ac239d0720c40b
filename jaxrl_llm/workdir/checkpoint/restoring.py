"""Restoring the newest complete checkpoint. Damaged ones are reported and set aside."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import orbax.checkpoint as ocp

from jaxrl_llm.devices import hosts
from jaxrl_llm.workdir.checkpoint import manifest
from jaxrl_llm.workdir.checkpoint.folders import clear_leftovers
from jaxrl_llm.workdir.checkpoint.store import Checkpoints


def restore_latest(
  checkpoints: Checkpoints, abstract_arrays: Any, *, tell: Callable[[str], None] = lambda line: None, moves: bool = True
) -> tuple[Any, dict[str, Any]] | None:
  """Restores the newest complete step.

  Args:
    checkpoints: Checkpoints of a run, opened with `open_checkpoints`.
    abstract_arrays: Saved pytree as `jax.ShapeDtypeStruct`s, with the shardings to restore to.
    tell: Function that receives one line for each newer step that is skipped. The line names the
      damaged file.
    moves: Whether to remove the leftovers of an interrupted save, and to move damaged steps to a
      folder `damaged` beside that of the checkpoints, so that the run can save steps with their
      numbers again. False is for readers, since another run may be writing.

  Returns:
    The arrays and the record; None if there is no complete step.

  Raises:
    ValueError: If every step is damaged, or if the shapes of the step differ from those of the run.
  """
  directory = checkpoints.directory
  if moves:
    if hosts.is_main():
      clear_leftovers(directory)
    hosts.barrier()
  whole, damaged = None, {}
  for step in sorted((int(path.name) for path in directory.glob("*") if path.name.isdecimal()), reverse=True):
    trouble = manifest.problem(directory / str(step))
    if trouble is None:
      whole = step
      break  # Older steps need not be read.
    damaged[step] = trouble
  if whole is None and any("interrupted" not in trouble for trouble in damaged.values()):
    shown = "; ".join(f"{step}: {trouble}" for step, trouble in damaged.items())
    raise ValueError(
      f"checkpoints in {directory}: found none that is complete ({shown}); start again with another --workdir"
    )
  then = "starting from the beginning" if whole is None else f"continuing from checkpoint {whole}"
  for step, trouble in damaged.items():
    where = f"; it was moved to {_set_aside(directory, step)}" if moves else ""
    tell(f"checkpoint {step} is damaged: {trouble}; {then}{where}")
  checkpoints.newest = whole
  if whole is None:
    return None
  checkpoints.bytes = manifest.facts(directory / str(whole))[1]
  args = ocp.args.Composite(arrays=ocp.args.StandardRestore(abstract_arrays), record=ocp.args.JsonRestore())
  try:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
      restored = checkpointer.restore(directory / str(whole), args=args)
    chex.assert_trees_all_equal_shapes_and_dtypes(restored["arrays"], abstract_arrays)
  except Exception as error:  # Orbax raises at least five unrelated types if shapes differ.
    reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    raise ValueError(
      f"checkpoint {directory / str(whole)} cannot be restored ({reason}); is it from a run with another model?"
    ) from error
  return restored["arrays"], restored["record"]


def _set_aside(directory: Path, step: int) -> Path:
  """Moves a damaged step to the folder `damaged`. Nothing is deleted."""
  place = directory.parent / "damaged"
  target = next(path for n in range(10_000) if not (path := place / (f"{step}" if n == 0 else f"{step}-{n}")).exists())
  if hosts.is_main():
    place.mkdir(exist_ok=True)
    (directory / str(step)).rename(target)
  hosts.barrier()
  return target
