"""Saving checkpoints: all state in one step, so that its parts cannot disagree.

The parts are params, optimizer, data position and counters. A run continues after a failed save.

A save has stages. After each stage, all processes learn its outcome in every process, and continue
or give up together:

  begin     the required and the free space are known
  made      the folder exists under a temporary name
  copied    the arrays are in host memory, and the next update may donate them
  written   every process has written its part (from here on in the background if asynchronous)
  named     the folder is named by its number
  digested  every process has read back its share of the files
  whole     the manifest exists; only then are older steps deleted

The processes exchange outcomes under keys of their own, independently of the order of the main
thread's exchanges.
"""

import asyncio
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxrl_llm.devices import hosts
from jaxrl_llm.messages import one_line
from jaxrl_llm.workdir import disk
from jaxrl_llm.workdir.checkpoint import folders, manifest, orbax_noise
from jaxrl_llm.workdir.checkpoint.retention import Save, kept
from jaxrl_llm.workdir.checkpoint.store import Checkpoints, finish

_MARGIN = 1 << 20  # Bytes for everything but the arrays.
_WAIT_SECONDS = 3600  # For the slowest process; a failure is reported at once.
_numbers = itertools.count()  # Numbers of the saves, the same in all processes.


class _StageError(Exception):
  """The failure of a stage in at least one process."""


class _Job(NamedTuple):
  save: Save  # Facts for the manifest.
  number: int  # Index among all saves of the run.
  record: str  # JSON of the record at the time of the call.
  at: Callable[[str], None]  # Argument of `save`.
  handler: ocp.StandardCheckpointHandler  # Writer of the arrays.


def save(
  checkpoints: Checkpoints,
  step: int,
  arrays: Any,
  record: dict[str, Any],
  *,
  accuracy: float | None = None,
  temporary: bool = False,
  at: Callable[[str], None] = lambda place: None,
) -> None:
  """Writes one step, which one rename makes visible, and then its manifest.

  A save that fails, because of a full disk or any other error, leaves nothing behind. `failures`
  reports it, and `checkpoints.failure` holds the reason until a save succeeds. At most one save is
  in flight, and the next one waits for it.

  Args:
    checkpoints: Checkpoints of a run, opened with `open_checkpoints`.
    step: Number of the checkpoint, which increases from save to save.
    arrays: Pytree of arrays: params, optimizer state, counters on the device, keys. They may be
      donated after the return.
    record: All other state as JSON values: iterator states, counters, the facts of the summary.
    accuracy: Held-out accuracy at this step; None if it was not measured.
    temporary: Whether the next regular checkpoint replaces this one.
    at: Function that is called with "save" before anything is written, with "manifest" between the
      arrays and the manifest, and with "saved" at the end.

  Raises:
    RuntimeError: If a checkpoint of that step exists.

  Note:
    On CPU, and for state that is offloaded to the host, an array shares its memory with the host,
    and the next step donates it. JAX does not guarantee that an asynchronous writer then reads the
    old bytes, although JAX 0.10 was seen to keep them. The arrays are therefore copied first.
  """
  finish(checkpoints)
  if checkpoints.last is not None and step > checkpoints.last:
    return
  orbax_noise.silence()
  checkpoints.last_try = time.monotonic()
  accuracy = None if accuracy is None or not math.isfinite(accuracy) else float(accuracy)
  job = _Job(Save(step, time.time(), accuracy, temporary), next(_numbers), json.dumps(record), at, ocp.StandardCheckpointHandler())
  needed, futures = 0, []
  try:
    if checkpoints.failure is not None and hosts.is_main():
      folders.clear_leftovers(checkpoints.directory)
    needed, free = _begin(checkpoints, job, arrays)
    if needed > free:
      raise _StageError("the disk has no room for it")
    _together(job, "made", lambda: folders.make_scratch(checkpoints.directory, step) if hosts.is_main() else None)
    _together(job, "copied", lambda: futures.extend(_start_writing(checkpoints, job, arrays)))
  except _StageError as error:
    return _give_up(checkpoints, job, needed, str(error))
  checkpoints.run(lambda: _complete(checkpoints, job, futures, needed))


def _begin(checkpoints: Checkpoints, job: _Job, arrays: Any) -> tuple[int, int]:
  """Returns the bytes that the save needs, and the free bytes."""
  folder = checkpoints.directory / str(job.save.step)
  if job.number > 1 and hosts.is_main():
    # All have begun the save before this one, so all have read the one before that. Another process
    # may still be reading what was said last.
    hosts.forget(f"save/{job.number - 2}")

  def measure() -> dict[str, Any]:
    job.at("save")
    return {"bytes": _own_bytes(arrays), "free": disk.free_bytes(checkpoints.directory), "there": folder.exists()}

  measured = _together(job, "begin", measure)
  if measured[0]["there"]:
    raise RuntimeError(f"checkpoint {folder} exists already and was not overwritten")
  # Arrays are compressed, more strongly while an optimizer is young. The size of the last
  # checkpoint is therefore the better estimate.
  needed = (checkpoints.bytes or sum(own["bytes"] for own in measured)) + _MARGIN
  return needed, min(own["free"] for own in measured)


def _start_writing(checkpoints: Checkpoints, job: _Job, arrays: Any) -> list[Any]:
  """Starts to write the arrays. Returns the futures once no update can reuse their memory."""
  if checkpoints.asynchronous:
    arrays = jax.tree.map(_own, arrays)
  folder = epath.Path(folders.scratch(checkpoints.directory, job.save.step) / "arrays")
  return asyncio.run(job.handler.async_save(folder, args=ocp.args.StandardSave(arrays))) or []


def _complete(checkpoints: Checkpoints, job: _Job, futures: list[Any], needed: int) -> None:
  """Runs the stages that need no device."""
  try:
    _together(job, "written", lambda: [future.result() for future in futures] and None)
    _together(job, "named", lambda: _name(checkpoints, job) if hosts.is_main() else None)
    folder = checkpoints.directory / str(job.save.step)

    def digest() -> dict[str, Any]:
      job.at("manifest")
      return manifest.own_digests(folder)

    files = {name: file for own in _together(job, "digested", digest) for name, file in own.items()}
    _together(job, "whole", lambda: manifest.write(folder, files, job.save) if hosts.is_main() else None)
  except _StageError as error:
    return _give_up(checkpoints, job, needed, str(error))
  checkpoints.newest, checkpoints.bytes, checkpoints.failure = job.save.step, sum(file["bytes"] for file in files.values()), None
  if hosts.is_main():
    _delete_old(checkpoints)
  job.at("saved")


def _name(checkpoints: Checkpoints, job: _Job) -> None:
  scratch = folders.scratch(checkpoints.directory, job.save.step)
  job.handler.finalize(epath.Path(scratch / "arrays"))
  # In the form of Orbax, which restores it.
  with open(scratch / "record" / "metadata", "w", encoding="utf-8") as file:
    file.write(job.record)
    file.flush()
    os.fsync(file.fileno())
  scratch.rename(checkpoints.directory / str(job.save.step))


def _delete_old(checkpoints: Checkpoints) -> None:
  directory = checkpoints.directory
  steps = manifest.whole_steps(directory)
  stay = kept([manifest.facts(directory / str(step))[0] for step in steps], **checkpoints.retention)
  for step in steps:
    if step not in stay:
      folders.delete(directory / str(step))


def _give_up(checkpoints: Checkpoints, job: _Job, needed: int, reason: str) -> None:
  """Removes what the save has written, and records its failure."""
  step, directory = job.save.step, checkpoints.directory
  if hosts.is_main():
    folders.remove_for_good(folders.scratch(directory, step))
    folders.remove(directory / f".{manifest.NAME}.{step}")
    if not (directory / str(step) / manifest.NAME).exists():
      folders.remove(directory / str(step))
  remaining = (
    f"checkpoint {checkpoints.newest} stands" if checkpoints.newest is not None else "there is no checkpoint yet"
  )
  needs = f"{needed:,} bytes needed, " if needed else ""  # Unknown if the first stage failed.
  checkpoints.failure = (
    f"checkpoint {directory / str(step)} was not saved: {reason} "
    f"({needs}{disk.free_bytes(directory):,} free); {remaining}"
  )
  checkpoints.untold.append(f"{checkpoints.failure}, the run continues")


def _together(job: _Job, stage: str, do: Callable[[], Any]) -> list[Any]:
  """Runs a stage in all processes. Returns the JSON value of each process.

  Raises:
    _StageError: If the stage failed in some process. All processes raise the same error.
  """
  try:
    outcome = {"value": do()}
  # Orbax raises many types for a full disk. Whatever the error, training matters more than this
  # save.
  except Exception as error:
    reason = one_line(error, typed=False, limit=100_000).split(" [tensorstore_spec=")[0]
    # The error of the disk comes last, before the settings of Orbax's writer.
    outcome = {"error": one_line(reason, tail=135)}
  texts = hosts.gather_under(f"save/{job.number}/{stage}", json.dumps(outcome), seconds=_WAIT_SECONDS)
  outcomes = [json.loads(text) for text in texts]
  for index, each in enumerate(outcomes):
    if "error" in each:
      raise _StageError(each["error"] if len(outcomes) == 1 else f"process {index}: {each['error']}")
  return [each["value"] for each in outcomes]


def _own_bytes(arrays: Any) -> int:
  """Returns the bytes of the shards that this process writes."""
  shards = [
    shard
    for x in jax.tree.leaves(arrays)
    if isinstance(x, jax.Array)
    for shard in x.addressable_shards
    if shard.replica_id == 0
  ]
  return sum(shard.data.nbytes for shard in shards)


def _own(x: Any) -> Any:
  """Copies an array to memory of its own if Orbax would read the memory of the array itself."""
  if not isinstance(x, jax.Array):
    return x
  on_host = next(iter(x.sharding.device_set)).platform == "cpu" or "host" in str(x.sharding.memory_kind)
  return jax.device_put(x, x.sharding, may_alias=False) if on_host else x
