"""The analysis behind `experiments/claims/moe_stability`: the hazards, the rules on trials made by hand, and the command."""

import math

import pytest

from experiments.claims.moe_stability import __main__ as command
from experiments.claims.moe_stability import rules
from experiments.claims.moe_stability.survival import Life, hazard_quotient, kaplan_meier
from experiments.results import from_json
from jaxrl_llm import objectives


def test_survival_by_hand():
  assert kaplan_meier([Life(2, True), Life(2, True), Life(5, False), Life(3, True)]) == ([0.0, 2.0, 3.0, 5.0], [1.0, 0.5, 0.25, 0.25])
  falls = {seed: Life(4.0 + seed, True) for seed in range(5)}
  stands = dict.fromkeys(range(5), Life(16.0, False))
  at = hazard_quotient(falls, stands)
  assert at["mean"] == pytest.approx(math.log((5.5 / 30) / (0.5 / 80)))
  assert 0 < at["low"] < at["mean"] < at["high"]


def trials(falls, *, change=0.1, right=None):
  """Trials of 192 updates, those of some ways collapsed at an update; std(log r) is smaller with replay."""
  found = []
  for seed in rules.SEEDS:
    for names, arm in rules.arms(2e-3):
      way = names["way"]
      log_r = (0.1 if arm.replay == "R2" else 0.2) + 0.01 * seed
      row = {"seed": seed, "samples": 8, "right": str((right or {}).get(way, 4)) * 20, "trained": 192, "collapsed_at": falls.get(way)}
      found.append(names | row | {"change": [change] * 12, "log_r": [log_r] * 11 + [None]})
  return found


@pytest.mark.parametrize(("grpo", "replayed", "expected"), [
  (5, None, "reproduced"), (5, 5, "not reproduced"), (None, 5, "not reproduced"), (None, None, "mechanism not engaged"),
])  # fmt: skip
def test_the_rule_wants_more_collapses_without_replay(grpo, replayed, expected):
  found = rules.judge(trials({"GRPO": grpo, "GRPO with R2": replayed}))
  assert found["E6, hazard: GRPO above GRPO with R2, N = 16, rate 0.002"]["verdict"] == expected
  assert found["E6, ratios: R2 narrows GRPO's, N = 64, rate 0.002"]["verdict"] == "reproduced"
  assert all(name.startswith("E6, ") and x["rule"] for name, x in found.items())


def test_the_rule_wants_replay_to_end_higher():
  name = "E6, accuracy: GRPO with R2 above GRPO, N = 16, rate 0.002"
  assert rules.judge(trials({}, right={"GRPO with R2": 7}))[name]["verdict"] == "reproduced"
  assert rules.judge(trials({}, right={"GRPO": 7}))[name]["verdict"] == "not reproduced"


def test_routes_that_do_not_move_decide_nothing():
  found = rules.judge(trials({"GRPO": 5}, change=0.001, right={"GRPO with R2": 7}))
  assert {x["verdict"] for x in found.values()} == {"mechanism not engaged"}


def test_every_arm_can_be_trained_and_none_is_there_twice():
  arms = [arm for rate in rules.RATES for _, arm in rules.arms(rate)]
  assert len(set(arms)) == len(arms) == 2 * (2 * len(rules.WAYS) + 2)
  for arm in arms:
    assert objectives.make(arm.objective, **dict(arm.settings)).needs <= {"old_logprobs"}
    assert arm.recompute, "routes are those of the pass that makes π_old"


@pytest.mark.slow
def test_smoke_run_writes_verdicts_and_the_figure(tmp_path, capsys):
  command.main(["--smoke", "--folder", str(tmp_path)])
  results = from_json((tmp_path / "results.json").read_text())
  assert len(results["trials"]) == 2 * len(rules.RATES) * len(rules.arms(1e-3))
  assert (tmp_path / "figures" / "moe_stability.png").stat().st_size > 10_000
  assert "E6, hazard: GRPO above GRPO with R2, N = 16, rate 0.002" in capsys.readouterr().out
