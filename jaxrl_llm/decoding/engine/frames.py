"""Frames: requests, what was drawn, and whatever else passes between processes, as bytes.

A frame is the length of a header in four bytes, the header as JSON, and the raw little-endian
numbers of the arrays that the header lists:

  {"kind": "done", "id": 7, "arrays": [["tokens", "int32", [3]], ["logprobs", "float32", [3]]]}

Nothing is unpickled: what arrives is numbers and text. Starts no JAX.
"""

import contextlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.decoding.engine.requests import Decoded, Piece, Request
from jaxrl_llm.messages import one_line, shown
from jaxrl_llm.models.image_slots import Pictures
from jaxrl_llm.types import Patches

LARGEST_FRAME = 1 << 28
"""Largest number of bytes of a frame."""

_LARGEST_HEADER, _MOST_ARRAYS = 1 << 24, 16
_PICTURES_KEPT = 64
_AS_ARRAYS = ("tokens", "logprobs", "routes", "kept")
_DTYPES = ("int16", "int32", "float32", "uint8")


class WireError(Exception):
  """A frame or a connection that cannot be used. One line."""


class Frame(NamedTuple):
  """A message.

  Attributes:
    kind: What it is about.
    fields: Values that JSON can write.
    arrays: Arrays by name; those of a decoded frame are read-only.
  """

  kind: str
  fields: Mapping[str, Any] = {}
  arrays: Mapping[str, np.ndarray] = {}


def encode(frame: Frame) -> bytes:
  """Returns the bytes of a frame.

  Raises:
    WireError: If it is too large, or an array has a dtype that frames do not have.

  Example:
    >>> frame = decode(encode(Frame("done", {"id": 7}, {"logprobs": np.float32([-0.1])})))
    >>> frame.kind, frame.fields, frame.arrays["logprobs"].tolist() == np.float32([-0.1]).tolist()
    ('done', {'id': 7}, True)
  """
  arrays, parts = [], []
  for name, x in frame.arrays.items():
    if x.dtype.name not in _DTYPES:
      raise WireError(f"{frame.kind}.{name}: found the dtype {x.dtype.name}, expected one of {', '.join(_DTYPES)}")
    arrays.append([name, x.dtype.name, list(x.shape)])
    parts.append(np.ascontiguousarray(x, x.dtype.newbyteorder("<")).data.cast("B") if x.size else b"")
  header = json.dumps({"kind": frame.kind, "arrays": arrays, **frame.fields}).encode()
  data = b"".join([len(header).to_bytes(4, "little"), header, *parts])
  if len(data) > LARGEST_FRAME or len(header) > _LARGEST_HEADER:
    raise WireError(f"{frame.kind}: found a frame of {len(data):,} bytes, expected at most {LARGEST_FRAME:,}")
  return data


def decode(data: bytes) -> Frame:
  """Reads a frame.

  Raises:
    WireError: If the bytes are no frame. One line, with what is wrong.

  Example:
    >>> decode(b"GET / HTTP/1.1")
    Traceback (most recent call last):
    ...
    jaxrl_llm.decoding.engine.frames.WireError: found a frame with a header of 542,393,671 bytes ...
  """
  size = int.from_bytes(data[:4], "little")
  if len(data) < 4 or size > min(len(data) - 4, _LARGEST_HEADER):
    raise WireError(f"found a frame with a header of {size:,} bytes in {len(data):,}, expected one inside the frame")
  try:
    fields = json.loads(data[4 : 4 + size])
    kind, listed = fields.pop("kind"), fields.pop("arrays")
    if not isinstance(kind, str) or not isinstance(listed, list) or len(listed) > _MOST_ARRAYS:
      raise ValueError("kind or arrays are of another type")
    arrays, start = {}, 4 + size
    for name, dtype, shape in listed:
      if dtype not in _DTYPES or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{shown(name)} has the dtype {shown(dtype)} and the shape {shown(shape)}")
      count = math.prod(shape)
      end = start + count * np.dtype(dtype).itemsize
      if end > len(data):
        raise ValueError(f"{shown(name)} ends behind the frame")
      arrays[name] = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), count, start).reshape(shape)
      start = end
    if start != len(data):
      raise ValueError(f"{len(data) - start:,} bytes are left over")
  except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
    raise WireError(f"found a frame that cannot be read ({one_line(error)})") from error
  return Frame(kind, fields, arrays)


def joined(frames: Sequence[Frame]) -> bytes:
  """Returns several frames as one message."""
  encoded = map(encode, frames)
  return b"".join(part for frame in encoded for part in (len(frame).to_bytes(4, "little"), frame))


def parted(message: bytes) -> list[Frame]:
  """Inverts `joined`.

  Raises:
    WireError: If the bytes are no frames.
  """
  frames, start = [], 0
  while start < len(message):
    end = start + 4 + int.from_bytes(message[start : start + 4], "little")
    frames.append(decode(message[start + 4 : end]))
    start = end
  return frames


def request_frame(number: int, request: Request, *, pieces: bool) -> Frame:
  """Returns the frame of a request.

  Args:
    number: Number by which the answers name the request.
    request: Completion to draw, with ids of at most 32 bits.
    pieces: Whether the tokens are to be sent as they are drawn.

  Raises:
    ValueError: If the request has a grammar, which no frame holds. One line.
  """
  if request.grammar is not None:
    raise ValueError("grammar: found one, expected None: it cannot be sent to another process")
  fields = {name: plain(value) for name, value in request._asdict().items() if name not in ("tokens", "pictures", "grammar")}
  if request.pictures is not None:
    fields["pictures"] = request.pictures.key.hex()
  return Frame("request", {"id": number, "pieces": pieces, "request": fields}, {"tokens": np.asarray(request.tokens, np.int32)})


def request_of(frame: Frame, pictures: Mapping[bytes, Pictures] = {}) -> Request:
  """Returns the request of a frame, with those of some pictures that it names.

  Raises:
    WireError: If it is none.
  """
  with _reading(frame):
    fields = dict(frame.fields["request"])
    for name in ("stop_ids", "stops"):
      fields[name] = tuple(fields[name])
    if "pictures" in fields:
      fields["pictures"] = pictures[bytes.fromhex(fields["pictures"])]
    return Request(frame.arrays["tokens"].tolist(), **fields | {"parts": _pairs(fields["parts"])})


def pictures_frame(pictures: Pictures) -> Frame:
  """Returns the frame of the pictures that the requests behind it name by their key."""
  arrays = {"positions": pictures.positions, "slots": pictures.slots}
  if pictures.features is not None:
    arrays["features"] = np.asarray(pictures.features)
  else:
    arrays |= pictures.patches._asdict()
  # Frames have no bfloat16 and no Booleans.
  dtypes = {name: x.dtype.name for name, x in arrays.items() if x.dtype.name not in _DTYPES}
  as_bits = lambda x: np.ascontiguousarray(x).view({1: np.uint8, 2: np.int16}[x.dtype.itemsize])
  arrays = {name: as_bits(x) if name in dtypes else x for name, x in arrays.items()}
  return Frame("pictures", {"key": pictures.key.hex(), "end": int(pictures.end), "dtypes": dtypes}, arrays)


def pictures_of(frame: Frame) -> Pictures:
  """Returns the pictures of a frame.

  Raises:
    WireError: If there are none.
  """
  with _reading(frame):
    fields, arrays = frame.fields, {name: x.astype(x.dtype.newbyteorder("=")) for name, x in frame.arrays.items()}
    arrays |= {name: arrays[name].view(dtype) for name, dtype in fields["dtypes"].items()}
    places = bytes.fromhex(fields["key"]), arrays["positions"], arrays["slots"], int(fields["end"])
    if "features" in arrays:
      return Pictures(*places, features=arrays["features"])
    return Pictures(*places, patches=Patches(*(arrays[name] for name in Patches._fields)))


class LatestPictures(OrderedDict):
  """The pictures that a connection has carried last, the same on both of its sides."""

  def add(self, pictures: Pictures) -> bool:
    """Notes that a request shows pictures; returns whether they are new here."""
    is_new = pictures.key not in self
    self.setdefault(pictures.key, pictures)
    self.move_to_end(pictures.key)
    if len(self) > _PICTURES_KEPT:
      self.popitem(last=False)
    return is_new


def piece_frame(number: int, piece: Piece) -> Frame:
  """Returns the frame of tokens of a request."""
  return Frame("piece", {"id": number}, _drawn(piece))


def piece_of(frame: Frame) -> Piece:
  """Returns the tokens of a frame.

  Raises:
    WireError: If there are none.
  """
  with _reading(frame):
    return Piece(frame.arrays["tokens"].tolist(), frame.arrays["logprobs"].tolist())


def completion_frame(number: int, completion: Decoded) -> Frame:
  """Returns the frame of a completion."""
  arrays, kept = _drawn(completion), completion.kept
  if completion.routes is not None:
    arrays["routes"] = np.asarray(completion.routes, np.int16)
  if kept is not None:
    arrays["kept"] = np.asarray([token for own in kept for token in own], np.int32)
    arrays["kept_counts"] = np.asarray([len(own) for own in kept], np.int32)
  fields = {name: plain(value) for name, value in completion._asdict().items() if name not in _AS_ARRAYS}
  return Frame("done", {"id": number} | fields, arrays)


def completion_of(frame: Frame) -> Decoded:
  """Returns the completion of a frame.

  Raises:
    WireError: If it is none.
  """
  with _reading(frame):
    arrays, fields = frame.arrays, {name: value for name, value in frame.fields.items() if name != "id"}
    routes, kept = arrays.get("routes"), None
    if "kept" in arrays:
      ends = np.cumsum(arrays["kept_counts"])[:-1]
      kept = [own.tolist() for own in np.split(arrays["kept"], ends)] if len(arrays["kept_counts"]) else []
    fields |= dict(parts=_pairs(fields["parts"]), routes=None if routes is None else routes.astype(np.int16), kept=kept)
    return Decoded(arrays["tokens"].tolist(), arrays["logprobs"].tolist(), **fields)


def _pairs(listed: Any) -> tuple[tuple[int, int], ...]:
  return tuple((int(version), int(count)) for version, count in listed)


def _drawn(drawn: Piece | Decoded) -> dict[str, np.ndarray]:
  return {"tokens": np.asarray(drawn.tokens, np.int32), "logprobs": np.asarray(drawn.logprobs, np.float32)}


def plain(value: Any) -> Any:
  """Returns a value as JSON has it, without NumPy's numbers."""
  if isinstance(value, np.generic):
    return value.item()
  return [plain(x) for x in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def _reading(frame: Frame) -> Iterator[None]:
  try:
    yield
  except (KeyError, TypeError, ValueError) as error:
    raise WireError(f"found a frame {shown(frame.kind)} that cannot be read ({one_line(error)})") from error
