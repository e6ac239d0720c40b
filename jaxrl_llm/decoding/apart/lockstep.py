"""Engines of several processes that decode together, on a mesh of all their devices.

Each process runs the same loop. What callers bring to that of process 0 is told to all others with
the turn in which it is taken, and all else follows from counts, which are the same everywhere:

  process 0: callers -> news of turn t -> told -> turn t: the same programs in the same order
  others:                     heard ────────────┘
"""

from collections.abc import Iterator

from jaxrl_llm.decoding.apart import wire
from jaxrl_llm.decoding.apart.wire import Frame
from jaxrl_llm.decoding.engine.in_hand import News
from jaxrl_llm.devices import hosts

_HEAR_S = 0.5  # Between two looks at whether the engine is to close.


class LockStep:
  """The `Peers` of an engine in a run of several processes.

  Args:
    name: Name of the engine, the same in all processes and never used again.

  Attributes:
    leads: Whether this is process 0.
  """

  def __init__(self, name: str):
    self.leads, self._channel = hosts.is_main(), hosts.Channel(name)

  def tell(self, news: News) -> None:
    """Sends the news of a turn to all others."""
    self._channel.send(encode_news(news))

  def hear(self) -> News | None:
    """Waits for the news of a turn; returns None if there are none for a while."""
    message = self._channel.receive(_HEAR_S)
    return None if message is None else decode_news(message)


def encode_news(news: News) -> bytes:
  """Returns the news of a turn as bytes, with the version of new weights in place of them.

  Example:
    >>> from jaxrl_llm.decoding.engine.requests import Request
    >>> decode_news(encode_news(News([Request([5, 6], 3)], aborted=(1,), update=("weights", 7)))).update
    (None, 7)
  """
  fields = dict(aborted=news.aborted, version=news.update and news.update[1], is_closing=news.is_closing)
  asked = (wire.request_frame(i, request, pieces=False) for i, request in enumerate(news.requests))
  shown = {request.pictures.key: request.pictures for request in news.requests if request.pictures is not None}
  frames = map(wire.encode, (Frame("news", fields), *map(wire.pictures_frame, shown.values()), *asked))
  return b"".join(part for frame in frames for part in (len(frame).to_bytes(4, "little"), frame))


def decode_news(message: bytes) -> News:
  """Inverts `encode_news`."""
  first, *frames = _frames(message)
  shown = {own.key: own for own in map(wire.pictures_of, (frame for frame in frames if frame.kind == "pictures"))}
  asked = [wire.request_of(frame, shown) for frame in frames if frame.kind == "request"]
  version = first.fields["version"]
  update = None if version is None else (None, version)
  return News(asked, tuple(first.fields["aborted"]), update, first.fields["is_closing"])


def _frames(message: bytes) -> Iterator[Frame]:
  start = 0
  while start < len(message):
    size = int.from_bytes(message[start : start + 4], "little")
    yield wire.decode(message[start + 4 : start + 4 + size])
    start += 4 + size
