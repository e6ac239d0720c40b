"""Preference pairs for a reward model, from files or generated.

A pair is a chosen and a rejected response to one prompt. A row has `prompt` (the user's last
message), `conversation` (JSON of all messages before the response if there is more than one,
else ""), `chosen`, `rejected` and `margin` (a number as text, or "").
"""

import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.tasks.files import report as report_lib
from jaxrl_llm.tasks.files import tables, text_files
from jaxrl_llm.tasks.files.chats import Message, as_json, read
from jaxrl_llm.tasks.files.columns import Columns, Unusable, read_columns, short, text, usable_rows
from jaxrl_llm.tasks.files.report import Report, Tally
from jaxrl_llm.tasks.files.storage import Row, plain, split_of, uniform
from jaxrl_llm.tasks.files.tables import ConvertedRows
from jaxrl_llm.tasks.files.text_files import Record
from jaxrl_llm.tasks.image_prompts import prompt_ids
from jaxrl_llm.tasks.sets import arithmetic
from jaxrl_llm.text_types import Tokenizer

COLUMNS = ("prompt", "conversation", "chosen", "rejected", "margin", "place")
SOURCES = ("arithmetic", "file")
"""Values of `task.name` for preference pairs."""

WRONG_PER_PROBLEM = 4
# Workings by the careless teacher. A one-step problem is wrong in a third of them, in one of seven
# ways.
_TRIES = 60


class PairColumns(NamedTuple):
  """The names of a file's columns.

  Attributes:
    prompt: Column of the prompt, a text or a list of messages; None if `chosen` and `rejected` are
      whole conversations.
    chosen: Column of the chosen response: a text, or a list of messages that ends with the
      assistant's, with or without the earlier ones.
    rejected: Column of the rejected response, in the same form.
    margin: Column of how much better the chosen response is; None for no such column.
  """

  prompt: str | None = "prompt"
  chosen: str = "chosen"
  rejected: str = "rejected"
  margin: str | None = None


class Pairs(NamedTuple):
  """Loaded pairs.

  Attributes:
    train: Training rows.
    test: Test rows; those held out of `path` have other prompts than training.
    report: Counts of rows read, kept and dropped; None for generated pairs.
    fingerprint: Digest of all pairs; None for generated ones.
  """

  train: Sequence[Row]
  test: Sequence[Row]
  report: Report | None = None
  fingerprint: str | None = None


def generated(levels: Collection[int] | None = None) -> Pairs:
  """Returns pairs of right and wrong workings of arithmetic problems, by `arithmetic`'s teacher.

  Each training problem has up to four wrong workings and each test problem one, all with a wrong
  answer.

  Args:
    levels: Steps per problem, from `arithmetic.LEVELS`; None is all.

  Raises:
    ValueError: If there is no such level.

  Example:
    >>> row = generated(levels=(1,)).train[0]
    >>> row["prompt"], row["chosen"], row["rejected"]
    ('0-0\\n', '0-0=0\\n#0', '0-0=2\\n#2')
  """
  levels = arithmetic.LEVELS if levels is None else tuple(levels)
  if not levels or not set(levels) <= set(arithmetic.LEVELS):
    raise ValueError(f"task.levels: found {levels}, expected one or more of {arithmetic.LEVELS}")
  rows: dict[str, list[Row]] = {"train": [], "test": []}
  for question in itertools.chain(*map(arithmetic.questions_of, levels)):
    split = split_of(question)
    right = arithmetic.working(question)
    tries = (arithmetic.working(question, error_rate=arithmetic.ERROR_RATE, seed=seed) for seed in range(_TRIES))
    wrong = dict.fromkeys(x for x in tries if x.rpartition("\n")[2] != right.rpartition("\n")[2])
    row = {"prompt": arithmetic.Arithmetic.TEMPLATE.format(question=question), "conversation": "", "chosen": right, "margin": ""}
    rows[split] += [
      row | {"rejected": x} for x in itertools.islice(wrong, WRONG_PER_PROBLEM if split == "train" else 1)
    ]
  return Pairs(rows["train"], rows["test"])


def from_files(
  tokenizer: Tokenizer,
  *,
  path: str | os.PathLike | None,
  test_path: str | os.PathLike | None = None,
  test_fraction: float | None = None,
  columns: PairColumns = PairColumns(),  # noqa: B008  A NamedTuple is immutable.
  max_tokens: int,
  data_dir: str | os.PathLike | None = None,
  bad_rows: str = "drop",
) -> Pairs:
  """Loads pairs from files in Hugging Face's preference format, as texts or as lists of messages.

  Args:
    tokenizer: Tokenizer of the model.
    path: File of pairs, in a format that `text_files.read_records` accepts.
    test_path: File of test pairs; None holds out some prompts of `path`.
    test_fraction: Fraction of the prompts held out; None is 0.1.
    columns: Names of the files' columns.
    max_tokens: Maximum length of a response with its prompt, in tokens; longer ones are bad rows.
    data_dir: Local folder that holds datasets; None is ~/.cache/jaxrl_llm/data.
    bad_rows: Policy for unusable rows: "drop" leaves them out and counts them; "error" raises at
      the first.

  Raises:
    ValueError: If files, columns or rows cannot be used. One line.
  """
  files = check_files(path=path, test_path=test_path, test_fraction=test_fraction)
  as_columns = Columns(columns.chosen, columns.rejected, others=tuple(x for x in (columns.prompt, columns.margin) if x is not None))
  convert, seen = functools.partial(row_of, columns=columns), set()
  identity = lambda row: {"duplicate pair": tuple(row[x] for x in COLUMNS[:4])}
  generators = {
    split: lambda tally, file=file: usable_rows(
      read_columns(file, as_columns), convert, tally, seen=seen, identity=identity
    )
    for split, file in files.items()
  }
  settings = ["pairs", columns, list(files), [os.path.splitext(file)[1] for file in files.values()]]
  key = tables.key_of(list(files.values()), settings)
  sources, counts = tables.open_table(
    "preferences", key, generators, columns=COLUMNS, data_dir=data_dir, bad_rows=bad_rows
  )
  return _fitting(sources, counts, tokenizer, max_tokens=max_tokens, fraction=test_fraction or 0.1, bad_rows=bad_rows)


def check_files(**settings: Any) -> dict[str, pathlib.Path]:
  """Rejects missing files of pairs and conflicting settings; see `text_files.check_splits`."""
  return text_files.check_splits(**settings, rows="pairs", example="pairs.jsonl with prompt, chosen and rejected on each line")


def row_of(record: Record, columns: PairColumns) -> Row:
  """Returns the pair in a record of a file.

  Raises:
    Unusable: If a part of the pair is missing or invalid.

  Example:
    >>> user, answer = {"role": "user", "content": "1+1?"}, lambda x: [{"role": "assistant", "content": x}]
    >>> texts = row_of({"prompt": "1+1?", "chosen": "2", "rejected": "3"}, PairColumns())
    >>> texts == row_of({"prompt": [user], "chosen": answer("2"), "rejected": answer("3")}, PairColumns())
    True
    >>> texts == row_of({"chosen": [user, *answer("2")], "rejected": [user, *answer("3")]}, PairColumns(prompt=None))
    True
  """
  prompt = None if columns.prompt is None else read(record, columns.prompt)
  prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
  (before, chosen), (other, rejected) = (_response(read(record, name), prompt, name) for name in (columns.chosen, columns.rejected))
  if before != other:
    raise Unusable("chosen and rejected have different prompts")
  if before is None:
    raise Unusable("no prompt", "texts need a column of prompts: task.prompt_column")
  if chosen == rejected:
    raise Unusable("chosen and rejected are the same", short(chosen))
  margin = "" if columns.margin is None else text(record, columns.margin)
  if margin and not _is_finite(margin):
    raise Unusable(f"{columns.margin} is no number", short(margin))
  if before[-1]["role"] != "user":
    raise Unusable("prompt does not end with the user", short(json.dumps(before, ensure_ascii=False)))
  if not before[-1]["content"].strip():
    raise Unusable("prompt is empty")
  return {"prompt": before[-1]["content"], "conversation": as_json(before), "chosen": chosen, "rejected": rejected, "margin": margin}


def encode_pair(row: Row, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
  """Returns the ids of the chosen and the rejected sequence.

  A sequence is the prompt as a policy receives it, the response and the end token.

  Raises:
    Unusable: If there are several messages and the tokenizer has no chat template, or its template
      rejects them.

  Example:
    >>> from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
    >>> encode_pair({"prompt": "1", "conversation": "", "chosen": "a", "rejected": "b"}, ByteTokenizer())
    ([257, 49, 97, 258], [257, 49, 98, 258])
  """
  if row["conversation"] and getattr(tokenizer, "chat_template", None) is None:
    raise Unusable("several messages, but the tokenizer has no chat template")
  prompt = prompt_ids(row, tokenizer)
  return tuple([*prompt, *tokenizer.encode(row[name]), tokenizer.eos_id] for name in ("chosen", "rejected"))


def _fitting(
  sources: Mapping[str, Sequence],
  counts: Report,
  tokenizer: Tokenizer,
  *,
  max_tokens: int,
  fraction: float,
  bad_rows: str,
) -> Pairs:
  """Returns the stored pairs that fit into `max_tokens`, in two splits."""
  tally, digest = Tally(bad_rows), hashlib.blake2b(digest_size=8)
  kept: dict[str, list[tuple[int, int, float]]] = {}
  for split, source in sources.items():
    kept[split] = []
    for index, row in enumerate(ConvertedRows(source, plain)):
      try:
        length = max(map(len, encode_pair(row, tokenizer)))
      except Unusable as error:
        tally.bad(error.reason, row["place"], error.detail)
        continue
      if length > max_tokens:
        tally.bad(f"longer than {max_tokens} tokens", row["place"], f"{length}; see task.max_tokens")
        continue
      # All pairs of a prompt go to the same split.
      kept[split].append((row[tables.INDEX], index, uniform("split", row["conversation"] or row["prompt"])))
    kept[split].sort()
    digest.update(json.dumps([split, [number for number, _, _ in kept[split]]]).encode())
  counts = report_lib.merge(
    [counts._replace(kept=sum(map(len, kept.values()))), Report(0, 0, tally.dropped, tally.first)]
  )
  if "test" not in kept:
    rows = kept["train"]
    kept = {"train": [x for x in rows if x[2] >= fraction], "test": [x for x in rows if x[2] < fraction]}
  for split, rows in kept.items():
    if not rows:
      words = report_lib.in_words(counts).replace("problems", "pairs")
      raise ValueError(
        f"task.path, {split}: found no pair that can be used ({words}); "
        "expected at least one to train on and one to test on"
      )
  rows_of = {
    split: ConvertedRows(sources.get(split, sources["train"]), plain, indices=[index for _, index, _ in kept[split]])
    for split in ("train", "test")
  }
  for split, rows in rows_of.items():
    for row in rows:
      digest.update(json.dumps([split, *(row[x] for x in COLUMNS[:5])]).encode())
  return Pairs(**rows_of, report=counts, fingerprint=digest.hexdigest())


def _response(value: str | list[Message], prompt: list[Message] | None, name: str) -> tuple[list[Message] | None, str]:
  """Returns the messages before a response, and the response."""
  if isinstance(value, str):
    return prompt, value
  *head, last = value
  if last["role"] != "assistant":
    raise Unusable(f"{name} does not end with the assistant", f"role {last['role']!r}")
  if not last["content"].strip():
    raise Unusable(f"{name} is empty")
  if not head:
    return prompt, last["content"]
  if head[0]["role"] != "assistant":
    return head, last["content"]  # A whole conversation, prompt included.
  if prompt is None:
    raise Unusable(f"{name} begins with the assistant", "without a column of prompts")
  return [*prompt, *head], last["content"]


def _is_finite(value: str) -> bool:
  try:
    return math.isfinite(float(value))
  except ValueError:
    return False
