"""Prompt templates: plain text with column names in braces, and no other format-string syntax."""

import string
from collections.abc import Collection, Mapping
from typing import Any

from jaxrl_llm.messages import Problem, did_you_mean
from jaxrl_llm.tasks.files.values import short


def fields(template: str, *, setting: str = "task.prompt_template") -> tuple[str, ...]:
  """Returns the columns that a template names, each once, in order of first use.

  `{column}` stands for a column's text, `{column.key}` for one within it, and `{{` for a brace.
  Messages name the `setting`.

  Raises:
    ValueError: If braces are unbalanced, a field has no name, a field has an attribute, index,
      conversion or format, or there is no field, so that all prompts would be the same. One line,
      with the fix.

  Example:
    >>> fields("{question} Put it in \\\\boxed{{}}.")
    ('question',)
    >>> fields("{question} Put it in \\\\boxed{}.")
    Traceback (most recent call last):
    ...
    ValueError: task.prompt_template: found '{}', expected the name of a column in it,
      such as {question}; write {{}} for a pair of braces
  """
  try:
    parsed = list(string.Formatter().parse(template))
  except ValueError as error:
    fix = "balanced braces; write {{ for one that is text"
    raise ValueError(Problem(setting, f"{short(template)} ({error})", fix)) from error
  names = []
  for _, name, form, conversion in parsed:
    if name is None:
      continue
    if form or conversion or not _is_column(name):
      text = "{" + name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "") + "}"
      fix = f"the name of a column in it, such as {{question}}; write {{{{{text[1:-1]}}}}} for a pair of braces"
      raise ValueError(Problem(setting, repr(text), fix))
    names.append(name)
  if not names:
    raise ValueError(Problem(setting, short(template), "a column in it, such as {question}"))
  return tuple(dict.fromkeys(names))


def check_template(template: str, known: Collection[str], *, setting: str = "task.prompt_template") -> None:
  """Checks that the rows have all columns that a template names.

  Raises:
    ValueError: If a column is missing. One line, with the nearest column.
  """
  for name in fields(template, setting=setting):
    if name not in known:
      hint = did_you_mean(name, known, "; did you mean {{{}}}?")
      raise ValueError(f"{setting}: found {{{name}}}, expected one of the columns {', '.join(sorted(known))}{hint}")


def render(template: str, row: Mapping[str, Any]) -> str:
  """Returns a row's prompt. Braces in the row's own text stay as they are.

  Example:
    >>> render("{question}\\nAnswer:", {"question": "What is {1, 2}?"})
    'What is {1, 2}?\\nAnswer:'
  """
  return "".join(text + ("" if name is None else str(row[name])) for text, name, _, _ in string.Formatter().parse(template))


def _is_column(name: str) -> bool:
  first, *inner = name.split(".")
  return first.isidentifier() and all((x.isidentifier() and x[0] != "_") or x.isdecimal() for x in inner)
