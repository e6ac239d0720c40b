"""The manifest of a checkpoint: what files it has, and the SHA-256 of each, so that no byte can change unseen.

Orbax restores wrong numbers without a word where a byte of an array's file has changed. The manifest is written last, after the step has
its name: a step without one is a save that was interrupted.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import hosts

NAME = "manifest.json"
SCHEMA = 1
_THREADS = 8  # Of hashing, which holds no lock: as many files at a time.


def write(folder: Path, step: int) -> None:
  """Writes the manifest of a step that is complete; all processes take part, and each reads its share of the files.

  Args:
    folder: of the step.
    step: its number.
  """
  files = _digests(folder, _files(folder))
  if not hosts.is_main():
    return
  body = {"schema": SCHEMA, "step": step, "files": files, "versions": _versions(), "devices": jax.device_count()}
  text = json.dumps(body | {"sha256": _digest_of(body)}, indent=1)
  scratch = folder.parent / f".{NAME}.{step}"
  with open(scratch, "w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(scratch, folder / NAME)


def problem(folder: Path) -> str | None:
  """What is wrong with a step, in words that name the file; None for one that is whole. All processes must ask.

  Args:
    folder: of the step.
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
  found = _digests(folder, sorted(expected))
  changed = [name for name, facts in expected.items() if found[name] != facts]
  return f"{changed[0]} is not as it was written: its SHA-256 differs" if changed else None


def _files(folder: Path) -> list[str]:
  return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != NAME)


def _digests(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
  own = names[jax.process_index() :: jax.process_count()]
  with ThreadPoolExecutor(_THREADS) as threads:
    found = dict(zip(own, threads.map(lambda name: _file_digest(folder / name), own), strict=True))
  everyone: dict[str, dict[str, Any]] = {}
  for text in hosts.gather_text(json.dumps(found)):
    everyone |= json.loads(text)
  return {name: everyone[name] for name in names}


def _file_digest(path: Path) -> dict[str, Any]:
  with open(path, "rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  return {"bytes": path.stat().st_size, "sha256": digest}


def _digest_of(body: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _versions() -> dict[str, str]:
  return {name: metadata.version(name) for name in ("jax", "orbax-checkpoint", "optax", "flax")}
