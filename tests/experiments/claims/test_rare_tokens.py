"""The study `experiments/claims/rare_tokens`: bandits against a loop, rules, and a smoke run."""

import jax
import numpy as np
import pytest

from experiments.claims.rare_tokens import __main__ as command
from experiments.claims.rare_tokens import bandit as beds
from experiments.claims.rare_tokens import rules
from experiments.results import from_json


def by_hand(bandits, clip_high, learning_rate, updates):
  """Runs plain gradient steps of PPO on one bandit in NumPy; returns p(rare) at each of them.

  The gradient of logit v is Σ_a share·C·A·(1[a = v] − π_v).
  """
  old = np.exp(bandits.old[0])
  logits, rare = bandits.old[0].copy(), []
  for _ in range(updates + 1):
    pi = np.exp(logits) / np.exp(logits).sum()
    rare.append(pi[0])
    ratio, advantages = pi / old, bandits.advantages[0]
    ended = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 0.8))
    push = bandits.share[0] * np.where(ended, 0, ratio) * advantages
    logits = logits + learning_rate * (push - pi * push.sum())
  return np.array(rare)


@pytest.mark.parametrize(("method", "clip_high"), [("clip_higher", 0.28), ("unclipped", None)])
def test_the_updates_match_a_loop_in_numpy(method, clip_high):
  bandits = beds.make_bandits(3, count=1, arms=6)
  if clip_high is None:  # There is no clip then, so the loop's lower bound must not bind either.
    bandits = bandits._replace(advantages=np.abs(bandits.advantages))
  with jax.enable_x64(True):
    probabilities = beds.follow(bandits, method, optimizer="sgd", learning_rate=0.7, updates=10)
  np.testing.assert_allclose(probabilities["rare"][:, 0], by_hand(bandits, clip_high or np.inf, 0.7, 10), rtol=1e-10)
  assert probabilities["cut"].any() == (method == "clip_higher")
  assert probabilities["rare"][0, 0] == pytest.approx(beds.RARE_PROBABILITY)


def test_a_rollout_batch_has_the_documented_shares_and_advantages():
  for drawn, rare in (("once", 1 / 16), ("expected", 0.003)):
    bandits = beds.make_bandits(0, count=5, arms=8, drawn=drawn)
    np.testing.assert_allclose(bandits.share.sum(axis=1), 1)
    np.testing.assert_allclose(bandits.share[:, 0], rare)
    np.testing.assert_allclose((bandits.share * bandits.advantages).sum(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose((bandits.share * bandits.advantages**2).sum(axis=1), 1)


def ends_with(**log_ratio):
  """Makes results in which every condition of two seeds ends at the given log-ratios."""
  every = {"ppo": 0.2, "clip_higher": 0.25, "cispo": 2.0, "sapo": 2.0, "dppo_tv": 2.0, "unclipped": 2.0} | log_ratio
  return {"ends": [
    condition._asdict() | {"method": method, "seed": seed, "log_ratio": [at, at + 0.001 * seed]}
    for condition in rules.CONDITIONS for method, at in every.items() for seed in (0, 1)
  ]}  # fmt: skip


def test_the_rules_distinguish_a_stall_from_a_rise():
  verdicts = {name: rule["verdict"] for name, rule in rules.judge(ends_with()).items()}
  assert set(verdicts.values()) == {"reproduced"}
  verdicts = {name: rule["verdict"] for name, rule in rules.judge(ends_with(ppo=1.0, cispo=0.3)).items()}
  assert verdicts["E19, PPO with 0.2 stalls"] == verdicts["E19, cispo rises"] == "contradicted"
  assert verdicts["E19, PPO with 0.28 stalls"] == verdicts["E19, sapo rises"] == "reproduced"
  idle = rules.judge(ends_with(unclipped=0.01))
  assert {rule["verdict"] for rule in idle.values()} == {"mechanism not engaged"}


@pytest.mark.exhaustive
def test_the_command_runs(tmp_path, capsys, monkeypatch):
  # The methods that have a line or a rule.
  names = ("ppo", "clip_higher", *rules.RISERS, "unclipped", "gspo", "vespo")
  monkeypatch.setattr(beds, "METHODS", {name: beds.METHODS[name] for name in names})
  monkeypatch.setattr(command.figures, "_NAMES", {name: name for name in beds.METHODS})
  command.main(["--smoke", "--folder", str(tmp_path)])
  assert "E19, cispo rises: " in capsys.readouterr().out
  assert [path.name for path in (tmp_path / "figures").iterdir()] == ["rare_tokens.png"]
  assert from_json((tmp_path / "results.json").read_text())["seeds"] == [0, 1]
