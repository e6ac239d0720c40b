"""The manifest of a checkpoint: what files it has, and the SHA-256 of each, so that no byte can change unseen.

Orbax restores wrong numbers without a word where a byte of an array's file has changed. The manifest is written last, after the step has
its name: a step without one is a save that was interrupted.
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
_THREADS = 8  # Of hashing, which holds no lock: as many files at a time.


def whole_steps(directory: Path) -> list[int]:
  """Numbers of the steps that have been saved to their end, as far as that shows without reading them; the folder need not exist."""
  return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal() and (path / NAME).is_file())


def own_digests(folder: Path) -> dict[str, dict[str, Any]]:
  """Size and SHA-256 of this process's share of the files in a step's folder, by name."""
  names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != NAME)
  return _digests_of_share(folder, names)


def write(folder: Path, files: Mapping[str, dict[str, Any]], save: Save) -> None:
  """Writes the manifest of a step that is complete, by one rename. For process 0.

  Args:
    folder: of the step.
    files: what all processes found, see `own_digests`.
    save: what is known of it.
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
  """What the manifest says of a step, and its bytes; of one that an earlier version wrote, or that cannot be read, what the files say."""
  step, changed = int(folder.name), (folder / NAME).stat().st_mtime
  try:
    read = json.loads((folder / NAME).read_text(encoding="utf-8"))
    save = read.get("save") or {"step": step, "time": changed}
    return Save(**save), sum(file["bytes"] for file in read["files"].values())
  except (OSError, ValueError, KeyError, AttributeError, TypeError):
    return Save(step, changed), 0


def problem(folder: Path) -> str | None:
  """What is wrong with the step in a folder, in words that name the file; None for one that is whole. All processes must ask."""
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
  found = {name: digest for text in hosts.gather_text(json.dumps(own)) for name, digest in json.loads(text).items()}
  changed = [name for name, facts in expected.items() if found[name] != facts]
  return f"{changed[0]} is not as it was written: its SHA-256 differs" if changed else None


def _digests_of_share(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Digests of this process's share of the named files, which all processes name in the same order."""
  names = names[jax.process_index() :: jax.process_count()]
  with ThreadPoolExecutor(_THREADS) as threads:
    return dict(zip(names, threads.map(lambda name: _file_digest(folder / name), names), strict=True))


def _file_digest(path: Path) -> dict[str, Any]:
  with open(path, "rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  return {"bytes": path.stat().st_size, "sha256": digest}


def _digest_of(body: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
