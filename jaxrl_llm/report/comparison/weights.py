"""The weights of two checkpoints, compared without JAX, one array at a time."""

from pathlib import Path

import numpy as np
import tensorstore as ts


def differing(a: Path, b: Path) -> list[str]:
  """Returns the arrays of two checkpoints that differ in a bit, or that only one of them has.

  Those of the policy come first.

  Args:
    a: Folder of a checkpoint, `WORKDIR/checkpoints/NUMBER`.
    b: Folder of the other one.

  Raises:
    ValueError: If an array cannot be read. One line.
  """
  names = [_names(folder) for folder in (a, b)]
  changed = names[0] ^ names[1] | {
    name for name in names[0] & names[1] if not _equal(_read(a, name), _read(b, name))
  }
  return sorted(changed, key=lambda name: (not name.startswith("state.params."), name))


def _names(folder: Path) -> set[str]:
  try:
    keys = ts.KvStore.open({"driver": "ocdbt", "base": _address(folder)}).result().list().result()
  except ValueError as error:
    raise ValueError(f"{folder}: cannot be read ({str(error).splitlines()[0][:200]})") from error
  return {name.removesuffix("/.zarray") for key in keys if (name := key.decode()).endswith("/.zarray")}


def _read(folder: Path, name: str) -> np.ndarray:
  store = {"driver": "ocdbt", "base": _address(folder), "path": f"{name}/"}
  try:
    return ts.open({"driver": "zarr", "kvstore": store}).result().read().result()
  except ValueError as error:
    raise ValueError(f"{folder}: {name} cannot be read ({str(error).splitlines()[0][:200]})") from error


def _address(folder: Path) -> str:
  return (folder / "arrays").resolve().as_uri()


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
  return (x.shape, x.dtype) == (y.shape, y.dtype) and x.tobytes() == y.tobytes()
