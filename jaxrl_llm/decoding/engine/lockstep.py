"""Engines of several processes that decode together, on a mesh of all their devices.

Each process runs the same loop. What callers bring to that of process 0 is told to all others with
the turn in which it is taken, and all else follows from counts, which are the same everywhere:

  process 0: callers -> news of turn t -> told -> turn t: the same programs in the same order
  others:                     heard ────────────┘
"""

import itertools
from collections.abc import Callable
from typing import Any

from jaxrl_llm.decoding.engine import frames
from jaxrl_llm.decoding.engine.frames import Frame
from jaxrl_llm.decoding.engine.in_hand import News
from jaxrl_llm.devices import hosts

_HEAR_S = 0.5  # Between two looks at whether the engine is to close.
_engines = itertools.count()  # All processes make the same engines in the same order.


class LockStep:
  """The `Peers` of an engine in a run of several processes.

  Attributes:
    leads: Whether this is process 0.
    calls: Functions of `DecodingEngine.call` by name; each process adds its own.
  """

  def __init__(self):
    self.calls: dict[str, Callable[..., Any]] = {}
    self.leads, self._channel = hosts.is_main(), hosts.Channel(f"engine/{next(_engines)}")

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
  fields = dict(aborted=news.aborted, version=news.update and news.update[1], calls=news.calls)
  fields |= dict(holds=news.holds, is_closing=news.is_closing)
  asked = (frames.request_frame(i, request, pieces=False) for i, request in enumerate(news.requests))
  shown = {request.pictures.key: request.pictures for request in news.requests if request.pictures is not None}
  return frames.joined([Frame("news", fields), *map(frames.pictures_frame, shown.values()), *asked])


def decode_news(message: bytes) -> News:
  """Inverts `encode_news`."""
  first, *others = frames.parted(message)
  shown = {own.key: own for own in map(frames.pictures_of, (frame for frame in others if frame.kind == "pictures"))}
  asked = [frames.request_of(frame, shown) for frame in others if frame.kind == "request"]
  fields = first.fields
  update = None if fields["version"] is None else (None, fields["version"])
  return News(asked, tuple(fields["aborted"]), update, fields["calls"], fields["holds"], fields["is_closing"])
