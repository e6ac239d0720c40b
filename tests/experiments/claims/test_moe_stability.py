"""The study `experiments/claims/moe_stability`: its rules on handmade trials, and a smoke run."""

import pytest

from experiments.claims.moe_stability import __main__ as command
from experiments.claims.moe_stability import rules
from experiments.results import from_json
from jaxrl_llm import objectives


def trials(falls=(), *, change=0.1, narrows=True, right=None):
  """Makes trials of which those of some ways collapse.

  Args:
    falls: Ways whose trials collapse.
    change: Fraction of the activated experts that change.
    narrows: Whether replay halves std(log r).
    right: Right samples of 8 at the end, by way; 4 if not given.
  """
  rows = []
  for seed in rules.SEEDS:
    for names, arm in rules.arms(2e-3):
      way = names["way"]
      log_r = (0.1 if narrows and arm.replay == "R2" else 0.2) * (1 + 0.01 * (seed + (arm.replay == "R2") * (-1) ** seed))
      curve = [0.3, 0.7, 0.1] if way in falls else [0.3, 0.6, 0.7]
      row = {"seed": seed, "samples": 8, "right": str((right or {}).get(way, 4)) * 20, "curve": curve}
      rows.append(names | row | {"change": [change] * 12, "log_r": [log_r] * 11 + [None]})
  return {"trials": rows}


@pytest.mark.parametrize(("falls", "expected"), [
  (("GRPO",), "reproduced"), (("GRPO", "GRPO with R2"), "inconclusive"), (("GRPO with R2",), "contradicted"), ((), "mechanism not engaged"),
])  # fmt: skip
def test_the_claim_requires_more_collapses_without_replay(falls, expected):
  verdicts = rules.judge(trials(falls))
  assert verdicts["E6, collapses: GRPO above GRPO with R2, N = 16, rate 0.002"]["verdict"] == expected
  assert verdicts["E6, ratios: R2 narrows GRPO's, N = 64, rate 0.002"]["verdict"] == "reproduced"
  assert all(name.startswith("E6, ") and x["rule"] for name, x in verdicts.items())


def test_the_claim_requires_a_higher_accuracy_with_replay():
  name = "E6, accuracy: GRPO with R2 above GRPO, N = 16, rate 0.002"
  assert rules.judge(trials(right={"GRPO with R2": 7}))[name]["verdict"] == "reproduced"
  assert rules.judge(trials(right={"GRPO": 7}))[name]["verdict"] == "contradicted"


def test_replay_that_does_not_narrow_the_ratios_decides_no_rule_about_replay():
  verdicts = rules.judge(trials(("GRPO",), narrows=False, right={"GRPO with R2": 7, "GSPO": 7}))
  assert {row["verdict"] for name, row in verdicts.items() if "with R2" in name} == {"mechanism not engaged"}
  assert verdicts["E6, ratios: R2 narrows GRPO's, N = 16, rate 0.002"]["verdict"] == "inconclusive"
  assert verdicts["E6, accuracy: GSPO above GRPO, N = 16, rate 0.002"]["verdict"] == "reproduced"


def test_routes_that_do_not_change_decide_nothing():
  verdicts = rules.judge(trials(("GRPO",), change=0.001, right={"GRPO with R2": 7}))
  assert {x["verdict"] for x in verdicts.values()} == {"mechanism not engaged"}


def test_every_arm_can_be_trained_and_none_is_listed_twice():
  arms = [arm for rate in rules.RATES for _, arm in rules.arms(rate)]
  assert len(set(arms)) == len(arms) == 2 * (2 * len(rules.WAYS) + 2)
  for arm in arms:
    assert objectives.make(arm.objective, **dict(arm.settings)).needs <= {"old_logprobs"}
    assert arm.recompute, "the routes are those of the pass that computes π_old"


@pytest.mark.exhaustive
def test_smoke_run_writes_verdicts_and_the_figure(tmp_path, capsys):
  command.main(["--smoke", "--folder", str(tmp_path)])
  results = from_json((tmp_path / "results.json").read_text())
  assert len(results["trials"]) == 2 * len(rules.RATES) * len(rules.arms(1e-3))
  assert (tmp_path / "figures" / "moe_stability.png").stat().st_size > 10_000
  assert "E6, collapses: GRPO above GRPO with R2, N = 16, rate 0.002" in capsys.readouterr().out
