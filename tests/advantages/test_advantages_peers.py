"""Advantages against the outputs of verl 0.9.1's own functions, recorded by `record_peers.py`.

Where definitions differ:
- Outside the mask, advantages are 0 here; verl leaves the formula's values there.
- For a group of one, verl returns the reward itself for GRPO and RLOO; here it is 0 for GRPO and
  refused for RLOO.
- A NaN reward makes its whole group NaN, as in verl; TRL leaves it out of the means and sets that
  sample's advantage to 0.
- `compute_gae_advantage_return` whitens; here `whiten` is a separate step.
- For GDPO, verl takes the last mean and variance over tokens; here they are over samples, as in the
  paper.
- The mean in `masked_whiten` divides by the number of entries + 1e-8, a relative 1e-9 on these
  inputs, so the tolerance is 1e-8 instead of 1e-10.
- With fewer than two counted entries `masked_whiten` raises; here the result is zeros.
"""

import json
import pathlib

import numpy as np
import pytest

from jaxrl_llm.advantages import (
  generalized_advantages,
  group_advantages,
  leave_one_out_advantages,
  per_reward_advantages,
  returns_to_go,
  whiten,
)

PEERS = {name: np.array(x) for name, x in json.loads((pathlib.Path(__file__).parent / "peers.json").read_text(encoding="utf-8")).items()}
MASK = PEERS["mask"] > 0
GAE = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)]


def on_tokens(advantages):
  return np.broadcast_to(np.asarray(advantages)[:, None], MASK.shape)[MASK]


def agrees(actual, name, rtol=1e-8):
  np.testing.assert_allclose(actual, PEERS[name], rtol=rtol, atol=rtol)


def test_group_methods_agree_with_verl(x64):
  rewards = PEERS["rewards"]
  agrees(on_tokens(group_advantages(rewards, 3)), "grpo", 1e-10)
  agrees(on_tokens(group_advantages(rewards, 3, normalize_std=False)), "grpo_without_std", 1e-10)
  agrees(on_tokens(leave_one_out_advantages(rewards, 3)), "rloo", 1e-10)
  centred = np.broadcast_to(np.asarray(group_advantages(rewards, 3, normalize_std=False))[:, None], MASK.shape)
  agrees(np.asarray(whiten(centred, MASK))[MASK], "reinforce_plus_plus_baseline")


def test_whitening_agrees_with_verl(x64):
  agrees(np.asarray(whiten(PEERS["token_rewards"], MASK))[MASK], "whiten")
  agrees(np.asarray(whiten(PEERS["token_rewards"], MASK, shift_mean=False))[MASK], "whiten_without_shift")


def test_reinforce_plus_plus_agrees_with_verl(x64):
  returns = np.asarray(returns_to_go(PEERS["token_rewards"], MASK, gamma=0.9))
  agrees(returns[MASK], "reinforce_plus_plus_returns", 1e-10)
  agrees(np.asarray(whiten(returns, MASK))[MASK], "reinforce_plus_plus")


@pytest.mark.parametrize(("gamma", "lam"), GAE)
def test_generalized_advantages_agree_with_verl(x64, gamma, lam):
  advantages = np.asarray(generalized_advantages(PEERS["token_rewards"], PEERS["values"], MASK, gamma=gamma, lam=lam))
  agrees((advantages + PEERS["values"])[MASK], f"gae_returns_{gamma}_{lam}", 1e-10)
  agrees(np.asarray(whiten(advantages, MASK))[MASK], f"gae_{gamma}_{lam}")


def test_gdpo_agrees_with_verl_except_for_the_population_of_its_variance(x64):
  """verl computes GDPO in float32."""
  parts, weights = np.stack([PEERS["rewards"], PEERS["second_rewards"]]), [1.0, 0.5]
  agrees(per_reward_advantages(parts, weights, 3), "gdpo_one_token", 1e-5)
  total = sum(weight * np.asarray(group_advantages(part, 3)) for part, weight in zip(parts, weights))
  mask = np.arange(max(PEERS["lengths"])) < PEERS["lengths"][:, None]
  over_tokens = whiten(np.broadcast_to(total[:, None], mask.shape), mask)
  agrees(over_tokens[:, 0], "gdpo", 1e-5)
  assert np.max(np.abs(per_reward_advantages(parts, weights, 3) - PEERS["gdpo"])) > 0.1
