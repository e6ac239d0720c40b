"""Saved adapters: one file for each, whole after a kill, with arrays and a record in JSON."""

import io
import json
import re
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from jaxrl_llm.serve.refusals import Refusal, wrong
from jaxrl_llm.workdir import disk

KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""Name of each kind of checkpoint in an answer, by the part of its path."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}")
_SUFFIX, _RECORD = ".npz", "record"


class Place(NamedTuple):
  """Place of a saved adapter.

  Attributes:
    run: Id of the adapter that was saved.
    kind: Key of `KINDS`.
    name: Name.
  """

  run: str
  kind: str
  name: str

  @property
  def path(self) -> str:
    """Path that clients know it by."""
    return f"tinker://{self.run}/{self.kind}/{self.name}"


def place_of(path: Any, field: str = "path") -> Place:
  """Reads a path of a client, which is never one of a file.

  Raises:
    Refusal: If it is none.

  Example:
    >>> place_of(f"tinker://{'0' * 32}:train:0/weights/step-1").name
    'step-1'
    >>> place_of("tinker://../../etc/weights/x")
    Traceback (most recent call last):
    ...
    jaxrl_llm.serve.refusals.Refusal: path: found 'tinker://../../etc/weights/x', expected \
tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME
  """
  scheme, _, rest = path.partition("://") if isinstance(path, str) else ("", "", "")
  run, *others = rest.split("/")
  if (
    scheme != "tinker"
    or len(others) != 2
    or others[0] not in KINDS
    or not _RUN.fullmatch(run)
    or not _NAME.fullmatch(others[1])
  ):
    raise wrong(field, path, "tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME")
  return Place(run, *others)


def check_name(name: Any) -> str:
  """Returns the name of a checkpoint.

  Raises:
    Refusal: If it could lead out of its folder, or is none.
  """
  if not isinstance(name, str) or not _NAME.fullmatch(name):
    raise wrong(
      "path", name, "a name of at most 128 letters, digits, '.', '_' or '-' that does not begin with '.'"
    )
  return name


def save(folder: Path, place: Place, arrays: PyTree, record: Mapping[str, Any], *, overwrite: bool) -> None:
  """Saves an adapter; when this returns, it is on the disk.

  Args:
    folder: Folder of all checkpoints.
    place: Place.
    arrays: Arrays.
    record: What else is known of it, which JSON can hold.
    overwrite: Whether one of the same name is replaced.

  Raises:
    Refusal: If there is one of this name, or no room.
  """
  file = _file(folder, place)
  if file.exists() and not overwrite:
    raise Refusal(
      409,
      f"path: found a checkpoint {place.name!r}, expected a name that is free, or overwrite=True",
      field="path",
    )
  named = {
    jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(arrays)
  }
  about = json.dumps({**record, "time": time.time()}).encode()
  content = io.BytesIO()
  np.savez(content, **named, **{_RECORD: np.frombuffer(about, np.uint8)})
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    disk.replace(file, content.getbuffer().tobytes(), synced=True)
  except OSError as error:
    raise Refusal(
      507, f"path: the checkpoint cannot be written: {error.strerror}", kind="server_error"
    ) from error


def read_record(folder: Path, place: Place) -> dict[str, Any]:
  """Reads what is known of a saved adapter.

  Raises:
    Refusal: If there is none, it has expired, or its file is broken.
  """
  return _opened(folder, place)[0]


def load(folder: Path, place: Place, like: PyTree) -> PyTree:
  """Loads the arrays of a saved adapter into a tree of the same form.

  Raises:
    Refusal: If there is none, its file is broken, or it does not have these arrays.
  """
  _, arrays = _opened(folder, place)
  leaves, form = jax.tree_util.tree_flatten_with_path(like)
  names = [jax.tree_util.keystr(path) for path, _ in leaves]
  if not set(names) <= arrays.keys() or any(
    arrays[name].shape != x.shape for name, (_, x) in zip(names, leaves, strict=True)
  ):
    raise Refusal(
      400,
      f"path: {place.path} has other arrays than the model expects: an adapter of another model or shape",
      field="path",
    )
  return jax.tree.unflatten(form, [arrays[name] for name in names])


def _opened(folder: Path, place: Place) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  try:
    with np.load(_file(folder, place), allow_pickle=False) as file:
      arrays = dict(file)
    record = json.loads(arrays.pop(_RECORD).tobytes())
  except FileNotFoundError as error:
    raise Refusal(404, f"path: found no checkpoint {place.path}", field="path") from error
  except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
    raise Refusal(400, f"path: the file of {place.path} is broken", field="path") from error
  if record.get("expires") is not None and time.time() > record["expires"]:
    raise Refusal(404, f"path: {place.path} has expired", field="path")
  return record, arrays


def places(folder: Path, run: str) -> list[Place]:
  """Returns the saved adapters of a run, in the order of their names."""
  files_of = {
    kind: sorted((folder / run / kind).glob(f"*{_SUFFIX}")) for kind in KINDS if _RUN.fullmatch(run)
  }
  return [
    Place(run, kind, file.name.removesuffix(_SUFFIX)) for kind, files in files_of.items() for file in files
  ]


def delete(folder: Path, place: Place) -> None:
  """Deletes a saved adapter, if there is one."""
  _file(folder, place).unlink(missing_ok=True)


def _file(folder: Path, place: Place) -> Path:
  return folder / place.run / place.kind / f"{place.name}{_SUFFIX}"
