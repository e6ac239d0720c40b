"""Prompts with pictures: marks in the text, parts of a message, and image tokens."""

from collections.abc import Sequence

from jaxrl_llm.pretrained.pictures import BadPicture

MARK = "<image>"
"""Text that stands for a picture in a prompt."""
TOKEN = "<|image_pad|>"
"""Special token of Qwen's vocabularies that stands for a picture, or for each part of one."""
PLAIN = f"<|vision_start|>{TOKEN}<|vision_end|>"
"""Text of a picture in a prompt without a chat template."""


def with_marks(text: str, count: int) -> str:
  """Returns a prompt with a mark for each picture, which come first if the text has no mark.

  Example:
    >>> with_marks("How many?", 2), with_marks("In <image>, how many?", 1)
    ('<image><image>How many?', 'In <image>, how many?')
  """
  return text if MARK in text else MARK * count + text


def parts(text: str, count: int) -> list[dict[str, str]]:
  """Splits a prompt at its marks, as the content of a message.

  Args:
    text: Text of the prompt.
    count: Number of pictures.

  Raises:
    BadPicture: If the number of marks differs from the number of pictures.

  Example:
    >>> parts("In <image>, how many?", 1)
    [{'type': 'text', 'text': 'In '}, {'type': 'image'}, {'type': 'text', 'text': ', how many?'}]
  """
  texts = text.split(MARK)
  if len(texts) - 1 != count:
    raise BadPicture("marks unlike the pictures", f"{len(texts) - 1} marks {MARK} in the prompt, but {count} pictures")
  content: list[dict[str, str]] = []
  for i, piece in enumerate(texts):
    content += [{"type": "image"}] * (i > 0) + [{"type": "text", "text": piece}] * bool(piece)
  return content


def collapse(ids: Sequence[int], image_id: int | None) -> list[int]:
  """Returns a prompt with one image token for each run of them, to be shown as text.

  Example:
    >>> collapse([5, 9, 9, 9, 6, 9], 9)
    [5, 9, 6, 9]
  """
  return [token for i, token in enumerate(ids) if token != image_id or not i or ids[i - 1] != image_id]


def expand(ids: Sequence[int], image_id: int, slots: Sequence[int]) -> list[int]:
  """Repeats the image token of each picture.

  Args:
    ids: Ids of a prompt, with one image token for each picture.
    image_id: Id of the image token.
    slots: Number of image tokens of each picture.

  Raises:
    BadPicture: If the number of image tokens differs from the number of pictures.

  Example:
    >>> expand([5, 9, 6, 9], 9, [3, 1])
    [5, 9, 9, 9, 6, 9]
  """
  count = sum(i == image_id for i in ids)
  if count != len(slots):
    raise BadPicture("image tokens unlike the pictures", f"{count} image tokens in the prompt, but {len(slots)} pictures")
  left = iter(slots)
  return [i for token in ids for i in ([token] * next(left) if token == image_id else [token])]
