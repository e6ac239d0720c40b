"""Golden: every objective against a float64 scalar loop written from the papers' formulas, loss and gradient.

The reference's gradient is the closed form C·Â of each method; finite differences tie it to the reference's loss, so that a slip in one of
the two shows.
"""

import math

import jax
import numpy as np
import pytest

from jaxrl_llm.objectives import OBJECTIVES, make, value

COMMON = {"dual_clip": None, "kl_coef": 0.0, "kl_estimator": "k3", "entropy_coef": 0.0, "max_tokens": None}
PAPERS = {
  "ppo": {"kind": "token", "clip_low": 0.2, "clip_high": 0.2, "weights": "token_mean", "value_coef": 0.5, "value_clip": 0.2},
  "grpo": {"kind": "token", "clip_low": 0.2, "clip_high": 0.2, "weights": "sequence_mean", "kl_coef": 0.04},
  "dr_grpo": {"kind": "token", "clip_low": 0.2, "clip_high": 0.2, "weights": "constant", "max_tokens": 3000},
  "dapo": {"kind": "token", "clip_low": 0.2, "clip_high": 0.28, "weights": "token_mean"},
  "gspo": {"kind": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "weights": "sequence_mean"},
  "gspo_token": {"kind": "sequence_token", "clip_low": 3e-4, "clip_high": 4e-4, "weights": "sequence_mean"},
  "sapo": {"kind": "soft", "tau_pos": 1.0, "tau_neg": 1.05, "weights": "sequence_mean"},
  "sft": {"kind": "likelihood", "weights": "token_mean"},
}
"""Every default, written down a second time: a changed default fails here."""

CASES = [
  ("ppo", {}),
  ("ppo", {"dual_clip": 1.3, "value_clip": None, "value_coef": 0.1, "weights": "sequence_mean"}),
  ("grpo", {}),
  ("grpo", {"kl_estimator": "k1", "kl_coef": 0.3}),
  ("grpo", {"kl_estimator": "k2", "kl_coef": 0.3, "entropy_coef": 0.01}),
  ("dr_grpo", {}),
  ("dr_grpo", {"max_tokens": 7}),
  ("dapo", {}),
  ("dapo", {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 1.2}),
  ("gspo", {}),
  ("gspo", {"clip_low": 0.05, "clip_high": 0.1, "weights": "token_mean"}),
  ("gspo_token", {}),
  ("gspo_token", {"clip_low": 0.05, "clip_high": 0.1}),
  ("sapo", {}),
  ("sapo", {"tau_pos": 3.0, "tau_neg": 0.5}),
  ("sft", {}),
  ("sft", {"weights": "sequence_mean"}),
]
IDS = [f"{name}-{'-'.join(changes) or 'paper'}" for name, changes in CASES]


def sequences_of(mask):
  return [[(b, t) for t in range(mask.shape[1]) if mask[b, t]] for b in range(mask.shape[0])]


def reference(settings, batch):
  """Loss, gradient in logprobs and gradient in values, by loops over sequences and tokens."""
  s = COMMON | settings
  kind, mask, lp, old = s["kind"], batch["mask"], batch["logprobs"], batch["old_logprobs"]
  loss, grad, value_grad = 0.0, np.zeros_like(lp), np.zeros_like(lp)
  sequences = [seq for seq in sequences_of(mask) if seq]
  num_tokens = sum(len(seq) for seq in sequences)

  for seq in sequences:
    weight = {
      "token_mean": 1 / num_tokens,
      "sequence_mean": 1 / len(sequences) / len(seq),
      "constant": 1 / len(sequences) / (s["max_tokens"] or 1),
    }[s["weights"]]
    mean_log_ratio = sum(lp[i] - old[i] for i in seq) / len(seq)
    for i in seq:
      advantage = batch["advantages"][i]
      if kind == "likelihood":
        loss -= weight * lp[i]
        grad[i] -= weight
        continue
      ratio = math.exp(lp[i] - old[i]) if kind in ("token", "soft") else math.exp(mean_log_ratio)
      if kind == "soft":
        tau = s["tau_pos"] if advantage > 0 else s["tau_neg"]
        surrogate = 4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
        coefficient = ratio / math.cosh(tau / 2 * (ratio - 1)) ** 2
      else:
        low, high = 1 - s["clip_low"], 1 + s["clip_high"]
        surrogate = min(ratio * advantage, min(max(ratio, low), high) * advantage)
        binds = ratio > high if advantage > 0 else ratio < low
        if s["dual_clip"] and advantage < 0:
          surrogate = max(surrogate, s["dual_clip"] * advantage)
          binds = binds or ratio > s["dual_clip"]
        coefficient = 0.0 if binds else ratio
      loss -= weight * surrogate
      for j in [i] if kind != "sequence" else seq:
        grad[j] -= weight * coefficient * advantage / (len(seq) if kind == "sequence" else 1)

      if s["kl_coef"]:
        log_u = batch["ref_logprobs"][i] - lp[i]
        u = math.exp(log_u)
        k, slope = {"k1": (-log_u, 1.0), "k2": (log_u**2 / 2, -log_u), "k3": (u - 1 - log_u, 1 - u)}[s["kl_estimator"]]
        loss += weight * s["kl_coef"] * k
        grad[i] += weight * s["kl_coef"] * slope
      loss -= weight * s["entropy_coef"] * batch["entropy"][i]
      if "value_coef" in s:
        v, old_v, target = batch["values"][i], batch["old_values"][i], batch["returns"][i]
        clip = math.inf if s["value_clip"] is None else s["value_clip"]
        bounded = min(max(v, old_v - clip), old_v + clip)
        worst = max((v - target) ** 2, (bounded - target) ** 2)
        loss += weight * s["value_coef"] * worst
        if (v - target) ** 2 >= (bounded - target) ** 2:
          value_grad[i] += weight * s["value_coef"] * 2 * (v - target)
  return loss, grad, value_grad


def settings_of(name, changes):
  return PAPERS[name] | changes


def arguments(name, batch):
  """PPO alone is given a critic: the others would not read it."""
  return batch if name == "ppo" else {k: x for k, x in batch.items() if k not in ("values", "returns", "old_values")}


def test_every_objective_has_its_paper_constants_checked():
  assert set(PAPERS) == set(OBJECTIVES) == {name for name, changes in CASES if not changes}


@pytest.mark.parametrize(("name", "changes"), CASES, ids=IDS)
def test_loss_and_gradient_match_the_scalar_loop(x64, make_batch, name, changes):
  batch = make_batch(seed=3)
  loss, grad, value_grad = reference(settings_of(name, changes), batch)
  objective = make(name, **changes)

  def f(logprobs, values):
    return value(objective, **arguments(name, batch | {"logprobs": logprobs, "values": values}))

  (found, metrics), (found_grad, found_value_grad) = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(batch["logprobs"], batch["values"])
  assert found.dtype == np.float64
  np.testing.assert_allclose(found, loss, rtol=1e-10)
  np.testing.assert_allclose(found_grad, grad, rtol=1e-10, atol=1e-15)
  if name == "ppo":
    np.testing.assert_allclose(found_value_grad, value_grad, rtol=1e-10, atol=1e-15)
    assert np.any(value_grad)
  assert np.all(np.isfinite(list(metrics.values())))
  # The parts add up to the whole; the centred loss is a second view of the policy part, not a part.
  parts = [x for key, x in metrics.items() if key.endswith("_loss") and key != "sapo/centred_loss"]
  np.testing.assert_allclose(sum(parts), metrics["actor/loss"], rtol=1e-10)


# The value of gspo_token depends on all tokens where its gradient does not; the relation tests tie it to gspo instead.
@pytest.mark.parametrize(("name", "changes"), [case for case in CASES if case[0] != "gspo_token"])
def test_reference_gradient_is_that_of_the_reference_loss(make_batch, name, changes):
  batch, settings, step = make_batch(seed=3), settings_of(name, changes), 1e-6
  _, grad, value_grad = reference(settings, batch)
  for field, expected in (("logprobs", grad), ("values", value_grad)):
    for i in np.ndindex(*grad.shape):
      up, down = (batch | {field: batch[field].copy()} for _ in range(2))
      up[field][i] += step
      down[field][i] -= step
      slope = (reference(settings, up)[0] - reference(settings, down)[0]) / (2 * step)
      np.testing.assert_allclose(slope, expected[i], rtol=1e-6, atol=1e-9)


def test_by_hand():
  # Two responses, ratios (2, 1/2) and (1/2), advantages +1 and −1, clip .2/.28: surrogates 1.28, 0.5 and −0.8; (−1.28 − 0.5 + 0.8)/3.
  logprobs = np.log([[0.5, 0.25], [0.25, 0.9]])
  old_logprobs = np.log([[0.25, 0.5], [0.5, 0.1]])
  loss, metrics = value(make("dapo"), logprobs, old_logprobs, np.array([1.0, -1.0]), np.array([[1, 1], [1, 0]]))
  np.testing.assert_allclose(loss, -0.98 / 3, rtol=1e-6)
  np.testing.assert_allclose(metrics["actor/pg_clipfrac"], 2 / 3, rtol=1e-6)
  np.testing.assert_allclose(metrics["actor/pg_clipfrac_pos"], 1 / 2, rtol=1e-6)
  np.testing.assert_allclose(metrics["actor/pg_clipfrac_neg"], 1, rtol=1e-6)
  np.testing.assert_allclose(metrics["ratio/mean"], 1, rtol=1e-6)
  np.testing.assert_allclose([metrics["ratio/min"], metrics["ratio/max"]], [0.5, 2], rtol=1e-6)
  np.testing.assert_allclose(metrics["actor/ppo_kl"], math.log(2) / 3, rtol=1e-6)


def test_sapo_gates_are_reported_by_the_sign_of_the_advantage():
  logprobs = np.log([[0.5, 0.25, 0.5]])
  old_logprobs = np.log([[0.25, 0.5, 0.5]])
  _, metrics = value(make("sapo"), logprobs, old_logprobs, np.array([[1.0, -1.0, -1.0]]), np.ones((1, 3)))
  np.testing.assert_allclose(metrics["sapo/gate_pos"], 1 / math.cosh(0.5) ** 2, rtol=1e-6)
  np.testing.assert_allclose(metrics["sapo/gate_neg"], (1 / math.cosh(1.05 / 4) ** 2 + 1) / 2, rtol=1e-6)
  centred = [4 / tau / (1 + math.exp(-tau * (r - 1))) - 2 / tau + 1 for tau, r in ((1, 2), (1.05, 0.5), (1.05, 1))]
  np.testing.assert_allclose(metrics["sapo/centred_loss"], -(centred[0] - centred[1] - centred[2]) / 3, rtol=1e-6)


def test_dual_clip_is_reported_only_when_set(make_batch):
  batch = make_batch(seed=3)
  _, without = value(make("dapo"), **arguments("dapo", batch))
  _, with_dual = value(make("dapo", dual_clip=1.2), **arguments("dapo", batch))
  ratios, counted = np.exp(batch["logprobs"] - batch["old_logprobs"]), batch["mask"] > 0
  assert "actor/pg_clipfrac_lower" not in without
  np.testing.assert_allclose(
    with_dual["actor/pg_clipfrac_lower"], np.mean(((ratios > 1.2) & (batch["advantages"] < 0))[counted]), rtol=1e-6
  )
  assert with_dual["actor/pg_clipfrac_lower"] > 0
