"""Files of safetensors: eight bytes of length, a JSON header, and the bytes of each tensor in turn.

This module does not use the package of that name, for three reasons. Its reader maps the file, so
that all bytes read so far count as memory in use. Its writer takes all tensors of a file at once.
Its messages do not say what is wrong. The format takes only these few lines, and the tests read the
files written here with that package.
"""

import functools
import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes of weights by their names in the format."""

_MAX_HEADER_BYTES = 100_000_000  # Limit of the format.
_BLOCK_BYTES = 2**25
_FOREIGN = {
  b"version https://git-lfs": "a pointer of Git LFS in place of the weights; fetch them with `git lfs pull`",
  b"PK\x03\x04": "a pickle of PyTorch; convert it to safetensors, a pickle can run code and is never opened",
  b"\x80\x02": "a pickle of PyTorch; convert it to safetensors, a pickle can run code and is never opened",
  b"GGUF": "a GGUF file; name it .gguf",
  b"<": "a web page in place of the weights; download the file again",
}


class Stored(NamedTuple):
  """The place of a tensor in a file.

  Attributes:
    file: Path of the file.
    dtype: Dtype by its name in the format, such as "BF16".
    shape: Shape of the tensor.
    offset: Offset of its first byte in the file.
    num_bytes: Number of its bytes.
  """

  file: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  offset: int
  num_bytes: int


def read_header(path: pathlib.Path) -> dict[str, Stored]:
  """Reads the place of each tensor of a file, by name and in the order of the file.

  Raises:
    ValueError: If the file has another format, or is cut off.
  """
  num_bytes = path.stat().st_size
  with path.open("rb") as file:
    start = file.read(24)
    for magic, what in _FOREIGN.items():
      if start.startswith(magic):
        raise ValueError(f"{path}: found {what}, expected safetensors")
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > _MAX_HEADER_BYTES:
      raise ValueError(f"{path}: found {num_bytes} bytes that are not safetensors, expected a header's length and a header")
    if 8 + length > num_bytes:
      raise ValueError(
        f"{path}: found {num_bytes} bytes, expected a header of {length} and the tensors; the file is cut off, fetch it again"
      )
    file.seek(8)
    text = file.read(length)
  try:
    header = json.loads(text)
    header.pop("__metadata__", None)
    stored = {name: _stored(path, 8 + length, fields) for name, fields in header.items()}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f"{path}: found a header that is not safetensors' ({error}), expected JSON with dtype, shape and data_offsets"
    ) from error
  end = max((tensor.offset + tensor.num_bytes for tensor in stored.values()), default=8 + length)
  if end > num_bytes:
    raise ValueError(
      f"{path}: found {num_bytes} bytes, expected {end} by its header; the file is cut off, fetch it again"
    )
  return stored


def _stored(path: pathlib.Path, start: int, fields: Any) -> Stored:
  """Checks and returns one entry of a header."""
  if not isinstance(fields, dict):
    raise ValueError(f"a tensor described by {fields!r}")
  begin, end = fields["data_offsets"]
  shape = tuple(int(size) for size in fields["shape"])
  stored = Stored(path, fields["dtype"], shape, start + int(begin), int(end) - int(begin))
  if begin < 0 or stored.num_bytes < 0 or any(size < 0 for size in shape):
    raise ValueError(f"data_offsets {fields['data_offsets']} of shape {list(shape)}")
  if stored.dtype in DTYPES and stored.num_bytes != math.prod(shape) * jnp.dtype(DTYPES[stored.dtype]).itemsize:
    raise ValueError(f"{stored.num_bytes} bytes for a {stored.dtype} of shape {list(shape)}")
  return stored


def read_tensor(stored: Stored) -> np.ndarray:
  """Reads a tensor into memory of its own."""
  data = np.fromfile(stored.file, np.uint8, count=stored.num_bytes, offset=stored.offset)
  if data.nbytes != stored.num_bytes:
    raise ValueError(
      f"{stored.file}: found {data.nbytes} bytes at {stored.offset}, expected {stored.num_bytes}; it changed while it was read"
    )
  return data.view(jnp.dtype(DTYPES[stored.dtype])).reshape(stored.shape)


def is_equal(one: Stored, other: Stored) -> bool:
  """Returns whether two tensors hold the same values.

  It reads a block of rows at a time, up to the first one that differs.
  """
  return _is_equal(one, other, tuple(tensor.file.stat().st_mtime_ns for tensor in (one, other)))


@functools.lru_cache(maxsize=16)
def _is_equal(one: Stored, other: Stored, changed: tuple[int, ...]) -> bool:
  """Compares tensors of files that changed at these times."""
  del changed  # A part of the cache's key: a start of a run asks several times.
  if one.shape != other.shape or not math.prod(one.shape[:1]) or not {one.dtype, other.dtype} <= DTYPES.keys():
    return False
  step = max(_BLOCK_BYTES // max(one.num_bytes // one.shape[0], 1), 1)

  def rows(stored: Stored, begin: int) -> np.ndarray:
    count, of_row = min(step, stored.shape[0] - begin), stored.num_bytes // stored.shape[0]
    shape, offset = (count, *stored.shape[1:]), stored.offset + begin * of_row
    return read_tensor(stored._replace(shape=shape, offset=offset, num_bytes=count * of_row)).astype(np.float32)

  return all(np.array_equal(rows(one, begin), rows(other, begin)) for begin in range(0, one.shape[0], step))


def write_file(path: pathlib.Path, layout: dict[str, tuple[tuple[int, ...], str]], tensors: Iterable[np.ndarray]) -> None:
  """Writes tensors to a file, and holds only one of them at a time.

  Args:
    path: Path of the file.
    layout: Shape and dtype (such as "bfloat16") of each tensor by name, in the order of the
      tensors.
    tensors: Tensors to write.
  """
  code = {dtype: name for name, dtype in DTYPES.items()}
  # transformers does not open a file without this format entry.
  header, offset = {"__metadata__": {"format": "pt"}}, 0
  for name, (shape, dtype) in layout.items():
    end = offset + math.prod(shape) * jnp.dtype(dtype).itemsize
    header[name] = {"dtype": code[dtype], "shape": list(shape), "data_offsets": [offset, end]}
    offset = end
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # The tensors must begin at a multiple of 8.
  with path.open("wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for (name, (shape, dtype)), tensor in zip(layout.items(), tensors, strict=True):
      if tensor.shape != shape or tensor.dtype != jnp.dtype(dtype):
        raise ValueError(f"{path}: {name}: found {tensor.dtype} {tensor.shape}, expected {dtype} {shape}")
      file.write(np.ascontiguousarray(tensor).view(np.uint8).data)
    file.flush()
    os.fsync(file.fileno())
