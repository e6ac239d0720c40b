"""Hyper-parameters of objectives: which ones exist, what each may be, and which ones conflict.

A name means the same in every objective, so its rule is stated once, here. All problems of a call
are in one message.
"""

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxrl_llm import messages
from jaxrl_llm.objectives.base import WEIGHTS
from jaxrl_llm.objectives.gates import GATES
from jaxrl_llm.objectives.penalties import KL_ESTIMATORS
from jaxrl_llm.objectives.ratios import RATIOS
from jaxrl_llm.types import GateFn, Objective

Rule = tuple[Callable[[Any], bool], str]
"""A test that a setting must pass, and the same test in words."""


def is_number(x: Any) -> bool:
  """Returns whether `x` is a real number, infinities included; a bool or NaN is not."""
  return isinstance(x, numbers.Real) and not isinstance(x, bool) and not math.isnan(x)


def is_finite(x: Any) -> bool:
  """Returns whether `x` is a finite real number."""
  return is_number(x) and math.isfinite(x)


def _is_count(x: Any) -> bool:
  return isinstance(x, numbers.Integral) and not isinstance(x, bool) and int(x) > 0


def one_of(choices: Iterable[str]) -> Rule:
  """Returns the rule of a setting that takes one of several names."""
  return lambda x: isinstance(x, str) and x in choices, "one of " + ", ".join(map(repr, choices))


def name_or_function(choices: Iterable[str]) -> Rule:
  """Returns the rule of a slot that takes a function or the name of one."""
  is_name, words = one_of(choices)
  return lambda x: callable(x) or is_name(x), f"{words}, or a function"


_COEFFICIENT = (lambda x: is_finite(x) and x >= 0, "a finite number >= 0")
_POSITIVE = (lambda x: is_finite(x) and x > 0, "a finite number > 0")
_BOUND = (lambda x: is_number(x) and x >= 0, "a number >= 0")
_CAP = (lambda x: is_number(x) and x >= 1, "a number >= 1, so that a ratio of 1 keeps its weight")

RULES = {
  "ratio": name_or_function(RATIOS),
  "gate": name_or_function(GATES),
  "anchor": one_of(("old", "sampler")),
  "clip_low": (lambda x: is_number(x) and 0 <= x <= 1, "a number from 0 to 1, since a ratio is never below 0"),
  "clip_high": _BOUND,
  "dual_clip": (lambda x: x is None or (is_finite(x) and x > 1), "None or a finite number > 1"),
  "tau_pos": _POSITIVE,
  "tau_neg": _POSITIVE,
  "log_clip_low": _BOUND,
  "log_clip_high": _BOUND,
  "sigma": _POSITIVE,
  "alpha": _COEFFICIENT,
  "beta": _COEFFICIENT,
  "k_pos": _COEFFICIENT,
  "lambda_pos": _POSITIVE,
  "k_neg": _COEFFICIENT,
  "lambda_neg": _POSITIVE,
  "delta_low": _BOUND,
  "delta_high": _BOUND,
  "ratio_cap": _CAP,
  "delta": (lambda x: is_number(x) and 0 <= x <= 1, "a number from 0 to 1, since two probabilities differ by no more"),
  "w_min": (lambda x: is_number(x) and 0 < x <= 1, "a number > 0 and <= 1, the weight of the first token"),
  "budget": _COEFFICIENT,
  "tis_cap": _CAP,
  "pull": _COEFFICIENT,
  "half_life": _POSITIVE,
  "future_cap": _COEFFICIENT,
  "safe_ratio": _CAP,
  "cov_share": (lambda x: is_number(x) and 0 < x < 1, "a number > 0 and < 1, a share of the batch's tokens"),
  "cov_low": (is_number, "a number"),
  "cov_high": (is_number, "a number"),
  "cov_kl_coef": _COEFFICIENT,
  "kl_coef": _COEFFICIENT,
  "kl_estimator": one_of(KL_ESTIMATORS),
  "entropy_coef": _COEFFICIENT,
  "value_coef": _COEFFICIENT,
  "value_clip": (lambda x: x is None or (is_finite(x) and x >= 0), "None or a finite number >= 0"),
  "weights": one_of(WEIGHTS),
  "max_tokens": (lambda x: x is None or _is_count(x), "None or a whole number of tokens > 0"),
}
"""Rule of each hyper-parameter.

If an objective's default for one is None, None is legal too: it leaves the value to other settings.
"""


def gate_settings(gate: str | GateFn) -> dict[str, Any]:
  """Returns the settings of a gate with their defaults; a gate given as a function has none.

  Example:
    >>> gate_settings("soft")
    {'tau_pos': 1.0, 'tau_neg': 1.05}
  """
  return {} if callable(gate) else _defaults(GATES[gate])


def did_you_mean(name: Any, known: Iterable[str]) -> str:
  """Returns a hint if a known name is close to `name`, else an empty string.

  Example:
    >>> did_you_mean("Gsop", ["gspo", "grpo"])
    " (did you mean 'gspo'?)"
  """
  return messages.did_you_mean(str(name).lower(), known, " (did you mean {!r}?)")


def _defaults(factory: Callable) -> dict[str, Any]:
  # Arguments that a functools.partial binds by position are absent from its signature, as intended.
  return {name: parameter.default for name, parameter in inspect.signature(factory).parameters.items()}


def _in_words(settings: Mapping[str, Any]) -> str:
  return ", ".join(f"{name}={x!r}" for name, x in settings.items())


def _conflicts(settings: dict[str, Any], given: dict[str, Any], defaults: dict[str, Any]) -> Iterator[str]:
  """Yields problems of settings that are legal alone but not together.

  `given` holds the settings that the caller passed.
  """
  if "gate" in settings:
    yield from _settings_of_other_gates(settings)
  if "max_tokens" in settings:
    weights, max_tokens = settings["weights"], settings["max_tokens"]
    if weights == "constant" and max_tokens is None:
      yield "max_tokens: found None, expected a whole number of tokens > 0, because weights is 'constant'"
    if weights != "constant" and given.get("max_tokens") is not None:
      yield f"max_tokens: found {max_tokens!r}, expected None, because weights is {weights!r} and would ignore it"
  if "cov_high" in settings and settings["cov_low"] > settings["cov_high"]:
    yield f"cov_low: found {settings['cov_low']!r}, expected at most cov_high={settings['cov_high']!r}"
  for name, coef in (("kl_estimator", "kl_coef"), ("value_clip", "value_coef")):
    if name in settings and settings[coef] == 0 and settings[name] != defaults[name]:
      yield f"{name}: found {settings[name]!r}, expected {defaults[name]!r}, because {coef} is 0 and would ignore it"


def _settings_of_other_gates(settings: dict[str, Any]) -> Iterator[str]:
  """Yields problems of settings that the chosen gate would ignore, if the gate is a setting."""
  gate = settings["gate"]
  takes = gate_settings(gate)
  ignored = {name for factory in GATES.values() for name in _defaults(factory)} - takes.keys()
  for name in (name for name in settings if name in ignored and settings[name] is not None):
    reason = "a function and takes no settings" if callable(gate) else f"{gate!r} and takes {_in_words(takes) or 'no settings'}"
    yield f"{name}: found {settings[name]!r}, expected None, because gate is {reason}{did_you_mean(name, takes)}"


def _plain(name: str, x: Any) -> Any:
  """Converts a number to Python's own type, so that 0, 0.0 and NumPy's 0 are one setting."""
  if name == "max_tokens" and _is_count(x):
    return int(x)
  return float(x) if is_number(x) else x


def checked(factory: Callable[..., Objective], rules: Mapping[str, Rule] | None = None) -> Callable[..., Objective]:
  """Decorates an objective's factory to reject unknown, illegal and ineffective settings.

  The ValueError lists every problem in one line, as field, found, expected. The rules stay with the
  factory, as its attribute `rules`.

  Args:
    factory: Function of keyword hyper-parameters that all have a default and a rule.
    rules: Rules of this factory, in addition to those of `RULES` or in place of them.

  Example:
    >>> from jaxrl_llm.objectives.gspo import gspo
    >>> gspo(clip_low=-1)
    Traceback (most recent call last):
      ...
    ValueError: gspo: clip_low: found -1, expected a number from 0 to 1, since a ratio is never \
below 0
  """
  defaults = _defaults(factory)
  rules = RULES | (rules or {})

  def is_legal(name: str, x: Any) -> bool:
    return (x is None and defaults[name] is None) or bool(rules[name][0](x))

  @functools.wraps(factory)
  def checked_factory(**given: Any) -> Objective:
    unknown = [f"unknown hyper-parameter {name!r}{did_you_mean(name, defaults)}" for name in given if name not in defaults]
    settings = {name: given.get(name, default) for name, default in defaults.items()}
    illegal = [f"{name}: found {x!r}, expected {rules[name][1]}" for name, x in settings.items() if not is_legal(name, x)]
    # Only legal settings can be compared with one another.
    problems = unknown + (illegal or list(_conflicts(settings, given, defaults)))
    if unknown:
      problems.append(f"it takes {_in_words(defaults)}")
    if problems:
      raise ValueError(f"{factory.__name__}: {'; '.join(problems)}")
    return factory(**{name: _plain(name, x) for name, x in settings.items()})

  checked_factory.rules = rules
  return checked_factory
