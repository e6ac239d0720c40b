"""The rules that say what counts as reproduced, by the verdicts of `experiments.judging`.

Looked at before the run of 2026-11-22: one pilot seed (100, not among the seeds of the run), with
30 steps, in two arms: 1/|o| with std, from a teacher who rambles above all when he is wrong, in
which wrong responses grew from 8.2 to about 10 tokens and shrank again; and GSPO, from the teacher
of the run, in which all shrank from 7.6 to 6.5. Neither constant weights nor LUSPO were looked at.
This model does not see its own slips, so that the first teacher's wrong responses were hardly
longer than the right ones either: one teacher serves both claims, and what they need is that
lengths vary, which is what the weights act on. On another bed (two-step arithmetic), which learnt
too little, the same two arms had been tried at two learning rates.

Changed on 2026-11-25, when the results of seeds 0 to 4 were known: the five verdicts and Student's
interval alone (before, a bootstrap had to agree); and E18's confirmatory rule is that of held-out
lengths at the end, as a straight line misses a course that rises and falls. Seeds 200 to 239 are
fresh: nothing of them was known then.

All differences are paired: the same seed has the same warm start, problems and keys. Nothing can be
decided where responses have hardly different lengths (`SPREAD`), nor, for E21, where length and
answer go together from the start (`NEUTRAL`).
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments import judging
from experiments.ablations.dapo_ladder.measures import trend
from experiments.ablations.routing_replay.measures import per_seed, where
from experiments.claims.lengths.bed import Arm

SEEDS = tuple(range(200, 240))
CONFIRMATORY = {"E18": "E18, length of wrong responses at the end", "E21": "E21, GSPO shortens against LUSPO"}
"""The one rule of each claim that a verdict is read from; all others are exploratory."""
STEPS = 24

DR_GRPO = tuple(Arm(weights, std) for weights in ("one_over_length", "constant") for std in (True, False))
LUSPO = (Arm("gspo"), Arm("luspo"), DR_GRPO[0])  # The last one is GRPO, which both claims share.
ARMS = (*DR_GRPO, *LUSPO[:2])

SPREAD = 2.0  # Standard deviation of the lengths in the first rollout batch, in tokens: weights have something to act on.
NEUTRAL = 0.25  # Largest |correlation| of length and answer there, mean over the seeds, at which the task counts as neutral.

Rows = Sequence[Mapping]
Read = Callable[[Mapping], float]


def judge(results: Mapping) -> dict[str, dict]:
  """The verdicts of `results.json`, each with its rule in words and the numbers that decided.

  Args:
    results: `rows`, one for each seed, arm and rollout batch, see `bed.train`; `ends`, what each trial held out.
  """
  rows, ends = results["rows"], results["ends"]
  return _dr_grpo(rows, ends) | _luspo(rows, ends)


def _dr_grpo(rows: Rows, ends: Rows) -> dict[str, dict]:
  first = where(rows, step=1, **DR_GRPO[0]._asdict())
  spread = float(np.mean([row["spread"] for row in first]))
  longer = float(np.mean([row["tokens_wrong"] - row["tokens_right"] for row in first if row["tokens_right"] and row["tokens_wrong"]]))
  engaged = dict(engaged=spread >= SPREAD, spread=spread, wrong_longer_at_first=longer)
  over, constant = ({std: Arm(weights, std) for std in (True, False)} for weights in ("one_over_length", "constant"))
  slope = lambda arm: slopes(rows, arm, "tokens_wrong")
  words = "slope of the length of wrong responses against the step under 1/|o| minus under constant weights"
  differences = {std: slope(over[std]) - slope(constant[std]) for std in (True, False)}
  found = {
    "E18, wrong responses lengthen": _slope(
      f"{words}, mean of both ways to scale advantages, above 0", sum(differences.values()) / 2, **engaged
    ),
    "E18, with std": _slope(f"{words}, above 0", differences[True], **engaged),
    "E18, without std": _slope(f"{words}, above 0", differences[False], **engaged),
    "E18, they grow": _slope(
      "slope of the length of wrong responses under 1/|o| with std, above 0", slope(over[True]), **engaged
    ),
    "E18, length of wrong responses at the end": _held_out(
      "held-out length of wrong responses under GRPO (1/|o|, std) minus under Dr. GRPO (constant, no std), above 0",
      ends, over[True], constant[False], wrong_length, **engaged,
    ),
    "E18, accuracy per token": _held_out(
      "held-out right answers per 100 tokens under Dr. GRPO minus under GRPO, above 0", ends, constant[False], over[True], per_100_tokens,
      **engaged,
    ),
  }  # fmt: skip
  return found


def _luspo(rows: Rows, ends: Rows) -> dict[str, dict]:
  gspo, luspo, grpo = LUSPO
  first = where(rows, step=1, **gspo._asdict())
  spread, correlation = (float(np.mean([row[name] for row in first if row[name] is not None])) for name in ("spread", "correlation"))
  engaged = dict(engaged=spread >= SPREAD and abs(correlation) <= NEUTRAL, spread=spread, correlation=correlation)
  slope = lambda arm: slopes(rows, arm, "tokens")
  words = "slope of the mean length against the step"
  return {
    "E21, GSPO shortens against LUSPO": _slope(f"{words} under GSPO minus under LUSPO, below 0", slope(gspo) - slope(luspo), -1, **engaged),
    "E21, GSPO shortens": _slope(f"{words} under GSPO, below 0", slope(gspo), -1, **engaged),
    "E21, GRPO shortens against LUSPO": _slope(f"{words} under GRPO minus under LUSPO, below 0", slope(grpo) - slope(luspo), -1, **engaged),
    "E21, length at the end": _held_out(
      "held-out length of responses under LUSPO minus under GSPO, above 0", ends, luspo, gspo, length, **engaged
    ),
    "E21, accuracy": _held_out("held-out accuracy under LUSPO minus under GSPO, above 0", ends, luspo, gspo, accuracy, **engaged),
  }  # fmt: skip


def slopes(rows: Rows, arm: Arm, name: str) -> np.ndarray:
  """Of each seed the slope of a quantity against the step."""
  return np.array(per_seed(where(rows, **arm._asdict()), lambda mine: trend(mine, name)))


def length(end: Mapping) -> float:
  """Mean length of the held-out responses, in tokens."""
  return float(np.sum(end["tokens"]) / (len(end["tokens"]) * end["responses"]))


def wrong_length(end: Mapping) -> float:
  """Mean length of the wrong ones, in tokens."""
  return float(np.sum(end["wrong_tokens"]) / np.sum(end["responses"] - np.array(end["right"])))


def accuracy(end: Mapping) -> float:
  """Share of right responses."""
  return float(np.mean(end["right"]) / end["responses"])


def per_100_tokens(end: Mapping) -> float:
  """Right responses in a hundred tokens."""
  return float(100 * np.sum(end["right"]) / np.sum(end["tokens"]))


def _slope(rule: str, values: np.ndarray, side: int = 1, **numbers) -> dict:
  return (judging.above if side > 0 else judging.below)(f"{rule}, tokens a step", values, **numbers)


def _held_out(rule: str, ends: Rows, more: Arm, less: Arm, read: Read, **numbers) -> dict:
  first, second = ({end["seed"]: read(end) for end in where(ends, **arm._asdict())} for arm in (more, less))
  return judging.above(rule, judging.paired(first, second), **numbers)
