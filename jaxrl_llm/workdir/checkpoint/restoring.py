"""Finding and restoring checkpoints: the newest that is whole; a damaged one is named, and put aside."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import orbax.checkpoint as ocp

from jaxrl_llm.devices import hosts
from jaxrl_llm.workdir.checkpoint import manifest
from jaxrl_llm.workdir.checkpoint.folders import clear_leftovers
from jaxrl_llm.workdir.checkpoint.opening import Checkpoints


def restore_latest(
  checkpoints: Checkpoints, abstract_arrays: Any, *, tell: Callable[[str], None] = lambda line: None, moves: bool = True
) -> tuple[Any, dict[str, Any]] | None:
  """The newest step that is whole, or None where there is none.

  Args:
    checkpoints: from `open_checkpoints`.
    abstract_arrays: the pytree that was saved, as `jax.ShapeDtypeStruct`s with the shardings to restore to.
    tell: is told of each newer step that is passed over, in one line that names what is damaged.
    moves: clear away what an interrupted save left, and put damaged steps aside, into a folder `damaged` beside the checkpoints', so that
      the run can save steps of their numbers again; False for who only reads, while another run may be writing.

  Returns:
    The arrays and the record.

  Raises:
    ValueError: every step is damaged, or one holds other shapes than the run asks for.
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
      break  # Older ones need not be read.
    damaged[step] = trouble
  if whole is None and any("interrupted" not in trouble for trouble in damaged.values()):
    shown = "; ".join(f"{step}: {trouble}" for step, trouble in damaged.items())
    raise ValueError(f"checkpoints in {directory}: found none that is whole ({shown}); start again with another --workdir")
  then = "starting from the beginning" if whole is None else f"going on from checkpoint {whole}"
  for step, trouble in damaged.items():
    where = f"; it lies in {_set_aside(directory, step)} now" if moves else ""
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
  except Exception as error:  # Orbax raises at least five unrelated types where shapes differ.
    reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    raise ValueError(f"checkpoint {directory / str(whole)} cannot be restored ({reason}); is it of a run with another model?") from error
  return restored["arrays"], restored["record"]


def _set_aside(directory: Path, step: int) -> Path:
  """Moves a damaged step out of the way: nothing is deleted."""
  place = directory.parent / "damaged"
  target = next(path for n in range(10_000) if not (path := place / (f"{step}" if n == 0 else f"{step}-{n}")).exists())
  if hosts.is_main():
    place.mkdir(exist_ok=True)
    (directory / str(step)).rename(target)
  hosts.barrier()
  return target
