"""The rules that say what counts as reproduced, by the verdicts of `experiments.judging`.

Looked at before the run of 2026-11-22: one pilot seed (100, not among the seeds of the run), its
warm start and 24 RL steps of the lowest rung, to see that responses are cut, that the upper clip
binds and that groups without a difference occur. Of no other rung was anything looked at.

Changed on 2026-11-25, when the results were known: the five verdicts and Student's interval alone;
E8 needs a collapse of the entropy to be prevented (it has to fall to half with the narrow clip),
and E9 wrong responses that are still longer when the ramble of the first steps is gone: both arms
of E9 have the soft penalty on length, which removes it within four steps; and E11's main rule is
that of the filter against the same rung without it, where it had set the two remedies against each
other.

All differences are paired: the same seed has the same warm start, the same prompts (but for
refills) and the same keys.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.ablations.dapo_ladder.bed import RUNGS
from experiments.ablations.dapo_ladder.measures import at_tokens, trend
from experiments.ablations.routing_replay.measures import mean_of, per_seed, where
from experiments.judging import above, below, interval, paired, solved

SEEDS = (0, 1, 2, 3, 4)

CONFIRMATORY = {
  "E8": "E8, entropy: 0.28 above 0.2",
  "E9": "E9, length of wrong responses",
  "E10": "E10, accuracy at equal steps",
  "E11": "E11, filter: accuracy",
}
"""The one rule of each claim that a verdict is read from; all others are exploratory."""

PAPER = {"base": 30, "filter": 36, "clip_higher": 38, "soft": 41, "token": 42, "dynamic": 50}
"""avg@32 on AIME 2024 in per cent, table 1 of the paper: Qwen2.5-32B."""

CLIPPED = 1e-4  # Of the tokens with A > 0: below it the upper clip is not engaged.
FALLEN = 0.5  # Share of its first value to which entropy falls with the narrow clip: below it there is a collapse to be prevented.
CUT = 0.01  # Of the responses in the first quarter of the steps.
LONGER = 1.0  # Tokens by which wrong responses are longer than right ones, mean over the second half of the steps.
WITHOUT_DIFFERENCE = 0.05  # Of the groups.

Rows = Sequence[Mapping]


def judge(results: Mapping) -> dict[str, dict]:
  """The verdicts of `results.json`, each with its rule in words and the numbers that decided.

  Args:
    results: `steps`, a row for each seed, arm and RL step; `evals`, one for each evaluation;
      `looks`, one for each rollout batch of which all responses were written down; `ends`, one for
      each trial, with `right`, of each held-out problem how many samples are right.
  """
  steps, evals, looks, ends = (results[name] for name in ("steps", "evals", "looks", "ends"))
  found = {"DAPO, all switches: accuracy": _accuracy(ends, "dynamic", "base")}
  found |= _clip_higher(steps, ends) | _token_level(looks, ends) | _dynamic(steps, evals, looks, ends)
  return found | _overlong(steps, looks, ends)


def _clip_higher(steps: Rows, ends: Rows) -> dict[str, dict]:
  clipped = float(np.mean(_of(steps, "filter", mean_of("clip_up"))))
  last = max(row["step"] for row in steps)
  at = lambda first, final: np.mean([row["entropy"] for row in where(steps, rung="filter") if first <= row["step"] <= final])
  fallen = float(at(last - last // 6, last) / at(1, max(1, last // 12)))
  engaged = dict(engaged=clipped >= CLIPPED and fallen <= FALLEN, clipped_up=clipped, fallen_to=fallen)
  area = {arm: _of(steps, arm, mean_of("entropy")) for arm in ("filter", "clip_higher", "clip_wide")}
  found = {
    "E8, entropy: 0.28 above 0.2": above(
      "mean entropy over the run with an upper clip of 0.28 minus with 0.2, above 0", _minus(area["clip_higher"], area["filter"]), **engaged
    ),
    "E8, accuracy": _accuracy(ends, "clip_higher", "filter", **engaged),
  }  # fmt: skip
  if area["clip_wide"]:
    slopes = [float(np.polyfit((0.2, 0.28, 0.4), at, 1)[0]) for at in zip(*area.values(), strict=True)]
    found["E8, entropy rises with the upper clip"] = above(
      "slope of the mean entropy against an upper clip of 0.2, 0.28 and 0.4, above 0", slopes, **engaged
    )
  return found


def _token_level(looks: Rows, ends: Rows) -> dict[str, dict]:
  half = max(row["step"] for row in looks) / 2
  both = [row for row in where(looks, rung="soft") if row["tokens_right"] and row["tokens_wrong"]]
  longer = {
    name: float(np.mean([row["tokens_wrong"] - row["tokens_right"] for row in rows]))
    for name, rows in (("at_first", where(both, step=1)), ("later", [row for row in both if row["step"] > half]))
  }
  engaged = dict(engaged=longer["later"] >= LONGER) | {f"wrong_longer_{name}": tokens for name, tokens in longer.items()}
  slope = lambda name: lambda rows: trend(rows, name)
  wrong = _minus(_of(looks, "token", slope("tokens_wrong")), _of(looks, "soft", slope("tokens_wrong")))
  return {
    "E9, length of wrong responses": below(
      "slope of the length of wrong responses against the RL step with the token mean minus with the sequence mean, below 0",
      wrong, **engaged,
    ),
    "E9, accuracy": _accuracy(ends, "token", "soft", **engaged),
  }  # fmt: skip


def _dynamic(steps: Rows, evals: Rows, looks: Rows, ends: Rows) -> dict[str, dict]:
  alike = 1 - float(np.mean(_of(looks, "token", mean_of("mixed"))))
  engaged = dict(engaged=alike >= WITHOUT_DIFFERENCE)
  mixed = _minus(_of(looks, "dynamic", mean_of("mixed")), _of(looks, "token", mean_of("mixed")))
  drawn = {arm: _of(steps, arm, lambda rows: sum(row["drawn"] for row in rows)) for arm in ("token", "dynamic")}
  seeds = sorted({row["seed"] for row in steps})

  def reached(arm: str, seed: int, budget: float) -> float:
    return at_tokens(where(steps, rung=arm, seed=seed), where(evals, rung=arm, seed=seed), budget)

  budgets = [min(pair) for pair in zip(*drawn.values(), strict=True)]
  at_equal = [reached("dynamic", seed, budget) - reached("token", seed, budget) for seed, budget in zip(seeds, budgets, strict=True)]
  factor = interval([b / a for a, b in zip(*drawn.values(), strict=True)])
  return {
    "E10, groups that differ": above(
      "fraction of the groups of a batch with right and wrong responses, with dynamic sampling minus without, above 0", mixed, **engaged,
      without_difference=alike,
    ),
    "E10, accuracy at equal steps": _accuracy(ends, "dynamic", "token", **engaged, tokens_drawn=factor),
    "E10, accuracy at equal tokens": above(
      "held-out accuracy after as many response tokens as the cheaper of the two drew in all, with dynamic sampling minus without, above 0",
      at_equal, **engaged,
    ),
  }  # fmt: skip


def _overlong(steps: Rows, looks: Rows, ends: Rows) -> dict[str, dict]:
  quarter = max(row["step"] for row in steps) / 4
  early = [row for row in steps if row["step"] <= quarter]
  cut = {arm: float(np.mean(_of(early, arm, mean_of("truncated")))) for arm in ("base", "clip_higher")}
  all_cut = {arm: _of(steps, arm, mean_of("truncated")) for arm in (*RUNGS, "punish")}
  unlucky = [row for row in where(looks, rung="base") if row["cut_count"]]
  column = lambda rows, name: [row[name] for row in rows]
  blamed = per_seed(unlucky, lambda rows: float(np.average(column(rows, "cut_advantage"), weights=column(rows, "cut_count"))))
  low, high = (dict(engaged=cut[arm] >= CUT, cut_at_first=cut[arm]) for arm in ("base", "clip_higher"))
  words = "fraction of the responses that are cut, mean over the run"
  found = {
    "E11, sound workings are blamed": below(
      "mean advantage, on the lowest rung, of responses that were cut before they had made a mistake, below 0", blamed, **low
    ),
    "E11, filter: accuracy": _accuracy(ends, "filter", "base", **low),
    "E11, filter: more is cut": above(
      f"{words}, with the filter minus without, above 0", _minus(all_cut["filter"], all_cut["base"]), **low
    ),
    "E11, soft penalty: accuracy": _accuracy(ends, "soft", "clip_higher", **high),
    "E11, soft penalty: less is cut": below(
      f"{words}, with the soft penalty minus with the filter, below 0", _minus(all_cut["soft"], all_cut["clip_higher"]), **high
    ),
  }  # fmt: skip
  if all_cut["punish"]:
    found["E11, soft penalty against -1: accuracy"] = _accuracy(ends, "soft", "punish", **high)
    found["E11, soft penalty against -1: less is cut"] = below(
      f"{words}, with the soft penalty minus with -1 for what is cut, below 0", _minus(all_cut["soft"], all_cut["punish"]), **high
    )
  return found


def _of(rows: Rows, arm: str, read) -> list[float]:
  return per_seed(where(rows, rung=arm), read)


def _minus(more: Sequence[float], less: Sequence[float]) -> list[float]:
  return [a - b for a, b in zip(more, less, strict=True)]


def _accuracy(ends: Rows, more: str, less: str, **numbers) -> dict:
  rule = f"held-out accuracy at the end, `{more}` minus `{less}`, above 0"
  return above(rule, paired(solved(ends, rung=more), solved(ends, rung=less)), **numbers)
