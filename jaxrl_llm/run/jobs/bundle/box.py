"""The file of a bundle: a zip of arrays (.npy) and JSON, whose every byte is checked before use.

Three checks stand behind one another. The file ends with the SHA-256 of all bytes before it, as the
comment of the zip. `manifest.json` has the size and the SHA-256 of every other entry. An array must
have the dtype and the shape that its reader expects. Nothing is compressed, so no entry can be
larger than the file, and nothing is a pickle.
"""

import hashlib
import io
import json
import math
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9_.]+(?:/[A-Za-z0-9_.]+)*")
_SEAL = 64  # Characters of a SHA-256 in hexadecimal.
_MAX_JSON, _MAX_HEADER = 2**28, 10_000
_BLOCK = 2**22
AGAIN = "make the bundle, or copy it, again"
"""The likely fix of a damaged bundle."""


class BoxError(ValueError):
  """A file that is no undamaged bundle. One line."""


def write(path: Path, jsons: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
  """Writes a bundle, by one rename.

  Args:
    path: File to write.
    jsons: JSON values by the names of their entries.
    arrays: Arrays by the names of their entries, without ".npy". Those in bfloat16 are stored as
      the whole numbers of their bits.

  Raises:
    OSError: If the file cannot be written.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "step.zip")
    >>> write(path, {"about.json": {"step": 3}}, {"batch/mask": np.ones(2, np.float32)})
    >>> box = Box(path)
    >>> box.names, box.read_json("about.json"), box.read_array("batch/mask", (2,), "float32").tolist()
    (['about.json', 'batch/mask.npy'], {'step': 3}, [1.0, 1.0])
  """
  entries, partial = {}, path.with_name(f"{path.name}.tmp")
  try:
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as file:
      for name, value in jsons.items():
        entries[name] = _add(file, name, lambda out, value=value: out.write(json.dumps(value, indent=1).encode()))
      for name, x in arrays.items():
        entries[f"{name}.npy"] = _add(file, f"{name}.npy", lambda out, x=x: np.lib.format.write_array(out, _stored(x), allow_pickle=False))
      _add(file, MANIFEST, lambda out: out.write(json.dumps({"entries": entries}, indent=1).encode()))
      file.comment = b"0" * _SEAL
    seal(partial)
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)


def seal(path: Path) -> None:
  """Writes the SHA-256 of a file's bytes before its last 64 over those."""
  digest = _digest_before_seal(path)
  with path.open("r+b") as file:
    file.seek(-_SEAL, os.SEEK_END)
    file.write(digest.encode())


def _digest_before_seal(path: Path) -> str:
  left, digest = path.stat().st_size - _SEAL, hashlib.sha256()
  with path.open("rb") as file:
    while left > 0 and (block := file.read(min(left, _BLOCK))):
      digest.update(block)
      left -= len(block)
  return digest.hexdigest()


class _Hashed:
  """A file to write to, which counts and hashes its bytes."""

  def __init__(self, file: Any):
    self.file, self.digest, self.size = file, hashlib.sha256(), 0

  def write(self, data: bytes) -> int:
    self.digest.update(data)
    self.size += len(data)
    return self.file.write(data)


def _add(file: zipfile.ZipFile, name: str, write_to: Any) -> dict[str, Any]:
  # A fixed date, so that equal contents are equal bytes.
  with file.open(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), "w", force_zip64=True) as raw:
    write_to(out := _Hashed(raw))
  return {"size": out.size, "sha256": out.digest.hexdigest()}


def _stored(x: np.ndarray) -> np.ndarray:
  return x.view(_stored_dtype(x.dtype)) if x.ndim else np.asarray(x)


def _stored_dtype(dtype: Any) -> np.dtype:
  dtype = np.dtype(dtype)
  return dtype if dtype.isbuiltin == 1 else np.dtype(f"<u{dtype.itemsize}")


class Box:
  """An open bundle. Its seal, its manifest and the sizes of its entries are checked at once.

  Args:
    path: File to read.

  Attributes:
    path: The file.
    names: Names of the entries, without the manifest.

  Raises:
    BoxError: If the file is damaged, or no bundle.
  """

  def __init__(self, path: Path):
    self.path = path
    try:
      size = path.stat().st_size
      with path.open("rb") as file:
        begins = file.read(4)
        file.seek(max(size - _SEAL, 0))
        sealed = file.read(_SEAL)
      if begins != b"PK\x03\x04":
        raise self.error("a file that does not begin as a zip", "a bundle")
      if sealed != _digest_before_seal(path).encode():
        raise self.error("bytes that do not match the SHA-256 at its end", f"an undamaged bundle; {AGAIN}")
      self._zip = zipfile.ZipFile(path)
      infos = self._zip.infolist()
    except BoxError:
      raise
    except OSError as error:
      raise BoxError(f"{path}: {error.strerror or error}; expected the file of a bundle") from error
    except Exception as error:  # What `zipfile` raises for a crafted directory has many types.
      raise self.error(f"a directory of entries that cannot be read ({type(error).__name__})", "a bundle") from error
    self._infos = {info.filename: info for info in infos}
    if len(self._infos) < len(infos):
      raise self.error("two entries of one name", "each name once")
    for name, info in self._infos.items():
      if not _NAME.fullmatch(name) or {".", ".."} & set(name.split("/")):
        raise self.error(f"an entry named {name[:80]!r}", "names of letters, digits, '_', '.' and '/' that lead nowhere else")
      if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size or info.file_size > size:
        raise self.error(f"{name}, which is compressed or encrypted", "an entry as it is")
    self._sums: dict[str, Any] = {MANIFEST: None}
    listed = self.read_json(MANIFEST)
    listed = listed.get("entries") if isinstance(listed, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(x, dict) and set(x) == {"size", "sha256"} for x in listed.values()):
      raise self.error(f"a {MANIFEST} of another form", "the size and the sha256 of each entry")
    if odd := sorted(listed.keys() ^ (self._infos.keys() - {MANIFEST})):
      where = "the manifest lists and the file lacks" if odd[0] in listed else "the manifest does not list"
      raise self.error(f"the entry {odd[0][:80]!r}, which {where}", f"the entries of the manifest; {AGAIN}")
    for name, own in listed.items():
      if own["size"] != self._infos[name].file_size:
        raise self.error(f"{self._infos[name].file_size} bytes of {name}", f"{own['size']!r} as in the manifest; {AGAIN}")
    self._sums |= listed
    self.names = list(listed)

  def error(self, what: str, expected: str) -> BoxError:
    """Returns an error about this file."""
    return BoxError(f"{self.path}: found {what}, expected {expected}")

  def read_json(self, name: str) -> Any:
    """Reads and checks an entry in JSON.

    Raises:
      BoxError: If there is none, or it is damaged.
    """
    if name in self._infos and self._infos[name].file_size > _MAX_JSON:
      raise self.error(f"{self._infos[name].file_size} bytes of {name}", f"at most {_MAX_JSON}")
    try:
      return json.loads(self._read(name))
    except (ValueError, RecursionError) as error:
      if isinstance(error, BoxError):
        raise
      raise self.error(f"{name}, which is not JSON", f"a bundle; {AGAIN}") from error

  def read_array(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Reads and checks the array NAME.npy.

    Raises:
      BoxError: If there is none, it is damaged, or it has another shape or dtype.
    """
    dtype, stored = np.dtype(dtype), _stored_dtype(dtype)
    data = self._read(f"{name}.npy", most=math.prod(shape) * dtype.itemsize + _MAX_HEADER)
    file = io.BytesIO(data)
    try:
      if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("another version")
      its_shape, in_columns, its_dtype = np.lib.format.read_array_header_1_0(file, max_header_size=_MAX_HEADER)
    except Exception as error:  # A header is a Python literal.
      raise self.error(f"{name}.npy, whose header cannot be read", f"an array {dtype} {list(shape)}") from error
    if (its_shape, in_columns and len(shape) > 1, its_dtype) != (shape, False, stored):
      raise self.error(f"{name}.npy: {its_dtype} {list(its_shape)}", f"{stored} {list(shape)}")
    rest = data[file.tell() :]
    if len(rest) != math.prod(shape) * dtype.itemsize:
      raise self.error(f"{name}.npy: {len(rest)} bytes of numbers", f"{math.prod(shape) * dtype.itemsize}")
    return np.frombuffer(rest, stored).view(dtype).reshape(shape)

  def _read(self, name: str, *, most: int = _MAX_JSON) -> bytes:
    if name not in self._infos or name not in self._sums:
      raise self.error(f"no {name}", f"one; {AGAIN}")
    if self._infos[name].file_size > most:
      raise self.error(f"{self._infos[name].file_size} bytes of {name}", f"at most {most}")
    try:
      with self._zip.open(name) as file:
        data = file.read(self._infos[name].file_size + 1)
    except Exception as error:  # As above, for the header in front of an entry.
      raise self.error(f"{name}, which cannot be read ({type(error).__name__})", f"a bundle; {AGAIN}") from error
    own = self._sums[name]
    if own is not None and (len(data) != own["size"] or hashlib.sha256(data).hexdigest() != own["sha256"]):
      raise self.error(f"{name}, which differs from its SHA-256 in the manifest", f"an undamaged bundle; {AGAIN}")
    return data
