"""The analysis behind `experiments/claims/moe_stability`: when a run has collapsed, the hazards, the rules, and the command."""

import math

import numpy as np
import pytest

from experiments.ablations.routing_replay import bed as routed
from experiments.claims.moe_stability import __main__ as command
from experiments.claims.moe_stability import bed as beds
from experiments.claims.moe_stability import rules
from experiments.claims.moe_stability.survival import collapse, hazard_quotient, kaplan_meier
from experiments.results import from_json

FINE = {"reward": 0.4, "entropy": 1.0, "grad_norm": 1.0, "finite": True}


def test_each_kind_of_collapse_is_seen_and_dated():
  alive = [FINE] * 6
  assert collapse(alive) is None
  assert collapse([*alive, FINE | {"finite": False}]) == (7, "nan")
  assert collapse([*alive, FINE | {"entropy": 0.04}]) == (7, "entropy")
  assert collapse([*alive, FINE | {"grad_norm": 11.0}]) == (7, "gradient")
  assert collapse([FINE, FINE | {"grad_norm": 11.0}]) is None  # There is no median to speak of yet.
  dead = [FINE | {"reward": 0.0}] * 6
  assert collapse([*alive, *dead[:4]]) is None  # The running mean needs two batches to halve, and must stay there for four.
  assert collapse([*alive, *dead[:5]]) == (8, "reward")
  assert collapse([*alive, *dead[:3], *alive]) is None  # It recovered.


def test_survival_by_hand():
  assert kaplan_meier([(2, True), (2, True), (5, False), (3, True)]) == ([0.0, 2.0, 3.0, 5.0], [1.0, 0.5, 0.25, 0.25])
  falls = {seed: (4.0 + seed, True) for seed in range(5)}
  stands = dict.fromkeys(range(5), (16.0, False))
  at = hazard_quotient(falls, stands)
  assert at["mean"] == pytest.approx(math.log((5.5 / 30) / (0.5 / 80)))
  assert 0 < at["low"] < at["mean"] < at["high"]


def trial(arm, seed, fall):
  rewards = [0.4] * 16 if fall is None else [0.4] * (fall - 2) + [0.0] * 5
  at = {"seed": seed} | arm._asdict()
  std_z = (0.1 if arm.replay == "R2" else 0.2) + 0.01 * seed
  return [at | FINE | {"rollout": i + 1, "reward": reward, "std_z": std_z} for i, reward in enumerate(rewards)]


@pytest.mark.parametrize(("grpo", "replayed", "verdict"), [
  (5, None, "reproduced"), (5, 5, "not reproduced"), (None, 5, "not reproduced"), (None, None, "mechanism not engaged"),
])  # fmt: skip
def test_the_rule_wants_more_collapses_without_replay(grpo, replayed, verdict):
  falls = {("grpo", "none"): grpo, ("grpo", "R2"): replayed}
  trials = [(arm, seed) for arm in rules.arms(1e-3) for seed in range(5)]
  fall = lambda arm: falls.get((arm.objective, arm.replay)) if arm.model == "experts" else None
  rows = [row for arm, seed in trials for row in trial(arm, seed, fall(arm))]
  found = rules.judge(rows)
  assert found["E6, hazard: GRPO above GRPO with R2, rate 0.001"]["verdict"] == verdict
  assert found["E6, ratios: R2 narrows GRPO's, rate 0.001"]["verdict"] == "reproduced"


def test_the_dense_control_has_as_many_active_parameters_and_nothing_to_route():
  experts, dense = (beds.bed_of(beds.SIZES, model).config for model in ("experts", "dense"))
  assert dense.experts.num_experts == dense.experts.top_k == experts.experts.top_k < experts.experts.num_experts
  assert dense._replace(experts=experts.experts) == experts


def test_the_command_runs_and_goes_on(tmp_path, capsys, monkeypatch):
  """One arm of a tiny model rewarded for every other response; the second launch finds its trial done."""
  monkeypatch.setattr(routed, "graded", lambda rollouts, chosen: np.arange(len(rollouts.tokens), dtype=np.float32) % 2)
  monkeypatch.setattr(rules, "arms", lambda rate: [beds.Arm("experts", "gspo", "R2", 4, rules.E5_RATE)])
  monkeypatch.setattr(rules, "judge", lambda rows: {"E6": {"rule": "none", "verdict": "not reproduced", "rows": len(rows)}})
  monkeypatch.setattr(command.figures, "draw", lambda *_: None)
  monkeypatch.setattr(command, "SMOKE", command.SMOKE._replace(sizes=beds.SMOKE._replace(warm_steps=0), seeds=(0,)))
  command.main(["--smoke", "--folder", str(tmp_path)])
  assert "'rows': 1" in capsys.readouterr().out
  (row,) = from_json((tmp_path / "results.json").read_text())["rows"]
  assert row["std_z"] > 0 and row["max_r"] > 1 and row["finite"]
  command.main(["--smoke", "--folder", str(tmp_path)])
  assert "rollout batches" not in capsys.readouterr().out
