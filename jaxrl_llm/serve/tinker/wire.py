"""Messages of the Tinker SDK in the wire format of protocol buffers, of which it needs little.

The SDK sends data to train on, and takes completions and log-probabilities, in this format alone.
Arrays are runs of bytes in it, so that a dependency would save no time.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.serve.refusals import Refusal

Reader = Callable[[Any], Any]
"""Function from what the wire holds of a field to its value."""

Schema = Mapping[int, tuple[str, Reader]]
"""Name and reader of each field by its number; a name that ends with "*" is repeated."""

FLOAT32, INT64, INT32 = 1, 2, 3
"""Numbers of element types."""

_DTYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}
_BROKEN = Refusal(400, "the body is no message of protocol buffers of the Tinker SDK", code="bad_message")


def encode(*fields: tuple[int, Any]) -> bytes:
  """Encodes the fields of a message, each with its number, in order.

  A value is a whole number, a float64, a text or bytes, which are also what a nested message is.

  Example:
    >>> encode((1, 300), (2, "hi"), (3, encode((1, 1))))
    b'\\x08\\xac\\x02\\x12\\x02hi\\x1a\\x02\\x08\\x01'
  """
  parts = []
  for number, value in fields:
    if isinstance(value, float):
      parts += [_varint(number << 3 | 1), struct.pack("<d", value)]
    elif isinstance(value, int):
      parts += [_varint(number << 3), _varint(value % (1 << 64))]
    else:
      data = value.encode() if isinstance(value, str) else bytes(value)
      parts += [_varint(number << 3 | 2), _varint(len(data)), data]
  return b"".join(parts)


def packed(numbers: Iterable[int]) -> bytes:
  """Encodes repeated whole numbers, which lie in one field."""
  return b"".join(map(_varint, numbers))


def _varint(value: int) -> bytes:
  out = bytearray()
  while value >= 128:
    out.append(value & 127 | 128)
    value >>= 7
  out.append(value)
  return bytes(out)


def decode(data: Any, schema: Schema) -> dict[str, Any]:
  """Decodes a message; fields that the schema does not have are left out.

  Raises:
    Refusal: If the bytes are no such message.

  Example:
    >>> decode(memoryview(encode((1, 300), (2, "a"), (2, "b"), (9, 0))), {1: ("size", int), 2: ("names*", text)})
    {'size': 300, 'names': ['a', 'b']}
  """
  out: dict[str, Any] = {}
  try:
    for number, value in _fields(data):
      if number in schema:
        name, read = schema[number]
        if name.endswith("*"):
          out.setdefault(name[:-1], []).append(read(value))
        else:
          out[name] = read(value)
  except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
    raise _BROKEN from error
  return out


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
  """Yields the fields of a message: whole numbers, or parts of the bytes."""
  at = 0
  while at < len(data):
    key, at = _read_varint(data, at)
    kind = key & 7
    if kind == 0:
      value, at = _read_varint(data, at)
    else:
      # Fixed sizes of 64 and 32 bits, or a size in front. Groups are of an older time.
      size, at = (8, at) if kind == 1 else (4, at) if kind == 5 else _read_varint(data, at)
      if kind not in (1, 2, 5) or size > len(data) - at:
        raise ValueError
      value, at = data[at : at + size], at + size
    yield key >> 3, value


def _read_varint(data: Any, at: int) -> tuple[int, int]:
  value = 0
  for shift in range(0, 70, 7):
    byte = data[at]
    at += 1
    value |= (byte & 127) << shift
    if byte < 128:
      return value, at
  raise ValueError


def text(value: Any) -> str:
  """Reads a text."""
  return str(value, "utf-8")


def raw(value: Any) -> memoryview:
  """Reads bytes, which a whole number is not."""
  return value[:]


def double(value: Any) -> float:
  """Reads a float64."""
  return struct.unpack("<d", value)[0]


def whole_numbers(value: Any) -> list[int]:
  """Reads repeated whole numbers, which lie in one field."""
  if isinstance(value, int):
    return [value]
  numbers, at = [], 0
  while at < len(value):
    number, at = _read_varint(value, at)
    numbers.append(number)
  return numbers


def message(schema: Schema) -> Reader:
  """Returns the reader of a nested message."""
  return lambda value: decode(value, schema)


def entry(read: Reader) -> Reader:
  """Returns the reader of an entry of a map, as a key and a value."""
  schema = {1: ("key", text), 2: ("value", read)}

  def pair(value: Any) -> tuple[str, Any]:
    decoded = decode(value, schema)
    return decoded.get("key", ""), decoded.get("value")

  return pair


def tensor(value: Any) -> np.ndarray:
  """Reads an array; one in rows of few entries (CSR) becomes whole, with zeros in between."""
  fields = decode(value, _TENSOR)
  dtype, shape = _DTYPES[fields.get("dtype", 0)], fields.get("shape")
  sparse = fields.get("sparse")
  if sparse is None:
    array = np.frombuffer(fields.get("dense", b""), dtype)
    return array.reshape(shape) if shape is not None else array
  parts = ("values", dtype), ("rows", "<i8"), ("columns", "<i8")
  values, rows, columns = (np.frombuffer(sparse.get(name, b""), of) for name, of in parts)
  count, width = shape
  # A small message could ask for any amount of memory.
  is_whole = len(rows) == count + 1 and rows[0] == 0 and rows[-1] == len(columns)
  if not is_whole or width > _WIDEST or np.any(np.diff(rows) < 0) or np.any(columns < 0):
    raise ValueError
  array = np.zeros((count, width), dtype)
  array[np.repeat(np.arange(count), np.diff(rows)), columns] = values
  return array


_WIDEST = 1024
_TENSOR = {
  1: ("dense", raw),
  2: ("sparse", message({1: ("values", raw), 2: ("rows", raw), 3: ("columns", raw)})),
  3: ("dtype", int),
  4: ("shape", whole_numbers),
}
_CHUNK = {
  1: ("tokens", lambda value: np.frombuffer(decode(value, {1: ("tokens", raw)}).get("tokens", b""), "<i4"))
}
_DATUM = {1: ("chunks*", message(_CHUNK)), 2: ("inputs*", entry(tensor))}
_SETTING = {1: ("number", double), 2: ("text", text)}
TRAINING_CALL = {
  1: ("model_id", text),
  2: ("seq_id", int),
  3: ("data*", message(_DATUM)),
  4: ("loss_fn", text),
  5: ("settings*", entry(double)),
  6: ("forward_only", bool),
  7: ("settings_and_names*", entry(message(_SETTING))),
}
"""Schema of a call of `forward_backward` or `forward`."""
