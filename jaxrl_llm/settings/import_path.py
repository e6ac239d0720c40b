"""Objects that are named by their import path MODULE:FUNCTION."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxrl_llm.messages import did_you_mean, one_line
from jaxrl_llm.settings.signature import settings_of, unread

Made = TypeVar("Made")


def load(path: str, *, where: str) -> Any:
  """Returns the object at an import path.

  Args:
    path: Import path `package.module:name`.
    where: Prefix of error messages.

  Raises:
    ValueError: If the module or name does not exist. One line, with the fix.
  """
  module_name, colon, name = str(path).partition(":")
  if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
    raise ValueError(f"{where}: expected an import path such as 'my_rewards:brevity' or 'package.module:function'")
  try:
    module = importlib.import_module(module_name)
  except Exception as error:  # A user's module may raise anything while it is imported.
    missing = isinstance(error, ModuleNotFoundError) and module_name.startswith(str(error.name))
    hint = "; is its folder on PYTHONPATH?" if missing else ""
    raise ValueError(f"{where}: importing {module_name!r} raised {one_line(error)}{hint}") from error
  if not hasattr(module, name):
    names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    hint = did_you_mean(name, names)
    raise ValueError(f"{where}: found no {name!r} in the module, expected one of {', '.join(sorted(names)[:12]) or 'its functions'}{hint}")
  return getattr(module, name)


def load_factory(path: str, *, where: str) -> Callable[..., Any]:
  """Returns the factory at an import path.

  Raises:
    ValueError: If the module or name does not exist, or cannot be called. One line, with the fix.
  """
  factory = load(path, where=where)
  if not callable(factory):
    raise ValueError(f"{where}: found {type(factory).__name__}, expected a function of settings by keyword")
  return factory


def make(factory: Callable[..., Any], settings: Mapping[str, Any], kind: type[Made], *arguments: Any, where: str) -> Made:
  """Calls a user's factory with settings and checks what it returns.

  Args:
    factory: Factory at an import path.
    settings: Settings by name.
    kind: Type that it must return.
    arguments: Arguments in front of the settings.
    where: Prefix of error messages.

  Raises:
    ValueError: If the factory does not have a setting, raises an error or returns another type. One
      line.
  """
  known = settings_of(factory)
  for name in settings:
    if name not in known:
      raise ValueError(f"{where}: {unread(name, settings[name], known, 'it')}")
  try:
    made = factory(*arguments, **settings)
  except Exception as error:  # A user's factory may raise anything.
    raise ValueError(f"{where}: calling it raised {one_line(error)}") from error
  if not isinstance(made, kind):
    raise ValueError(f"{where}: it returned {type(made).__name__}, expected {kind.__module__}.{kind.__name__}")
  return made
