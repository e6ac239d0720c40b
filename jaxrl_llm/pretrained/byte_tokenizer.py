"""Byte-level tokenizer that encodes any text, without a vocabulary file or training."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsInt

from jaxrl_llm.pretrained import image_prompts


@dataclass(frozen=True)
class ByteTokenizer:
  """Tokenizer whose ids 0 to 255 are UTF-8 bytes.

  The padding, begin and end ids follow. The remaining ids are reserved.

  Attributes:
    vocab_size: Number of ids that a model must have. A multiple of 8, so that a vocabulary sharded
      over 2, 4 or 8 devices divides evenly.
    pad_id: Id that fills unused slots; never sampled or learned.
    bos_id: Id that begins a prompt.
    eos_id: Id that ends a response.
    image_id: Id of each image token of a picture.

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
  image_id: int = 259

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end a response."""
    return (self.eos_id,)

  def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
    """Encodes text with one id per byte, after `bos_id` if `add_bos`.

    A lone surrogate, which UTF-8 cannot encode, becomes "?".
    """
    return [self.bos_id] * add_bos + list(text.encode("utf-8", errors="replace"))

  def encode_prompt(self, text: str, slots: Sequence[int] = ()) -> list[int]:
    """Encodes text after the begin token, and each picture as image tokens.

    Args:
      text: Text of the prompt; see `image_prompts.MARK`.
      slots: Number of image tokens of each picture.

    Raises:
      BadPicture: If the marks in the text do not fit the pictures.

    Example:
      >>> ByteTokenizer().encode_prompt("<image>?", [2])
      [257, 259, 259, 63]
    """
    if not slots:
      return self.encode(text, add_bos=True)
    ids = [self.bos_id]
    for part in image_prompts.parts(text, len(slots)):
      ids += self.encode(part["text"]) if part["type"] == "text" else [self.image_id]
    return image_prompts.expand(ids, self.image_id, slots)

  def decode(self, ids: Iterable[SupportsInt]) -> str:
    """Decodes ids to text and never raises, because a policy may write anything.

    A leading begin token and all end tokens are left out. Bytes that are not UTF-8 become U+FFFD,
    and so do all other ids that are not bytes. If a pad token were left out, "#1", a pad token and
    "0" would read as the answer 10.
    """
    ids = [int(i) for i in ids]
    if ids[:1] == [self.bos_id]:
      del ids[0]
    pieces = (bytes([i]) if 0 <= i < 256 else b"\xff" for i in ids if i != self.eos_id)
    return b"".join(pieces).decode("utf-8", errors="replace")

  def token_bytes(self) -> list[bytes | None]:
    """Returns the bytes of each id in a text; None for ids that occur in no text."""
    return [bytes([i]) if i < 256 else None for i in range(self.vocab_size)]
