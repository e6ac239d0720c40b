"""Saving and restoring: one Orbax step for all state, so that params, optimizer, data position and counters cannot disagree."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxrl_llm import hosts
from jaxrl_llm.checkpoint import manifest


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
  """Writes one step; it becomes visible by one rename, or not at all; then its manifest.

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
  manifest.write(Path(manager.directory) / str(step), step)


def whole_steps(directory: Path) -> list[int]:
  """Numbers of the steps that have been saved to their end, as far as that can be seen without reading them.

  Args:
    directory: of the checkpoints.
  """
  return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal() and (path / manifest.NAME).is_file())


def restore_latest(
  manager: ocp.CheckpointManager, abstract_arrays: Any, *, tell: Callable[[str], None] = lambda line: None, moves: bool = True
) -> tuple[Any, dict[str, Any]] | None:
  """The newest step that is whole, or None where there is none.

  Args:
    manager: from `open_checkpoints`.
    abstract_arrays: the pytree that was saved, as `jax.ShapeDtypeStruct`s with the shardings to restore to.
    tell: is told of each newer step that is passed over, in one line that names what is damaged.
    moves: put those steps aside, into a folder `damaged` beside the checkpoints', so that the run can save steps of their numbers again;
      False for who only reads.

  Returns:
    The arrays and the record.

  Raises:
    ValueError: every step is damaged, or one holds other shapes than the run asks for.
  """
  directory = Path(manager.directory)
  whole, damaged = None, {}
  for step in sorted(manager.all_steps(), reverse=True):
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
  if moves and damaged:
    manager.reload()
  if whole is None:
    return None
  args = ocp.args.Composite(arrays=ocp.args.StandardRestore(abstract_arrays), record=ocp.args.JsonRestore())
  try:
    restored = manager.restore(whole, args=args)
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
