"""Objectives as a command line names them, with their settings, also by import path."""

import ast
import inspect

from jaxrl_llm import objectives
from jaxrl_llm.messages import one_line
from jaxrl_llm.settings.import_path import load
from jaxrl_llm.types import Objective


def named(text: str) -> Objective:
  """Builds an objective from a call as it is written in Python.

  A KL penalty is off unless `kl_coef` is given: it needs a reference, and is no part of the policy
  gradient.

  Args:
    text: Name of an objective, or import path `package.module:factory`, with settings in
      parentheses.

  Raises:
    ValueError: If there is no such objective, or a setting is wrong. One line.

  Example:
    >>> named("gspo(clip_low=0.01, clip_high=0.02)").ratio_level
    'sequence'
    >>> named("gspo(0.01)")
    Traceback (most recent call last):
      ...
    ValueError: --objectives: found 'gspo(0.01)', expected settings by name, as in \
gspo(clip_low=0.1)
  """
  where = f"--objectives: found {text!r}"
  name, opening, _ = text.partition("(")
  settings = _settings(text[len(name) :], where) if opening else {}
  if ":" in name:
    factory = load(name, where="--objectives")
    try:
      objective = factory(**settings)
    except Exception as error:  # A user's factory may raise anything.
      raise ValueError(f"{where}: calling it raised {one_line(error)}") from error
    if not isinstance(objective, Objective):
      raise ValueError(f"{where}: it returned {type(objective).__name__}, expected jaxrl_llm.types.Objective")
    return objective
  factory = objectives.OBJECTIVES.get(name)
  if factory is not None and "kl_coef" in inspect.signature(factory).parameters:
    settings = {"kl_coef": 0.0} | settings
  try:
    return objectives.make(name, **settings)
  except ValueError as error:
    raise ValueError(f"{where}: {one_line(error, typed=False)}") from error


def _settings(text: str, where: str) -> dict[str, object]:
  try:
    call = ast.parse(f"f{text}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
      raise ValueError
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
  except (SyntaxError, ValueError) as error:
    raise ValueError(f"{where}, expected settings by name, as in gspo(clip_low=0.1)") from error
