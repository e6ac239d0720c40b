"""ZebraLogic: puzzles about the inhabitants of a row of houses.

A problem asks for the whole grid, which is judged here, or is a question about it with choices.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.tasks.files.columns import BLANK, Unusable, short, text
from jaxrl_llm.tasks.files.downloads import Files, hub
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.files.text_files import Record
from jaxrl_llm.text_types import Completion

GRID = "{question}\n\nSolve the puzzle. End with a JSON object that has the solution in this form, with every ? filled in:\n{form}"
CHOICES = "{question}\n\n{form}\n\nPut the letter of the right choice in \\boxed{{}}."
COLUMNS = ("form", "size")
"""Columns of the rows besides those that all rows have."""

FILES = {
  mode: {
    "test": Files(
      (f"{mode}_mode/test*.parquet", f"{mode}_mode/*.jsonl", f"**/*{mode}*.jsonl", f"**/{mode}*/*.parquet", f"**/*{mode}*.parquet"),
      hub("WildEval/ZebraLogic", f"{mode}_mode/test-00000-of-00001.parquet"),
    )
  }
  for mode in ("grid", "mc")
}
# Characters to read from the end of a response, where the answer is. The limit bounds the work on
# hostile text.
_MAX_CHARS = 20_000
_LETTERS = "ABCDEFGHIJ"


def grid(record: Record) -> Row:
  """Converts a record that asks for the whole grid.

  The record has `puzzle`, `size` (such as "5*6") and `solution` with `header` and `rows`. The level
  is the number of houses.
  """
  solution = record.get("solution")
  if isinstance(solution, str):
    try:
      solution = json.loads(solution)
    except ValueError as error:
      raise Unusable("solution is no grid", str(error)) from error
  header, rows = (solution.get("header"), solution.get("rows")) if isinstance(solution, Mapping) else (None, None)
  if not header or not rows or any(not isinstance(row, list) or len(row) != len(header) for row in rows):
    raise Unusable("solution is no grid", short(str(solution)))
  if any("___" in str(cell) for row in rows for cell in row):
    raise Unusable("solution is hidden", "the dataset WildEval/ZebraLogic has it")
  houses = {f"House {row[0]}": dict(zip(header[1:], row[1:], strict=True)) for row in rows}
  return BLANK | {
    "question": text(record, "puzzle"),
    "answer": json.dumps(houses, ensure_ascii=False),
    "level": len(houses),
    "id": text(record, "id"),
    "form": json.dumps({house: dict.fromkeys(header[1:], "?") for house in houses}, ensure_ascii=False),
    "size": text(record, "size", empty=True) if "size" in record else "",
  }


def multiple_choice(record: Record) -> Row:
  """Converts a record that asks a question with choices.

  The record has `puzzle`, `question`, `choices` and `answer`, the text of one of the choices, which
  becomes its letter. The level is the number of houses, from the record's `id`, or 0.
  """
  choices, answer = record.get("choices"), text(record, "answer")
  if not isinstance(choices, list) or not 2 <= len(choices) <= len(_LETTERS):
    raise Unusable("choices are no list of 2 to 10", short(str(choices)))
  choices = [str(choice) for choice in choices]
  if choices.count(answer) != 1:
    raise Unusable("answer is not one of the choices", short(answer))
  name = text(record, "id")
  size = re.search(r"([0-9]+)x([0-9]+)", name)
  return BLANK | {
    "question": f"{text(record, 'puzzle')}\n\n{text(record, 'question')}",
    "answer": _LETTERS[choices.index(answer)],
    "level": int(size[1]) if size else 0,
    "id": name,
    "form": "\n".join(f"{letter}) {choice}" for letter, choice in zip(_LETTERS, choices, strict=False)),
    "size": f"{size[1]}*{size[2]}" if size else "",
  }


def zebra_grid(completion: Completion, example: Mapping[str, Any]) -> float:
  """Returns 1 if every cell of the grid is right, else 0: ZebraLogic's accuracy by puzzle.

  The answer is the last JSON object of the response, or the object under its key "solution". As in
  ZeroEval's evaluator, case and outer spaces do not matter, a cell may be a list of one, and
  further houses, columns and keys are not read. Unlike there, a list of several is wrong, and so is
  a house or column that is there twice in different spellings with different cells.

  Args:
    completion: Response, of which the last 20,000 characters are read. A response that exhausted
      the token budget earns 0.
    example: Row with the grid as JSON in `answer`.
  """
  if not completion.stopped:
    return 0.0
  answer, grid = _last_object(completion.text[-_MAX_CHARS:]), json.loads(example["answer"])
  solutions = [part for key, part in (answer or {}).items() if _plain(key) == "solution" and isinstance(part, dict)]
  return float(_has(solutions[-1] if solutions else answer, grid))


def _plain(cell: Any) -> str:
  """Normalises the case and the outer spaces of a text."""
  return str(cell).strip().lower()


def _has(answer: Any, grid: Any) -> bool:
  """Returns whether an answer has every cell of a grid, of two levels."""
  if isinstance(answer, list) and len(answer) == 1:
    answer = answer[0]
  if not isinstance(grid, dict):
    return not isinstance(answer, dict | list) and _plain(answer) == _plain(grid)
  if not isinstance(answer, dict):
    return False
  spelt: dict[str, list[Any]] = {}
  for key, part in answer.items():
    spelt.setdefault(_plain(key), []).append(part)
  return all(_plain(key) in spelt and all(_has(each, part) for each in spelt[_plain(key)]) for key, part in grid.items())


def _last_object(text: str) -> dict[str, Any] | None:
  """Returns the last JSON object in a text that is not inside another one."""
  decoder, last, at, tries = json.JSONDecoder(strict=False), None, text.find("{"), 0
  while at >= 0 and tries < 200:  # Bounds the work on a text full of braces.
    tries += 1
    try:
      value, end = decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
      end = at + 1
    else:
      last = value if isinstance(value, dict) else last
    at = text.find("{", end)
  return last
