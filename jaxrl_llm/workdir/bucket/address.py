"""The address of a workdir in a bucket, and the local folder that mirrors it."""

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

SCHEMES = ("gs", "s3")
MIRRORS = "JAXRL_LLM_MIRRORS"
"""Environment variable with the folder of all mirrors."""


class Address(NamedTuple):
  """Address of a workdir in a bucket.

  Attributes:
    scheme: Kind of storage, "gs" or "s3".
    bucket: Name of the bucket.
    path: Path inside the bucket, without a slash at either end.
  """

  scheme: str
  bucket: str
  path: str

  def __str__(self) -> str:
    return f"{self.scheme}://{self.bucket}/{self.path}"


class Mirror(NamedTuple):
  """Local folders for a workdir in a bucket, on one file system.

  Attributes:
    run: Workdir as the run sees it.
    state: Folder of facts about the mirror itself.
    outgoing: Folder of checkpoints that are being sent, as hard links.
  """

  run: Path
  state: Path
  outgoing: Path


def is_address(text: object) -> bool:
  """Returns whether a workdir is the URL of some storage, known or not.

  Example:
    >>> is_address("gs://bucket/run"), is_address("runs/gspo")
    (True, False)
  """
  # One letter is a drive of Windows.
  return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", str(text)) is not None


def parse(text: str) -> Address:
  """Parses the address of a workdir in a bucket. As a `Path`, it has lost a slash.

  Raises:
    ValueError: If the scheme is unknown, or bucket or path are missing. One line.

  Example:
    >>> parse("s3://bucket/runs/first/")
    Address(scheme='s3', bucket='bucket', path='runs/first')
  """
  match = re.fullmatch(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+([^/]*)/*(.*?)/*", text)
  scheme, bucket, path = match.groups() if match else ("", "", "")
  parts = path.split("/")
  if scheme not in SCHEMES or not bucket or not path or any(part in ("", ".", "..") for part in parts):
    raise ValueError(f"found {text!r}, expected a folder, or gs://BUCKET/RUN or s3://BUCKET/RUN")
  return Address(scheme, bucket, path)


def mirror_of(address: Address, *, reads: bool = False) -> Mirror:
  """Returns the folders that mirror a workdir on this machine. They need not exist.

  Args:
    address: Address of the workdir.
    reads: Whether the mirror is for commands that only read, which a run on the same machine must
      not disturb.
  """
  home = os.environ.get(MIRRORS) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_llm" / "mirrors"
  readable = re.sub(r"[^A-Za-z0-9._-]", "-", f"{address.bucket}-{address.path}")[-60:].lstrip("-.")
  name = f"{readable}-{hashlib.sha256(str(address).encode()).hexdigest()[:10]}"
  folder = Path(home).expanduser().absolute() / (f"{name}.read" if reads else name)
  # The last part is the run's own name, which reports show.
  return Mirror(folder / "run" / address.path.rpartition("/")[2], folder / "state", folder / "outgoing")
