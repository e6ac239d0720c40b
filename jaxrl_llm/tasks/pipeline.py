"""From rows of text to batches of ids: an endless shuffled stream, prompts padded on the left, demonstrations as pairs."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.pretrained.chat_template import next_message
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.mixture import MixedRows
from jaxrl_llm.text_types import Tokenizer


def example_iterator(source: Sequence[Row], *, batch_size: int, seed: int) -> Iterator[list[Row]]:
  """An endless stream of batches, in a new order each epoch.

  Args:
    source: rows, with random access. Of a mixture, each part has its own order and epochs, and its share of any stretch of the stream is
      its weight, to a row.
    batch_size: rows of a batch. Every batch is full: one may span the end of an epoch.
    seed: of the order, from 0 to 2³²-1.

  Returns:
    A `grain.DatasetIterator` over lists of rows. `get_state()` gives a small dict fit for JSON;
    `set_state()` on an iterator made with the same arguments goes on from there.

  Raises:
    ValueError: an empty source or part of one, or no rows in a batch.

  Example:
    >>> stream = example_iterator([{"question": q} for q in "abc"], batch_size=2, seed=0)
    >>> state = stream.get_state()
    >>> batch = next(stream)
    >>> stream.set_state(state)
    >>> next(stream) == batch
    True

  Note:
    No worker processes and no read-ahead threads: the rows are in memory, and the state is then exactly what the caller has seen.
  """
  if batch_size < 1 or not len(source):
    raise ValueError(f"found batches of {batch_size} from {len(source)} rows, expected at least 1 of each")
  import grain  # Here, because it imports jax: a config can be checked against a task before.

  mixed = isinstance(source, MixedRows) and source.weights is not None
  parts = source.parts if mixed else (source,)
  if not all(map(len, parts)):
    raise ValueError(f"found parts of {', '.join(str(len(part)) for part in parts)} rows, expected at least 1 in each")
  streams = []
  for i, part in enumerate(parts):
    epochs = max(1, 2**53 // len(part))  # As good as endless. Truly endless is `None`, of which grain cannot make batches of one row.
    # `dict` copies: whoever changes a row changes its own.
    streams.append(grain.MapDataset.source(part).map(dict).shuffle(seed=(seed + i) % 2**32).repeat(epochs))
  dataset = grain.MapDataset.mix(streams, weights=source.weights) if mixed else streams[0]
  return iter(dataset.batch(batch_size, batch_fn=list).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def encode_prompts(examples: Sequence[Row], tokenizer: Tokenizer, *, buckets: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
  """Prompts as one array, padded on the left.

  Args:
    examples: rows with a `prompt`.
    tokenizer: the task's.
    buckets: allowed widths, in tokens; the smallest that holds the longest prompt is taken, so that few shapes are ever compiled.

  Returns:
    Ids, int32 `[n P]`, and where they are real, bool `[n P]`.

  Raises:
    ValueError: a prompt longer than the largest bucket. Nothing is ever cut: a policy that sees half a question learns to guess.

  Example:
    >>> from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
    >>> ids, mask = encode_prompts([{"prompt": "1+2"}, {"prompt": "3"}], ByteTokenizer(), buckets=(4, 8))
    >>> ids.tolist()
    [[257, 49, 43, 50], [256, 256, 257, 51]]
    >>> mask.tolist()
    [[True, True, True, True], [False, False, True, True]]
  """
  rows = [tokenizer.encode_prompt(example["prompt"]) for example in examples]
  longest = max(range(len(rows)), key=lambda i: len(rows[i]), default=None)
  width = 0 if longest is None else len(rows[longest])
  fitting = [bucket for bucket in buckets if bucket >= width]
  if not fitting:
    text = examples[longest]["prompt"]
    raise ValueError(
      f"rollout.prompt_buckets: found a prompt of {width} tokens ({text if len(text) <= 60 else text[:60] + '...'!r}), expected at most "
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
    prompt: ids.
    response: ids; the last is the end token, so that stopping is learned too.
    written: of each id of the response whether it is to be imitated; False at what an environment replied.
  """

  prompt: list[int]
  response: list[int]
  written: list[bool]


def encode_demonstrations(examples: Iterable[Row], tokenizer: Tokenizer, *, replies: str | None = None) -> list[Demonstration]:
  """Demonstrations as ids.

  Args:
    examples: rows with a `prompt` and a `response`.
    tokenizer: the task's.
    replies: a regular expression whose group 1 is what an environment wrote in a response. It is encoded by itself, as it is when the
      environment really replies.

  Example:
    >>> from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
    >>> encode_demonstrations([{"prompt": "1", "response": "#1"}], ByteTokenizer())[0]
    Demonstration(prompt=[257, 49], response=[35, 49, 258], written=[True, True, True])
    >>> encode_demonstrations([{"prompt": "1", "response": "1+1=2;"}], ByteTokenizer(), replies="=(.)")[0].written
    [True, True, True, True, False, True, True]
  """
  return [_demonstration(example, tokenizer, replies) for example in examples]


def _demonstration(example: Row, tokenizer: Tokenizer, replies: str | None) -> Demonstration:
  text, ids, written, start = example["response"], [], [], 0
  spans = [] if replies is None else [match.span(1) for match in re.finditer(replies, text, re.DOTALL)]
  for begin, end in [*spans, (len(text), len(text))]:
    for piece, own in ((text[start:begin], True), (text[begin:end], False)):
      found = tokenizer.encode(piece) if piece else []
      ids, written, start = ids + found, written + [own] * len(found), end
  return Demonstration(tokenizer.encode_prompt(example["prompt"]), [*ids, tokenizer.eos_id], [*written, True])


def encode_reply(text: str, tokenizer: Tokenizer, *, is_message: bool) -> list[int]:
  """What an environment says, as the ids that the policy reads.

  Args:
    text: what it says.
    tokenizer: the task's.
    is_message: whether the policy's message has ended, so that this is another one, written with the chat template where the tokenizer has
      one; else it goes into the policy's message.

  Example:
    >>> from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
    >>> encode_reply("6>>", ByteTokenizer(), is_message=False)
    [54, 62, 62]
  """
  template = getattr(tokenizer, "chat_template", None) if is_message else None
  if template is None:
    return tokenizer.encode(text)
  return tokenizer.encode(next_message(template, text, tokenizer.backend.id_to_token(tokenizer.eos_id)))


def max_prompt_tokens(source: Iterable[Row], tokenizer: Tokenizer) -> int:
  """Length of the longest prompt, in tokens with the begin token; 0 without rows."""
  return max((len(tokenizer.encode_prompt(example["prompt"])) for example in source), default=0)
