"""The code of a run: a hash of each module of this package, kept in its workdir."""

import contextlib
import functools
import hashlib
import json
from pathlib import Path

from jaxrl_llm import __file__ as PACKAGE
from jaxrl_llm.workdir import disk

FILE = "source.json"
"""File in the workdir with the SHA-256 of each module, by its path in the package."""


@functools.cache
def hashes() -> dict[str, str]:
  """Returns the SHA-256 of each module of this package, by its path within the package."""
  root = Path(PACKAGE).resolve().parent
  return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(root.rglob("*.py"))}


@functools.cache
def source_digest() -> str:
  """Returns a hash of all modules of this package."""
  return hashlib.sha256(json.dumps(hashes()).encode()).hexdigest()


def record(workdir: Path) -> None:
  """Writes the hashes of an attempt's code to its workdir."""
  with contextlib.suppress(OSError):  # A full disk must not end a run for this.
    disk.replace(workdir / FILE, json.dumps(hashes(), indent=0) + "\n")


def changed(workdir: Path) -> list[str]:
  """Returns the modules that are others than in the last attempt of a run; empty if it has none."""
  try:
    before = json.loads((workdir / FILE).read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return []
  now = hashes()
  return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
