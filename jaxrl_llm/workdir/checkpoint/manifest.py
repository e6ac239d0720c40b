"""The manifest of a checkpoint: its files and their SHA-256 digests, which reveal any changed byte.

If a byte of an array's file has changed, Orbax restores wrong numbers without an error. The
manifest is written last, after the step has its name. A step without one is an interrupted save.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.devices import hosts
from jaxrl_llm.workdir.checkpoint.retention import Save

NAME = "manifest.json"
SCHEMA = 1
_THREADS = 8  # Files hashed at a time; hashing releases the interpreter lock.


def whole_steps(directory: Path) -> list[int]:
  """Returns the numbers of the steps with a manifest, in ascending order.

  Their files are not read. The folder need not exist.
  """
  return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal() and (path / NAME).is_file())


def own_digests(folder: Path) -> dict[str, dict[str, Any]]:
  """Returns size and SHA-256 of this process's share of the files in a step's folder, by name."""
  names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != NAME)
  return _digests_of_share(folder, names)


def write(folder: Path, files: Mapping[str, dict[str, Any]], save: Save) -> None:
  """Writes the manifest of a complete step atomically. Only process 0 calls it.

  Args:
    folder: Folder of the step.
    files: Size and SHA-256 of every file by name, the `own_digests` of all processes.
    save: Facts about the checkpoint.
  """
  versions = {name: metadata.version(name) for name in ("jax", "orbax-checkpoint", "optax", "flax")}
  body = {"schema": SCHEMA, "step": save.step, "files": dict(sorted(files.items()))}
  body |= {"save": save._asdict(), "versions": versions, "devices": jax.device_count()}
  text = json.dumps(body | {"sha256": _digest_of(body)}, indent=1)
  scratch = folder.parent / f".{NAME}.{save.step}"
  with open(scratch, "w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(scratch, folder / NAME)


def facts(folder: Path) -> tuple[Save, int]:
  """Returns the facts about a step in its manifest, and the size of the step in bytes.

  An earlier version wrote no facts: step and time then come from the file system. The same holds
  for an unreadable manifest, with a size of 0.
  """
  step, changed = int(folder.name), (folder / NAME).stat().st_mtime
  try:
    read = json.loads((folder / NAME).read_text(encoding="utf-8"))
    save = read.get("save") or {"step": step, "time": changed}
    return Save(**save), sum(file["bytes"] for file in read["files"].values())
  except (OSError, ValueError, KeyError, AttributeError, TypeError):
    return Save(step, changed), 0


def problem(folder: Path) -> str | None:
  """Returns a description of the damage to a step that names the file, or None for a complete step.

  All processes must call this function.
  """
  try:
    read = json.loads((folder / NAME).read_text(encoding="utf-8"))
    body = {name: value for name, value in read.items() if name != "sha256"}
    expected = body["files"]
    if read.get("sha256") != _digest_of(body):
      return f"{NAME} is not as it was written"
  except FileNotFoundError:
    return f"it has no {NAME}: its save was interrupted"
  except (OSError, ValueError, KeyError, AttributeError, TypeError):
    return f"{NAME} cannot be read"
  for name, facts in expected.items():
    path = folder / name
    if not path.is_file():
      return f"{name} is missing"
    if path.stat().st_size != facts["bytes"]:
      return f"{name} has {path.stat().st_size:,} bytes, expected {facts['bytes']:,}"
  own = _digests_of_share(folder, sorted(expected))
  actual = {name: digest for text in hosts.gather_text(json.dumps(own)) for name, digest in json.loads(text).items()}
  changed = [name for name, facts in expected.items() if actual[name] != facts]
  return f"{changed[0]} is not as it was written: its SHA-256 differs" if changed else None


def _digests_of_share(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Computes the digests of this process's share of the files.

  All processes must pass the same names in the same order.
  """
  names = names[jax.process_index() :: jax.process_count()]
  with ThreadPoolExecutor(_THREADS) as threads:
    return dict(zip(names, threads.map(lambda name: _file_digest(folder / name), names), strict=True))


def _file_digest(path: Path) -> dict[str, Any]:
  with open(path, "rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  return {"bytes": path.stat().st_size, "sha256": digest}


def _digest_of(body: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
