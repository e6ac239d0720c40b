"""The study `experiments/claims/lengths`: its teacher, its rules, and a smoke run."""

import jax
import numpy as np
import pytest

from experiments.claims.lengths import __main__ as command
from experiments.claims.lengths import bed as beds
from experiments.claims.lengths import rules
from experiments.claims.running_sums import END, PAD, graded
from experiments.results import from_json


def test_the_teacher_rambles_with_the_documented_probability_and_at_no_cost():
  chosen = beds.problems("train", 3000, np.random.default_rng(0))
  responses = beds.demonstrations(chosen, np.random.default_rng(1))
  mask, ended = responses != PAD, np.ones(len(chosen), bool)
  lengths = mask.sum(axis=1)
  assert lengths.min() == beds.DIGITS and lengths.max() < beds.BUDGET
  assert np.all(responses[np.arange(len(responses)), lengths - 1] == END)
  right = graded(chosen, responses, mask, ended)
  bare = responses[:, : beds.DIGITS].copy()
  bare[:, -1] = END
  np.testing.assert_array_equal(right, graded(chosen, bare, bare != PAD, ended))
  # Each of the five sums is right with a probability of 0.8, and some errors cancel.
  assert 0.3 < right.mean() < 0.45
  for answer in (0, 1):
    assert np.mean(lengths[right == answer] > beds.DIGITS) == pytest.approx(beds.RAMBLES, abs=0.04)


def test_the_weights_match_the_names_of_the_arms():
  """Weights of the tokens of a short and a long response."""
  mask = np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
  weights = {name: np.asarray(make().weigh(jax.numpy.asarray(mask), None)) for name, make in beds.OBJECTIVES.items()}
  for name in ("one_over_length", "gspo"):
    np.testing.assert_allclose(weights[name].sum(axis=1), 0.5)
  for name in ("constant", "luspo"):
    np.testing.assert_allclose(weights[name][0, 0], weights[name][1, 0])
  np.testing.assert_allclose(weights["constant"][0, 0], 1 / (2 * beds.BUDGET))


def trials(slope_of):
  """Makes trials whose lengths have a given slope, a function of the arm, in tokens a step."""
  rng, rows, ends = np.random.default_rng(0), [], []
  for seed in range(5):
    for arm in rules.ARMS:
      at = {"seed": seed} | arm._asdict()
      for step in range(1, 9):
        tokens = 20 + (slope_of(arm) + 0.005 * rng.standard_normal()) * step
        row = {"tokens": tokens, "tokens_wrong": tokens + 2, "tokens_right": tokens - 1, "spread": 5.0, "correlation": -0.1, "right": 0.3}
        rows.append(at | {"step": step} | row)
      tokens = [int(8 * (20 + 8 * slope_of(arm)))] * 6
      ends.append(at | {"right": [2] * 6, "tokens": tokens, "wrong_tokens": [int(0.75 * x) for x in tokens], "responses": 8})
  return {"rows": rows, "ends": ends}


def test_the_rules_detect_a_slope_and_its_absence():
  judged = lambda results: {name: row["verdict"] for name, row in rules.judge(results).items()}
  lengthens = lambda arm: {"one_over_length": 0.5, "constant": -0.5, "gspo": -0.5, "luspo": 0.0}[arm.objective]
  verdicts = judged(trials(lengthens))
  assert verdicts.pop("E21, GRPO shortens against LUSPO") == "contradicted"
  assert verdicts.pop("E21, accuracy") == "inconclusive"
  assert set(verdicts.values()) == {"reproduced"}
  verdicts = judged(trials(lambda arm: 0.1))
  assert verdicts["E18, wrong responses lengthen"] == verdicts["E21, GSPO shortens against LUSPO"] == "inconclusive"
  results = trials(lengthens)
  alike = results | {"rows": [row | {"spread": 1.0} for row in results["rows"]]}
  assert set(judged(alike).values()) == {"mechanism not engaged"}


@pytest.mark.exhaustive  # Compiles four objectives.
def test_the_command_runs_and_resumes(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(beds, "graded", lambda chosen, tokens, *_: (np.arange(len(tokens)) % 3 == 0).astype(np.float32))
  command.main(["--smoke", "--folder", str(tmp_path)])
  first = capsys.readouterr().out
  assert "E18, wrong responses lengthen: " in first and first.count("processor time") == 12
  results = from_json((tmp_path / "results.json").read_text())
  assert len(results["rows"]) == 24 and len(results["ends"][0]["right"]) == beds.SMOKE.num_prompts
  assert [path.name for path in (tmp_path / "figures").iterdir()] == ["lengths.png"]
  command.main(["--smoke", "--folder", str(tmp_path)])
  assert "processor time" not in capsys.readouterr().out
