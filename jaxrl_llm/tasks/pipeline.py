"""Input pipeline: an endless shuffled stream of rows, padded prompts, encoded demonstrations."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.pretrained.chat_messages import following_ids
from jaxrl_llm.pretrained.chat_options import date_of
from jaxrl_llm.pretrained.pictures import PictureConfig
from jaxrl_llm.pretrained.tokenizer import encode_foreign
from jaxrl_llm.tasks.files.storage import LESSON, Row
from jaxrl_llm.tasks.files.values import short
from jaxrl_llm.tasks.image_prompts import prompt_ids
from jaxrl_llm.tasks.mixture import MixedRows
from jaxrl_llm.text_types import Tokenizer


def example_iterator(source: Sequence[Row], *, batch_size: int, seed: int) -> Iterator[list[Row]]:
  """Returns an endless stream of batches, in a new order each epoch.

  Args:
    source: Rows with random access. Each part of a mixture has its own order and epochs, and its
      share of any stretch of the stream is its weight, to within a row.
    batch_size: Rows per batch. Every batch is full, so a batch may span the end of an epoch.
    seed: Seed of the order, from 0 to 2³²-1.

  Returns:
    A `grain.DatasetIterator` over lists of rows. `get_state()` returns a small JSON-serialisable
    dict; `set_state()` on an iterator made with the same arguments resumes from it.

  Raises:
    ValueError: If the source or a part of it is empty, or `batch_size` is below 1.

  Example:
    >>> stream = example_iterator([{"question": q} for q in "abc"], batch_size=2, seed=0)
    >>> state = stream.get_state()
    >>> batch = next(stream)
    >>> stream.set_state(state)
    >>> next(stream) == batch
    True

  Note:
    There are no worker processes and no prefetching threads: the rows are in memory, and the state
    matches exactly what the caller has seen.
  """
  if batch_size < 1 or not len(source):
    raise ValueError(f"found batches of {batch_size} from {len(source)} rows, expected at least 1 of each")
  import grain  # Imported here because it imports jax, which checking a config must not need.

  mixed = isinstance(source, MixedRows) and source.weights is not None
  parts = source.parts if mixed else (source,)
  if not all(map(len, parts)):
    raise ValueError(f"found parts of {', '.join(str(len(part)) for part in parts)} rows, expected at least 1 in each")
  streams = []
  for i, part in enumerate(parts):
    # Practically endless. With `None`, grain cannot make batches of one row.
    epochs = max(1, 2**53 // len(part))
    # `dict` copies each row, so that a caller's changes do not reach the source.
    streams.append(grain.MapDataset.source(part).map(dict).shuffle(seed=(seed + i) % 2**32).repeat(epochs))
  dataset = grain.MapDataset.mix(streams, weights=source.weights) if mixed else streams[0]
  return iter(dataset.batch(batch_size, batch_fn=list).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def encode_prompts(
  examples: Sequence[Row], tokenizer: Tokenizer, *, buckets: Sequence[int], pictures: PictureConfig | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Encodes prompts as one array, padded on the left.

  Args:
    examples: Rows with a `prompt`.
    tokenizer: Tokenizer of the task.
    buckets: Allowed widths, in tokens. The smallest that fits the longest prompt is used, so that
      few shapes are compiled.
    pictures: Settings of the checkpoint's pictures; None for a policy that reads text alone.

  Returns:
    Ids, int32 `[n P]`, and the mask of tokens that are not padding, bool `[n P]`.

  Raises:
    ValueError: If a prompt is longer than the largest bucket. Prompts are never truncated: a policy
      that sees half a question learns to guess.

  Example:
    >>> from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
    >>> ids, mask = encode_prompts([{"prompt": "1+2"}, {"prompt": "3"}], ByteTokenizer(), buckets=(4, 8))
    >>> ids.tolist()
    [[257, 49, 43, 50], [256, 256, 257, 51]]
    >>> mask.tolist()
    [[True, True, True, True], [False, False, True, True]]
  """
  rows = [prompt_ids(example, tokenizer, pictures) for example in examples]
  longest = max(range(len(rows)), key=lambda i: len(rows[i]), default=None)
  width = 0 if longest is None else len(rows[longest])
  fitting = [bucket for bucket in buckets if bucket >= width]
  if not fitting:
    raise ValueError(
      f"rollout.prompt_buckets: found a prompt of {width} tokens ({short(examples[longest]['prompt'])}), expected at most "
      f"{max(buckets, default=0)}; add a bucket of {-(-width // 8) * 8}"
    )
  ids = np.full((len(rows), min(fitting)), tokenizer.pad_id, np.int32)
  mask = np.zeros(ids.shape, bool)
  for i, row in enumerate(rows):
    ids[i, ids.shape[1] - len(row):] = row
    mask[i, ids.shape[1] - len(row):] = True
  return ids, mask


class Demonstration(NamedTuple):
  """A response to imitate, as ids without padding.

  Attributes:
    prompt: Ids of the prompt.
    response: Ids of the response; the last is the end token, so that stopping is learned too.
    written: Whether each id of the response is to be imitated; False for an environment's replies.
  """

  prompt: list[int]
  response: list[int]
  written: list[bool]


def encode_demonstrations(
  examples: Iterable[Row], tokenizer: Tokenizer, *, replies: str | None = None, pictures: PictureConfig | None = None
) -> list[Demonstration]:
  """Encodes demonstrations as ids.

  Args:
    examples: Rows with a `prompt` and a `response`.
    tokenizer: Tokenizer of the task.
    replies: Regular expression whose group 1 is an environment's reply within a response. The reply
      is encoded separately, as it is during a rollout.
    pictures: Settings of the checkpoint's pictures; None for a policy that reads text alone.

  Example:
    >>> from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
    >>> encode_demonstrations([{"prompt": "1", "response": "#1"}], ByteTokenizer())[0]
    Demonstration(prompt=[257, 49], response=[35, 49, 258], written=[True, True, True])
    >>> encode_demonstrations([{"prompt": "1", "response": "1+1=2;"}], ByteTokenizer(), replies="=(.)")[0].written
    [True, True, True, True, False, True, True]
  """
  return [_demonstration(example, tokenizer, replies, pictures) for example in examples]


def _demonstration(example: Row, tokenizer: Tokenizer, replies: str | None, pictures: PictureConfig | None) -> Demonstration:
  if LESSON in example:
    ids, written = map(list, zip(*example[LESSON], strict=True))
    return Demonstration(prompt_ids(example, tokenizer, pictures), ids, written)
  text, ids, written, start = example["response"], [], [], 0
  spans = [] if replies is None else [match.span(1) for match in re.finditer(replies, text, re.DOTALL)]
  for begin, end in [*spans, (len(text), len(text))]:
    for piece, own in ((text[start:begin], True), (text[begin:end], False)):
      piece_ids = tokenizer.encode(piece) if piece else []
      ids, written, start = ids + piece_ids, written + [own] * len(piece_ids), end
  return Demonstration(prompt_ids(example, tokenizer, pictures), [*ids, tokenizer.eos_id], [*written, True])


def encode_reply(text: str, tokenizer: Tokenizer, *, is_message: bool) -> list[int]:
  """Encodes an environment's reply as the ids that the policy reads.

  Args:
    text: The reply.
    tokenizer: Tokenizer of the task.
    is_message: Whether the policy's message has ended, so that the reply is a message of its own,
      rendered with the tokenizer's chat template if it has one. Otherwise the reply continues the
      policy's message.

  Example:
    >>> from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
    >>> encode_reply("6>>", ByteTokenizer(), is_message=False)
    [54, 62, 62]
  """
  if is_message and getattr(tokenizer, "chat_template", None) is not None:
    return following_ids([{"role": "user", "content": text}], tokenizer, is_ended=True)
  return encode_foreign(text, tokenizer)


def prompt_notes(source: Iterable[Row], tokenizer: Tokenizer, *, most: int = 1000) -> list[str]:
  """Returns lines about what prompts contain by the checkpoint: a date, and special tokens as text.

  Args:
    source: Rows with a `prompt`.
    tokenizer: Tokenizer of the task.
    most: Number of rows that are looked at, from the first.
  """
  template, names, lines = getattr(tokenizer, "chat_template", None), getattr(tokenizer, "special", ()), []
  if template is not None and (date := date_of(template)) is not None:
    lines.append(f"prompts: the chat template reads the date {date}, whatever the day (task.chat_options, strftime_now)")
  prompts = [row["prompt"] for row in itertools.islice(source, most)] if names else []
  spelt = [text for text in prompts if any(name in text for name in names)]
  if spelt:
    name = next(name for name in names if name in spelt[0])
    lines.append(f"prompts: {len(spelt)} of the first {len(prompts)} spell special tokens, such as {name!r}, as text (task.special_tokens)")
  return lines


def prompt_lengths(source: Iterable[Row], tokenizer: Tokenizer, *, pictures: PictureConfig | None = None) -> list[int]:
  """Returns the length of each prompt in tokens, begin token and image tokens included."""
  return [len(prompt_ids(example, tokenizer, pictures)) for example in source]
