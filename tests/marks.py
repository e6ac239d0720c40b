"""Cases of a test that run by default, and others, which run elsewhere."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

_PARAM = type(pytest.param())

TYPICAL = ("ppo", "grpo", "gspo", "sapo")
"""Objectives that stand for all: both kinds of ratio, a hard and a soft gate, and a critic."""


def few(cases: Iterable[Any], *keep: int | str, rest: str = "exhaustive", by_hand: Sequence[int] = ()) -> list[Any]:
  """Marks all cases of a parametrization except a few.

  Args:
    cases: Cases as `pytest.mark.parametrize` takes them, tuples only for several arguments. Those
      with marks of their own keep these.
    *keep: Indices of the cases that stay without a mark, or their first values.
    rest: Mark of the others, `slow` or `exhaustive`.
    by_hand: Indices of cases that are `exhaustive` even if `rest` is `slow`.
  """
  cases, marked = list(cases), []
  params = [case if isinstance(case, _PARAM) else pytest.param(*(case if isinstance(case, tuple) else (case,))) for case in cases]
  known = {*range(len(cases)), *(param.values[0] for param in params if isinstance(param.values[0], str))}
  assert known.issuperset([*keep, *by_hand]), f"a case is gone, choose others: {keep} {by_hand}"
  for i, param in enumerate(params):
    if i in keep or (isinstance(param.values[0], str) and param.values[0] in keep) or param.marks:
      marked.append(param)
    else:
      mark = getattr(pytest.mark, "exhaustive" if i in by_hand else rest)
      marked.append(pytest.param(*param.values, marks=mark, id=param.id))
  return marked


def typical(cases: Iterable[Any]) -> list[Any]:
  """Leaves the cases of typical objectives unmarked; the first value of a case is its objective."""
  cases = list(cases)
  names = {case[0] if isinstance(case, tuple) else case for case in cases}
  return few(cases, *(name for name in TYPICAL if name in names), rest="slow")
