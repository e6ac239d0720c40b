"""Header of a GGUF file: its metadata and the location of each tensor, without reading any tensor.

This reader replaces `gguf.GGUFReader`, which builds several NumPy views for each string of a
vocabulary. For SmolLM2's 49,152 tokens that takes 3.4 s instead of 0.1 s, and both the model and
the tokenizer read the header. `GGUFReader` also trusts the lengths it reads, so a damaged file may
hang it.
"""

import mmap
import os
import pathlib
import struct
from typing import Any, NamedTuple

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4


class TensorInfo(NamedTuple):
  """Shape, type and location of one tensor in the file.

  Attributes:
    shape: Dimensions with rows first, as in NumPy (the file stores them reversed).
    ggml_type: Number of the element or block type.
    offset: Position of the first byte, from the start of the file.
  """

  shape: tuple[int, ...]
  ggml_type: int
  offset: int


class Header(NamedTuple):
  """Contents of a file except for the tensors' values.

  Attributes:
    path: Path of the file.
    metadata: Values by key, each an int, float, bool, str, or a list of these.
    tensors: Tensors by their llama.cpp names.
    num_bytes: Length of the file in bytes.
  """

  path: pathlib.Path
  metadata: dict[str, Any]
  tensors: dict[str, TensorInfo]
  num_bytes: int


class _Cursor:
  """A position in the file that only moves forward and never past the end."""

  def __init__(self, data: mmap.mmap):
    self.data, self.offset = data, 0

  def take(self, form: str, count: int = 1) -> tuple:
    width = struct.calcsize("<" + form)
    end = self.offset + width * count
    if end > len(self.data):  # Check before reading: a damaged count may be astronomical.
      raise EOFError
    values = struct.unpack_from(f"<{count}{form}", self.data, self.offset)
    self.offset = end
    return values

  def strings(self, count: int) -> list[str]:
    """Reads strings in one loop, because a vocabulary has hundreds of thousands.

    The loop ends with the file at the latest, because every string takes bytes of it.
    """
    strings, offset, size, data, length = [], self.offset, len(self.data), self.data, struct.Struct("<Q")
    for _ in range(count):
      start = offset + length.size
      if start > size:
        raise EOFError
      offset = start + length.unpack_from(data, offset)[0]
      if offset > size:
        raise EOFError
      strings.append(data[start:offset].decode("utf-8"))
    self.offset = offset
    return strings

  def value(self, kind: int) -> Any:
    if kind == _STRING:
      return self.strings(1)[0]
    if kind == _ARRAY:
      inner, count = *self.take("I"), *self.take("Q")
      if inner in _SCALARS:
        return list(self.take(_SCALARS[inner], count))
      if inner != _STRING:
        raise ValueError(f"a list of type {inner}")
      return self.strings(count)
    if kind not in _SCALARS:
      raise ValueError(f"a value of unknown type {kind}")
    return self.take(_SCALARS[kind])[0]


def read_header(path: str | os.PathLike) -> Header:
  """Reads the header of a `.gguf` file.

  Raises:
    ValueError: If the file does not exist, is not GGUF, has an unknown version or byte order, is a
      part of a split file, or ends early. One line.

  References:
    GGUF, the file format of ggml, versions 2 and 3: docs/gguf.md of github.com/ggml-org/ggml.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f"{path}: found no file, expected a .gguf checkpoint")
  num_bytes = path.stat().st_size
  with path.open("rb") as file:
    magic = file.read(4)
    if magic != b"GGUF":
      raise ValueError(f"{path}: begins with {magic!r}, expected b'GGUF'; this is no GGUF checkpoint, or its download was cut short")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
      try:
        metadata, tensors = _parse(_Cursor(data))
      except EOFError as error:
        raise ValueError(f"{path}: ends inside its header, after {num_bytes:,} bytes; copy or download it again") from error
      except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: found {error} in its header, expected GGUF version 2 or 3; copy or download it again") from error
  if int(metadata.get("split.count", 0)) > 1:
    raise ValueError(f"{path}: one of {metadata['split.count']} parts, expected a whole checkpoint; join them: llama-gguf-split --merge")
  return Header(path, metadata, tensors, num_bytes)


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
  _, version = cursor.take("I", 2)  # The magic comes first.
  if version not in (2, 3):
    raise ValueError(f"version {version}" if version & 0xFFFF else "big-endian numbers")
  num_tensors, num_values = cursor.take("Q", 2)
  metadata = {}
  for _ in range(num_values):
    (key,) = cursor.strings(1)
    metadata[key] = cursor.value(*cursor.take("I"))
  tensors = {}
  for _ in range(num_tensors):
    (name,) = cursor.strings(1)
    (num_dims,) = cursor.take("I")
    if num_dims > _MAX_DIMS:
      raise ValueError(f"a tensor of {num_dims} dimensions")
    shape = cursor.take("Q", num_dims)[::-1]
    tensors[name] = TensorInfo(shape, *cursor.take("I"), *cursor.take("Q"))
  alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
  if alignment <= 0 or alignment % 8:
    raise ValueError(f"an alignment of {alignment}")
  start = -(-cursor.offset // alignment) * alignment
  return metadata, {name: tensor._replace(offset=start + tensor.offset) for name, tensor in tensors.items()}
