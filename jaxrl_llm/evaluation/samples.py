"""One JSON line for each sample of an evaluation, so that others can grade it again without the model."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SCHEMA = 1
"""Written into every row; raised when the meaning of a field changes."""


class SampleRow(NamedTuple):
  """One sample of one problem.

  Attributes:
    id: of the problem, the same for all of its samples.
    sample: its number among the samples of the problem, from 0.
    prompt: the text that the policy was given, with whatever a chat template put around it.
    response: the text that it wrote.
    answer: what was extracted from it; None where nothing was found or nobody looked.
    gold: the right answer.
    score: the reward, by the name that it has in the file; None where it failed.
    parts: each reward by itself, unweighted.
    cause: why the verifier failed; None where it did not.
    num_tokens: of the response, the stop token included.
    stopped: whether it ended by itself.
    level: difficulty of the problem, a number or a word; None where there is none.
    seed: of the evaluation.
    model: where the weights came from.
    step: updates that they had seen; None where it is not known.
    example: the problem's whole row, for verifiers that need more than `gold`; with sample 0 alone, since it may hold megabytes of tests.
    turns: of a conversation with an environment; `response` is then the last one's text.
    failed: (cause, one line) where the environment failed, so that no verifier can tell; None where it did not.
  """

  id: str
  sample: int
  prompt: str
  response: str
  answer: str | None
  gold: str
  score: float | None
  parts: Mapping[str, float]
  cause: str | None
  num_tokens: int
  stopped: bool
  level: str | int | float | None = None
  seed: int | None = None
  model: str = ""
  step: int | None = None
  example: Mapping[str, Any] = {}
  turns: Sequence[Mapping[str, Any]] = ()
  failed: Sequence[str] | None = None


def write_samples(path: str | os.PathLike, rows: Iterable[SampleRow]) -> int:
  """Writes rows, and returns their number. Once all are written, the file replaces the one at its path.

  Raises:
    ValueError: a row with a number that JSON does not have, such as NaN.
  """
  path, written = os.fspath(path), 0
  unfinished = f"{path}.unfinished"
  with open(unfinished, "w", encoding="utf-8", newline="\n") as file:
    for row in rows:
      try:
        file.write(json.dumps({"schema": SCHEMA} | row._asdict(), allow_nan=False) + "\n")
        written += 1
      except (TypeError, ValueError) as error:
        raise ValueError(f"samples: found a row of problem {row.id!r} that JSON cannot hold ({error}), expected finite values") from None
  os.replace(unfinished, path)
  return written


def read_samples(path: str | os.PathLike) -> list[SampleRow]:
  """The rows of a file that `write_samples` wrote.

  Raises:
    ValueError: a line that is no such row: its number, and what is wrong with it.
  """
  rows = []
  with open(path, encoding="utf-8") as file:
    for number, line in enumerate(file, 1):
      try:
        found = json.loads(line)
      except ValueError as error:
        raise ValueError(f"{os.fspath(path)}, line {number}: found no JSON ({error}), expected a sample; is the file cut off?") from None
      if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
        raise ValueError(f"{os.fspath(path)}, line {number}: found no sample of schema {SCHEMA}, expected what write_samples writes")
      missing, unknown = set(SampleRow._fields) - set(found), set(found) - set(SampleRow._fields)
      if unknown or missing - set(SampleRow._field_defaults):
        raise ValueError(f"{os.fspath(path)}, line {number}: found the fields {sorted(found)}, expected {list(SampleRow._fields)}")
      rows.append(SampleRow(**found | {"turns": tuple(found.get("turns", ()))}))
  return rows
