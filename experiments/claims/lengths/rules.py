"""The rules that say what counts as reproduced. Written before the measured run, and not changed after it.

Looked at beforehand: one pilot seed (100, not among the seeds of the run), with 30 steps, in two arms: 1/|o| with std, from a teacher who
rambles above all when he is wrong, in which wrong responses grew from 8.2 to about 10 tokens and shrank again; and GSPO, from the teacher
of the run, in which all shrank from 7.6 to 6.5. Neither constant weights nor LUSPO were looked at. This model does not see its own slips,
so that the first teacher's wrong responses were hardly longer than the right ones either: one teacher serves both claims, and what they
need is that lengths vary, which is what the weights act on. On another bed (two-step arithmetic), which learnt too little, the same two
arms had been tried at two learning rates.

A verdict is "reproduced", "not reproduced" or "mechanism not engaged", the last where nothing in the run could have decided. All
differences are paired: the same seed has the same warm start, problems and keys. Slopes pass if two intervals lie on the side that the
rule names: the bootstrap's and Student's, both over the seeds. Held-out lengths and accuracies pass by the hierarchical bootstrap over
seeds and problems and Student's over the seeds. Nothing is corrected for the number of rules.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.ablations.dapo_ladder.measures import trend
from experiments.ablations.ratio_lab.measures import interval
from experiments.ablations.routing_replay.measures import per_seed, where
from experiments.claims.lengths.bed import Arm

SEEDS = tuple(range(5))
STEPS = 24

DR_GRPO = tuple(Arm(weights, std) for weights in ("one_over_length", "constant") for std in (True, False))
LUSPO = (Arm("gspo"), Arm("luspo"), DR_GRPO[0])  # The last one is GRPO, which both claims share.
ARMS = (*DR_GRPO, *LUSPO[:2])

SPREAD = 2.0  # Standard deviation of the lengths in the first rollout batch, in tokens: weights have something to act on.
NEUTRAL = 0.25  # Largest |correlation| of length and answer there, mean over the seeds, at which the task counts as neutral.

Rows = Sequence[Mapping]
Read = Callable[[Rows], np.ndarray]


def judge(rows: Rows, ends: Rows) -> dict[str, dict]:
  """All verdicts, each with its rule in words and the numbers that decided.

  Args:
    rows: a row for each seed, arm and rollout batch, see `bed.train`.
    ends: for each trial what was held out.
  """
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


def length(end: Mapping) -> np.ndarray:
  """Of each held-out problem tokens and responses, whose quotient is the mean length."""
  return np.stack([end["tokens"], np.full(len(end["tokens"]), end["responses"])], axis=1)


def wrong_length(end: Mapping) -> np.ndarray:
  """Tokens of the wrong responses, and their number."""
  return np.stack([end["wrong_tokens"], end["responses"] - np.array(end["right"])], axis=1)


def accuracy(end: Mapping) -> np.ndarray:
  """Right responses and responses."""
  return np.stack([end["right"], np.full(len(end["right"]), end["responses"])], axis=1)


def per_100_tokens(end: Mapping) -> np.ndarray:
  """Right responses, and hundreds of tokens."""
  return np.stack([end["right"], np.array(end["tokens"]) / 100], axis=1)


def quotients(
  more: Mapping[int, np.ndarray], less: Mapping[int, np.ndarray], *, draws: int = 4000, seed: int = 0
) -> dict[str, dict[str, float]]:
  """The difference of two arms' quotients, and both of its 95 % intervals: seeds and then problems are drawn; and Student's.

  Args:
    more: of each seed numerators and denominators of its problems, [P, 2].
    less: the same of the arm that is taken away, for the same problems.
    draws: of the bootstrap.
    seed: of it.

  Example:
    >>> ones, twos = (np.full((3, 2), x) for x in ([1, 1], [2, 1]))
    >>> quotients({0: twos, 1: twos}, {0: ones, 1: ones}, draws=10)["interval"]
    {'mean': 1.0, 'low': 1.0, 'high': 1.0}
  """
  above, below = (np.array([x[seed] for seed in sorted(x)], float) for x in (more, less))
  of = lambda x: x[..., 0].sum(axis=-1) / x[..., 1].sum(axis=-1)
  by_seed = of(above) - of(below)
  rng, (num_seeds, num_problems, _) = np.random.default_rng(seed), above.shape
  means = np.zeros(draws)
  for _ in range(num_seeds):  # Each place of a draw: any seed, and that many of its problems.
    drawn, problems = rng.integers(num_seeds, size=(draws, 1)), rng.integers(num_problems, size=(draws, num_problems))
    means += (of(above[drawn, problems]) - of(below[drawn, problems])) / num_seeds
  low, high = np.quantile(means, (0.025, 0.975))
  return {"interval": {"mean": float(by_seed.mean()), "low": float(low), "high": float(high)}, "over_seeds": interval(by_seed)}


def over_seeds(values: np.ndarray, *, draws: int = 4000, seed: int = 0) -> dict[str, dict[str, float]]:
  """The mean over the seeds and both of its 95 % intervals, the bootstrap's and Student's."""
  drawn = np.random.default_rng(seed).choice(values, (draws, len(values))).mean(axis=1)
  low, high = np.quantile(drawn, (0.025, 0.975))
  return {"interval": {"mean": float(values.mean()), "low": float(low), "high": float(high)}, "over_seeds": interval(values)}


def _slope(rule: str, values: np.ndarray, side: int = 1, *, engaged: bool, **numbers) -> dict:
  found = over_seeds(values)
  beyond = [x["low"] if side > 0 else -x["high"] for x in found.values()]
  return _verdict(f"{rule}: both intervals, tokens a step", min(beyond) > 0, engaged, **found, **numbers)


def _held_out(rule: str, ends: Rows, more: Arm, less: Arm, read: Read, *, engaged: bool, **numbers) -> dict:
  above, below = ({end["seed"]: read(end) for end in where(ends, **arm._asdict())} for arm in (more, less))
  found = quotients(above, below)
  return _verdict(f"{rule}: both intervals", min(x["low"] for x in found.values()) > 0, engaged, **found, **numbers)


def _verdict(rule: str, passed: bool, engaged: bool, **numbers) -> dict:
  verdict = ("reproduced" if passed else "not reproduced") if engaged else "mechanism not engaged"
  return {"rule": rule, "verdict": verdict, **numbers}
