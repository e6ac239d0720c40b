"""Rules for verdicts: Student's interval over paired seeds, exact tests, and their power.

A rule names a quantity and the side of a bound on which the claim puts it. The quantity has one
value per seed, and its 95 % interval is Student's. There are five verdicts:

  reproduced             The interval lies on the claim's side of the bound.
  contradicted           The interval lies on the other side.
  inconclusive           The interval contains the bound: the run could not tell.
  mechanism not engaged  What the claim is about did not happen in the run, so that nothing could
                         have decided.
  identity verified      The claim is algebra, checked in floating point. It is no experiment.

That there is *no* difference worth having is a claim of its own (`within`). It is reproduced if the
interval lies between two bounds: two one-sided tests at 2.5 % each (Schuirmann, 1987).

Student's interval widens with outliers of either sign. For bimodal outcomes (some seeds learn, some
do not) it therefore errs on the side of "inconclusive". The exact sign-flip test, which assumes
only that the differences are symmetric about 0 under the null, is stored beside it. With five seeds
its smallest p-value is 0.0625.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

REPRODUCED, CONTRADICTED, INCONCLUSIVE = "reproduced", "contradicted", "inconclusive"
NOT_ENGAGED, VERIFIED, CALIBRATION = "mechanism not engaged", "identity verified", "calibration"
VERDICTS = (REPRODUCED, CONTRADICTED, INCONCLUSIVE, NOT_ENGAGED, VERIFIED)
"""Verdicts in the order in which the page counts them; a calibration measures without a claim."""

POWER, ALPHA = 0.8, 0.05
"""Power behind `finds`, and the level of all two-sided tests."""


def interval(values: Sequence[float]) -> dict[str, float]:
  """Returns the mean over the seeds and its 95 % interval by Student.

  Example:
    >>> {name: round(x, 3) for name, x in interval([1.0, 2.0, 3.0]).items()}
    {'mean': 2.0, 'low': -0.484, 'high': 4.484}
  """
  from scipy.stats import t  # JAX depends on SciPy.

  mean, count = float(np.mean(values)), len(values)
  half = float(t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count)) if count > 1 else math.inf
  return {"mean": mean, "low": mean - half, "high": mean + half}


def solved(trials: Sequence[Mapping], **where) -> dict[int, float]:
  """Returns the held-out accuracy at the end of the trials, by seed.

  Args:
    trials: Rows with `seed`, `right` (one digit per problem) and `samples`.
    **where: Values by column; only rows with these values count.
  """
  rows = [row for row in trials if all(row[name] == value for name, value in where.items())]
  return {row["seed"]: float(np.mean([int(x) for x in row["right"]])) / row["samples"] for row in rows}


def paired(more: Mapping[int, float], less: Mapping[int, float]) -> np.ndarray:
  """Subtracts one arm from another, seed by seed.

  The result has one number for each seed that both arms have, in the order of the seeds.

  Example:
    >>> paired({0: 0.5, 1: 0.75}, {1: 0.25, 0: 0.25}).tolist()
    [0.25, 0.5]
  """
  return np.array([more[seed] - less[seed] for seed in sorted(more) if seed in less])


def above(rule: str, values: Iterable[float], bound: float = 0.0, *, engaged: bool = True, **numbers) -> dict:
  """Returns the verdict of a claim that a quantity lies above a bound.

  Args:
    rule: Claim in words.
    values: Quantity, one number per seed.
    bound: Bound.
    engaged: Whether the claim's mechanism was at work in the run.
    **numbers: Further numbers to store beside the verdict.

  Returns:
    A row of "verdicts": `rule`, `verdict`, `interval` (Student's 95 %), `seeds`, `p` (Student's
    two-sided test against the bound), `p_sign_flip`, and `finds`, the true distance from the bound
    that the test would have found with a probability of 80 %.

  Example:
    >>> above("b above a", [0.1, 0.2, 0.15])["verdict"], above("b above a", [0.1, -0.2, 0.15])["verdict"]
    ('reproduced', 'inconclusive')
  """
  return _judged(rule, values, bound, lambda at: at["low"] > bound, lambda at: at["high"] < bound, engaged, numbers)


def below(rule: str, values: Iterable[float], bound: float = 0.0, *, engaged: bool = True, **numbers) -> dict:
  """Judges the claim that a quantity lies below a bound, as `above` does."""
  return _judged(rule, values, bound, lambda at: at["high"] < bound, lambda at: at["low"] > bound, engaged, numbers)


def within(rule: str, values: Iterable[float], low: float, high: float, *, engaged: bool = True, **numbers) -> dict:
  """Returns the verdict of a claim that a quantity lies between two bounds.

  Its `p` is that of the test against the nearer bound. For the rest see `above`.
  """
  values = np.asarray(list(values), float)
  nearer = min((low, high), key=lambda bound: abs(np.mean(values) - bound))
  holds = lambda at: low < at["low"] and at["high"] < high
  return _judged(rule, values, nearer, holds, lambda at: at["high"] < low or at["low"] > high, engaged, numbers)


def more_often(rule: str, more: Mapping[int, bool], less: Mapping[int, bool], *, engaged: bool = True, **numbers) -> dict:
  """Returns the verdict of a claim that something happens in more seeds of one arm than of another.

  The test is McNemar's exact test. If it happens in no seed of either arm, the mechanism is not
  engaged. `needs` is the number of seeds that must differ, all in one direction, for the test to
  decide.

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
  needs = 1 - math.floor(math.log2(ALPHA))  # Smallest n with 2 / 2^n below the level.
  numbers = {"first": sum(first), "second": sum(second), "of": len(seeds), "needs": needs, "p": p} | numbers
  return {"rule": rule, "verdict": verdict, **numbers}


def mostly(rule: str, happened: Mapping[int, bool], *, engaged: bool = True, **numbers) -> dict:
  """Returns the verdict of a claim that something happens in more than half of all seeds.

  The exact 95 % interval of the fraction decides. `needs` is the number of seeds in which it must
  happen for the claim to be reproduced; None if all of them would not be enough.

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

  This is an intersection-union test, whose p-value is the largest p-value of its parts.

  Args:
    rule: Claim in words.
    parts: Verdicts of its parts, by name.

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
  """Returns the verdict of a rule that involves no chance.

  Examples are that all cells of a table pass, or that an identity holds in floating point.
  """
  verdict = (VERIFIED if identity else REPRODUCED) if passed else CONTRADICTED
  return {"rule": rule, "verdict": verdict if engaged else NOT_ENGAGED, **numbers}


def waits(rule: str) -> dict:
  """Returns the verdict of a rule whose trials are not done: it is inconclusive."""
  return {"rule": f"waits for its trials: {rule}", "verdict": INCONCLUSIVE}


def fell(curve: Sequence[float]) -> bool:
  """Returns whether a trial has collapsed: the endpoint of every new study.

  A trial has collapsed if the mean of its held-out accuracy over the last quarter of training is
  below three quarters of the start, or below half of its own peak. The first part is for policies
  that were at their best when they began.

  Args:
    curve: Held-out accuracies from the start of training to its end, evenly spaced.

  Example:
    >>> fell([0.3, 0.5, 0.8, 0.3, 0.2]), fell([0.3, 0.5, 0.8, 0.3, 0.7]), fell([0.3, 0.2])
    (True, False, True)
  """
  last = np.mean(_last_quarter(curve))
  return bool(last < 0.75 * curve[0] or last < 0.5 * max(curve))


def collapsed(curve: Sequence[float], *, share: float = 0.5) -> bool:
  """Returns whether a trial has collapsed by the endpoint of the claims judged before `fell`.

  A trial has collapsed if its held-out accuracy stays below half of its own peak over the last
  quarter of training. The rules of E15, E17 and E20 name this function, and their verdicts
  were read by it, so it stays as it is. It misses a policy that falls from one third to chance and
  has its peak at the start: [33, 5, 10, 14, 18, 18, 13] % is no collapse. By `fell` one verdict of
  the stored rows would differ: "E17, none collapses first, T = 1.4" would be inconclusive (1 seed
  of 29 against 1) where no seed collapses by this function, so that its mechanism is not engaged.

  Args:
    curve: Held-out accuracies from the start of training to its end, evenly spaced.
    share: Share of the peak. All studies use 0.5; other values show how much depends on it.

  Example:
    >>> collapsed([0.3, 0.5, 0.8, 0.3, 0.2]), collapsed([0.3, 0.5, 0.8, 0.3, 0.7]), collapsed([0.3, 0.2])
    (True, False, False)
  """
  return max(_last_quarter(curve)) < share * max(curve)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
  """Adjusts the p-values of a family of tests by Holm's method.

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

  It is exact for up to 16 values that are not 0. Beyond, it is estimated from 100,000 random flips.

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
  """Formats the numbers of a verdict: its interval and its power, or else its other entries.

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
  """Formats all verdicts as a study prints them, one per line."""
  return "\n".join(f"{name}: {row['verdict']} ({described(row)})" for name, row in verdicts.items())


def _last_quarter(curve: Sequence[float]) -> Sequence[float]:
  """Returns the points of a curve that lie in its last quarter, both ends included."""
  return curve[math.ceil(0.75 * (len(curve) - 1)) :]


def _judged(rule: str, values: Iterable[float], bound: float, holds, fails, engaged: bool, numbers: Mapping) -> dict:
  """Makes a row of "verdicts" from two conditions on the interval of the values."""
  values = np.asarray(list(values), float)
  at = interval(values)
  verdict = REPRODUCED if holds(at) else CONTRADICTED if fails(at) else INCONCLUSIVE
  row = {"rule": rule, "verdict": verdict if engaged else NOT_ENGAGED, "interval": at, "seeds": len(values)}
  if len(values) > 1:
    row |= {"p": _student_p(values - bound), "p_sign_flip": sign_flip(values - bound), "finds": _finds(values)}
  return row | numbers


def _student_p(values: np.ndarray) -> float:
  """Returns the two-sided p-value of Student's test of a zero mean."""
  from scipy.stats import t

  spread = np.std(values, ddof=1) / math.sqrt(len(values))
  if spread == 0:
    return float(values[0] == 0)
  return float(2 * t.sf(abs(np.mean(values)) / spread, len(values) - 1))


def _finds(values: np.ndarray) -> float:
  """Returns the distance from a bound that a test would find with a probability of 80 %.

  The test is two-sided at 5 %, on values that spread as much as the given ones.
  """
  from scipy.stats import t

  freedom = len(values) - 1
  return float((t.ppf(1 - ALPHA / 2, freedom) + t.ppf(POWER, freedom)) * np.std(values, ddof=1) / math.sqrt(len(values)))
