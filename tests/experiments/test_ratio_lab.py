"""Tests of `experiments/ablations/ratio_lab`: measures, the lines through them, and verdicts."""

import math
import sys

import numpy as np
import pytest

from experiments.ablations import plots
from experiments.ablations.ratio_lab import bed, measures, rules
from experiments.judging import interval
from experiments.results import from_json, rounded, to_json


def test_the_clip_of_a_sequence_follows_the_root_of_its_length():
  assert measures.sequence_clip(4096) == pytest.approx((3e-4, 4e-4))
  assert measures.sequence_clip(64, 3.0) == pytest.approx((3 * 8 * 3e-4, 3 * 8 * 4e-4))
  assert measures.matched_clip(64) == pytest.approx((0.2 / 8, 0.27 / 8))


@pytest.mark.slow
def test_clipped_fractions_are_those_counted_by_hand(rng):
  log_ratio = 0.2 * rng.standard_normal((40, 16))
  advantages = rng.standard_normal(40)
  fractions = measures.clip_fractions(log_ratio, advantages)

  def count(ratio, low, high):
    """Returns the fraction of tokens whose gradient the clip removes."""
    return np.mean(np.where(advantages[:, None] > 0, ratio > 1 + high, ratio < 1 - low))

  assert fractions["grpo"] == pytest.approx(count(np.exp(log_ratio), 0.2, 0.27))
  s = np.exp(np.mean(log_ratio, axis=1, keepdims=True))
  for name, scale in (("gspo_x0.3", 0.3), ("gspo_x1", 1.0), ("gspo_x3", 3.0)):
    assert fractions[name] == pytest.approx(count(s, *measures.sequence_clip(16, scale)))
  assert fractions["gspo_matched"] == pytest.approx(count(s, *measures.matched_clip(16)))


def test_statistics_of_independent_tokens(rng):
  spread, tokens = 0.05, 64
  statistics = measures.ratio_statistics(spread * rng.standard_normal((20000, tokens)) - spread**2 / 2)
  assert statistics["var_rho"] == pytest.approx(math.expm1(tokens * spread**2), rel=0.05)
  assert statistics["std_log_s"] == pytest.approx(spread / math.sqrt(tokens), rel=0.02)
  assert statistics["std_s"] == pytest.approx(statistics["std_log_s"], rel=0.02)
  assert statistics["ess_sequences"] == pytest.approx(math.exp(-tokens * spread**2), rel=0.02)
  assert statistics["ess_tokens"] == pytest.approx(math.exp(-(spread**2)), rel=1e-3)


def test_effective_fraction():
  assert measures.effective_fraction(np.ones(7)) == 1
  assert measures.effective_fraction(np.array([1.0, 0, 0, 0])) == 0.25


def test_a_synthetic_drift_is_correlated_within_a_sequence(rng):
  z = 0.1 * rng.standard_normal((4000, 64))
  spread = {kind: measures.with_drift(z, kind, rng) for kind in ("independent", "autoregressive", "shared")}
  for drifted in spread.values():
    assert np.std(drifted) == pytest.approx(0.1, rel=0.03)
  of_means = {kind: np.std(np.mean(drifted, axis=1)) for kind, drifted in spread.items()}
  assert of_means["independent"] == pytest.approx(0.1 / 8, rel=0.05)
  assert of_means["shared"] == pytest.approx(0.1 * math.sqrt((1 + 1 / 64) / 2), rel=0.05)
  assert of_means["independent"] < of_means["autoregressive"] < of_means["shared"]
  with pytest.raises(ValueError, match="kind: found 'other'"):
    measures.with_drift(z, "other", rng)


def test_slopes_and_intervals():
  rows = [{"seed": seed, "tokens": t, "y": (1 + seed) * t ** (-0.5 + 0.01 * seed)} for seed in range(3) for t in (8, 32, 128)]
  measured = interval(measures.slopes(rows, "y"))
  assert measured["mean"] == pytest.approx(-0.49)
  half = 4.302653 * 0.01 / math.sqrt(3)  # Student's t with 2 degrees of freedom.
  assert (measured["low"], measured["high"]) == pytest.approx((-0.49 - half, -0.49 + half))
  assert interval([1.0])["high"] == math.inf


def made_up(gspo: float, grpo: float, power: float):
  """Makes up rows with given clipped fractions, and quantities that follow T^power."""
  names = ("var_rho", "std_s", "std_log_s", "mean_max_r", "ess_tokens", "ess_sequences")
  runs = [
    dict(seed=seed, tokens=64, learning_rate=1e-3, updates=4, grpo=grpo, gspo_matched=grpo)
    | {f"gspo_x{scale:g}": gspo for scale in measures.SCALES}
    for seed in (0, 1)
  ]
  prefixes = []
  for seed in (0, 1):
    for tokens in (8, 64):
      curve = tokens ** (power + seed * 1e-3)
      prefixes.append(dict(seed=seed, tokens=tokens, updates=4) | dict.fromkeys(names, 2 + curve) | {"std_log_s": curve})
  drifts = [row | {"kind": kind} for row in prefixes for kind in ("independent", "autoregressive", "shared")]
  return {"runs": runs, "prefixes": prefixes, "drifts": drifts}


def test_verdicts():
  def verdicts(*settings):
    return {name: row["verdict"] for name, row in rules.judge(made_up(*settings)).items()}

  good = verdicts(0.2, 0.01, -0.5)
  assert good["E1"] == good["E1, bands of equal width"] == good["E4, std(log s)"] == "reproduced"
  assert good["E4, -1/2 fails for a shared drift"] == "contradicted"
  assert verdicts(0.09, 0.01, -0.5)["E1"] == "contradicted"
  assert verdicts(0.2, 0.0, -0.5)["E1"] == "mechanism not engaged"
  flat = verdicts(0.2, 0.01, -0.1)
  assert flat["E4, std(log s)"] == "contradicted"
  assert flat["E4, -1/2 fails for a shared drift"] == "reproduced"


def test_results_survive_the_file():
  results = {"seeds": [0, 1], "verdicts": {"E1": {"rule": "x"}}, "runs": [{"seed": 0, "x": 0.1}, {"seed": 1, "x": 0.2}]}
  assert from_json(to_json(results)) == results
  assert rounded({"x": [1 / 3, 2, None]}) == {"x": [0.3333, 2, None]}


def test_the_language_is_a_chain(rng):
  language = bed.make_language(16, rng)
  np.testing.assert_allclose(np.sum(language.transitions, axis=1), 1)
  assert np.sum(language.target) == 8
  tokens = bed.draw(language, (4000, 3), rng)
  counts = np.zeros((16, 16))
  np.add.at(counts, (tokens[:, 1], tokens[:, 2]), 1)
  seen = np.sum(counts, axis=1, keepdims=True)
  np.testing.assert_allclose((counts / seen)[seen[:, 0] > 150], language.transitions[seen[:, 0] > 150], atol=0.12)


def test_minibatches_repeat_cyclically():
  batch = bed.rectangle(np.arange(8 * 6).reshape(8, 6))
  assert bed.minibatch(batch, 7, 4).tokens[:, 0].tolist() == [36, 42]
  assert batch.mask.sum() == 8 * (6 - bed.PROMPT_TOKENS)


def test_without_matplotlib_the_message_names_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  with pytest.raises(ImportError, match=r"jaxrl-llm\[logging\]"), plots.new_figure(1.0):
    pass
