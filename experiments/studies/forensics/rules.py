"""Which collapses are continued, with which remedies, and what counts as saved.

Committed before the run that counts, which is the second. The first, by the rules of commit
362ade81, continued ten recorded collapses from the step of the recorded alarm. The sampler draws
otherwise since they were recorded: all ten collapsed again, but none had its recorded accuracies,
and none its alarm at that step. It saved 0 of 30 without a remedy, 18 by "rate", 6 by "clip", and 0
by "sapo" and "drop". These numbers were seen, and `first_run.json` has them. Of the rules only this
has changed: the collapses are others and more, they are repeated before they are chosen, and each
is continued from its own alarm.

Looked at further: the 189 recorded runs of `experiments.studies.alarms`, smoke runs of an untrained
tiny model, and two faults of seed 990.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments import judging
from experiments.studies.alarms import bed
from experiments.studies.alarms import rules as alarm_rules
from jaxrl_llm.config.alarms import AlarmLimits
from jaxrl_llm.run.observe import alarms

LIMITS = AlarmLimits(policy_kl_above=0.01, reward_sigmas=3.0)
"""The two rules that are on by default."""
FIRST, LAST = 8, 60
"""RL steps within which an alarm must begin."""
SEEN, COUNT = 10, 20
"""Number of collapses of the first run, and of the second, which has none of these."""
DRAWS = (1, 2, 3)
"""Continuations of each collapse with each remedy. The problems and the keys of the sampler are new
after the alarm, and the same for all remedies."""

OF_DATA = ("grader inverted", "lag begins", "grader misplaced", "lucky digit", "length bonus")
"""Arms whose fault is in the data; that of all others is in the optimisation."""

REMEDIES = ("none", "rate", "clip", "sapo", "drop")
"""What is changed from the step after the alarm on. The fault itself, such as a wrong grader, a lag
or a rate that grows, stays.

  none  Nothing: the same arm with other draws.
  rate  A quarter of the learning rate that the run would have at each step.
  clip  A clip a quarter as wide, or a narrow clip where there was none; see `CHANGED`.
  sapo  SAPO's gate at its default temperatures, with the run's weights of tokens; see `CHANGED`.
  drop  In each update, the group whose gradient agrees least with the sum of the others' has no
        weight, and the others keep theirs. Agreement is the cosine of `Shares.agreement`, before
        the update. An update is half of a rollout batch: four groups of eight responses. A group
        with equal rewards has no gradient, agrees with nothing, and is never the one.
"""
SLOWER = 4

_SUM, _NARROW = ("weights", "sequence_sum"), (("kl_coef", 0.0), ("clip_low", 0.05), ("clip_high", 0.05))
CHANGED = {
  "grpo": {"clip": ("grpo", _NARROW), "sapo": ("sapo", ())},
  "reinforce": {"clip": ("grpo", (*_NARROW, _SUM)), "sapo": ("sapo", (_SUM,))},
}
"""Objective and settings of two remedies, by the objective of the run. No other objective has a collapse.

GRPO's own clip is 0.2, and a quarter of it 0.05. REINFORCE has no ratio and no clip: it gets PPO's,
which is GRPO's, at 0.05, with the ratio to the weights that drew. SAPO weighs tokens as GRPO does.
In place of REINFORCE, either keeps its sum over the tokens of a response.
"""


class Collapse(NamedTuple):
  """A collapse with an alarm.

  Attributes:
    arm: Key of `alarms.rules.ARMS`.
    seed: Seed of the run.
    alarm: Alarm that warned of it.
    step: RL step at which the alarm began, after which the run is continued.
    begins: RL step at which the collapse begins.
  """

  arm: str
  seed: int
  alarm: str
  step: int
  begins: int


def warning(run: Mapping) -> Collapse | None:
  """Returns the collapse of a run, with its first alarm from `FIRST` to `LAST` and before it.

  None if the run has not collapsed, or not after such an alarm. An alarm that began earlier and
  goes on is none.
  """
  outcome, state = alarm_rules.outcome(run["accuracy"]), alarms.new_state()
  if outcome.kind != "collapsed":
    return None
  for step, row in enumerate(bed.as_rows(run), 1):
    known = state["counts"]
    state, _, _ = alarms.observe(state, row, step=step, limits=LIMITS)
    begun = [name for name, count in state["counts"].items() if count > known.get(name, 0)]
    if begun and FIRST <= step <= min(LAST, outcome.begins - 1):
      return Collapse(run["arm"], run["seed"], begun[0], step, outcome.begins)
  return None


def choose(warned: Iterable[Collapse | None]) -> list[Collapse]:
  """Sorts collapses into the order in which they are chosen.

  One of each arm in the order of `alarms.rules.ARMS`, with the lowest seed; then a second of each,
  and so on.
  """
  known = [at for at in warned if at is not None]
  of_arms = [sorted(at for at in known if at.arm == arm) for arm in alarm_rules.ARMS]
  turns = max(map(len, of_arms), default=0)
  return [of_arm[turn] for turn in range(turns) for of_arm in of_arms if turn < len(of_arm)]


def to_repeat(runs: Sequence[Mapping]) -> list[tuple[str, int]]:
  """Returns arm and seed of the collapses among recorded runs, but those of the first run."""
  first = {at[:2] for at in choose(map(warning, runs))[:SEEN]}
  fallen = [run for run in runs if alarm_rules.outcome(run["accuracy"]).kind == "collapsed"]
  return [(run["arm"], run["seed"]) for run in fallen if (run["arm"], run["seed"]) not in first]


def judge(rows: Sequence[Mapping]) -> dict[str, dict[str, Any]]:
  """Judges the remedies.

  A continuation is saved if the run has not collapsed at RL step 80 by `alarms.rules.outcome`, of
  the accuracies up to the alarm and those of the continuation. It need not be healthy.

  A remedy saves more (or fewer) than none if the exact two-sided sign test over the pairs of
  collapse and draw is below 5 % after Holm's correction for the four remedies, and the 95 %
  interval of the difference lies on the same side of 0. The test takes the draws of a collapse for
  independent, which they are not; the interval draws whole collapses with replacement.

  Args:
    rows: Continuations, with `arm`, `seed`, `remedy`, `draw` and `accuracy`, that of the whole run.
      All remedies have the same collapses and draws.

  Returns:
    For each remedy: how many were `saved`, and `healthy`, `neither` or `collapsed`, `of` how many;
    `end`, the mean accuracy of the last three evaluations; and against "none" the pairs in which it
    alone saved (`more`) and in which none alone did (`fewer`), `p` and `p_holm`, the difference in
    the share saved (`gain`) with its interval (`low`, `high`), and the `verdict`.
  """
  out, saved = {}, {}
  for remedy in REMEDIES:
    of = [row for row in rows if row["remedy"] == remedy]
    kinds = [alarm_rules.outcome(row["accuracy"]).kind for row in of]
    pairs = [(row["arm"], row["seed"], row["draw"]) for row in of]
    saved[remedy] = {pair: kind != "collapsed" for pair, kind in zip(pairs, kinds, strict=True)}
    counts = {kind: kinds.count(kind) for kind in ("healthy", "neither", "collapsed")}
    end = float(np.mean([row["accuracy"][-3:] for row in of]))
    out[remedy] = {"saved": sum(saved[remedy].values())} | counts | {"of": len(of), "end": end}
  p_values = {remedy: judging.more_often("", saved[remedy], saved["none"])["p"] for remedy in REMEDIES[1:]}
  collapses = sorted({pair[:2] for pair in saved["none"]})
  drawn = np.random.default_rng(0).integers(len(collapses), size=(2000, len(collapses)))
  for remedy, p_holm in judging.holm(p_values).items():
    gains = {pair: int(kept) - int(saved["none"][pair]) for pair, kept in saved[remedy].items()}
    means = np.array([np.mean([gain for pair, gain in gains.items() if pair[:2] == at]) for at in collapses])
    low, high = map(float, np.quantile(means[drawn].mean(axis=1), (0.025, 0.975)))
    side = "saves more" if low > 0 else "saves fewer" if high < 0 else "cannot tell"
    out[remedy] |= {
      "more": sum(gain > 0 for gain in gains.values()), "fewer": sum(gain < 0 for gain in gains.values()),
      "p": p_values[remedy], "p_holm": p_holm, "gain": float(means.mean()), "low": low, "high": high,
      "verdict": side if p_holm < judging.ALPHA else "cannot tell",
    }  # fmt: skip
  return out


def judge_parts(rows: Sequence[Mapping]) -> dict[str, dict]:
  """Judges all collapses, which decides, and those of each cause alone, which only describes."""
  data, rest = ([row for row in rows if (row["arm"] in OF_DATA) == of_data] for of_data in (True, False))
  return {"all": judge(rows), "data": judge(data), "optimisation": judge(rest)}


def judge_repeats(rows: Sequence[Mapping], runs: Sequence[Mapping]) -> dict[str, int]:
  """Counts the repeats (`of`), and how many are `equal` to their records, `collapsed` and `warned`."""
  known = {(run["arm"], run["seed"]): run["accuracy"] for run in runs}
  equal = sum(row["accuracy"] == known[row["arm"], row["seed"]] for row in rows)
  again = sum(alarm_rules.outcome(row["accuracy"]).kind == "collapsed" for row in rows)
  warned = sum(row["alarm"] is not None for row in rows)
  return {"of": len(rows), "equal": equal, "collapsed": again, "warned": warned}
