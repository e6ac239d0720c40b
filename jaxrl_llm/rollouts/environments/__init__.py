"""Environments for multi-turn conversations, including tools. Plain Python and text; no JAX.

| environment | the policy writes | and reads |
| --- | --- | --- |
| `calculator` | `<<487*36=` | `17532>>` |
| `proposer` | a sum of its own, `7+8-5` | a request to solve it |
| `python` | `<code>print(6 * 7)</code>` | `<interpreter>42</interpreter>` |
| `openenv:URL` | an action of the environment that runs at this address | the observation |
| `verifiers:ID` | a turn of a conversation that an environment of verifiers holds | what its program says next |
| `MODULE:FUNCTION` | (your own: a function that returns an `Environment`) | |
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_llm.messages import Problem, did_you_mean
from jaxrl_llm.rollouts.environments.calculator import calculator
from jaxrl_llm.rollouts.environments.openenv import check_openenv, openenv
from jaxrl_llm.rollouts.environments.proposer import proposer
from jaxrl_llm.rollouts.environments.protocol import Environment, Reply, State
from jaxrl_llm.rollouts.environments.python_tool import python_tool
from jaxrl_llm.rollouts.environments.verifiers import check_verifiers, verifiers
from jaxrl_llm.settings import import_path, signature
from jaxrl_llm.settings.signature import Setting
from jaxrl_llm.settings.values import COUNT, LINES, NOT_NEGATIVE

__all__ = [
  "ENVIRONMENTS", "FAMILIES", "Environment", "Family", "Named", "Reply", "State", "check_environment", "factory", "holds_problems",
  "make", "settings_of", "shared_settings",
]  # fmt: skip

class Named(NamedTuple):
  """An environment with a name of its own.

  Attributes:
    make: Function `(**settings) -> Environment`.
    shared: Section of the config with settings that it shares with rewards; "" for none.
    names: Those settings. What is wrong with the first keeps the environment from working here.
  """

  make: Callable[..., Environment]
  shared: str = ""
  names: tuple[str, ...] = ()


ENVIRONMENTS: dict[str, Named] = {
  "calculator": Named(calculator),
  "proposer": Named(proposer),
  "python": Named(python_tool, "sandbox", ("backend", "timeout_s", "memory_gb", "image", "url")),
}
"""The package's environments by name."""


class Family(NamedTuple):
  """Environments with names of the form FAMILY:REST.

  Attributes:
    make: Function `(rest, *, timeout_s, **settings) -> Environment`.
    check: Function `(rest, **settings)` that rejects wrong names and settings. It runs no user
      code.
    holds_problems: Whether the conversations are about the environment's own problems alone.
  """

  make: Callable[..., Environment]
  check: Callable[..., None]
  holds_problems: bool = False


FAMILIES: dict[str, Family] = {
  "openenv": Family(openenv, check_openenv),
  "verifiers": Family(verifiers, check_verifiers, holds_problems=True),
}
"""Families of environments by the part of the name before the colon."""


RULES = {"call_reward": NOT_NEGATIVE, "sessions": COUNT, "lessons": COUNT, "attempts": COUNT, "max_chars": COUNT} | dict.fromkeys(
  ("action", "reset", "settings", "request"), LINES
)
"""Legal values of settings, which mean the same in every environment; others have a type."""


def check_environment(name: str, settings: dict[str, Any]) -> None:
  """Checks the name and the settings of an environment without making it.

  The name is a key of `ENVIRONMENTS`, FAMILY:REST with a key of `FAMILIES`, or MODULE:FUNCTION.

  Raises:
    MissingPackageError: If the environment needs a package that is missing.
    ValueError: If the name or a setting is unknown. One line, with the fix.

  Example:
    >>> check_environment("calculater", {})
    Traceback (most recent call last):
    ...
    ValueError: environment.name: found 'calculater', expected one of calculator, proposer, ...
  """
  family, rest = _family(name)
  if ":" not in name or family or settings:  # Else there is nothing to import a user's module for.
    make = factory(name)
    for setting in settings:
      if setting not in inspect.signature(make).parameters:
        known = signature.settings_of(make)
        raise ValueError(signature.unread(f"environment.{setting}", settings[setting], known, f"environment {name}"))
  if family:
    family.check(rest, **settings)


def factory(name: str) -> Callable[..., Environment]:
  """Returns the function of settings by keyword that makes an environment.

  Raises:
    ValueError: If there is no such environment. One line, with the fix.
  """
  if name in ENVIRONMENTS:
    return ENVIRONMENTS[name].make
  if (family := _family(name)[0]) is not None:
    return family.make
  if ":" in name:
    return import_path.load_factory(name, where=f"environment.name {name!r}")
  names = f"{', '.join(ENVIRONMENTS)}, openenv:URL, verifiers:ID, MODULE:FUNCTION"
  raise ValueError(Problem("environment.name", repr(name), f"one of {names}{did_you_mean(name, ENVIRONMENTS)}"))


def settings_of(name: str) -> dict[str, Setting]:
  """Returns the settings that an environment alone has; those of another section are left out."""
  return {key: x for key, x in signature.settings_of(factory(name), RULES).items() if key not in shared_settings(name)[1]}


def holds_problems(name: str | None) -> bool:
  """Returns whether an environment's conversations are about its own problems alone."""
  family = _family(name or "")[0]
  return family is not None and family.holds_problems


def shared_settings(name: str) -> tuple[str, tuple[str, ...]]:
  """Returns the section of the config that an environment shares with rewards, and its fields."""
  return ENVIRONMENTS[name][1:] if name in ENVIRONMENTS else ("", ())


def _family(name: str) -> tuple[Family | None, str]:
  """Returns the family of an environment, and the rest of its name; None if it is in no family."""
  family, _, rest = name.partition(":")
  return (FAMILIES[family], rest) if family in FAMILIES else (None, "")


def make(name: str, *, reply_timeout_s: float = 60.0, **settings: Any) -> Environment:
  """Makes an environment by name (see `check_environment`) with its settings.

  Args:
    name: Name of the environment.
    reply_timeout_s: Limit on one reply of an environment that runs elsewhere, in seconds.
    **settings: Settings of the environment itself.

  Raises:
    MissingPackageError: If the environment needs a package that is missing.
    ValueError: If the environment or a setting is unknown, if one that runs elsewhere cannot be
      reached, or if the user's function cannot be imported or returns another type. One line.

  Example:
    >>> make("calculator").stops
    ('=',)
  """
  check_environment(name, settings)
  if name in ENVIRONMENTS:
    return ENVIRONMENTS[name].make(**settings)
  family, rest = _family(name)
  if family:
    return family.make(rest, timeout_s=reply_timeout_s, **settings)
  return import_path.make(factory(name), settings, Environment, where=f"environment.name {name!r}")
