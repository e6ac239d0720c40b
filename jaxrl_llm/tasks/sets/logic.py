"""ZebraLogic, puzzles of who lives in which house: the whole grid, judged here, or one question about it with choices."""

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
"""Of the rows, besides those that all have."""

FILES = {
  mode: {
    "test": Files(
      (f"{mode}_mode/test*.parquet", f"{mode}_mode/*.jsonl", f"**/*{mode}*.jsonl", f"**/{mode}*/*.parquet", f"**/*{mode}*.parquet"),
      hub("WildEval/ZebraLogic", f"{mode}_mode/test-00000-of-00001.parquet"),
    )
  }
  for mode in ("grid", "mc")
}
_MAX_CHARS = 20_000  # Of a response, from its end: the answer stands there, and work on hostile text stays bounded.
_LETTERS = "ABCDEFGHIJ"


def grid(record: Record) -> Row:
  """`puzzle`, `size` "5*6" and `solution` with `header` and `rows`; the level is the number of houses."""
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
    raise Unusable("solution is hidden", "WildEval/ZebraLogic has it")
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
  """`puzzle`, `question`, `choices` and `answer`, the text of one of them, which becomes its letter; the level is the number of houses."""
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
  """1 where every cell of the grid is right, else 0: ZebraLogic's accuracy by puzzle.

  Read is the last JSON object of the response, or what it has under "solution". Upper and lower case are the same.

  Args:
    completion: the response; only its last 20,000 characters are read. One that ran into the token budget earns 0.
    example: the row, with the grid as JSON in `answer`.
  """
  if not completion.stopped:
    return 0.0
  found = _last_object(completion.text[-_MAX_CHARS:])
  if found is not None and isinstance(found.get("solution"), dict):
    found = found["solution"]
  return float(found is not None and _plain(found) == _plain(json.loads(example["answer"])))


def _plain(value: Any) -> Any:
  """A grid in which only differences that count are left."""
  if isinstance(value, dict):
    return {str(key).strip().lower(): _plain(cell) for key, cell in value.items()}
  return str(value).strip().lower()


def _last_object(text: str) -> dict[str, Any] | None:
  """The last JSON object that stands in a text by itself, not inside another one."""
  decoder, found, at, tries = json.JSONDecoder(), None, text.find("{"), 0
  while at >= 0 and tries < 200:  # A bound on the work that a text full of braces makes.
    tries += 1
    try:
      value, end = decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
      end = at + 1
    else:
      found = value if isinstance(value, dict) else found
    at = text.find("{", end)
  return found
