"""The rules that say what counts as reproduced. Written before the measured run, and not changed after it.

Looked at beforehand: one pilot seed (100, not among the seeds of the run), its warm start and 24 RL steps of the lowest rung, to see that
responses are cut, that the upper clip binds and that groups without a difference occur. Of no other rung was anything looked at.

A verdict is "reproduced", "not reproduced" or "mechanism not engaged", the last where nothing in the run could have decided. All
differences are paired: the same seed has the same warm start, the same prompts (but for refills) and the same keys. Intervals are 95 %. A
difference of accuracies passes if two intervals lie above 0: the hierarchical bootstrap over seeds and problems, and Student's over the
seeds, for five seeds are few to draw from. All else goes by Student's. Nothing is corrected for the number of rules.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.ablations.dapo_ladder.bed import RUNGS
from experiments.ablations.dapo_ladder.measures import at_tokens, paired_problems, solved, trend
from experiments.ablations.ratio_lab.measures import interval
from experiments.ablations.routing_replay.measures import mean_of, per_seed, where

SEEDS = (0, 1, 2, 3, 4)

PAPER = {"base": 30, "filter": 36, "clip_higher": 38, "soft": 41, "token": 42, "dynamic": 50}
"""avg@32 on AIME 2024 in per cent, table 1 of the paper: Qwen2.5-32B."""

CLIPPED = 1e-4  # Of the tokens with A > 0: below it the upper clip is not engaged.
CUT = 0.01  # Of the responses in the first quarter of the steps.
LONGER = 1.0  # Tokens by which wrong responses are longer than right ones in the first rollout batch.
WITHOUT_DIFFERENCE = 0.05  # Of the groups.

Rows = Sequence[Mapping]


def judge(steps: Rows, evals: Rows, looks: Rows, ends: Rows) -> dict[str, dict]:
  """All verdicts, each with its rule in words and the numbers that decided.

  Args:
    steps: a row for each seed, arm and RL step.
    evals: for each evaluation.
    looks: for each rollout batch of which all responses were written down.
    ends: for each trial, `right`: of each held-out problem how many samples are right.
  """
  found = {"DAPO, all switches: accuracy": _accuracy(ends, "dynamic", "base")}
  found |= _clip_higher(steps, ends) | _token_level(looks, ends) | _dynamic(steps, evals, looks, ends)
  return found | _overlong(steps, looks, ends)


def _clip_higher(steps: Rows, ends: Rows) -> dict[str, dict]:
  engaged = np.mean(_of(steps, "filter", mean_of("clip_up"))) >= CLIPPED
  area = {arm: _of(steps, arm, mean_of("entropy")) for arm in ("filter", "clip_higher", "clip_wide")}
  found = {
    "E8, entropy: 0.28 above 0.2": _above(
      "mean entropy over the run with an upper clip of 0.28 minus with 0.2", _minus(area["clip_higher"], area["filter"]), engaged=engaged,
      clipped_up=float(np.mean(_of(steps, "filter", mean_of("clip_up")))),
    ),
    "E8, accuracy": _accuracy(ends, "clip_higher", "filter", engaged=engaged),
  }  # fmt: skip
  if area["clip_wide"]:
    slopes = [float(np.polyfit((0.2, 0.28, 0.4), at, 1)[0]) for at in zip(*area.values(), strict=True)]
    found["E8, entropy rises with the upper clip"] = _above(
      "slope of the mean entropy against an upper clip of 0.2, 0.28 and 0.4", interval(slopes), engaged=engaged
    )
  return found


def _token_level(looks: Rows, ends: Rows) -> dict[str, dict]:
  first = [row | {"longer": row["tokens_wrong"] - row["tokens_right"]} for row in looks if row["step"] == 1 and row["tokens_right"]]
  longer = float(np.mean(_of(first, "soft", mean_of("longer"))))
  slope = lambda name: lambda rows: trend(rows, name)
  wrong = _minus(_of(looks, "token", slope("tokens_wrong")), _of(looks, "soft", slope("tokens_wrong")))
  return {
    "E9, length of wrong responses": _below(
      "slope of the length of wrong responses against the RL step with the token mean minus with the sequence mean", wrong,
      engaged=longer >= LONGER, wrong_longer_at_first=longer,
    ),
    "E9, accuracy": _accuracy(ends, "token", "soft", engaged=longer >= LONGER),
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
    "E10, groups that differ": _above(
      "fraction of the groups of a batch with right and wrong responses, with dynamic sampling minus without", mixed, **engaged,
      without_difference=alike,
    ),
    "E10, accuracy at equal steps": _accuracy(ends, "dynamic", "token", **engaged, tokens_drawn=factor),
    "E10, accuracy at equal tokens": _above(
      "held-out accuracy after as many response tokens as the cheaper of the two drew in all, with dynamic sampling minus without",
      interval(at_equal), **engaged,
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
    "E11, sound workings are blamed": _below(
      "mean advantage, on the lowest rung, of responses that were cut before they had made a mistake", interval(blamed), **low
    ),
    "E11, filter: accuracy": _accuracy(ends, "filter", "base", **low),
    "E11, filter: more is cut": _above(f"{words}, with the filter minus without", _minus(all_cut["filter"], all_cut["base"]), **low),
    "E11, soft penalty: accuracy": _accuracy(ends, "soft", "clip_higher", **high),
    "E11, soft penalty: less is cut": _below(
      f"{words}, with the soft penalty minus with the filter", _minus(all_cut["soft"], all_cut["clip_higher"]), **high
    ),
  }  # fmt: skip
  if all_cut["punish"]:
    found["E11, soft penalty against -1: accuracy"] = _accuracy(ends, "soft", "punish", **high)
    found["E11, soft penalty against -1: less is cut"] = _below(
      f"{words}, with the soft penalty minus with -1 for what is cut", _minus(all_cut["soft"], all_cut["punish"]), **high
    )
  return found


def _of(rows: Rows, arm: str, read) -> list[float]:
  return per_seed(where(rows, rung=arm), read)


def _minus(more: Sequence[float], less: Sequence[float]) -> dict[str, float]:
  return interval([a - b for a, b in zip(more, less, strict=True)])


def _accuracy(ends: Rows, more: str, less: str, *, engaged: bool = True, **numbers) -> dict:
  with_it, without = solved(ends, more), solved(ends, less)
  by_problem, by_seed = paired_problems(with_it, without), _minus(*([x[seed].mean() for seed in sorted(x)] for x in (with_it, without)))
  rule = f"held-out accuracy at the end, `{more}` minus `{less}`, above 0: both intervals"
  numbers = {"interval": by_problem, "over_seeds": by_seed} | numbers
  return _verdict(rule, min(by_problem["low"], by_seed["low"]) > 0, engaged, **numbers)


def _above(rule: str, at: Mapping[str, float], *, engaged: bool = True, **numbers) -> dict:
  return _verdict(f"{rule}, above 0: the whole interval", at["low"] > 0, engaged, interval=dict(at), **numbers)


def _below(rule: str, at: Mapping[str, float], *, engaged: bool = True, **numbers) -> dict:
  return _verdict(f"{rule}, below 0: the whole interval", at["high"] < 0, engaged, interval=dict(at), **numbers)


def _verdict(rule: str, passed: bool, engaged: bool, **numbers) -> dict:
  verdict = ("reproduced" if passed else "not reproduced") if engaged else "mechanism not engaged"
  return {"rule": rule, "verdict": verdict, **numbers}
