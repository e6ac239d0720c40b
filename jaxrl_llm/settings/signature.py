"""Settings of a registry entry, from its signature, its docstring and the rules of its room."""

import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.messages import Problem, did_you_mean, shown
from jaxrl_llm.settings.values import NUMBER, SWITCH, TEXT, Check, has_type

_IS_NUMBER = lambda x: has_type(NUMBER, x)
_BY_TYPE = {
  float: Check(_IS_NUMBER, "a number", float),
  int: Check(lambda x: isinstance(x, int) and _IS_NUMBER(x), "a whole number", int),
  str: TEXT,
  bool: SWITCH,
  tuple: Check(lambda x: isinstance(x, tuple), "a tuple, as in (0.5, 5.0)", tuple),
}


class Setting(NamedTuple):
  """A setting of an entry.

  Attributes:
    default: Default; `inspect.Parameter.empty` for a setting that must be given.
    check: Check of its legal values.
    sentence: Meaning, from the entry's docstring.
  """

  default: Any
  check: Check
  sentence: str

  @property
  def is_required(self) -> bool:
    """Whether the setting has no default."""
    return self.default is inspect.Parameter.empty


def settings_of(make: Callable[..., Any], rules: Mapping[str, Any] = types.MappingProxyType({})) -> dict[str, Setting]:
  """Returns the settings of an entry: the keyword parameters of the function that makes it.

  Args:
    make: Function that makes the entry. Parameters without a default are settings only if they can
      be passed by keyword alone.
    rules: Legal values of settings, by name: a `Check`, or a test with the same test in words. The
      type of the default or the annotation is all that is known of others.

  Example:
    >>> def pull(*, width: float = 1.0, anchor: str | None = None):
    ...   '''Pulls.
    ...
    ...   Args:
    ...     width: Half-width of the pull, in
    ...       nats.
    ...   '''
    >>> settings_of(pull)["width"].sentence, settings_of(pull)["anchor"].check.words
    ('Half-width of the pull, in nats.', 'text on one line, of printable characters')
  """
  try:
    parameters = inspect.signature(make).parameters
  except (TypeError, ValueError):  # Some built-in functions have no signature.
    return {}
  sentences, settings = documented(make), {}
  for name, parameter in parameters.items():
    can_be_omitted = parameter.default is not parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    if parameter.kind is parameter.KEYWORD_ONLY or can_be_omitted:
      rule = rules.get(name, _BY_TYPE[_type(parameter)])
      check = rule if isinstance(rule, Check) else Check(*rule, _type(parameter))
      optional = type(None) in (type(parameter.default), *typing.get_args(parameter.annotation))
      settings[name] = Setting(parameter.default, check._replace(optional=optional), sentences.get(name, ""))
  return settings


def documented(make: Callable[..., Any]) -> dict[str, str]:
  """Returns what a docstring says about each argument (or attribute), on one line each."""
  while isinstance(make, functools.partial):
    make = make.func
  section = re.search(r"^(?:Args|Attributes):\n((?:  .*\n|\n)*)", inspect.cleandoc(make.__doc__ or "") + "\n", flags=re.MULTILINE)
  entries = re.finditer(r"^  ([\w, ]+): (.*(?:\n    .*)*)", section[1] if section else "", flags=re.MULTILINE)
  return {name: " ".join(entry[2].split()) for entry in entries for name in entry[1].split(", ")}


def _type(parameter: inspect.Parameter) -> type:
  """Returns the type of a setting: that of its default, or of its annotation besides None."""
  if type(parameter.default) in _BY_TYPE:
    return float if parameter.default.__class__ is int and float in _members(parameter.annotation) else type(parameter.default)
  members = [typing.get_origin(member) or member for member in _members(parameter.annotation)]
  for member in members:
    if member in _BY_TYPE:
      return member
    if member is os.PathLike:
      return str
    if isinstance(member, type) and issubclass(member, Collection):
      return tuple
  return str


def _members(annotation: Any) -> tuple[Any, ...]:
  is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
  return tuple(x for x in typing.get_args(annotation) if x is not type(None)) if is_union else (annotation,)


def in_words(settings: Mapping[str, Setting]) -> str:
  """Lists settings with their defaults, as in `tau_pos=1.0, tau_neg=1.05`."""
  return ", ".join(name if x.is_required or x.default is None else f"{name}={x.default!r}" for name, x in settings.items())


def unread(field: str, value: Any, settings: Mapping[str, Setting], entry: str) -> Problem:
  """Returns the problem of a setting that an entry does not have.

  Args:
    field: Path of the setting.
    value: Value of the setting.
    settings: Settings of the entry.
    entry: Name of the entry, for the message.

  Example:
    >>> unread("width", 2.0, {}, "objective gspo").expected
    'None, because objective gspo does not read it and takes no settings of its own'
  """
  takes = f"takes {in_words(settings)}" if settings else "takes no settings of its own"
  near = did_you_mean(field.rpartition(".")[2], settings)
  return Problem(field, shown(value), f"None, because {entry} does not read it and {takes}{near}")
