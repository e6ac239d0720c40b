"""Verdicts of rules.

There are five of them, Student's interval over paired seeds, and what a comparison could have seen.

A rule names a quantity and the side of a bound on which the claim puts it. The quantity has one
value a seed; its 95 % interval is Student's. The claim is

  reproduced             where the interval lies on the claim's side of the bound;
  contradicted           where it lies on the other side;
  inconclusive           where it holds the bound: the run could not tell;
  mechanism not engaged  where what the claim is about did not happen in the run, so that nothing
  could have decided; identity verified      where it is algebra, checked in floating point: no
  experiment.

Whether there is *no* difference worth having is a claim of its own (`within`), and is reproduced
where the interval lies between two bounds: two one-sided tests at 2.5 % each (Schuirmann, 1987).

Student's interval widens with outliers of either sign, so that for bimodal outcomes (some seeds
learn, some do not) it errs on the side of "inconclusive". The exact sign-flip test, which assumes
only that the differences are symmetric about 0 under the null, is stored beside it; with five seeds
its smallest p-value is 0.0625.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

REPRODUCED, CONTRADICTED, INCONCLUSIVE = "reproduced", "contradicted", "inconclusive"
NOT_ENGAGED, VERIFIED, CALIBRATION = "mechanism not engaged", "identity verified", "calibration"
VERDICTS = (REPRODUCED, CONTRADICTED, INCONCLUSIVE, NOT_ENGAGED, VERIFIED)
"""In the order in which a page counts them. A calibration is a measurement without a claim."""

POWER, ALPHA = 0.8, 0.05


def interval(values: Sequence[float]) -> dict[str, float]:
  """Returns the mean over the seeds, and Student's 95 % interval of it.

  Example:
    >>> {name: round(x, 3) for name, x in interval([1.0, 2.0, 3.0]).items()}
    {'mean': 2.0, 'low': -0.484, 'high': 4.484}
  """
  from scipy.stats import t  # jax needs scipy, so it is there.

  mean, count = float(np.mean(values)), len(values)
  half = float(t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count)) if count > 1 else math.inf
  return {"mean": mean, "low": mean - half, "high": mean + half}


def solved(trials: Sequence[Mapping], **where) -> dict[int, float]:
  """Returns the held-out accuracy at the end of a trial, by seed.

  Args:
    trials: Rows with `seed`, `right` (a digit for each problem) and `samples`.
    **where: Values that the rows must hold.
  """
  rows = [row for row in trials if all(row[name] == value for name, value in where.items())]
  return {row["seed"]: float(np.mean([int(x) for x in row["right"]])) / row["samples"] for row in rows}


def paired(more: Mapping[int, float], less: Mapping[int, float]) -> np.ndarray:
  """Returns the differences of two arms, a number for each seed that both have.

  They are in the order of the seeds.

  Example:
    >>> paired({0: 0.5, 1: 0.75}, {1: 0.25, 0: 0.25}).tolist()
    [0.25, 0.5]
  """
  return np.array([more[seed] - less[seed] for seed in sorted(more) if seed in less])


def above(rule: str, values: Iterable[float], bound: float = 0.0, *, engaged: bool = True, **numbers) -> dict:
  """Returns the verdict of a claim that a quantity lies above a bound.

  Args:
    rule: The claim in words.
    values: The quantity, a number for each seed.
    bound: The bound.
    engaged: Whether the claim's mechanism was at work in the run.
    **numbers: Further numbers to store beside the verdict.

  Returns:
    A row of "verdicts": `rule`, `verdict`, `interval` (Student's 95 %), `seeds`, `p` (two-sided,
    Student's test against the bound), `p_sign_flip`, and `finds`, the true distance from the bound
    that would have been found with a probability of 80 %.

  Example:
    >>> above("b above a", [0.1, 0.2, 0.15])["verdict"], above("b above a", [0.1, -0.2, 0.15])["verdict"]
    ('reproduced', 'inconclusive')
  """
  return _judged(rule, values, bound, lambda at: at["low"] > bound, lambda at: at["high"] < bound, engaged, numbers)


def below(rule: str, values: Iterable[float], bound: float = 0.0, *, engaged: bool = True, **numbers) -> dict:
  """Returns the verdict of a claim that a quantity lies below a bound; see `above`."""
  return _judged(rule, values, bound, lambda at: at["high"] < bound, lambda at: at["low"] > bound, engaged, numbers)


def within(rule: str, values: Iterable[float], low: float, high: float, *, engaged: bool = True, **numbers) -> dict:
  """Returns the verdict of a claim that a quantity lies between two bounds.

  See `above`. Its `p` is against the nearer one.
  """
  values = np.asarray(list(values), float)
  nearer = min((low, high), key=lambda bound: abs(np.mean(values) - bound))
  holds = lambda at: low < at["low"] and at["high"] < high
  return _judged(rule, values, nearer, holds, lambda at: at["high"] < low or at["low"] > high, engaged, numbers)


def more_often(rule: str, more: Mapping[int, bool], less: Mapping[int, bool], *, engaged: bool = True, **numbers) -> dict:
  """Returns the verdict of a claim that something happens in more seeds of one arm than of another.

  The test is McNemar's exact test.

  It is not engaged where it happens in neither arm. `needs` is the number of seeds that have to
  differ, all to one side, for a verdict.

  Example:
    >>> more_often("a falls more often", dict.fromkeys(range(6), True), dict.fromkeys(range(6), False))["verdict"]
    'reproduced'
  """
  from scipy.stats import binomtest

  seeds = sorted(set(more) & set(less))
  first, second = ([bool(arm[seed]) for seed in seeds] for arm in (more, less))
  only_first, only_second = (sum(a and not b for a, b in zip(*pair, strict=True)) for pair in ((first, second), (second, first)))
  split = only_first + only_second
  p = float(binomtest(only_first, split).pvalue) if split else 1.0
  side = REPRODUCED if only_first > only_second else CONTRADICTED
  verdict = (side if p < ALPHA else INCONCLUSIVE) if engaged and (any(first) or any(second)) else NOT_ENGAGED
  needs = 1 - math.floor(math.log2(ALPHA))  # The least n with 2 / 2^n below the level.
  numbers = {"first": sum(first), "second": sum(second), "of": len(seeds), "needs": needs, "p": p} | numbers
  return {"rule": rule, "verdict": verdict, **numbers}


def mostly(rule: str, happened: Mapping[int, bool], *, engaged: bool = True, **numbers) -> dict:
  """Returns the verdict of a claim that something happens in more than half of all seeds.

  It is by the exact 95 % interval of a fraction.

  `needs` is the number of seeds in which it has to happen for the claim to be reproduced; None
  where all of them would not be enough.

  Example:
    >>> mostly("it falls", dict.fromkeys(range(5), True))["verdict"], mostly("it falls", dict.fromkeys(range(8), True))["verdict"]
    ('inconclusive', 'reproduced')
  """
  from scipy.stats import binomtest

  test = binomtest(sum(map(bool, happened.values())), len(happened))
  at = test.proportion_ci(0.95)
  verdict = REPRODUCED if at.low > 0.5 else CONTRADICTED if at.high < 0.5 else INCONCLUSIVE
  enough = (count for count in range(test.n + 1) if binomtest(count, test.n).proportion_ci(0.95).low > 0.5)
  numbers = {"happened": test.k, "of": test.n, "needs": next(enough, None), "p": float(test.pvalue)} | numbers
  return {"rule": rule, "verdict": verdict if engaged else NOT_ENGAGED, **numbers}


def every(rule: str, parts: Mapping[str, Mapping]) -> dict:
  """Returns the verdict of a claim that several rules hold together.

  It is an intersection-union test, whose p-value is the largest of theirs.

  Args:
    rule: The claim in words.
    parts: The verdicts of its parts, by name.

  Example:
    >>> every("both", {"a": above("", [1.0, 1.1]), "b": above("", [1.0, -1.1])})["verdict"]
    'inconclusive'
  """
  verdicts = {part["verdict"] for part in parts.values()}
  worst = next((verdict for verdict in (CONTRADICTED, NOT_ENGAGED, INCONCLUSIVE) if verdict in verdicts), REPRODUCED)
  held = [name for name, part in parts.items() if part["verdict"] == REPRODUCED]
  p = max((part["p"] for part in parts.values() if "p" in part), default=None)
  numbers = {"held": len(held), "of": len(parts), "fail": [name for name in parts if name not in held], "p": p}
  return {"rule": rule, "verdict": worst} | numbers


def holds(rule: str, passed: bool, /, *, identity: bool = False, engaged: bool = True, **numbers) -> dict:
  """Returns the verdict of a rule without chance.

  It holds if all cells of a table pass, or an identity holds in floating point.
  """
  verdict = (VERIFIED if identity else REPRODUCED) if passed else CONTRADICTED
  return {"rule": rule, "verdict": verdict if engaged else NOT_ENGAGED, **numbers}


def collapsed(curve: Sequence[float], *, share: float = 0.5) -> bool:
  """Returns whether a trial has collapsed.

  Over its last quarter held-out accuracy stays below half of its own peak.

  Args:
    curve: Held-out accuracies from the start of training to its end, evenly spaced.
    share: Share of the peak; 0.5 is the endpoint of all studies, others show how much depends on
      it.

  Example:
    >>> collapsed([0.3, 0.5, 0.8, 0.3, 0.2]), collapsed([0.3, 0.5, 0.8, 0.3, 0.7]), collapsed([0.3, 0.2])
    (True, False, False)
  """
  last = curve[math.ceil(0.75 * (len(curve) - 1)) :]
  return max(last) < share * max(curve)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
  """Returns Holm's adjusted p-values of a family of tests.

  Example:
    >>> {name: round(p, 3) for name, p in holm({"a": 0.01, "b": 0.04, "c": 0.03}).items()}
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
  """
  adjusted, highest = {}, 0.0
  for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
    highest = max(highest, min(1.0, (len(p_values) - rank) * p))
    adjusted[name] = highest
  return adjusted


def sign_flip(values: Sequence[float]) -> float:
  """Returns the two-sided p-value of the sign-flip test of a mean of 0.

  It is exact up to 16 values, else of 100,000 random flips.

  Example:
    >>> sign_flip([0.1, 0.2, 0.15, 0.3, 0.1])
    0.0625
  """
  values = np.asarray(values, float)
  values = values[values != 0]
  if not len(values):
    return 1.0
  if len(values) <= 16:
    signs = np.array(list(itertools.product((1, -1), repeat=len(values))))
  else:
    signs = np.random.default_rng(0).choice((1, -1), (100_000, len(values)))
  return float(np.mean(np.abs(signs @ values) >= abs(values.sum()) * (1 - 1e-12)))


def described(row: Mapping) -> str:
  """Returns the numbers of a verdict in words.

  They are its interval and what it could have found, or else its entries.

  Example:
    >>> described(above("b above a", [0.1, 0.2, 0.15]))
    '+0.15 [+0.0258, +0.274], 3 seeds, p = 0.035; would find 0.155'
    >>> described({"rule": "it is", "verdict": "", "passed": 3, "of": 5})
    'passed 3, of 5'
  """
  skipped = {"rule", "verdict", "interval", "seeds", "p", "p_sign_flip", "finds"}
  if at := row.get("interval"):
    text = f"{at['mean']:+.3g} [{at['low']:+.3g}, {at['high']:+.3g}], {row['seeds']} seeds"
    return text + (f", p = {row['p']:.2g}; would find {row['finds']:.3g}" if "p" in row else "")
  kept = {name: value for name, value in row.items() if isinstance(value, int | float) and name not in skipped}
  numbers = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in kept.items()]
  return ", ".join(numbers) + (f", p = {row['p']:.2g}" if row.get("p") is not None else "") or row["rule"]


def lines(verdicts: Mapping[str, Mapping]) -> str:
  """Returns all verdicts, a line each, as a study prints them."""
  return "\n".join(f"{name}: {row['verdict']} ({described(row)})" for name, row in verdicts.items())


def _judged(rule: str, values: Iterable[float], bound: float, holds, fails, engaged: bool, numbers: Mapping) -> dict:
  values = np.asarray(list(values), float)
  at = interval(values)
  verdict = REPRODUCED if holds(at) else CONTRADICTED if fails(at) else INCONCLUSIVE
  row = {"rule": rule, "verdict": verdict if engaged else NOT_ENGAGED, "interval": at, "seeds": len(values)}
  if len(values) > 1:
    row |= {"p": _student_p(values - bound), "p_sign_flip": sign_flip(values - bound), "finds": _finds(values)}
  return row | numbers


def _student_p(values: np.ndarray) -> float:
  from scipy.stats import t

  spread = np.std(values, ddof=1) / math.sqrt(len(values))
  if spread == 0:
    return float(values[0] == 0)
  return float(2 * t.sf(abs(np.mean(values)) / spread, len(values) - 1))


def _finds(values: np.ndarray) -> float:
  """Returns the distance from a bound that would be found with a probability of 80 %.

  The test is two-sided at 5 %, and the values spread like these.
  """
  from scipy.stats import t

  freedom = len(values) - 1
  return float((t.ppf(1 - ALPHA / 2, freedom) + t.ppf(POWER, freedom)) * np.std(values, ddof=1) / math.sqrt(len(values)))
