"""Download of the files of a workdir that its local mirror lacks, from its bucket."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxrl_llm.workdir.bucket.index import Index, Part, Step
from jaxrl_llm.workdir.bucket.store import Store, patiently

MANIFEST = "manifest.json"
PAGES = ("report.html",)
"""Files that can be made again. They are sent under their own names, for a browser to open."""

_THREADS = 8  # Files downloaded at a time.
_HALF = ".bringing"


def bring_files(store: Store, index: Index, folder: Path, *, needed: Callable[[str], bool] = lambda path: True) -> None:
  """Brings every file but the checkpoints.

  Args:
    store: Objects of the workdir.
    index: Contents of the workdir.
    folder: Mirrored workdir, which is created if it is missing.
    needed: Test of whether to bring the file at a path.

  Raises:
    FileNotFoundError: If an object is gone: a writer has replaced it, or it is lost.
    ValueError: If an object is not as it was written. One line.
  """
  folder.mkdir(parents=True, exist_ok=True)
  wanted = {path: parts for path, parts in index.files.items() if needed(path)}
  with ThreadPoolExecutor(_THREADS) as threads:
    list(threads.map(lambda item: _bring_file(store, folder / item[0], item[1]), wanted.items()))


def bring_pages(store: Store, folder: Path) -> None:
  """Brings what can be made again, as far as it is there."""
  for name in PAGES:
    if (answer := patiently(lambda: store.get(name))) is not None:  # noqa: B023 (called at once)
      (folder / name).write_bytes(answer[0])


def bring_steps(store: Store, index: Index, folder: Path, *, step: int | None = None) -> None:
  """Brings the newest whole checkpoint, with damaged ones after it, or the one that is named.

  A damaged checkpoint comes as it is, so that the run names it and sets it aside like one of its
  own. One whose manifest is lost comes with an empty one, because it was whole once.

  Args:
    store: Objects of the workdir.
    index: Contents of the workdir.
    folder: Mirrored workdir.
    step: Number of the checkpoint; None for the newest.
  """
  for number in sorted(index.steps, reverse=True) if step is None else [step]:
    place, at = folder / "checkpoints" / str(number), index.steps[number]
    if (place / MANIFEST).is_file() and hashlib.sha256((place / MANIFEST).read_bytes()).hexdigest() == at.sha256:
      return
    half = folder.parent / f"{number}{_HALF}"
    for path in (place, half):
      shutil.rmtree(path, ignore_errors=True)
    whole = _bring_step(store, at, half)
    place.parent.mkdir(parents=True, exist_ok=True)
    half.rename(place)
    if whole:
      return


def files_of(manifest: bytes) -> dict[str, tuple[int, str]]:
  """Returns size and SHA-256 of the files in a checkpoint's manifest; empty if it is damaged."""
  try:
    return {name: (facts["bytes"], facts["sha256"]) for name, facts in json.loads(manifest)["files"].items()}
  except (ValueError, KeyError, TypeError, AttributeError):
    return {}


def _bring_step(store: Store, step: Step, place: Path) -> bool:
  """Downloads a checkpoint. Returns whether it is whole."""
  place.mkdir(parents=True)
  answer = patiently(lambda: store.get(f"{step.at}/{MANIFEST}"))
  manifest = answer[0] if answer else b""
  (place / MANIFEST).write_bytes(manifest)
  if hashlib.sha256(manifest).hexdigest() != step.sha256:
    return False
  files = files_of(manifest)

  def bring(name: str) -> bool:
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    try:
      return _download(store, f"{step.at}/{name}", place / name) == files[name]
    except FileNotFoundError:
      return False

  with ThreadPoolExecutor(_THREADS) as threads:
    return all(list(threads.map(bring, files)))


def _bring_file(store: Store, path: Path, parts: Sequence[Part]) -> None:
  kept = leading(path, parts)
  if kept == len(parts) and path.exists() and path.stat().st_size == sum(part.bytes for part in parts):
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  half = path.with_name(path.name + _HALF)
  have = sum(part.bytes for part in parts[:kept])
  half.write_bytes(path.read_bytes()[:have] if have else b"")
  for part in parts[kept:]:
    size = half.stat().st_size
    if _download(store, part.name, half, size) != (part.bytes, part.sha256):
      raise ValueError(
        f"{store.address}: {path.name} is not as it was written (object {part.name}); "
        "restore an earlier version of that object, or choose another --workdir"
      )
  half.replace(path)


def leading(path: Path, parts: Sequence[Part]) -> int:
  """Returns the number of leading parts that a local file holds byte for byte."""
  if not path.is_file():
    return 0
  with open(path, "rb") as file:
    for number, part in enumerate(parts):
      if hashlib.sha256(file.read(part.bytes)).hexdigest() != part.sha256:
        return number
  return len(parts)


def _download(store: Store, name: str, path: Path, size: int = 0) -> tuple[int, str]:
  def attempt() -> tuple[int, str]:
    with open(path, "ab") as file:
      file.truncate(size)  # What an earlier try left.
      facts = store.download(name, file)
      file.flush()
      os.fsync(file.fileno())
      return facts

  return patiently(attempt)
