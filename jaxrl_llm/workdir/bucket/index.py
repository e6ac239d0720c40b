"""The index of a workdir in a bucket: the one object that is ever replaced.

All other objects are written once, under names that no other writer uses. The index names those
that count. Each write of it has a precondition on its last state, so that one write makes a
checkpoint visible whole, and a writer that has lost its claim can change nothing.
"""

import hashlib
import json
from typing import Any, NamedTuple

from jaxrl_llm.workdir.bucket.store import StorageError, Store, Tag

NAME = "index.json"
SCHEMA = 1


class Part(NamedTuple):
  """Object that holds a file, or one part of a file that grows.

  Attributes:
    name: Name of the object.
    bytes: Size.
    sha256: Digest of the content.
  """

  name: str
  bytes: int
  sha256: str


class Step(NamedTuple):
  """Checkpoint in a bucket.

  Attributes:
    at: Folder of its objects.
    sha256: Digest of its manifest, which names the other files and their digests.
    bytes: Size of all its files.
    save: Facts about the checkpoint, a `retention.Save`, as JSON.
  """

  at: str
  sha256: str
  bytes: int
  save: dict[str, Any]


class Owner(NamedTuple):
  """Process that writes to the workdir.

  Attributes:
    token: Random name of the process.
    host: Host name.
    boot: Random name of the host's present boot; "" if unknown.
    pid: Number of the process.
    began: Start of the process in the host's own unit; "" if unknown.
  """

  token: str
  host: str
  boot: str
  pid: int
  began: str

  def __str__(self) -> str:
    return f"process {self.pid} on {self.host}"


class Index(NamedTuple):
  """Contents of a workdir in a bucket.

  Attributes:
    serial: Number of writes of the index, which each sign of life increases.
    owner: Process that writes there; None if no process does.
    mirror: Name of the local mirror that published last; None before the first time.
    steps: Checkpoints, by number.
    files: Parts of every other file, by its path in the workdir.
    aside: Folders of damaged checkpoints, which nothing deletes.
  """

  serial: int = 0
  owner: Owner | None = None
  mirror: str | None = None
  steps: dict[int, Step] = {}  # noqa: RUF012 (a NamedTuple; nothing changes it)
  files: dict[str, tuple[Part, ...]] = {}  # noqa: RUF012
  aside: tuple[str, ...] = ()


def names_of(index: Index) -> set[str]:
  """Returns the names of the objects of all files other than checkpoints."""
  return {part.name for parts in index.files.values() for part in parts}


def content_digest(index: Index) -> str:
  """Returns a digest of the contents and of who sent them, which signs of life do not change."""
  return hashlib.sha256(to_bytes(index._replace(serial=0, owner=None))).hexdigest()


def to_bytes(index: Index) -> bytes:
  """Formats an index as JSON with its own digest."""
  body = {"schema": SCHEMA, "serial": index.serial, "owner": index.owner and index.owner._asdict(), "mirror": index.mirror}
  body["checkpoints"] = {str(number): step._asdict() for number, step in sorted(index.steps.items())}
  body["files"] = {path: [list(part) for part in parts] for path, parts in sorted(index.files.items())}
  body["aside"] = list(index.aside)
  return json.dumps(body | {"sha256": _digest(body)}).encode()


def from_bytes(data: bytes) -> Index:
  """Parses an index.

  Raises:
    ValueError: If it is damaged or of another version. One line.

  Example:
    >>> index = Index(3, Owner("a", "host", "b", 1, "c"), "m", {8: Step("checkpoints/8-a-1", "d", 9, {"step": 8})})
    >>> from_bytes(to_bytes(index)) == index
    True
  """
  try:
    body = json.loads(data)
    digest, schema = body.pop("sha256"), body["schema"]
    if digest != _digest(body):
      raise ValueError("its SHA-256 differs")
    if schema != SCHEMA:
      raise ValueError(f"schema {schema!r}, expected {SCHEMA}")
    return Index(
      body["serial"],
      body["owner"] and Owner(**body["owner"]),
      body["mirror"],
      {int(number): Step(**step) for number, step in body["checkpoints"].items()},
      {path: tuple(Part(*part) for part in parts) for path, parts in body["files"].items()},
      tuple(body["aside"]),
    )
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f"{NAME} is not as it was written ({error})") from error


def read(store: Store) -> tuple[Index, Tag] | None:
  """Reads the index and its state; None if there is none.

  Raises:
    StorageError: If the storage fails, or the index is damaged.
  """
  if (answer := store.get(NAME)) is None:
    return None
  try:
    return from_bytes(answer[0]), answer[1]
  except ValueError as error:
    raise StorageError(
      f"{store.address}: {error}; restore an earlier version of that object, or choose another --workdir", lasting=True
    ) from error


def _digest(body: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
