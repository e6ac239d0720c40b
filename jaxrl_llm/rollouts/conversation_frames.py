"""Conversations as frames, for other processes and for files."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.decoding.engine import frames
from jaxrl_llm.decoding.engine.frames import Frame
from jaxrl_llm.rollouts.jobs import Conversation, to_completion
from jaxrl_llm.text_types import Turn
from jaxrl_llm.types import StopReason

_ARRAYS = {
  "tokens": np.int32, "logprobs": np.float32, "raw_logprobs": np.float32, "written": np.uint8, "prompt": np.int32,
  "versions": np.int32, "routes": np.int16,
}  # fmt: skip


def conversation_frame(conversation: Conversation) -> Frame:
  """Returns the frame of a conversation, in which a text that is not read yet has been.

  Example:
    >>> one = Conversation(3, [5], [6, 7], [-0.5, 0.0], [True, False], (Turn("a", "b", 1.0, 0),), StopReason.TOKEN)
    >>> back = conversation_of(conversation_frame(one))
    >>> back == one._replace(versions=[], raw_logprobs=[])
    True
  """
  if callable(conversation.text):
    conversation = conversation._replace(text=to_completion(conversation).text)
  fields = {name: frames.plain(value) for name, value in conversation._asdict().items() if name not in _ARRAYS}
  fields |= dict(reason=int(conversation.reason), sequence=int(conversation.sequence))
  held = {name: getattr(conversation, name) for name in _ARRAYS}
  return Frame("conversation", fields, {name: np.asarray(x, _ARRAYS[name]) for name, x in held.items() if x is not None})


def conversation_of(frame: Frame) -> Conversation:
  """Inverts `conversation_frame`."""
  fields, arrays = dict(frame.fields), dict(frame.arrays)
  fields |= dict(turns=tuple(map(_turn, fields["turns"])), reason=StopReason(fields["reason"]))
  fields["failed"] = None if fields["failed"] is None else tuple(fields["failed"])
  routes, written = arrays.pop("routes", None), arrays.pop("written").astype(bool).tolist()
  parts: Mapping[str, Any] = {name: x.tolist() for name, x in arrays.items()}
  return Conversation(**fields, **parts, written=written, routes=routes)


def _turn(parts: Sequence[Any]) -> Turn:
  said, reply, *rest = parts
  return Turn(said, tuple(reply) if isinstance(reply, list) else reply, *rest)
