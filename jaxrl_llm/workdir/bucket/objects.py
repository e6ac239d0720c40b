"""The files of a mirrored workdir as objects: what has changed, and in which parts it is sent."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.workdir.bucket.download import PAGES, leading
from jaxrl_llm.workdir.bucket.index import Part

MERGED_BYTES = 256 << 10
"""Size of a last part above which the next part is an object of its own."""

_GROWING = (".jsonl", ".log")
_FOLDERS = ("checkpoints", "damaged", "tensorboard")
_LEFT_OUT = (".lock", "samplers.json")


class ObjectPart(NamedTuple):
  """Bytes of a file to send as an object.

  Attributes:
    path: Path of the file in the workdir.
    start: Position of its first byte in the file.
    data: The bytes.
  """

  path: str
  start: int
  data: bytes


Signature = tuple[int, int, int]


def signature(path: Path) -> Signature:
  """Returns facts of a file that change whenever it is written."""
  facts = path.stat()
  return facts.st_ino, facts.st_size, facts.st_mtime_ns


def paths_of(folder: Path) -> list[str]:
  """Returns the paths of the files to send, in order."""
  paths = []
  for place, folders, names in os.walk(folder):
    if Path(place) == folder:
      folders[:] = [name for name in folders if name not in _FOLDERS]
      names = [name for name in names if name not in (*_LEFT_OUT, *PAGES)]
    paths += [Path(place, name).relative_to(folder).as_posix() for name in names if not name.endswith((".tmp", ".bringing"))]
  return sorted(paths)


def collect(
  folder: Path, known: Mapping[str, Sequence[Part]], seen: dict[str, Signature], *, merged_bytes: int = MERGED_BYTES
) -> tuple[dict[str, tuple[Part, ...]], list[ObjectPart]]:
  """Compares the files of a workdir with what was sent.

  A file that grows is sent in parts of whole lines. A small last part is sent again together with
  what has come since, so that the parts stay few.

  Args:
    folder: Mirrored workdir.
    known: Parts that were sent, by path.
    seen: Signatures of the files at the last call, which this call updates.
    merged_bytes: Size of a last part above which the next part is an object of its own.

  Returns:
    The parts of each file that stay as they are, and the pieces to send after them.
  """
  kept, pieces = {}, []
  for path in paths_of(folder):
    before = tuple(known.get(path, ()))
    try:
      now = signature(folder / path)
      if seen.get(path) == now and path in known:
        kept[path] = before
        continue
      grows = path.endswith(_GROWING)
      if grows:
        # A file that was replaced, as on resuming, may differ anywhere, others only at the end.
        same = seen.get(path, (None,))[0] == now[0] and seen[path][1] <= now[1]
        parts = before if same else before[: leading(folder / path, before)]
        if parts and parts[-1].bytes < merged_bytes:
          parts = parts[:-1]
      else:
        parts = ()
      start = sum(part.bytes for part in parts)
      with open(folder / path, "rb") as file:
        file.seek(start)
        data = file.read()
    except FileNotFoundError:  # Removed since it was listed.
      continue
    if grows:
      data = data[: data.rfind(b"\n") + 1]  # A line may be half written.
    last = before[len(parts) :]
    seen[path] = now
    if len(last) == 1 and (last[0].bytes, last[0].sha256) == (len(data), hashlib.sha256(data).hexdigest()):
      kept[path] = before
      continue
    kept[path] = parts
    if data or not grows:
      pieces.append(ObjectPart(path, start, data))
  return kept, pieces


def send(pieces: Sequence[ObjectPart], kept: Mapping[str, tuple[Part, ...]], put: Callable[[str, bytes], None], name: Callable[[str], str]):
  """Sends pieces, and returns the parts of every file afterwards.

  Args:
    pieces: Pieces to send, from `collect`.
    kept: Parts that stay, from `collect`.
    put: Function that writes an object.
    name: Function that makes the name of a new object from the path of its file.
  """
  files = dict(kept)
  for piece in pieces:
    part = Part(name(piece.path), len(piece.data), hashlib.sha256(piece.data).hexdigest())
    put(part.name, piece.data)
    files[piece.path] = (*files.get(piece.path, ()), part)
  return files
