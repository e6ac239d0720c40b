"""Parsers for the reward terms of a config: names with weights, and settings as text."""

import ast
import math
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.messages import Problem


def parse_terms(texts: Sequence[str]) -> dict[str, float]:
  """Parses weights by reward from texts such as "tags=0.1".

  A reward is a key of `REWARDS`, MODULE:FUNCTION or judge:RUBRIC. Without a weight, its weight is
  1. A reward of weight 0 is only logged.

  Raises:
    ValueError: If a reward occurs twice, or a weight is invalid. One line.

  Example:
    >>> parse_terms(("tags=0.1", "my_rewards:brevity=-0.5", "maths"))
    {'tags': 0.1, 'my_rewards:brevity': -0.5, 'maths': 1.0}
  """
  weights: dict[str, float] = {}
  for text in texts:
    name, mark, number = str(text).rpartition("=")
    name, number = (name, number) if mark else (number, "1")
    try:
      weight = float(number)
    except ValueError:
      weight = math.nan
    if not math.isfinite(weight) or not name:
      raise ValueError(Problem("reward.terms", repr(text), "a reward and its weight, such as 'tags=0.1'"))
    if name in weights:
      raise ValueError(Problem("reward.terms", f"{name!r} twice", "each reward once"))
    weights[name] = weight
  return weights


def parse_settings(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
  r"""Parses settings by reward from texts of the form REWARD.SETTING=VALUE.

  A value that is not a Python literal is kept as text.

  Raises:
    ValueError: If a text has another form, or a setting occurs twice. One line.

  Example:
    >>> parse_settings(("tags.names=('plan', 'answer')", "tags.alone=False", r"pattern.regex=^\w+$"))
    {'tags': {'names': ('plan', 'answer'), 'alone': False}, 'pattern': {'regex': '^\\w+$'}}
  """
  settings: dict[str, dict[str, Any]] = {}
  for text in texts:
    path, mark, value = str(text).partition("=")
    name, dot, setting = path.partition(".")
    if not (mark and dot and name and setting.isidentifier()):
      raise ValueError(Problem("reward.settings", repr(text), "REWARD.SETTING=VALUE, such as 'pattern.regex=[0-9]+'"))
    if setting in settings.setdefault(name, {}):
      raise ValueError(Problem("reward.settings", f"{path!r} twice", "each setting once"))
    settings[name][setting] = _value(value)
  return settings


def _value(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return text
