"""Files of safetensors: eight bytes of length, a JSON header, and the tensors' bytes one after the other.

Own code and not the package of that name: its reader maps the file, so that what has been read counts as memory in use, its writer wants
all tensors of a file at once, and its messages do not say what is wrong. The format is these few lines; the tests read what is written
here with that package.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The dtypes that weights have, by the format's names."""

_MAX_HEADER_BYTES = 100_000_000  # As the format has it.
_FOREIGN = {
  b"version https://git-lfs": "a pointer of Git LFS in the place of the weights; fetch them with `git lfs pull`",
  b"PK\x03\x04": "a pickle of PyTorch; convert it to safetensors, a pickle can run code and is never opened",
  b"\x80\x02": "a pickle of PyTorch; convert it to safetensors, a pickle can run code and is never opened",
  b"GGUF": "a GGUF file; name it .gguf",
  b"<": "a web page in the place of the weights; download the file again",
}


class Stored(NamedTuple):
  """Where a tensor lies: its dtype as the format names it, such as "BF16", and the offset of its first byte in the file."""

  file: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  offset: int
  num_bytes: int


def read_header(path: pathlib.Path) -> dict[str, Stored]:
  """Where each tensor of a file lies, by name and in the order of the file.

  Raises:
    ValueError: a file of another format, or one that is cut off.
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
    raise ValueError(f"{path}: found {num_bytes} bytes, expected {end} by its header; it is cut off, fetch it again")
  return stored


def _stored(path: pathlib.Path, start: int, fields: Any) -> Stored:
  """One entry of a header, checked."""
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
  """The tensor, read into memory of its own."""
  data = np.fromfile(stored.file, np.uint8, count=stored.num_bytes, offset=stored.offset)
  if data.nbytes != stored.num_bytes:
    raise ValueError(
      f"{stored.file}: found {data.nbytes} bytes at {stored.offset}, expected {stored.num_bytes}; it changed while it was read"
    )
  return data.view(jnp.dtype(DTYPES[stored.dtype])).reshape(stored.shape)


def write_file(path: pathlib.Path, layout: dict[str, tuple[tuple[int, ...], str]], tensors: Iterable[np.ndarray]) -> None:
  """Writes tensors to a file; no two of them are held at once.

  `layout` is name to shape and dtype, such as "bfloat16", in the order of the tensors.
  """
  code = {dtype: name for name, dtype in DTYPES.items()}
  header, offset = {"__metadata__": {"format": "pt"}}, 0  # Without this word transformers does not open a file.
  for name, (shape, dtype) in layout.items():
    end = offset + math.prod(shape) * jnp.dtype(dtype).itemsize
    header[name] = {"dtype": code[dtype], "shape": list(shape), "data_offsets": [offset, end]}
    offset = end
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # So that the tensors begin at a multiple of 8.
  with path.open("wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for (name, (shape, dtype)), tensor in zip(layout.items(), tensors, strict=True):
      if tensor.shape != shape or tensor.dtype != jnp.dtype(dtype):
        raise ValueError(f"{path}: {name}: found {tensor.dtype} {tensor.shape}, expected {dtype} {shape}")
      file.write(np.ascontiguousarray(tensor).view(np.uint8).data)
    file.flush()
    os.fsync(file.fileno())
