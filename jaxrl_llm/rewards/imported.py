"""A reward that is any Python function, given by its import path."""

import inspect
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.messages import one_line
from jaxrl_llm.settings.import_path import load
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
