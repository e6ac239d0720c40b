"""The study `experiments/claims/experts`: its rules on handmade trials, and a smoke run."""

import jax
import numpy as np
import pytest

from experiments.claims import bed as beds
from experiments.claims.experts import __main__ as command
from experiments.claims.experts import rules
from experiments.results import from_json

MAIN = rules.CONFIRMATORY["E6"]


def trials(falls=(), *, change=0.08, factor=0.8):
  """Makes trials of which those of some ways collapse.

  Args:
    falls: Ways whose trials collapse.
    change: Fraction of the activated experts that change.
    factor: Quotient of the spreads of the ratios with and without the routes of π_old.
  """
  rows = []
  for seed in rules.SEEDS:
    for names, _ in rules.arms():
      noise = 1 + 0.01 * (-1) ** seed
      row = {"seed": seed, "samples": 8, "right": "1" * 20, "curve": [0.3, 0.7, 0.1] if names["way"] in falls else [0.3, 0.6, 0.7]}
      spreads = {"log_r": [0.2, None] * 32, "log_r_replayed": [0.2 * factor * noise, 0.1] * 32}
      rows.append(names | row | spreads | {"change": [change] * 64})
  return {"trials": rows}


@pytest.mark.parametrize(("falls", "expected"), [
  (("GRPO",), "reproduced"), (("GRPO", "GRPO with R2"), "inconclusive"), (("GRPO with R2",), "contradicted"), ((), "mechanism not engaged"),
])  # fmt: skip
def test_the_claim_requires_more_collapses_without_replay(falls, expected):
  verdicts = rules.judge(trials(falls))
  assert verdicts[MAIN]["verdict"] == expected
  narrows = verdicts["E6, ratios: R2 narrows GRPO's"]
  assert narrows["verdict"] == "reproduced" and abs(narrows["share_of_variance"] - 0.36) < 0.001


def test_replay_that_does_not_narrow_the_ratios_decides_no_rule_about_replay():
  verdicts = rules.judge(trials(("GRPO",), factor=1.0))
  assert {row["verdict"] for name, row in verdicts.items() if "with R2" in name} == {"mechanism not engaged"}
  assert verdicts["E6, collapses: GRPO above GSPO"]["verdict"] == "reproduced"


@pytest.mark.parametrize("change", [0.01, 0.3])
def test_routes_that_change_too_little_or_too_much_decide_nothing(change):
  assert {x["verdict"] for x in rules.judge(trials(("GRPO",), change=change)).values()} == {"mechanism not engaged"}


def test_frozen_weights_stay_as_they_are_and_others_move():
  bed = beds.make_bed(beds.SMOKE, "experts")
  params = bed.init(jax.random.key(0))
  chosen = beds.SMOKE.problems("train", 2, np.random.default_rng(0))
  arm = beds.Arm("grpo", rules.WAYS["GRPO"].settings, model="experts", frozen="router")
  batch = beds.draw(bed, params, chosen, jax.random.key(1), arm).batch
  batch = batch._replace(advantages=np.ones_like(batch.mask))
  after, _ = bed.step(arm.objective, arm.settings, "none", "router")(bed.new_state(params), batch, 1e-2)
  changed = lambda path, a, b: ("router" in jax.tree_util.keystr(path), bool(np.any(a != b)))
  moved = jax.tree_util.tree_map_with_path(changed, params, after.params)
  pairs = jax.tree.leaves(moved, is_leaf=lambda x: isinstance(x, tuple))
  assert any(frozen for frozen, _ in pairs) and all(moves != frozen for frozen, moves in pairs), pairs


@pytest.mark.exhaustive
def test_smoke_run_writes_verdicts_and_the_figure(tmp_path, capsys):
  command.main(["--smoke", "--folder", str(tmp_path)])
  results = from_json((tmp_path / "results.json").read_text())
  assert len(results["trials"]) == 2 * len(rules.arms())
  assert (tmp_path / "figures" / "experts.png").stat().st_size > 10_000
  assert MAIN in capsys.readouterr().out
