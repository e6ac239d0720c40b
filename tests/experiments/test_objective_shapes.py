"""Tests of `experiments/ablations/objective_shapes`: coefficients in closed form, and bounds."""

import json

import numpy as np
import pytest

from experiments.ablations.objective_shapes import studies
from experiments.ablations.objective_shapes.__main__ import HERE
from experiments.ablations.objective_shapes.coefficients import coefficients, curve, policy_term
from experiments.ablations.objective_shapes.figures import ORDER
from jaxrl_llm import objectives
from tests.marks import TYPICAL, few

RATIO = np.array([0.25, 0.9, 1.0, 1.1, 2.5])


def sech2(x):
  return 1 / np.cosh(x) ** 2


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", few(objectives.OBJECTIVES, *TYPICAL))
def test_every_objective_weighs_an_on_policy_token_by_one(name):
  weights = [curve(policy_term(name), np.ones(1), sign).item() for sign in (1, -1)]
  np.testing.assert_allclose(weights, [1.0, -1.0 if name == "sft" else 1.0], rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
  ("name", "positive", "negative"),
  [
    ("grpo", np.where(RATIO > 1.2, 0, RATIO), np.where(RATIO < 0.8, 0, RATIO)),
    ("gspo", np.where(RATIO > 1.0004, 0, RATIO), np.where(RATIO < 0.9997, 0, RATIO)),
    ("cispo", RATIO, RATIO),
    ("sapo", RATIO * sech2((RATIO - 1) / 2), RATIO * sech2(1.05 * (RATIO - 1) / 2)),
    ("vespo", RATIO**2 * np.exp(3 - 3 * RATIO), RATIO**3 * np.exp(2 - 2 * RATIO)),
    ("dppo_tv", np.where(RATIO > 1.5, 0, RATIO), np.where(RATIO < 0.5, 0, RATIO)),
  ],
)
def test_curves_have_the_closed_forms(name, positive, negative):
  for sign, expected in ((1, positive), (-1, negative)):
    np.testing.assert_allclose(curve(policy_term(name), RATIO, sign), expected, rtol=1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", few(["sapo", "gspo", "gspo_token", "gmpo", "rloo", "vespo", "topr"], 0, 1))
def test_one_token_stands_for_a_sequence_of_equal_tokens(name):
  """The caption of figure 1, for r of the token, s of the sequence and the product ρ."""
  num_tokens = 5
  share = num_tokens if name in ("rloo", "vespo", "topr") else 1
  # The surrogate of RLOO is ρ·A, once per sequence. Under a mean over its tokens, each token moves
  # the terms of all of them.
  terms = num_tokens if name == "rloo" else 1
  objective = policy_term(name)
  many = coefficients(objective, np.repeat(np.log(RATIO)[:, None] / share, num_tokens, axis=1), -np.ones(len(RATIO)))
  one = curve(objective, RATIO, -1)[:, None]
  np.testing.assert_allclose(many, terms * np.repeat(one, num_tokens, axis=1), rtol=1e-10)


def test_the_figure_shows_every_objective():
  assert set(ORDER) == set(objectives.OBJECTIVES)
  assert len(set(ORDER)) == len(ORDER)


def test_zeros_are_counted():
  fractions = studies.zero_mass(("grpo", "sapo"), 64, spreads=(0.003, 0.3))
  assert fractions["sapo"] == [0.0, 0.0]
  assert fractions["grpo"][0] == 0.0
  # About half of the ratios outside of 1 ± 0.2 at a spread of 0.3.
  assert 0.2 < fractions["grpo"][1] < 0.3


@pytest.mark.usefixtures("x64")
def test_gspo_token_differs_for_unequal_advantages_only():
  differences = studies.token_variant(batches=3)
  assert differences["equal"] < 1e-12
  assert differences["unequal"] > 0.1


@pytest.mark.usefixtures("x64")
def test_the_gate_and_its_limit():
  distance = np.array([-3.0, -0.5, 0.0, 0.7])
  np.testing.assert_allclose(studies.gate(distance, tau=2.0), sech2(distance), rtol=1e-12)
  sequences = [np.array([0.1, -0.3]), np.array([0.5, 0.5, 0.5]), np.array([-1.0, 2.0, 0.2, 0.0])]
  limit = studies.smooth_limit(sequences)
  g = lambda z: sech2(z / 2)
  np.testing.assert_allclose(limit["difference"], [abs(np.mean(g(z)) - g(np.mean(z))) for z in sequences], rtol=1e-9, atol=1e-15)
  np.testing.assert_allclose(limit["variance"], [np.var(z) for z in sequences], atol=1e-15)
  assert np.all(limit["difference"] <= limit["bound"] + 1e-15)
  z = np.concatenate(sequences)
  np.testing.assert_allclose(limit["swap"], abs(sech2(np.expm1(z) / 2) - g(z)), atol=1e-14)
  assert np.all(limit["swap"] <= limit["swap_bound"])


@pytest.mark.usefixtures("x64")
def test_the_hand_example_agrees_with_the_reference():
  example = studies.hand_example()
  expected = {"s": 1.264, "variance": 0.155, "mean_gate": 0.954, "gate_of_mean": 0.986, "difference": 0.0324, "bound": 0.0388}
  assert example == pytest.approx(expected, rel=3e-3)


@pytest.mark.usefixtures("x64")
def test_one_outlier_clips_a_whole_sequence_in_gspo_and_one_token_in_grpo():
  shares = studies.outliers(counts=(0, 1), draws=8)
  assert shares["gspo"]["positive"][1] == 0
  assert shares["grpo"]["positive"][1] == pytest.approx(np.sqrt(63 / 64), rel=1e-3)
  assert shares["grpo"]["negative"][1] == pytest.approx(np.sqrt((63 + 2.5**2) / 64), rel=1e-3)
  assert shares["sapo"]["outlier"][1] == pytest.approx(2.5 * sech2(0.75), rel=1e-9)


def test_variation_leaves_clipped_sequences_out():
  log_ratio = np.array([[0.1, -0.1], [0.5, 0.5]])
  by_rule = studies.variation(log_ratio, np.ones(2))
  assert np.all(by_rule["gspo"][1] == 0)
  assert by_rule["gspo_variation"].shape == (1,)
  np.testing.assert_allclose(by_rule["gspo_variation"], 0, atol=1e-6)
  np.testing.assert_allclose(by_rule["grpo"][0], np.exp(log_ratio[0]), rtol=1e-6)


def test_the_committed_results_cover_every_objective():
  results = json.loads((HERE / "results.json").read_text())
  assert set(results["E12"]["fractions"]) == set(objectives.OBJECTIVES)
