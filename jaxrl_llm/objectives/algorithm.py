"""Shared half of every algorithm: settings, their documentation, and composition of the slots."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from jaxrl_llm.objectives.base import policy_objective, weights_by_name
from jaxrl_llm.objectives.gates import GATES
from jaxrl_llm.objectives.penalties import entropy_bonus, kl_penalty
from jaxrl_llm.objectives.settings import Rule, checked, gate_settings
from jaxrl_llm.types import GateFn, Objective, PenaltyFn, RatioFn, TrainBatch

SHARED = """\
  kl_coef: Loss per nat of divergence from the reference; if positive, the objective needs
    `ref_logprobs`.
  kl_estimator: Key of `penalties.KL_ESTIMATORS`.
  entropy_coef: Reward per nat of entropy; if positive, the objective needs `entropy`.
  weights: Weighting of tokens: "token_mean", "prompt_mean", "sequence_mean", "sequence_sum" or
    "constant".
  max_tokens: Generation budget in tokens, for weights="constant" only.

Returns:
  The objective.

Raises:
  ValueError: If a setting is unknown, illegal or without effect.\
"""
"""Docstring shared by all algorithms; it follows the arguments of the gate and the algorithm."""


class Slots(NamedTuple):
  """Parts that distinguish an algorithm from the others.

  Attributes:
    ratio, gate, value_loss, anchor, prepare, teaches_without_advantage: Arguments of
      `base.policy_objective`.
    correction: Off-policy correction that is part of the algorithm (see `corrections`), as a
      function of the objective; None for no correction.
  """

  ratio: RatioFn
  gate: GateFn
  value_loss: PenaltyFn | None = None
  anchor: str | None = "old"
  prepare: Callable[[TrainBatch], TrainBatch] | None = None
  teaches_without_advantage: bool = False
  correction: Callable[[Objective], Objective] | None = None


def algorithm(
  *,
  weights: str,
  max_tokens: int | None = None,
  kl_coef: float = 0.0,
  settings_of: Callable[..., GateFn] | None = None,
  rules: Mapping[str, Rule] | None = None,
  name: str | None = None,
) -> Callable[[Callable[..., Slots]], Callable[..., Objective]]:
  """Decorates a function that returns an algorithm's slots, to make it an objective's factory.

  The function takes the algorithm's own settings. The factory also takes those that all algorithms
  share (`SHARED`). It names every setting in its signature and docstring, and rejects illegal ones
  (see `settings.checked`). A parameter `**gate_settings` stands for the settings of all gates: each
  is None by default, and the function receives those that are not None.

  Args:
    weights, max_tokens, kl_coef: Defaults of these settings.
    settings_of: Gate factory whose docstring describes the settings that the function passes to it;
      None for a function that describes all of its settings itself.
    rules: Rules by name of setting, in addition to those of `settings.RULES` or in place of them.
    name: Name of the algorithm; None for the name of the function.

  Example:
    >>> from jaxrl_llm.objectives.gates import hard_clip
    >>> from jaxrl_llm.objectives.ratios import sequence_ratio
    >>> @algorithm(weights="sequence_mean")
    ... def wide_gspo(*, clip_high: float = 0.04) -> Slots:
    ...   return Slots(ratio=sequence_ratio, gate=hard_clip(0.03, clip_high))
    >>> list(inspect.signature(wide_gspo).parameters)
    ['clip_high', 'kl_coef', 'kl_estimator', 'entropy_coef', 'weights', 'max_tokens']
    >>> wide_gspo(entropy_coef=0.01).ratio_level
    'sequence'
  """
  parameter = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
  shared = (
    parameter("kl_coef", default=kl_coef, annotation=float),
    parameter("kl_estimator", default="k3", annotation=str),
    parameter("entropy_coef", default=0.0, annotation=float),
    parameter("weights", default=weights, annotation=str),
    parameter("max_tokens", default=max_tokens, annotation=int | None),
  )

  def decorate(slots_of: Callable[..., Slots]) -> Callable[..., Objective]:
    own = inspect.signature(slots_of).parameters

    def make(*, kl_coef, kl_estimator, entropy_coef, weights, max_tokens, **settings) -> Objective:
      slots = slots_of(**{key: x for key, x in settings.items() if key in own or x is not None})
      # A penalty with a coefficient of 0 is left out and costs nothing.
      penalties = [kl_penalty(kl_coef, kl_estimator)] if kl_coef else []
      penalties += [entropy_bonus(entropy_coef)] if entropy_coef else []
      needs = frozenset(field for field, coef in (("ref_logprobs", kl_coef), ("entropy", entropy_coef)) if coef)
      weigh = weights if callable(weights) else weights_by_name(weights, max_tokens)
      parts = slots._asdict()
      correct = parts.pop("correction")
      objective = policy_objective(**parts, weigh=weigh, penalties=penalties, needs=needs)
      return objective if correct is None else correct(objective)

    function = getattr(slots_of, "func", slots_of)  # Unwraps a functools.partial.
    functools.update_wrapper(make, function)
    make.__name__ = make.__qualname__ = name or function.__name__
    make.__doc__ = _documented(function.__doc__, "" if settings_of is None else _described(settings_of, own))
    make.__signature__ = inspect.Signature([*_expanded(own.values()), *shared], return_annotation=Objective)
    return checked(make, rules)

  return decorate


def _expanded(parameters: Iterable[inspect.Parameter]) -> Iterator[inspect.Parameter]:
  """Yields parameters, with `**gate_settings` spelt out: all gate settings, None by default."""
  for parameter in parameters:
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
      for setting in dict.fromkeys(setting for gate in GATES for setting in gate_settings(gate)):
        yield inspect.Parameter(setting, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=float | None)
    else:
      yield parameter


def _described(gate: Callable[..., GateFn], names: Iterable[str]) -> str:
  """Returns the entries of a gate's docstring for those settings that are among the names."""
  entries = re.finditer(r"^  (\w+): .*(?:\n    .*)*", inspect.cleandoc(gate.__doc__ or ""), flags=re.MULTILINE)
  return "\n".join(entry[0] for entry in entries if entry[1] in names)


def _documented(docstring: str | None, of_gate: str) -> str:
  """Completes an algorithm's docstring: gate arguments before its own, shared ones after."""
  text, *rest = re.split(r"\n\n(?=(?:Example|References|Note):\n)", inspect.cleandoc(docstring or ""), maxsplit=1)
  text, _, own = text.partition("\n\nArgs:\n")
  arguments = "\n".join(filter(None, [of_gate, own, SHARED]))
  return "\n\n".join([f"{text}\n\nArgs:\n{arguments}", *rest])
