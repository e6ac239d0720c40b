"""A byte-level tokenizer: no vocabulary file, no training, every text can be written."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsInt


@dataclass(frozen=True)
class ByteTokenizer:
  """Ids 0 to 255 are UTF-8 bytes; then padding, begin, end; the rest is reserved.

  Attributes:
    vocab_size: ids a model must have. A multiple of 8, so that a vocabulary sharded over 2, 4 or 8 devices divides evenly.
    pad_id: fills unused slots; never drawn from or learned.
    bos_id: begins a prompt.
    eos_id: ends a response.

  Example:
    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("7+8", add_bos=True)
    [257, 55, 43, 56]
    >>> tokenizer.decode([257, 55, 43, 56, 258])
    '7+8'
  """

  vocab_size: int = 264
  pad_id: int = 256
  bos_id: int = 257
  eos_id: int = 258

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end a response."""
    return (self.eos_id,)

  def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
    """Text to ids, one per byte, after `bos_id` if `add_bos`; a lone surrogate, which UTF-8 cannot write, becomes "?"."""
    return [self.bos_id] * add_bos + list(text.encode("utf-8", errors="replace"))

  def encode_prompt(self, text: str) -> list[int]:
    """The begin token and the text."""
    return self.encode(text, add_bos=True)

  def decode(self, ids: Iterable[SupportsInt]) -> str:
    """Ids to text. Never raises: a policy may write anything.

    A begin token in front and end tokens are left out. Bytes that are no UTF-8 become U+FFFD, and so does every other id that is no byte:
    were it left out, "#1", a pad token and "0" would read as the answer 10.
    """
    ids = [int(i) for i in ids]
    if ids[:1] == [self.bos_id]:
      del ids[0]
    pieces = (bytes([i]) if 0 <= i < 256 else b"\xff" for i in ids if i != self.eos_id)
    return b"".join(pieces).decode("utf-8", errors="replace")

  def token_bytes(self) -> list[bytes | None]:
    """The bytes that each id stands for in a text; None for ids that no text holds."""
    return [bytes([i]) if i < 256 else None for i in range(self.vocab_size)]
