"""What each kind of probe earns on each problem."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_llm.rewards.outcome import Graded
from jaxrl_llm.rewards.probes.texts import BLANK, DEMONSTRATION, EMPTY, Probe, probes, variants

GradeFn = Callable[[Sequence[Probe]], Graded]
"""Function `(probes) -> rewards` that grades each probe as a response to its problem."""

EPS = 1e-6  # Rewards are float32.
NEARLY = 0.9
"""Share of what the right answer earns above nothing that counts as earning as much.

Terms for the length or the form of a response may take or add a little.
"""


class Table(NamedTuple):
  """Rewards of probes to n problems.

  Attributes:
    rewards: Total reward by kind of probe, `[n]`; NaN if a problem has no such probe, or no reward.
    parts: Unweighted reward of each term, in the same form; the first is the verifier.
    failures: Description of the first failure, by kind of probe that failed.
    form: Form that the variations have, as in `probes`.
    forms: Forms in which the right answer was stated.
    shown: Those of them that the policy is shown, by where.
    example: Right answer of the first problem.
  """

  rewards: Mapping[str, Float[np.ndarray, " n"]]
  parts: Mapping[str, Mapping[str, Float[np.ndarray, " n"]]]
  failures: Mapping[str, str]
  form: str
  forms: tuple[str, ...]
  shown: Mapping[str, str]
  example: str

  @property
  def num_problems(self) -> int:
    """Number of problems."""
    return len(self.rewards[EMPTY])

  def of(self, kind: str) -> Float[np.ndarray, " n"]:
    """Returns the rewards of a kind of probe; all NaN if there is none of it."""
    return self.rewards.get(kind, np.full(self.num_problems, np.nan))

  def of_term(self, name: str, weight: float) -> "Table":
    """Returns the table of a term by itself, without failures."""
    rewards = {kind: weight * values for kind, values in self.parts[name].items()}
    return self._replace(rewards=rewards, failures={})

  @property
  def nothing(self) -> Float[np.ndarray, " n"]:
    """What a response earns that says nothing; the least of all responses if it has no reward."""
    nothing = np.fmin(self.of(EMPTY), self.of(BLANK))
    return np.where(np.isnan(nothing), self.least, nothing)

  @property
  def least(self) -> Float[np.ndarray, " n"]:
    """The least that a response earns."""
    return np.fmin.reduce(list(self.rewards.values()))

  @property
  def right(self) -> Float[np.ndarray, " n"]:
    """What the right answer earns in the form of the variations."""
    return self.of(self.form)

  def as_right(self, kind: str) -> Bool[np.ndarray, " m"]:
    """Returns for each problem whether a kind of probe earns as much as the right answer.

    Problems without such a probe, and those whose right answer earns nothing, are left out.
    """
    gap = self.right - self.nothing
    known = np.isfinite(gap) & np.isfinite(self.of(kind)) & (gap > EPS)
    return (self.of(kind) - self.nothing >= NEARLY * gap)[known]

  def more_than_nothing(self, kind: str) -> Bool[np.ndarray, " m"]:
    """Returns for each problem that has such a probe whether it earns more than nothing."""
    known = np.isfinite(self.nothing) & np.isfinite(self.of(kind))
    return (self.of(kind) > self.nothing + EPS)[known]


def measure(
  rows: Sequence[Mapping[str, Any]],
  grade: GradeFn,
  *,
  forms: Sequence[str],
  shown: Mapping[str, str] | None = None,
  long_chars: int = 400,
  seconds: float = 60.0,
) -> Table:
  """Grades the probes of some problems: first the right answers, then variations of the best form.

  The best form earns the most; of several, it is the first one that the policy is shown.

  Args:
    rows: Problems, as in `probes`.
    grade: Grader of the probes.
    forms: Forms in which to state the right answer, as in `FORMS`; none if only demonstrations are
      known to be right.
    shown: Forms that the policy is shown, by where, such as {"the solved problems": " {}"}.
    long_chars: Length of the long random text, in characters.
    seconds: Time after which no further problems are graded. The first ones always are.
  """
  shown = shown or {}
  forms = tuple(dict.fromkeys((*shown.values(), *forms)))
  graded: list[_Judged] = []
  done, begun = 0, time.monotonic()
  for end in (1, 4, len(rows)):  # The first problem shows what the others will take.
    if end > done and (not done or (time.monotonic() - begun) * 2 * (end - done) / done < seconds):
      chunk = probes(rows[done:end], forms, long_chars=long_chars)
      graded += _judged([probe._replace(row=done + probe.row) for probe in chunk], grade)
      done = min(end, len(rows))
  form = _best(_by_kind(graded, lambda judged: judged.reward, done), forms)
  graded += _judged(variants(rows[:done], form), grade)
  failures: dict[str, str] = {}
  for judged in graded:
    if judged.detail:
      failures.setdefault(judged.probe.kind, judged.detail)
  rewards = _by_kind(graded, lambda judged: judged.reward, done)
  part = lambda name: _by_kind(graded, lambda judged: judged.parts[name], done)
  parts = {name: part(name) for name in graded[0].parts}
  return Table(rewards, parts, failures, form, forms, shown, str(rows[0]["answer"]))


class _Judged(NamedTuple):
  """A graded probe: its rewards, which are NaN if it has none, and then why."""

  probe: Probe
  reward: float
  parts: Mapping[str, float]
  detail: str


def _judged(made: Sequence[Probe], grade: GradeFn) -> list[_Judged]:
  if not made:
    return []
  graded = grade(made)
  rewards, *terms = (np.where(graded.valid, x, np.nan) for x in (graded.totals, *graded.parts.values()))
  parts = [dict(zip(graded.parts, values, strict=True)) for values in zip(*terms, strict=True)]
  return [_Judged(*each) for each in zip(made, rewards, parts, graded.details, strict=True)]


def _by_kind(
  graded: Sequence[_Judged], value: Callable[[_Judged], float], num_problems: int
) -> dict[str, Float[np.ndarray, " n"]]:
  columns: dict[str, np.ndarray] = {}
  for judged in graded:
    column = columns.setdefault(judged.probe.kind, np.full(num_problems, np.nan))
    column[judged.probe.row] = value(judged)
  return columns


def _best(rewards: Mapping[str, np.ndarray], forms: Sequence[str]) -> str:
  """Returns the form that earns the most; the demonstration only if no other earns anything."""

  def mean(kind: str) -> float:
    values = rewards.get(kind, np.full(1, np.nan))
    return float(np.nanmean(values)) if np.isfinite(values).any() else -np.inf

  nothing = min(mean(EMPTY), mean(BLANK))
  best = max(forms, key=mean, default=DEMONSTRATION)
  only_shown = mean(DEMONSTRATION) > nothing + EPS >= mean(best)
  return DEMONSTRATION if only_shown else best
