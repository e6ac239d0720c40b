"""Samples of an evaluation as JSON lines, which can be graded again without the model."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SCHEMA = 1
"""Version written into every row; it increases when the meaning of a field changes."""


class SampleRow(NamedTuple):
  """One sample of one problem.

  Attributes:
    id: Identifier of the problem, shared by all of its samples.
    sample: Index of the sample within its problem, from 0.
    prompt: Text given to the policy, including anything added by a chat template.
    response: Text written by the policy.
    answer: Answer extracted from the response; None if none was found or none was looked for.
    gold: Right answer.
    score: Total reward; None if the verifier failed.
    parts: Each reward separately by name, unweighted.
    cause: Reason why the verifier failed; None if it did not.
    num_tokens: Number of tokens in the response, including the stop token.
    stopped: Whether the response ended on its own.
    level: Difficulty of the problem, a number or a word; None if it has none.
    seed: Seed of the evaluation.
    model: Origin of the weights.
    step: Number of updates applied to the weights; None if unknown.
    example: Full row of the problem, for verifiers that need more than `gold`. Only sample 0 has
      it, because it may hold megabytes of tests.
    turns: Turns of a conversation with an environment. `response` is then the text of the last one.
    failed: Pair (cause, one line) if the environment failed, so that no verifier can judge the
      sample; else None.
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
  """Writes rows to a file and returns their number.

  The file replaces the one at its path only after all rows are written.

  Raises:
    ValueError: If a row holds a number that JSON lacks, such as NaN.
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
  """Reads the rows of a file written by `write_samples`.

  Raises:
    ValueError: If a line is not such a row. The message gives the line number and the reason.
  """
  rows = []
  with open(path, encoding="utf-8") as file:
    for number, line in enumerate(file, 1):
      try:
        values = json.loads(line)
      except ValueError as error:
        raise ValueError(f"{os.fspath(path)}, line {number}: found no JSON ({error}), expected a sample; is the file cut off?") from None
      if not isinstance(values, dict) or values.pop("schema", None) != SCHEMA:
        raise ValueError(f"{os.fspath(path)}, line {number}: found no sample of schema {SCHEMA}, expected what write_samples writes")
      missing, unknown = set(SampleRow._fields) - set(values), set(values) - set(SampleRow._fields)
      if unknown or missing - set(SampleRow._field_defaults):
        raise ValueError(
          f"{os.fspath(path)}, line {number}: found the fields {sorted(values)}, expected {list(SampleRow._fields)}"
        )
      rows.append(SampleRow(**values | {"turns": tuple(values.get("turns", ()))}))
  return rows
