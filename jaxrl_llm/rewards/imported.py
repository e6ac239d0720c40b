"""A reward that is any Python function, given by its import path."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.messages import did_you_mean, one_line
from jaxrl_llm.text_types import RewardFn


def imported(path: str, settings: Mapping[str, Any] | None = None) -> RewardFn:
  """Imports a reward function of your own.

  Args:
    path: Import path `package.module:function`, with the module on Python's path. The function
      takes `(completion, example)` and returns one number.
    settings: Keyword arguments for a factory at `path` that returns the reward function. None if
      `path` is the reward function itself.

  Returns:
    The reward function.

  Raises:
    ValueError: If the module or name does not exist, or the object cannot be called with two
      arguments. One line, with the fix.

  Example:
    >>> imported("jaxrl_llm.rewards.answer_form:answer_from")
    Traceback (most recent call last):
    ...
    ValueError: reward ...: found no 'answer_from' in the module, ...; did you mean 'answer_form'?
  """
  where = f"reward {path!r}"
  function = load(path, where=where)
  if settings is not None:
    _check_call(where, function, (), dict(settings), f"a factory that takes {sorted(settings)}")
    try:
      function = function(**settings)
    except Exception as error:  # A user's factory may raise anything.
      raise ValueError(f"{where}: calling it with {sorted(settings)} raised {one_line(error)}") from error
  _check_call(where, function, (None, None), {}, "a function of (completion, example)")
  return function


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


def _check_call(where: str, function: Any, args: tuple, kwargs: dict[str, Any], expected: str) -> None:
  """Raises a ValueError if an object cannot be called with these arguments."""
  if not callable(function):
    raise ValueError(f"{where}: found {type(function).__name__}, expected {expected}")
  if inspect.iscoroutinefunction(function):
    raise ValueError(f"{where}: found an async function, expected {expected} that returns a number")
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # Some built-in functions have no signature.
    return
  try:
    signature.bind(*args, **kwargs)
  except TypeError as error:
    raise ValueError(f"{where}: found the signature {signature}, expected {expected}: {error}") from None
