"""Options of chat templates: their values as text, the names that templates read, and the date."""

import ast
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.messages import Problem, did_you_mean, shown
from jaxrl_llm.pretrained.chat_template import CLOCK, DATE, INPUTS, ChatTemplate, clock, environment, render


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
  """Parses options of a chat template from texts of the form NAME=VALUE.

  A value that is not a Python literal, true or false is kept as text.

  Raises:
    ValueError: If a text has another form, or an option occurs twice. One line.

  Example:
    >>> parse_options(("enable_thinking=False", "date_string=27 Nov 2026"))
    {'enable_thinking': False, 'date_string': '27 Nov 2026'}
  """
  options: dict[str, Any] = {}
  for text in texts:
    name, mark, value = str(text).partition("=")
    if not (mark and name.isidentifier()):
      raise ValueError(Problem("task.chat_options", repr(text), "NAME=VALUE, such as 'enable_thinking=False'"))
    if name in options:
      raise ValueError(Problem("task.chat_options", f"{name!r} twice", "each option once"))
    try:
      options[name] = {"true": True, "false": False}[value] if value in ("true", "false") else ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
      options[name] = value
  return options


def option_names(template: ChatTemplate) -> list[str]:
  """Returns the names of the options that a template reads.

  Example:
    >>> option_names(ChatTemplate("{{ bos_token }}{% if enable_thinking %}{{ messages[0].content }}{% endif %}", "example", {}))
    ['enable_thinking']
  """
  return sorted(name for name in _reads(template.source) if name not in INPUTS and not name.endswith("_token"))


def with_options(template: ChatTemplate, options: Mapping[str, Any]) -> ChatTemplate:
  """Returns a template with options set.

  Args:
    template: Template.
    options: Values by name. That of `strftime_now` is the date that the template reads.

  Raises:
    ValueError: If the template reads no such option, or the date is none; with a `Problem`, whose
      field is the option.
  """
  known = option_names(template) if options else []
  for name, value in options.items():
    if name not in known:
      expected = f"an option that {template.path} reads: {', '.join(known)}" if known else f"none: {template.path} reads no options"
      raise ValueError(Problem(name, shown(value), expected + did_you_mean(name, known)))
    try:
      clock(value if name == CLOCK else DATE)
    except (TypeError, ValueError) as error:
      raise ValueError(Problem(name, shown(value), f"the date that the chat template reads, such as {DATE}")) from error
  return template._replace(variables={**template.variables, **options})


def date_of(template: ChatTemplate) -> str | None:
  """Returns the date that a template writes into prompts; None if it writes none."""
  date = template.variables.get(CLOCK, DATE)
  on = lambda day: render(template._replace(variables={**template.variables, CLOCK: day}), [{"role": "user", "content": "How many?"}])
  try:
    return None if on(date) == on("1999-12-31") else date
  except ValueError:  # The template wants a system message.
    return None


def standalone(template: ChatTemplate) -> str:
  """Returns the source of a template with its options and its date, for programs that know neither.

  A program that sets an option itself has its own.

  Example:
    >>> template = ChatTemplate("{{ mood }} {{ strftime_now('%Y') }}", "example", {"bos_token": "<s>", "mood": "gay"})
    >>> standalone(template)
    "{%- if mood is not defined %}{%- set mood = 'gay' %}{%- endif %}{{ mood }} {{ '2024' }}"
  """
  write_date = clock(template.variables.get(CLOCK, DATE))
  source = re.sub(rf"{CLOCK}\(\s*(['\"])(.*?)\1\s*\)", lambda call: repr(write_date(call[2])), template.source)
  options = ((name, template.variables[name]) for name in option_names(template) if name in template.variables and name != CLOCK)
  return "".join(f"{{%- if {name} is not defined %}}{{%- set {name} = {x!r} %}}{{%- endif %}}" for name, x in options) + source


@functools.lru_cache(maxsize=16)
def _reads(source: str) -> frozenset[str]:
  """Returns the names of the variables that a template reads."""
  parsed = environment().parse(source)
  from jinja2 import meta

  return frozenset(meta.find_undeclared_variables(parsed))
