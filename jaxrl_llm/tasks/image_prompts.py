"""Prompts of problems as ids: texts, chats and pictures."""

from collections.abc import Sequence

from jaxrl_llm.pretrained import pictures as pictures_lib
from jaxrl_llm.pretrained.chat_messages import opening_ids
from jaxrl_llm.pretrained.chat_template import render
from jaxrl_llm.pretrained.image_prompts import MARK, collapse, expand, parts
from jaxrl_llm.pretrained.pictures import BadPicture, PictureConfig
from jaxrl_llm.tasks.files.chats import CONVERSATION, messages_of
from jaxrl_llm.tasks.files.storage import IDS, IMAGES, Row
from jaxrl_llm.tasks.files.values import Unusable, short
from jaxrl_llm.text_types import Tokenizer


def prompt_ids(row: Row, tokenizer: Tokenizer, pictures: PictureConfig | None = None) -> list[int]:
  """Encodes the prompt of a problem, with the image tokens of its pictures.

  Only the headers of the pictures are read.

  The messages of a chat are rendered by the chat template. Without one they are plain texts, a line
  break between two.

  Args:
    row: Problem with its `prompt`, or with ids that it already consists of.
    tokenizer: Tokenizer of the task.
    pictures: Settings of the checkpoint's pictures; None for a policy that reads text alone.

  Raises:
    BadPicture: If a picture cannot be used, or the marks in the prompt do not fit the pictures.
    Unusable: If the chat template refuses the messages of a chat.
    ValueError: If the problem has pictures and the policy reads text alone.

  Example:
    >>> from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
    >>> chat = '[{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]'
    >>> ByteTokenizer().decode(prompt_ids({"prompt": "1+1=", "conversation": chat}, ByteTokenizer()))
    'Add.\\n1+1='
  """
  if IDS in row:
    return list(row[IDS])
  images = row.get(IMAGES, ())
  if not images:
    ids = _chat_ids(row, tokenizer) if row.get(CONVERSATION) else tokenizer.encode_prompt(row["prompt"])
    # In a text for a model that reads text alone, the token's name is a text like any other.
    return ids if pictures is None else expand(ids, getattr(tokenizer, "image_id", None), ())
  if pictures is None:
    raise ValueError(f"found a problem with {len(images)} pictures, expected text alone, which is all that this model reads")
  slots = image_tokens(row, pictures)
  return _chat_ids(row, tokenizer, slots) if row.get(CONVERSATION) else tokenizer.encode_prompt(row["prompt"], slots)


def _chat_ids(row: Row, tokenizer: Tokenizer, slots: Sequence[int] = ()) -> list[int]:
  messages, template = messages_of(row, system=getattr(tokenizer, "system", None)), getattr(tokenizer, "chat_template", None)
  if template is None:
    return tokenizer.encode_prompt("\n".join(message["content"] for message in messages), slots)
  try:
    if not slots:
      return opening_ids(messages, (), tokenizer)
    marks = sum(message["content"].count(MARK) for message in messages)
    if marks != len(slots):
      raise BadPicture("marks unlike the pictures", f"{marks} marks {MARK} in the chat, but {len(slots)} pictures")
    content = [parts(message["content"], message["content"].count(MARK)) for message in messages]
    said = [message | {"content": x} for message, x in zip(messages, content, strict=True)]
    return expand(tokenizer.encode(render(template, said)), tokenizer.image_id, slots)
  except BadPicture:
    raise
  except ValueError as error:
    raise Unusable("messages that the chat template refuses", short(str(error))) from error


def prompt_text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
  """Decodes a prompt, with one image token for each picture."""
  return tokenizer.decode(collapse(ids, getattr(tokenizer, "image_id", None)))


def image_tokens(row: Row, pictures: PictureConfig) -> list[int]:
  """Returns the number of image tokens of each picture of a problem, from their headers.

  Raises:
    BadPicture: If a picture cannot be used, or is so narrow that it cannot be reduced enough.
  """
  sizes = [pictures_lib.size_of(image) for image in row[IMAGES]]
  counts = [pictures_lib.num_slots(pictures_lib.grid_of(*size, pictures), pictures) for size in sizes]
  most = pictures.max_pixels // pictures.token_size**2
  for (height, width), count in zip(sizes, counts, strict=True):
    if count > most:
      raise BadPicture("picture too narrow to reduce", f"{width} x {height} pixels are {count} image tokens, expected at most {most}")
  return counts


def check_reads_pictures(name: str, pictures: PictureConfig | None) -> None:
  """Raises a ValueError if a task with pictures is made for a policy that reads text alone."""
  if pictures is None:
    expected = "expected a vision-language model (config.model.path or config.model.preset)"
    raise ValueError(f"task {name}: found problems with pictures for a model that reads text alone, {expected}")
