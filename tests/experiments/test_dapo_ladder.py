"""Tests of `experiments/ablations/dapo_ladder`: teacher, rungs, measures and verdicts."""

import json

import numpy as np
import pytest

from configs import dapo
from experiments.ablations.dapo_ladder import __main__ as command
from experiments.ablations.dapo_ladder import bed, figures, measures, rules
from experiments.results import from_json
from jaxrl_llm.config import check, fields
from jaxrl_llm.tasks.sets import arithmetic
from tests import runs


@pytest.fixture(autouse=True)
def small(monkeypatch):
  """Problems of one step, of which there are 200."""
  monkeypatch.setattr(bed, "LEVELS", (1,))


def test_the_teacher_rambles_above_all_when_wrong(tmp_path, monkeypatch):
  monkeypatch.setattr(bed, "DEMONSTRATIONS", 8)
  bed.write_problems(tmp_path)
  lines_of = lambda name: (tmp_path / f"{name}.jsonl").read_text().splitlines()
  splits = {name: [json.loads(line) for line in lines_of(name)] for name in ("train", "test", "demonstrations")}
  questions = {name: {row["terms"] for row in rows} for name, rows in splits.items()}
  assert questions["train"] == questions["demonstrations"] and questions["train"].isdisjoint(questions["test"])
  shown = splits["demonstrations"]
  assert max(len(row["response"]) for row in shown) < bed.WARM_BUDGET
  lengths_by_truth = {True: [], False: []}
  for row in shown:
    *lines, answer = row["response"].split("\n")
    level = row["level"]
    # The lines after the working copy its last line.
    assert set(lines[level:]) <= {lines[level - 1]}
    lengths_by_truth[lines[:level] != arithmetic.working(row["terms"]).split("\n")[:-1]].append(len(lines) > level)
    assert len(lines) <= level + bed.MOST_COPIES and answer == f"#{lines[-1].rpartition('=')[2]}"
  for is_wrong, rambled in lengths_by_truth.items():
    assert np.mean(rambled) == pytest.approx(bed.RAMBLES[is_wrong], abs=0.05)


def test_each_rung_turns_its_own_switch(tmp_path):
  bed.write_problems(tmp_path)
  config_of = lambda arm: fields.flatten(bed.rung_config(bed.Sizes(), tmp_path, 0, arm))
  configs = [config_of(rung) for rung in bed.RUNGS]
  turned = [{field for field in low if low[field] != high[field]} for low, high in zip(configs, configs[1:], strict=False)]
  assert turned == [
    {"reward.overlong_filter"},
    {"objective.clip_high"},
    {"reward.overlong_filter", "reward.overlong_buffer"},
    {"objective.weights"},
    {"rollout.max_refills"},
  ]
  whole, top = fields.flatten(dapo.get_config()), configs[-1]
  kept = ("objective.clip_low", "objective.clip_high", "objective.weights", "reward.overlong_filter", "rollout.max_refills")
  assert {name: top[name] for name in kept} == {name: whole[name] for name in kept}
  beside = config_of("clip_higher")
  assert {field for field, value in config_of("punish").items() if beside[field] != value} == turned[2]
  assert {field for field, value in config_of("clip_wide").items() if beside[field] != value} == turned[1]
  for arm in (*bed.RUNGS, *bed.SIDES):
    assert not check.config_problems(bed.rung_config(bed.Sizes(), tmp_path, 0, arm))
  assert not check.config_problems(bed.warm_config(bed.Sizes(), tmp_path, 0))


def sample(response: str, *, prompt: str = "7+8-5\n", answer: str = "10", stopped: bool = True, advantage: float = 0.5) -> dict:
  ids = list(response.encode())
  row = dict(prompt=prompt, response=response, answer=answer, reward=0.0, advantage=advantage, level=2)
  return row | dict(num_tokens=len(ids), stopped=stopped, token_ids=ids, step=1)


def test_looks_by_hand():
  right, wrong = sample("7+8=15\n15-5=10\n#10"), sample("7+8=14\n14-5=9\n#9")
  sound = sample("7+8=15\n15-5=10\n15-5=10\n15", stopped=False, advantage=-1.5)
  unsound = sample("7+8=14\n14-5=9\n14-5=9\n14-", stopped=False, advantage=-0.5)
  (look,) = measures.looks([right, right, wrong, sound, wrong, unsound], group_size=2)
  assert look == {
    "step": 1, "right": pytest.approx(1 / 3), "tokens_right": 18.0, "tokens_wrong": pytest.approx((16 + 25 + 16 + 24) / 4),
    "mixed": 0.0, "cut_count": 1, "cut_right": 0.5, "cut_advantage": -1.5,
  }  # fmt: skip
  (look,) = measures.looks([right, wrong], group_size=2)
  assert (look["mixed"], look["cut_right"], look["cut_advantage"]) == (1.0, None, None)


def test_rows_of_metrics():
  row = {"phase": "rl", "step": 1, "actor/entropy": 0.2, "response_length/mean": 20.0, "response_length/clip_ratio": 0.1}
  row |= {"actor/pg_clipfrac_pos": 0.01, "actor/pg_clipfrac_neg": 0.02, "timing_s/step": 1.5}
  refilled = row | {"step": 2, "group/response_tokens_drawn": 450.0, "group/rounds": 3.0}
  evaluated = {"phase": "eval", "step": 0, "eval/accuracy": 0.25, "eval/response_length/mean": 18.0}
  rows = [evaluated, row, refilled, evaluated | {"step": 2, "eval/accuracy": 0.5}]
  steps, evals = measures.steps(rows, num_sequences=10), measures.evals(rows)
  assert [(x["drawn"], x["rounds"]) for x in steps] == [(200.0, 1.0), (450.0, 3.0)]
  assert measures.seconds(rows) == 3.0
  assert measures.at_tokens(steps, evals, 325.0) == pytest.approx(0.375)
  assert measures.at_tokens(steps, evals, 1e6) == 0.5


def test_a_trend_leaves_out_missing_values():
  assert measures.trend([{"step": 1, "x": 3.0}, {"step": 2, "x": None}, {"step": 3, "x": 7.0}], "x") == pytest.approx(2.0)


def made_up(
  *, gain: float = 0.1, clipped: float = 0.01, cut: float = 0.1, mixed: float = 0.6, longer: float = 6.0, falls_to: float = 0.4,
  sides: bool = True,
):  # fmt: skip
  """Makes up the rows of trials in which each arm is better than the one below by `gain`.

  With the default arguments every mechanism is engaged and acts as claimed.
  """
  tables = {name: [] for name in command.TABLES}
  arms = (*bed.RUNGS, *(bed.SIDES if sides else ()))
  heights = dict(zip(arms, (0, 1, 2, 3, 4, 5, 2, 2), strict=False))
  for seed in rules.SEEDS:
    rng = np.random.default_rng(seed)
    near = lambda x, rng=rng: x * (1 + 0.01 * rng.random())
    for arm in arms:
      at, height = {"seed": seed, "rung": arm}, heights[arm]
      entropy = {"filter": 0.1, "clip_higher": 0.15, "clip_wide": 0.2}.get(arm, 0.1)
      often = cut * {"base": 1.0, "filter": 1.5, "clip_higher": 1.5, "punish": 1.2}.get(arm, 0.5)
      for step in range(1, 9):
        left = 1 - (1 - falls_to) * (step - 1) / 7
        row = dict(entropy=near(entropy * left), tokens_mean=20.0, truncated=near(often), clip_up=clipped, clip_down=clipped)
        tables["steps"].append(at | {"step": step} | row | dict(drawn=2000.0 if arm == "dynamic" else 1000.0, rounds=1.0))
        wrong = near(16 + longer - (0.5 if height >= 4 else 0.1) * (step - 1))
        row = dict(right=0.3, tokens_right=16.0, tokens_wrong=wrong, mixed=near(0.9 if arm == "dynamic" else mixed))
        tables["looks"].append(at | {"step": step} | row | dict(cut_count=3, cut_right=0.3, cut_advantage=-0.5))
      for step in (0, 4, 8):
        tables["evals"].append(at | dict(step=step, accuracy=near(0.2 + gain * height * (step > 0)), tokens_mean=20.0))
      right = rng.binomial(4, np.clip(0.2 + gain * height, 0, 1), size=200)
      tables["ends"].append(at | dict(right="".join(map(str, right)), samples=4, seconds=60.0))
  return tables


def test_verdicts():
  def verdicts(**settings):
    return {name: row["verdict"] for name, row in rules.judge(made_up(**settings)).items()}

  assert set(verdicts().values()) == {"reproduced"}
  assert len(verdicts()) - len(verdicts(sides=False)) == 3
  flat = verdicts(gain=0.0)
  conclusive = [name for name in flat if "accuracy" in name and flat[name] != "inconclusive"]
  assert len(conclusive) <= 1, "one of nine comparisons without a difference may be conclusive by chance"
  assert {flat[name] for name in flat if "accuracy" not in name} == {"reproduced"}
  disengaged = (dict(clipped=0.0), dict(falls_to=0.7), dict(longer=0.5), dict(mixed=0.98), dict(cut=0.001))
  for settings, mark in zip(disengaged, ("E8", "E8", "E9", "E10", "E11"), strict=True):
    off = verdicts(**settings)
    assert {name.partition(",")[0] for name in off if off[name] == "mechanism not engaged"} == {mark}


def test_figures_are_drawn_from_the_rows_alone(tmp_path):
  figures.draw(made_up(), tmp_path, ["svg"])
  assert {path.name for path in tmp_path.iterdir()} == {"ladder.svg", "mechanisms.svg"}


def test_a_stopped_measurement_resumes(tmp_path, monkeypatch, capsys):
  started = []
  monkeypatch.setattr(bed, "write_problems", lambda folder: None)
  monkeypatch.setattr(bed, "warm_start", lambda sizes, folder, seed: None)
  monkeypatch.setattr(bed, "climb", lambda sizes, folder, seed, arm: started.append((seed, arm)) or {"ends": [{"seed": seed, "rung": arm}]})
  monkeypatch.setattr(rules, "judge", lambda results: {"E": {"rule": "", "verdict": "reproduced", "rows": len(results["ends"])}})
  path, plan = tmp_path / "results.json", command.SMOKE._replace(arms=("base", "filter"), sides=("punish",))
  command.measure(plan._replace(seeds=(0,), sides=()), path, tmp_path)
  command.measure(plan, path, tmp_path, resume=True)
  assert started == [(0, "base"), (0, "filter"), (1, "base"), (1, "filter"), (0, "punish"), (1, "punish")]
  assert from_json(path.read_text())["verdicts"]["E"]["rows"] == 6
  assert "punish, seed 1: " in capsys.readouterr().out


@pytest.mark.exhaustive  # Two compilations of a learner and a sampler; each piece has its own test.
def test_a_trial_from_end_to_end(tmp_path):
  bed.write_problems(tmp_path)
  with runs.quick():
    bed.warm_start(bed.SMOKE, tmp_path, 0)
    tables = bed.climb(bed.SMOKE, tmp_path, 0, "dynamic")
  assert [row["step"] for row in tables["steps"]] == [1, 2] and tables["steps"][0]["rounds"] == 3.0
  assert [row["step"] for row in tables["evals"]] == [0, 1, 2]
  assert [row["step"] for row in tables["looks"]] == [1, 2]
  (end,) = tables["ends"]
  assert len(end["right"]) == bed.SMOKE.eval_prompts and end["samples"] == 4
