"""Published sets of programming problems, converted from records to rows with `tests`.

`program_tests` describes the form of the tests.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.messages import Problem
from jaxrl_llm.tasks.files.columns import BLANK, Unusable, short, text
from jaxrl_llm.tasks.files.downloads import Files, hub
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.files.text_files import Record
from jaxrl_llm.tasks.sets import program_tests

TEMPLATE = "{question}\n\n{form}"
COLUMNS = ("tests", "starter_code", "form", "title", "date")
"""Columns of the rows besides those that all rows have."""

_BLANK = BLANK | {"starter_code": "", "title": "", "date": ""}
_STDIN = (
  "Write a Python program that solves the problem: it reads from standard input and writes to standard output. Put the program between "
  "```python and ```."
)
_COMPLETE = "Complete this Python code. Put the whole solution between ```python and ```."
_DIFFICULTIES = {"easy": 1, "medium": 2, "hard": 3}

LIVECODEBENCH_FILES = {
  "test": Files(
    ("test*.jsonl", "**/test*.jsonl", "**/test*.parquet"),
    hub("livecodebench/code_generation_lite", "test.jsonl", *(f"test{part}.jsonl" for part in range(2, 7))),
  ),
}
CODEFORCES_FILES = {
  split: Files(
    (f"data/{split}-*.parquet", f"verifiable/{split}-*.parquet", f"**/{split}*.parquet", f"**/{split}*.jsonl"),
    hub("open-r1/codeforces", f"data/{split}-*.parquet"),
  )
  for split in ("test", "train")
}


def livecodebench(record: Record) -> Row:
  """Converts a record of LiveCodeBench.

  The record has `question_content`, `starter_code`, `difficulty`, `contest_date`, public and
  private test cases, and `metadata` with the name of the function. The level is 1 for easy, 2 for
  medium and 3 for hard. `date` is the date of the contest, YYYY-MM-DD.
  """
  difficulty = text(record, "difficulty").strip().lower()
  if difficulty not in _DIFFICULTIES:
    raise Unusable("difficulty is none of easy, medium, hard", short(difficulty))
  date = _date(record)
  starter = text(record, "starter_code", empty=True)
  cases = program_tests.unpack(text(record, "public_test_cases"))
  if hidden := text(record, "private_test_cases", empty=True):
    cases = cases + program_tests.unpack(hidden)
  if starter.strip():
    tests = program_tests.call_tests(cases, function=_function(record))
  else:
    tests = program_tests.stdin_tests(cases)
  return _BLANK | {
    "question": text(record, "question_content"),
    "level": _DIFFICULTIES[difficulty],
    "id": text(record, "question_id"),
    "tests": tests,
    "starter_code": starter,
    "form": _form(starter),
    "title": text(record, "question_title", empty=True) if "question_title" in record else "",
    "date": date,
  }


def codeforces(record: Record) -> Row:
  """Converts a record of Codeforces.

  The record has `description`, formats of input and output, `examples`, `official_tests`, limits
  and `rating`, which becomes the level (0 if unrated).

  Problems that comparing outputs cannot judge are left out: interactive problems, problems that
  read or write files, problems with a checker of their own, and problems with incomplete tests.
  """
  for column, reason in (("interaction_format", "interactive problem"), ("generated_checker", "problem with a checker of its own")):
    if record.get(column):
      raise Unusable(reason)
  if record.get("input_mode") not in (None, "stdio"):
    raise Unusable("problem that reads or writes files", str(record["input_mode"]))
  if record.get("official_tests_complete") is False:
    raise Unusable("problem with incomplete tests")
  question = [text(record, "description")]
  for column, title in (("input_format", "Input"), ("output_format", "Output")):
    if part := text(record, column, empty=True).strip():
      question.append(f"{title}\n{part}")
  for case in _cases(record, "examples"):
    question.append(f"Example input\n{str(case.get('input')).strip()}\n\nExample output\n{str(case.get('output')).strip()}")
  if part := text(record, "note", empty=True).strip() if "note" in record else "":
    question.append(f"Note\n{part}")
  limits = {name: _number(record, column) for name, column in (("seconds", "time_limit"), ("megabytes", "memory_limit"))}
  return _BLANK | {
    "question": "\n\n".join(question),
    "level": int(_number(record, "rating") or 0),
    "id": text(record, "id"),
    "tests": program_tests.stdin_tests(_cases(record, "official_tests"), **limits),
    "form": _form(""),
    "title": text(record, "title", empty=True) if "title" in record else "",
  }


def human_eval(record: Record) -> Row:
  """Converts a record of HumanEval, with its own solution as the response.

  The record has `prompt`, `entry_point`, `test` (a program) and `canonical_solution`.
  """
  prompt, name = text(record, "prompt"), text(record, "entry_point")
  return _BLANK | {
    "question": f"```python\n{prompt.rstrip()}\n```",
    "response": f"```python\n{prompt}{text(record, 'canonical_solution')}\n```",
    "id": text(record, "task_id"),
    "tests": program_tests.check_tests(function=name, prompt=prompt, code=text(record, "test")),
    "starter_code": prompt,
    "form": _COMPLETE,
    "title": name,
  }


def within(after: str | None, before: str | None):
  """Selects problems dated from `after` to `before`, both included.

  Args:
    after: First date, YYYY-MM-DD; None is no limit.
    before: Last date, YYYY-MM-DD; None is no limit.

  Returns:
    Predicate `(row) -> bool`; None if there is no limit.

  Raises:
    ValueError: If a text is not a date, or `after` is later than `before`. One line.

  Example:
    >>> within("2024-08-01", None)({"date": "2024-07-31"})
    False
  """
  for name, value in (("after", after), ("before", before)):
    if value is not None and not re.fullmatch(r"[0-9]{4}-[01][0-9]-[0-3][0-9]", value):
      raise ValueError(Problem(f"task.{name}", repr(value), "a date such as 2024-08-01"))
  if after and before and after > before:
    raise ValueError(Problem("task.after", after, f"a date up to task.before={before}"))
  if after is None and before is None:
    return None
  return lambda row: (after or "") <= row["date"] <= (before or "9999")


def _form(starter: str) -> str:
  return f"{_COMPLETE}\n\n```python\n{starter.rstrip()}\n```" if starter.strip() else _STDIN


def _date(record: Record) -> str:
  date = text(record, "contest_date")
  if not re.match(r"[0-9]{4}-[01][0-9]-[0-3][0-9]", date):
    raise Unusable("contest_date is no date", short(date))
  return date[:10]


def _function(record: Record) -> str:
  try:
    metadata = json.loads(text(record, "metadata"))
  except ValueError as error:
    raise Unusable("metadata is no JSON", str(error)) from error
  name = metadata.get("func_name") if isinstance(metadata, dict) else None
  if not isinstance(name, str) or not name.isidentifier():
    raise Unusable("metadata names no function", short(str(name)))
  return name


def _number(record: Record, column: str) -> float | None:
  value = record.get(column)
  if value is None or value != value:  # Some readers return Parquet's null as NaN.
    return None
  if type(value) not in (int, float) or not 0 <= value < 1e6:
    raise Unusable(f"{column} is no number", short(str(value)))
  return value


def _cases(record: Record, column: str) -> list[Mapping[str, Any]]:
  cases = record.get(column)
  return [case for case in cases if isinstance(case, Mapping)] if isinstance(cases, list) else []
