"""What is trained, what counts as a collapse, and when a rule separates. Committed before the first run that counts.

Looked at before: seed 990 alone, by its held-out accuracy, to choose rates at which an arm learns,
and faults after which it falls. A first plan of longer steps was stopped after five runs of seed
700, which had taken six minutes of a busy machine; their accuracy was seen. No alarm had been
computed on any of these runs.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.studies.alarms.bed import EVERY, Arm
from jaxrl_llm.run.observe import alarms

SEEDS = tuple(range(710, 720))
TUNING = SEEDS[::2]
"""Seeds on which a limit may be chosen; the others confirm it."""
STEPS = 80

MINUTES = 35
"""Time after which no further seed begins. Seeds run one after another, and only whole ones count."""

_GRPO = (("kl_coef", 0.0),)
_GSPO = (("clip_low", 0.0144), ("clip_high", 0.0192))  # As wide as the short responses need: 48 times the paper's.
_BREAKS = dict(settings=_GRPO, breaks=True)
ARMS = {
  "grpo": Arm("grpo", _GRPO),
  "rate grows, grpo": Arm("grpo", _GRPO, rate_end=1e-2),
  "dapo": Arm("dapo"),
  "grader inverted": Arm("grpo", **_BREAKS, reward="inverted", rate=2e-3),
  "gspo": Arm("gspo", _GSPO),
  "sapo": Arm("sapo"),
  "lag begins": Arm("reinforce", rate=2e-3, lag=8, breaks=True),
  "cispo": Arm("cispo"),
  "grader misplaced": Arm("grpo", **_BREAKS, reward="misplaced", rate=2e-3),
  "reinforce": Arm("reinforce"),
  "dr_grpo": Arm("dr_grpo", (*_GRPO, ("max_tokens", 10))),
  "rate grows, reinforce": Arm("reinforce", rate_end=5e-3),
  "grpo, one update": Arm("grpo", _GRPO, updates=1),
  "rate jumps": Arm("grpo", **_BREAKS, rate=5e-3),
  "dapo, one update": Arm("dapo", updates=1),
  "grpo, 5e-4": Arm("grpo", _GRPO, rate=5e-4),
  "lucky digit": Arm("grpo", **_BREAKS, reward="lucky digit"),
  "dapo, 5e-4": Arm("dapo", rate=5e-4),
  "gspo, 5e-4": Arm("gspo", _GSPO, rate=5e-4),
  "length bonus": Arm("grpo", **_BREAKS, reward="length bonus"),
  "reinforce, 5e-4": Arm("reinforce", rate=5e-4),
}
"""Ways to train, by name. The outcome of each run decides what it is, and not its arm."""

LOST, KEPT, FOR_GOOD = 0.25, 0.9, 3
"""Share of its best accuracy that a collapsed run has lost, and that a healthy one has kept; evaluations
that a collapse must last."""
LATE = 20
"""Step after which a collapse can be warned of by a rule that needs 16 steps of history."""

HORIZON, LEAD = 64, 1
"""Steps before a collapse within which an alarm is its warning, and the smallest number of steps by
which a warning must come before it."""
BUDGET = 2.0
"""False alarms per 1,000 healthy steps that a rule may raise."""
GAIN = 0.1
"""By how much the share of collapses that a rule warns of must exceed the share of healthy runs in which
it holds in the same steps: the lower end of the 95 % interval, from 2,000 draws of the seeds with
replacement."""


class Outcome(NamedTuple):
  """What became of a run.

  Attributes:
    kind: "collapsed", "healthy" or "neither".
    begins: For a collapse, the RL step at whose evaluation it begins.
  """

  kind: str
  begins: int | None = None


def outcome(accuracy: Sequence[float]) -> Outcome:
  """Judges a run by its held-out accuracy, with the whole run in view.

  The best accuracy so far is the highest mean of three evaluations in a row. A run has collapsed if
  its last evaluations, three or more, all lie below three quarters of the best before them; the
  collapse begins at the first of these. A run is healthy if the mean of its last three evaluations
  is at least 0.9 of its best, and no lower than its first evaluation. All others are neither.

  Args:
    accuracy: Held-out accuracy at the start, and after every `EVERY` RL steps.

  Example:
    >>> outcome([0.3, 0.5, 0.6, 0.6, 0.6, 0.2, 0.1, 0.1])
    Outcome(kind='collapsed', begins=25)
    >>> outcome([0.3, 0.5, 0.6, 0.6, 0.1, 0.6, 0.6, 0.6]).kind, outcome([0.3, 0.6, 0.6, 0.6, 0.5, 0.5, 0.5]).kind
    ('healthy', 'neither')
  """
  means = [float(np.mean(accuracy[max(0, i - 2) : i + 1])) for i in range(len(accuracy))]
  best = np.maximum.accumulate(means)
  begins = len(accuracy)
  while begins > 1 and accuracy[begins - 1] < (1 - LOST) * best[begins - 2]:
    begins -= 1
  if len(accuracy) - begins >= FOR_GOOD:
    return Outcome("collapsed", begins * EVERY)
  return Outcome("healthy" if means[-1] >= max(KEPT * best[-1], accuracy[0]) else "neither")


class Rule(NamedTuple):
  """A rule of `jaxrl_llm.run.observe.alarms` with the limits to try.

  Attributes:
    field: Field of `alarms.AlarmLimits`.
    metric: Metric that the rule looks at.
    limits: Limits from strict to lax; the rule holds more often at each further one.
    default: Limit of the framework when the study began; None for a candidate that is no rule yet.
  """

  field: str
  metric: str
  limits: tuple[float, ...]
  default: float | None


_SIGMAS = (40.0, 30.0, 20.0, 15.0, 12.0, 10.0, 8.0, 7.0, 6.0, 5.0, 4.5, 4.0, 3.5, 3.0, 2.5, 2.0)
_SHARES = (0.999, 0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
RULES = {
  "loss_spike": Rule("spike_sigmas", "actor/loss", _SIGMAS, 6.0),
  "grad_norm_spike": Rule("spike_sigmas", "actor/grad_norm", _SIGMAS, 6.0),
  "reward_collapse": Rule("spike_sigmas", "critic/rewards/mean", _SIGMAS, 6.0),
  "entropy_collapse": Rule(
    "entropy_fraction", "actor/entropy", (0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8), 0.1
  ),
  "truncation": Rule("truncation_above", "response_length/clip_ratio", _SHARES, 0.8),
  "no_signal": Rule("no_signal_above", "group/frac_reward_zero_std", _SHARES, 0.95),
  "policy_kl": Rule("", "actor/ppo_kl_k3", (10.0, 3.0, 1.0, 0.5, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005), None),
}
"""Rules by name. `policy_kl` is a candidate: the divergence from the old policy, which the log of
2026-11-22 names as the first sign of a collapse that every alarm missed."""


def scores(name: str, values: Sequence[float | None], *, window: int = alarms.AlarmLimits().window) -> np.ndarray:
  """Returns by how much a rule's metric is out of the ordinary at each step; NaN without a value.

  The rule holds at a step if its score exceeds its limit, with the entropy's limit as 1 / fraction.

  Args:
    name: Key of `RULES`.
    values: Metric of the rule, one value per RL step.
    window: Number of steps that a spike is measured against.

  Example:
    >>> scores("truncation", [0.2, None, 0.9]).tolist()
    [0.2, nan, 0.9]
    >>> scores("entropy_collapse", [0.8, 0.4, 0.1]).round(3).tolist()
    [1.0, 2.0, 8.0]
  """
  rule, past, out, first = RULES[name], [], [], None
  for value in values:
    if value is None:
      out.append(np.nan)
    elif rule.field == "spike_sigmas":
      sigmas = alarms.deviation(value, past)
      out.append(abs(sigmas) if name == "loss_spike" else -sigmas if name == "reward_collapse" else sigmas)
      past = [*past, value][-window:]
    elif rule.field == "entropy_fraction":
      first = value if first is None else first
      out.append(first / value if value > 0 else np.inf)
    else:
      out.append(value)
  return np.array(out)


def firing(name: str, score: np.ndarray, limit: float) -> np.ndarray:
  """Returns the RL steps, from 1, at which a rule holds."""
  return np.flatnonzero(score > (1 / limit if RULES[name].field == "entropy_fraction" else limit)) + 1


def begins(steps: Sequence[int]) -> int:
  """Counts the alarms that begin, as `alarms.observe` does: one that ended within a few steps goes on.

  Example:
    >>> begins([3, 4, 9, 15, 40])
    3
  """
  return sum(i == 0 or step - steps[i - 1] > alarms.CALM for i, step in enumerate(steps))


def leads(steps: Sequence[int], collapse: int) -> int | None:
  """Returns by how many steps the first warning comes before a collapse; None without a warning."""
  inside = [step for step in steps if collapse - HORIZON <= step <= collapse - LEAD]
  return collapse - inside[0] if inside else None


def separates(numbers: Mapping[str, float]) -> bool:
  """Returns whether a rule earns its name at a limit, by its numbers on the confirming seeds.

  Args:
    numbers: `false_alarms` per 1,000 healthy steps, and `gain_low`, the lower end of the interval of
      the share warned minus the share of healthy runs in which the rule holds in the same steps.
  """
  return numbers["false_alarms"] <= BUDGET and numbers["gain_low"] > GAIN


def decide(curve: Mapping[str, Sequence[Mapping]], default: float | None) -> tuple[str, float | None]:
  """Decides about a rule.

  Its default stays if it separates on the confirming seeds. Otherwise the limit that warns of most
  collapses on the tuning seeds within the budget becomes the default, if it separates on the
  confirming ones. Otherwise the rule is off.

  Args:
    curve: Numbers at each limit, on the "tuning" and on the "confirming" seeds.
    default: Limit so far.

  Returns:
    "stays", "moves" or "off", and the limit.
  """
  confirming = {row["limit"]: row for row in curve["confirming"]}
  if default is not None and separates(confirming[default]):
    return "stays", default
  within = [row for row in curve["tuning"] if row["false_alarms"] <= BUDGET]
  best = max(within, key=lambda row: row["warned"], default=None)
  if best is not None and separates(confirming[best["limit"]]):
    return "moves", best["limit"]
  return "off", None
