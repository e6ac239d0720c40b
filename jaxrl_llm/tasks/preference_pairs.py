"""Pairs of a chosen and a rejected response to one prompt, for a reward model: from files, or generated.

A row has `prompt` (what the user says), `conversation` (JSON of all messages before the response, where the user's is not the only one,
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

from jaxrl_llm.pretrained.chat_template import Message, render
from jaxrl_llm.tasks.files import report as report_lib
from jaxrl_llm.tasks.files import tables, text_files
from jaxrl_llm.tasks.files.columns import Columns, Unusable, problems, read, short, text
from jaxrl_llm.tasks.files.report import Report, Tally
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.files.tables import StoredRows
from jaxrl_llm.tasks.files.text_files import Record
from jaxrl_llm.tasks.problem_set import held_out
from jaxrl_llm.tasks.sets import arithmetic
from jaxrl_llm.text_types import Tokenizer

COLUMNS = ("prompt", "conversation", "chosen", "rejected", "margin", "place")
SOURCES = ("arithmetic", "file")
"""What `task.name` may be for pairs."""

WRONG_PER_PROBLEM = 4
_TRIES = 60  # Of the careless teacher; a problem of one step is wrong in a third of them, in one of seven ways.


class PairColumns(NamedTuple):
  """Which column of a file holds what.

  Attributes:
    prompt: text, or a list of messages; None where `chosen` and `rejected` are whole conversations.
    chosen: text, or a list of messages that ends with the assistant's, with or without those before.
    rejected: likewise.
    margin: by how much the chosen one is better; None for no such column.
  """

  prompt: str | None = "prompt"
  chosen: str = "chosen"
  rejected: str = "rejected"
  margin: str | None = None


class Pairs(NamedTuple):
  """Pairs, loaded.

  Attributes:
    train: rows to learn from.
    test: rows of other prompts.
    report: what was read, kept and dropped; None for generated pairs.
    fingerprint: changes with any pair; None for generated ones.
  """

  train: Sequence[Row]
  test: Sequence[Row]
  report: Report | None = None
  fingerprint: str | None = None


def generated(levels: Collection[int] | None = None) -> Pairs:
  """Right and wrong workings of the same arithmetic problem, as the teacher of `arithmetic` writes them.

  Up to four wrong ones for each problem to train on and one for each that its split holds out, all with a wrong answer.

  Args:
    levels: steps of a problem, of `arithmetic.LEVELS`; None is all.

  Raises:
    ValueError: no such level.

  Example:
    >>> row = generated(levels=(1,)).train[0]
    >>> row["prompt"], row["chosen"], row["rejected"]
    ('0-0\\n', '0-0=0\\n#0', '0-0=2\\n#2')
  """
  levels = arithmetic.LEVELS if levels is None else tuple(levels)
  if not levels or not set(levels) <= set(arithmetic.LEVELS):
    raise ValueError(f"task.levels: found {levels}, expected one or more of {arithmetic.LEVELS}")
  found: dict[str, list[Row]] = {"train": [], "test": []}
  for question in itertools.chain(*map(arithmetic.problems, levels)):
    split = arithmetic.split_of(question)
    right = arithmetic.working(question)
    tries = (arithmetic.working(question, error_rate=arithmetic.ERROR_RATE, seed=seed) for seed in range(_TRIES))
    wrong = dict.fromkeys(x for x in tries if x.rpartition("\n")[2] != right.rpartition("\n")[2])
    row = {"prompt": arithmetic.render_prompt(question), "conversation": "", "chosen": right, "margin": ""}
    found[split] += [row | {"rejected": x} for x in itertools.islice(wrong, WRONG_PER_PROBLEM if split == "train" else 1)]
  return Pairs(found["train"], found["test"])


def from_files(
  tokenizer: Tokenizer,
  *,
  path: str | os.PathLike | None,
  test_path: str | os.PathLike | None = None,
  test_fraction: float | None = None,
  columns: PairColumns = PairColumns(),  # noqa: B008  A NamedTuple cannot change.
  max_tokens: int,
  data_dir: str | os.PathLike | None = None,
  bad_rows: str = "drop",
) -> Pairs:
  """Pairs of files in the preference format of Hugging Face, as texts or as lists of messages.

  Args:
    tokenizer: of the model.
    path: see `text_files.read`.
    test_path: pairs to test on; None holds out some prompts of `path`.
    test_fraction: of the prompts, held out; None is 0.1.
    columns: which is what.
    max_tokens: of a response with its prompt; longer ones are bad rows.
    data_dir: see `tables.open_table`.
    bad_rows: see `Tally`.

  Raises:
    ValueError: files, columns or rows that cannot be used. One line.
  """
  files = check_files(path=path, test_path=test_path, test_fraction=test_fraction)
  as_columns = Columns(columns.chosen, columns.rejected, others=tuple(x for x in (columns.prompt, columns.margin) if x is not None))
  convert, seen = functools.partial(row_of, columns=columns), set()
  identity = lambda row: {"duplicate pair": tuple(row[x] for x in COLUMNS[:4])}
  generators = {
    split: lambda tally, file=file: problems(read(file, as_columns), convert, tally, seen=seen, identity=identity)
    for split, file in files.items()
  }
  settings = ["pairs", columns, list(files), [os.path.splitext(file)[1] for file in files.values()]]
  key = tables.key_of(list(files.values()), settings)
  sources, found = tables.open_table("preferences", key, generators, columns=COLUMNS, data_dir=data_dir, bad_rows=bad_rows)
  return _fitting(sources, found, tokenizer, max_tokens=max_tokens, fraction=test_fraction or 0.1, bad_rows=bad_rows)


def check_files(**settings: Any) -> dict[str, pathlib.Path]:
  """Refuses files of pairs that are not there, and settings that do not go together; see `text_files.check_splits`."""
  return text_files.check_splits(**settings, rows="pairs", example="pairs.jsonl with prompt, chosen and rejected on each line")


def row_of(record: Record, columns: PairColumns) -> Row:
  """The pair of a record of a file.

  Raises:
    Unusable: what it lacks, or what is in the place of it.

  Example:
    >>> user, answer = {"role": "user", "content": "1+1?"}, lambda x: [{"role": "assistant", "content": x}]
    >>> texts = row_of({"prompt": "1+1?", "chosen": "2", "rejected": "3"}, PairColumns())
    >>> texts == row_of({"prompt": [user], "chosen": answer("2"), "rejected": answer("3")}, PairColumns())
    True
    >>> texts == row_of({"chosen": [user, *answer("2")], "rejected": [user, *answer("3")]}, PairColumns(prompt=None))
    True
  """
  prompt = None if columns.prompt is None else _read(record, columns.prompt)
  prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
  (before, chosen), (other, rejected) = (_response(_read(record, name), prompt, name) for name in (columns.chosen, columns.rejected))
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
  conversation = "" if len(before) == 1 else json.dumps(before, ensure_ascii=False)
  return {"prompt": before[-1]["content"], "conversation": conversation, "chosen": chosen, "rejected": rejected, "margin": margin}


def encode_pair(row: Row, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
  """Ids of the chosen and of the rejected sequence: the prompt as a policy is given it, the response, and the end token.

  Raises:
    Unusable: several messages, but a tokenizer without a chat template, or with one that refuses them.

  Example:
    >>> from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
    >>> encode_pair({"prompt": "1", "conversation": "", "chosen": "a", "rejected": "b"}, ByteTokenizer())
    ([257, 49, 97, 258], [257, 49, 98, 258])
  """
  if not row["conversation"]:
    prompt = tokenizer.encode_prompt(row["prompt"])
  elif (template := getattr(tokenizer, "chat_template", None)) is None:
    raise Unusable("several messages, but the tokenizer has no chat template")
  else:
    try:
      prompt = tokenizer.encode(render(template, json.loads(row["conversation"])))
    except ValueError as error:
      raise Unusable("messages that the chat template refuses", short(str(error))) from error
  return tuple([*prompt, *tokenizer.encode(row[name]), tokenizer.eos_id] for name in ("chosen", "rejected"))


def _fitting(
  sources: Mapping[str, Sequence], found: Report, tokenizer: Tokenizer, *, max_tokens: int, fraction: float, bad_rows: str
) -> Pairs:
  """The stored rows that the model has room for, in two splits."""
  tally, digest = Tally(bad_rows), hashlib.blake2b(digest_size=8)
  kept: dict[str, list[tuple[int, int, float]]] = {}
  for split, source in sources.items():
    kept[split] = []
    for index, row in enumerate(StoredRows(source)):
      try:
        length = max(map(len, encode_pair(row, tokenizer)))
      except Unusable as error:
        tally.bad(error.reason, row["place"], error.detail)
        continue
      if length > max_tokens:
        tally.bad(f"longer than {max_tokens} tokens", row["place"], f"{length}; see task.max_tokens")
        continue
      # All pairs of a prompt go to one side.
      kept[split].append((row[tables.INDEX], index, held_out(row["conversation"] or row["prompt"])))
    kept[split].sort()
    digest.update(json.dumps([split, [number for number, _, _ in kept[split]]]).encode())
  found = report_lib.merge([found._replace(kept=sum(map(len, kept.values()))), Report(0, 0, tally.dropped, tally.first)])
  if "test" not in kept:
    rows = kept["train"]
    kept = {"train": [x for x in rows if x[2] >= fraction], "test": [x for x in rows if x[2] < fraction]}
  for split, rows in kept.items():
    if not rows:
      words = report_lib.in_words(found).replace("problems", "pairs")
      raise ValueError(f"task.path, {split}: found no pair that can be used ({words}); expected at least one to learn and one to test on")
  rows_of = {
    split: StoredRows(sources.get(split, sources["train"]), indices=[index for _, index, _ in kept[split]]) for split in ("train", "test")
  }
  for split, rows in rows_of.items():
    for row in rows:
      digest.update(json.dumps([split, *(row[x] for x in COLUMNS[:5])]).encode())
  return Pairs(**rows_of, report=found, fingerprint=digest.hexdigest())


def _read(record: Record, name: str) -> str | list[Message]:
  """A column as text or as messages."""
  value = record.get(name)
  if not isinstance(value, list):
    return text(record, name)
  messages = []
  for message in value:
    if not isinstance(message, Mapping) or not all(isinstance(message.get(x), str) for x in ("role", "content")):
      raise Unusable(f"{name} is no list of messages", "each is to have a role and a content, both text")
    messages.append({"role": message["role"], "content": message["content"]})
  if not messages:
    raise Unusable(f"{name} is empty")
  return messages


def _response(value: str | list[Message], prompt: list[Message] | None, name: str) -> tuple[list[Message] | None, str]:
  """What stands before a response, and the response."""
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
    return head, last["content"]  # A whole conversation, the prompt in it.
  if prompt is None:
    raise Unusable(f"{name} begins with the assistant", "and there is no column of prompts")
  return [*prompt, *head], last["content"]


def _is_finite(value: str) -> bool:
  try:
    return math.isfinite(float(value))
  except ValueError:
    return False
