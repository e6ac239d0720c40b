"""Text of a completion while its tokens arrive, up to its first stop string."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxrl_llm.text_types import Tokenizer


class Spelling(NamedTuple):
  """Bytes and names of a vocabulary's tokens.

  Attributes:
    pieces: Bytes of each id in a text, None for special and unused ids; None if the bytes of a
      token depend on its neighbours.
    name: Function from an id to the name of the token.
    decode: Function from ids to their text.
  """

  pieces: list[bytes | None] | None
  name: Callable[[int], str]
  decode: Callable[[Sequence[int]], str]

  def bytes_of(self, token: int) -> bytes:
    """Returns the bytes of one token; the name of a special token."""
    piece = self.pieces[token] if self.pieces is not None and token < len(self.pieces) else None
    return self.name(token).encode("utf-8", "replace") if piece is None else piece


def make_spelling(tokenizer: Tokenizer) -> Spelling:
  """Returns the bytes and names of a tokenizer's tokens.

  Example:
    >>> from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
    >>> spelling = make_spelling(ByteTokenizer())
    >>> spelling.bytes_of(104), spelling.bytes_of(258)
    (b'h', b'<258>')
  """
  backend = getattr(tokenizer, "backend", None)

  def name(token: int) -> str:
    known = None if backend is None else backend.id_to_token(token)
    return f"<{token}>" if known is None else known

  try:
    pieces = tokenizer.token_bytes()
  except ValueError:
    pieces = None
  return Spelling(pieces, name, tokenizer.decode)


class TextStream:
  """Text of one completion.

  Characters that span tokens appear when they are whole. Text that may be the beginning of a stop
  string is held back.

  Args:
    spelling: Vocabulary.
    stops: Texts that end the completion and are left out.
    stop_ids: Ids that end the completion and are left out.
    skip_special: Whether to leave out special tokens.

  Attributes:
    stopped_by: Stop string that has ended the text; None if none has.

  Note:
    A stop string may span special tokens that are left out, as in the engine. If the bytes of a
    token depend on its neighbours, all text appears at the end.

  Example:
    >>> from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
    >>> stream = TextStream(make_spelling(ByteTokenizer()), stops=("END",))
    >>> [stream.feed(b"caf\\xc3"), stream.feed(b"\\xa9, EN"), stream.feed(b"D!"), stream.finish()]
    ['caf', 'é, ', '', '']
  """

  def __init__(self, spelling: Spelling, *, stops: Sequence[str] = (), stop_ids: Iterable[int] = (), skip_special: bool = True):
    self._spelling, self._stops, self._stop_ids, self._skip_special = spelling, stops, frozenset(stop_ids), skip_special
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
    self._held, self._late, self._ended = "", [], False
    self.stopped_by: str | None = None

  def feed(self, tokens: Iterable[int]) -> str:
    """Adds tokens and returns the text that they complete."""
    parts = []
    for token in tokens:
      if self._ended or token in self._stop_ids:
        continue
      if self._spelling.pieces is None:
        self._late.append(token)
        continue
      piece = self._spelling.pieces[token] if token < len(self._spelling.pieces) else None
      if piece is not None:
        parts.append(self._release(self._decoder.decode(piece)))
      elif not self._skip_special:
        parts.append(self._flush() + self._spelling.name(token))
    return "".join(parts)

  def finish(self) -> str:
    """Returns the text that was held back, at the end of the completion."""
    text = self._release(self._spelling.decode(self._late)) if self._late else ""
    text += self._flush()
    self._ended = True
    return text

  def _flush(self) -> str:
    if self._ended:
      return ""
    text = self._release(self._decoder.decode(b"", final=True))
    self._decoder.reset()
    text, self._held = text + self._held, ""
    return text

  def _release(self, text: str) -> str:
    if self._ended:
      return ""
    text = self._held + text
    starts = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
    if starts:
      start, self.stopped_by = min(starts)
      self._held, self._ended = "", True
      return text[:start]
    held = max((_overlap(text, stop) for stop in self._stops), default=0)
    self._held = text[len(text) - held :]
    return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
  """Returns the number of characters at the end of a text that begin a stop string."""
  return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
