"""Environments for multi-turn conversations, including tools. Plain Python and text; no JAX.

| environment | the policy writes | and reads |
| --- | --- | --- |
| `calculator` | `<<487*36=` | `17532>>` |
| `python` | `<code>print(6 * 7)</code>` | `<interpreter>42</interpreter>` |
| `MODULE:FUNCTION` | (your own: a function that returns an `Environment`) | |
"""

import inspect
from collections.abc import Callable
from typing import Any

from jaxrl_llm.messages import Problem, did_you_mean, shown
from jaxrl_llm.rewards.imported import load
from jaxrl_llm.rollouts.environments.calculator import calculator
from jaxrl_llm.rollouts.environments.protocol import Environment, Reply, State
from jaxrl_llm.rollouts.environments.python_tool import python_tool

__all__ = ["ENVIRONMENTS", "Environment", "Reply", "State", "check_environment", "make"]

ENVIRONMENTS: dict[str, Callable[..., Environment]] = {"calculator": calculator, "python": python_tool}
"""The package's environments by name."""


def check_environment(name: str, settings: dict[str, Any]) -> None:
  """Checks the name and the settings of an environment without importing any user code.

  The name is a key of `ENVIRONMENTS` or MODULE:FUNCTION.

  Raises:
    ValueError: If the name or a setting is unknown. One line, with the fix.

  Example:
    >>> check_environment("calculater", {})
    Traceback (most recent call last):
    ...
    ValueError: environment.name: found 'calculater', expected one of calculator, python, ...
  """
  if ":" not in name and name not in ENVIRONMENTS:
    hint = did_you_mean(name, ENVIRONMENTS)
    raise ValueError(Problem("environment.name", repr(name), f"one of {', '.join(ENVIRONMENTS)}, MODULE:FUNCTION{hint}"))
  known = () if ":" in name else tuple(inspect.signature(ENVIRONMENTS[name]).parameters)
  for setting in settings:
    if setting not in known:
      expected = f"None or 0, because environment {name} does not read it"
      raise ValueError(Problem(f"environment.{setting}", shown(settings[setting]), expected))


def make(name: str, **settings: Any) -> Environment:
  """Makes an environment by name (see `check_environment`) with its settings.

  Raises:
    ValueError: If the environment or a setting is unknown, or if the user's function cannot be
      imported or returns another type. One line.

  Example:
    >>> make("calculator").stops
    ('=',)
  """
  check_environment(name, settings)
  if name in ENVIRONMENTS:
    return ENVIRONMENTS[name](**settings)
  made = load(name, where=f"environment.name {name!r}")()
  if not isinstance(made, Environment):
    raise ValueError(f"environment.name: {name} returned {type(made).__name__}, expected a jaxrl_llm.rollouts.environments.Environment")
  return made
