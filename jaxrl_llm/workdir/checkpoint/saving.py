"""Saving: all state in one step, so that params, optimizer, data position and counters cannot disagree; a save may fail, the run goes on.

A save has stages. After each, all processes hear how it went in all of them, and go on or give up together:

  begin     it is known what has to be written, and how much room there is
  made      a folder under another name is there
  copied    the arrays are in host memory: the next update may donate them
  written   every process has written its part                        (from here on beside the run, where saves are asynchronous)
  named     the folder has its number
  digested  every process has read back its share of the files
  whole     the manifest is there; then, not before, older steps are deleted

They talk under keys of their own, not in the order of the main thread's exchanges.
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
from jaxrl_llm.workdir.checkpoint.opening import Checkpoints, finish
from jaxrl_llm.workdir.checkpoint.retention import Save, kept

_MARGIN = 1 << 20  # Bytes, for what is not an array.
_WAIT_SECONDS = 3600  # For the slowest process; one that fails says so at once.
_numbers = itertools.count()  # Of saves, the same in all processes.


class _StageError(Exception):
  """A stage failed in some process."""


class _Job(NamedTuple):
  save: Save  # What its manifest will say of it.
  number: int  # Among all saves of the run.
  record: str  # As JSON, of the moment of the call.
  at: Callable[[str], None]  # See `save`.
  handler: ocp.StandardCheckpointHandler  # Writes the arrays.


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
  """Writes one step; it becomes visible by one rename, or not at all; then its manifest.

  A save that fails, for want of room or whatever else a disk has, leaves nothing behind; `failures` tells of it, and
  `checkpoints.failure` holds it until one succeeds. At most one is under way: the next one waits for it.

  Args:
    checkpoints: from `open_checkpoints`.
    step: number of the checkpoint; grows from save to save.
    arrays: a pytree of arrays: params, optimizer state, counters on the device, keys. They may be donated when this returns.
    record: everything else, as JSON: iterator states, counters, what the summary needs.
    accuracy: held-out accuracy at this step; None where it was not measured.
    temporary: goes once there is a newer one.
    at: is called with "save" before anything is written, "manifest" between the arrays and the manifest, "saved" at the end.

  Raises:
    RuntimeError: there is a checkpoint of that step.

  Note:
    On CPU, as for what is offloaded to the host, an array shares its memory with the host, and the next step donates it. Nothing promises
    that an asynchronous writer then reads the old bytes, although JAX 0.10 was seen to keep them: the arrays are copied first.
  """
  finish(checkpoints)
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
  """Bytes that the save needs, and bytes that are free."""
  folder = checkpoints.directory / str(job.save.step)
  if job.number and hosts.is_main():
    hosts.forget(f"save/{job.number - 1}")  # That everybody has read.

  def look() -> dict[str, Any]:
    job.at("save")
    return {"bytes": _own_bytes(arrays), "free": disk.free_bytes(checkpoints.directory), "there": folder.exists()}

  found = _together(job, "begin", look)
  if found[0]["there"]:
    raise RuntimeError(f"checkpoint {folder} exists already and was not written again")
  # Arrays are compressed, which helps more with those of a young optimizer: what the last one took is nearer to the truth.
  needed = (checkpoints.bytes or sum(one["bytes"] for one in found)) + _MARGIN
  return needed, min(one["free"] for one in found)


def _start_writing(checkpoints: Checkpoints, job: _Job, arrays: Any) -> list[Any]:
  """Futures of the writing, once the arrays are in memory that no update takes."""
  if checkpoints.asynchronous:
    arrays = jax.tree.map(_own, arrays)
  folder = epath.Path(folders.scratch(checkpoints.directory, job.save.step) / "arrays")
  return asyncio.run(job.handler.async_save(folder, args=ocp.args.StandardSave(arrays))) or []


def _complete(checkpoints: Checkpoints, job: _Job, futures: list[Any], needed: int) -> None:
  """All that needs no device."""
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
  with open(scratch / "record" / "metadata", "w", encoding="utf-8") as file:  # As Orbax would, which restores it.
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
  """Removes what the save has written, and tells of it."""
  step, directory = job.save.step, checkpoints.directory
  if hosts.is_main():
    folders.remove_for_good(folders.scratch(directory, step))
    folders.remove(directory / f".{manifest.NAME}.{step}")
    if not (directory / str(step) / manifest.NAME).exists():
      folders.remove(directory / str(step))
  stands = f"checkpoint {checkpoints.newest} stands" if checkpoints.newest is not None else "there is no checkpoint yet"
  needs = f"{needed:,} bytes needed, " if needed else ""  # Where it failed before anybody knew.
  checkpoints.failure = f"checkpoint {directory / str(step)} was not saved: {reason} ({needs}{disk.free_bytes(directory):,} free); {stands}"
  checkpoints.untold.append(f"{checkpoints.failure}, the run goes on")


def _together(job: _Job, stage: str, do: Callable[[], Any]) -> list[Any]:
  """What each process finds, fit for JSON; the same error in all where one fails."""
  try:
    found = {"value": do()}
  except Exception as error:  # Orbax has many for a disk that is full; whatever it is, training is worth more than this save.
    reason = one_line(error, typed=False, limit=100_000).split(" [tensorstore_spec=")[0]
    found = {"error": one_line(reason, tail=135)}  # What the disk says stands last, before the settings of Orbax's writer.
  texts = hosts.gather_under(f"save/{job.number}/{stage}", json.dumps(found), seconds=_WAIT_SECONDS)
  everyone = [json.loads(text) for text in texts]
  for index, one in enumerate(everyone):
    if "error" in one:
      raise _StageError(one["error"] if len(everyone) == 1 else f"process {index}: {one['error']}")
  return [one["value"] for one in everyone]


def _own_bytes(arrays: Any) -> int:
  """Bytes of the pieces that this process writes."""
  pieces = [piece for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array) for piece in x.addressable_shards if piece.replica_id == 0]
  return sum(piece.data.nbytes for piece in pieces)


def _own(x: Any) -> Any:
  """The array, in memory of its own where Orbax would read the array's."""
  if not isinstance(x, jax.Array):
    return x
  on_host = next(iter(x.sharding.device_set)).platform == "cpu" or "host" in str(x.sharding.memory_kind)
  return jax.device_put(x, x.sharding, may_alias=False) if on_host else x
