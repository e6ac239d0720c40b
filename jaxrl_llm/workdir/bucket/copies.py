"""Local copies of workdirs in buckets for commands that read them, and the way back of pages."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from jaxrl_llm.workdir.bucket import address as address_lib
from jaxrl_llm.workdir.bucket import download
from jaxrl_llm.workdir.bucket import index as index_lib
from jaxrl_llm.workdir.bucket.index import Index
from jaxrl_llm.workdir.bucket.store import StorageError, Store, patiently

# A writer may replace an object between the reading of the index and that of the object.
_TRIES = 5
_RESULTS = "evaluations"


class NotSentError(ValueError):
  """A page or result that was written, but is not in the bucket."""


def localize(text: str | Path, *, step: int | None = None, checkpoints: bool = True) -> Path:
  """Brings what a command needs of a workdir, or of a folder of workdirs, to a local folder.

  The copy is brought up to date each time, and only what has changed is read.

  Args:
    text: Address of the workdir, or a local folder, which stays where it is.
    step: Number of the checkpoint to bring; None for the newest.
    checkpoints: Whether to bring a checkpoint.

  Raises:
    ValueError: If nothing is there, there is no such checkpoint, or the storage fails. One line.
    MissingPackageError: If obstore is not installed.
  """
  if not address_lib.is_address(text):
    return Path(text)
  address = address_lib.parse(str(text))
  folder = address_lib.mirror_of(address, reads=True).run
  try:
    store = Store(address)
    if patiently(lambda: index_lib.read(store)) is not None:
      _bring(store, folder, step=step, checkpoints=checkpoints)
      return folder
    runs = [name for name in patiently(store.folders) if patiently(lambda: store.get(f"{name}/{index_lib.NAME}"))]  # noqa: B023 (called at once)
    for name in runs:
      _bring(Store(address._replace(path=f"{address.path}/{name}")), folder / name, step=None, checkpoints=checkpoints)
  except StorageError as error:
    raise ValueError(str(error)) from error
  if not runs:
    raise ValueError(f"{address}: found no run, expected the --workdir of one, or a folder of them")
  return folder


def give_back(text: str | Path, folder: Path, paths: Iterable[Path]) -> str | None:
  """Sends pages or results that a command has written in a local copy, under their own names.

  Args:
    text: Workdir as the user gave it. Nothing happens if it is a local folder.
    folder: Local copy of the workdir.
    paths: Files inside the copy; others are left out.

  Returns:
    Address of the last file; None if none was sent.

  Raises:
    NotSentError: If the storage fails. One line.
  """
  if not address_lib.is_address(text):
    return None
  store, last = Store(address_lib.parse(str(text))), None
  for path in paths:
    if path.resolve().is_relative_to(folder.resolve()):
      name = path.resolve().relative_to(folder.resolve()).as_posix()
      try:
        patiently(lambda: store.put(name, path))  # noqa: B023 (called at once)
      except StorageError as error:
        raise NotSentError(f"{path} was written, but not sent: {error}") from error
      last = f"{store.address}/{name}"
  return last


def _bring(store: Store, folder: Path, *, step: int | None, checkpoints: bool) -> None:
  for tries in range(_TRIES):
    known = patiently(lambda: index_lib.read(store))
    if known is None:
      raise ValueError(f"{store.address}: found no run, expected the --workdir of one")
    index = known[0]
    if step is not None and step not in index.steps:
      shown = ", ".join(map(str, sorted(index.steps)[-10:])) or "none"
      raise ValueError(f"{store.address}: found no checkpoint {step}, expected one of {shown}")
    try:
      download.bring_files(store, index, folder)
      if checkpoints:
        _forget(folder, index)
        download.bring_steps(store, index, folder, step=step)
      break
    except FileNotFoundError as error:
      if tries == _TRIES - 1:
        raise ValueError(f"{store.address}: an object that its {index_lib.NAME} names is gone ({error})") from error
  # Those that other commands have sent under their own names.
  for name in patiently(lambda: list(store.names(_RESULTS))):
    if not (folder / name).exists() and (answer := store.get(name)) is not None:
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      (folder / name).write_bytes(answer[0])


def _forget(folder: Path, index: Index) -> None:
  """Removes copies of checkpoints that the run has deleted."""
  for path in (folder / "checkpoints").glob("*"):
    if path.name.isdecimal() and int(path.name) not in index.steps:
      shutil.rmtree(path, ignore_errors=True)
