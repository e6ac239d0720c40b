"""Which hyper-parameters an objective takes, what each may be, and which do not go together.

A name means the same in every objective, so its rule stands here once. All problems of a call come in one message.
"""

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

from jaxrl_llm.objectives.base import WEIGHTS
from jaxrl_llm.objectives.penalties import KL_ESTIMATORS
from jaxrl_llm.types import Objective


def _is_number(x: Any) -> bool:
  return isinstance(x, numbers.Real) and not isinstance(x, bool) and not math.isnan(x)


def _is_finite(x: Any) -> bool:
  return _is_number(x) and math.isfinite(x)


def _is_count(x: Any) -> bool:
  return isinstance(x, numbers.Integral) and not isinstance(x, bool) and int(x) > 0


def _choice(choices: Iterable[str]) -> tuple[Callable[[Any], bool], str]:
  return lambda x: isinstance(x, str) and x in choices, "one of " + ", ".join(map(repr, choices))


_COEFFICIENT = (lambda x: _is_finite(x) and x >= 0, "a finite number >= 0")
_TEMPERATURE = (lambda x: _is_finite(x) and x > 0, "a finite number > 0")

RULES = {
  "clip_low": (lambda x: _is_number(x) and 0 <= x <= 1, "a number from 0 to 1, since a ratio is never below 0"),
  "clip_high": (lambda x: _is_number(x) and x >= 0, "a number >= 0"),
  "dual_clip": (lambda x: x is None or (_is_finite(x) and x > 1), "None or a finite number > 1"),
  "tau_pos": _TEMPERATURE,
  "tau_neg": _TEMPERATURE,
  "kl_coef": _COEFFICIENT,
  "kl_estimator": _choice(KL_ESTIMATORS),
  "entropy_coef": _COEFFICIENT,
  "value_coef": _COEFFICIENT,
  "value_clip": (lambda x: x is None or (_is_finite(x) and x >= 0), "None or a finite number >= 0"),
  "weights": _choice(WEIGHTS),
  "max_tokens": (lambda x: x is None or _is_count(x), "None or a whole number of tokens > 0"),
}
"""Each hyper-parameter: the test it must pass and that test in words."""


def _conflicts(settings: dict[str, Any], given: dict[str, Any], defaults: dict[str, Any]) -> Iterable[str]:
  """Settings that are legal alone, but not together; `given` are those the caller wrote."""
  if settings["weights"] == "constant" and settings["max_tokens"] is None:
    yield "max_tokens: found None, expected a whole number of tokens > 0, because weights is 'constant'"
  if settings["weights"] != "constant" and given.get("max_tokens") is not None:
    yield f"max_tokens: found {given['max_tokens']!r}, expected None, because weights is {settings['weights']!r} and would ignore it"
  for switch, dependent in (("kl_coef", "kl_estimator"), ("value_coef", "value_clip")):
    if settings.get(switch) == 0 and settings[dependent] != defaults[dependent]:
      yield f"{dependent}: found {settings[dependent]!r}, expected {defaults[dependent]!r}, because {switch} is 0 and would ignore it"


def did_you_mean(name: Any, known: Iterable[str]) -> str:
  """A hint where something known is close to `name`, else nothing.

  Example:
    >>> did_you_mean("Gsop", ["gspo", "grpo"])
    " (did you mean 'gspo'?)"
  """
  close = difflib.get_close_matches(str(name).lower(), list(known), n=1)
  return f" (did you mean {close[0]!r}?)" if close else ""


def _plain(x: Any) -> Any:
  """Python's own numbers: 0, 0.0 and NumPy's 0 are one setting."""
  return float(x) if _is_number(x) else x


def checked(factory: Callable[..., Objective]) -> Callable[..., Objective]:
  """Decorates an objective's factory: it refuses settings that are unknown, illegal or without effect.

  Args:
    factory: function of keyword hyper-parameters that all have a default and a rule in `RULES`.

  Returns:
    The factory, which raises ValueError with every problem in one line, as field, found, expected.

  Example:
    >>> from jaxrl_llm.objectives.gspo import gspo
    >>> gspo(clip_low=-1)
    Traceback (most recent call last):
      ...
    ValueError: gspo: clip_low: found -1, expected a number from 0 to 1, since a ratio is never below 0
  """
  defaults = {name: parameter.default for name, parameter in inspect.signature(factory).parameters.items()}
  takes = ", ".join(f"{name}={default!r}" for name, default in defaults.items())

  @functools.wraps(factory)
  def checked_factory(**given: Any) -> Objective:
    unknown = [f"unknown hyper-parameter {name!r}{did_you_mean(name, defaults)}" for name in given if name not in defaults]
    settings = {name: given.get(name, default) for name, default in defaults.items()}
    illegal = [f"{name}: found {x!r}, expected {RULES[name][1]}" for name, x in settings.items() if not RULES[name][0](x)]
    # Only legal settings can be compared with one another.
    problems = unknown + (illegal or list(_conflicts(settings, given, defaults)))
    if unknown:
      problems.append(f"it takes {takes}")
    if problems:
      raise ValueError(f"{factory.__name__}: {'; '.join(problems)}")
    return factory(**{name: int(x) if _is_count(x) and name == "max_tokens" else _plain(x) for name, x in settings.items()})

  return checked_factory
