"""Relations: A = B when c = 0. Double precision; on-policy equalities are exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.objectives import make, value
from jaxrl_llm.objectives.gates import hard_clip, soft_gate
from jaxrl_llm.objectives.ratios import sequence_ratio, sequence_ratio_token_gradient

POLICY_FIELDS = ("logprobs", "old_logprobs", "advantages", "mask")


def policy_args(batch):
  return {name: batch[name] for name in POLICY_FIELDS}


def loss_and_grad(objective, batch):
  args = policy_args(batch)
  logprobs = args.pop("logprobs")
  (loss, metrics), grad = jax.value_and_grad(lambda x: value(objective, x, **args), has_aux=True)(logprobs)
  return loss, np.asarray(grad), metrics


ON_POLICY = [
  ("ppo", {"weights": "sequence_mean"}),
  ("ppo", {"weights": "sequence_mean", "clip_low": 0, "clip_high": 0, "dual_clip": 1.5}),
  ("grpo", {"kl_coef": 0}),
  ("dr_grpo", {"weights": "sequence_mean"}),
  ("dapo", {"weights": "sequence_mean"}),
  ("gspo", {}),
  ("gspo", {"clip_low": 0, "clip_high": 0}),
  ("gspo_token", {}),
  ("sapo", {}),
  ("sapo", {"tau_pos": 5.0, "tau_neg": 0.2}),
]


@pytest.mark.parametrize(("name", "changes"), ON_POLICY)
def test_on_policy_every_gradient_is_reinforce(x64, make_batch, name, changes):
  batch = make_batch(level="sequence")
  batch["old_logprobs"] = batch["logprobs"]
  _, grad, metrics = loss_and_grad(make(name, **changes), batch)
  mask = batch["mask"]
  expected = -mask * batch["advantages"][:, None] / mask.sum(1, keepdims=True) / len(mask)
  # The sequence ratio sums its tokens' shares, which rounds; all others are exact.
  np.testing.assert_allclose(grad, expected, rtol=1e-14)
  assert metrics.get("actor/pg_clipfrac", 0) == 0


def test_gspo_token_is_gspo_for_one_advantage_a_sequence(x64, make_batch):
  batch = make_batch(seed=4, level="sequence", spread=0.1)
  changes = {"clip_low": 0.03, "clip_high": 0.04}
  loss, grad, metrics = loss_and_grad(make("gspo", **changes), batch)
  token_loss, token_grad, token_metrics = loss_and_grad(make("gspo_token", **changes), batch)
  assert 0 < metrics["actor/pg_clipfrac"] < 1
  np.testing.assert_allclose(token_loss, loss, rtol=1e-12)
  np.testing.assert_allclose(token_grad, grad, rtol=1e-12, atol=1e-16)
  assert token_metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac"]


def test_gspo_token_differs_from_gspo_for_unequal_advantages(x64, make_batch):
  batch = make_batch(level="token", spread=0.1)
  changes = {"clip_low": 1, "clip_high": float("inf")}
  loss, grad, _ = loss_and_grad(make("gspo", **changes), batch)
  token_loss, token_grad, _ = loss_and_grad(make("gspo_token", **changes), batch)
  np.testing.assert_allclose(token_loss, loss, rtol=1e-12)
  assert np.max(np.abs(token_grad - grad)) > 1e-3


def test_gspo_weighs_all_tokens_of_a_response_alike_and_clips_it_whole(x64, make_batch):
  batch = make_batch(seed=4, level="sequence", spread=0.1)
  _, grad, _ = loss_and_grad(make("gspo", clip_low=0.03, clip_high=0.04), batch)
  kept = 0
  for row, length in enumerate((5, 3, 1, 6)):
    log_ratio = (batch["logprobs"] - batch["old_logprobs"])[row, :length]
    s, advantage = np.exp(log_ratio.mean()), batch["advantages"][row]
    clipped = s > 1.04 if advantage > 0 else s < 0.97
    expected = 0 if clipped else -s * advantage / (4 * length)
    np.testing.assert_allclose(grad[row, :length], expected, rtol=1e-12)
    kept += not clipped
  assert 0 < kept < 4


def test_sequence_ratio_lies_between_the_least_token_and_their_mean(x64, make_batch):
  batch = make_batch()
  log_ratio, mask = jnp.asarray(batch["logprobs"] - batch["old_logprobs"]), jnp.asarray(batch["mask"])
  s = np.exp(sequence_ratio(log_ratio, mask, None))
  np.testing.assert_array_equal(np.exp(sequence_ratio_token_gradient(log_ratio, mask, None)), s)
  for row, length in enumerate((5, 3, 1, 6)):
    r = np.exp(log_ratio[row, :length])
    assert r.min() - 1e-15 <= s[row, 0] <= r.mean() + 1e-15
  # A permutation of the tokens, or the response said twice, leaves it where it was.
  row = log_ratio[3]
  twice = jnp.concatenate([row[::-1], row])[None]
  np.testing.assert_allclose(np.exp(sequence_ratio(twice, jnp.ones((1, 12)), None))[0, 0], s[3, 0], rtol=1e-14)


def test_one_token_sequences_make_gspo_grpo(x64, make_batch):
  batch = make_batch(lengths=(1, 1, 1, 1))
  clip = {"clip_low": 0.2, "clip_high": 0.3}
  gspo, grpo = loss_and_grad(make("gspo", **clip), batch), loss_and_grad(make("grpo", kl_coef=0, **clip), batch)
  np.testing.assert_allclose(gspo[0], grpo[0], rtol=1e-12)
  np.testing.assert_allclose(gspo[1], grpo[1], rtol=1e-12)


@pytest.mark.parametrize("lengths, equal", [((4, 4, 4, 4), True), ((4, 2, 6, 6), False)])
def test_dapo_is_grpo_for_equal_lengths_and_clips(x64, make_batch, lengths, equal):
  batch = make_batch(lengths=lengths)
  dapo, grpo = loss_and_grad(make("dapo", clip_high=0.2), batch), loss_and_grad(make("grpo", kl_coef=0), batch)
  assert np.allclose(dapo[1], grpo[1], rtol=1e-12, atol=0) == equal
  assert np.isclose(dapo[0], grpo[0], rtol=1e-12) == equal


def test_weight_of_a_token_as_its_own_and_other_responses_grow(x64, make_batch):
  def share(name, lengths, **changes):
    batch = make_batch(lengths=(*lengths, 1, 1), spread=0, level="sequence") | {"advantages": np.ones(4)}
    grad = loss_and_grad(make(name, **changes), batch)[1]
    return [-grad[row, 0] for row in (0, 1)]

  cases = (("dapo", {}, True, False), ("grpo", {"kl_coef": 0}, False, True), ("dr_grpo", {"max_tokens": 9}, True, True))
  for name, changes, even, alone in cases:
    short, long = share(name, (2, 6), **changes)
    assert np.isclose(short, long) == even
    assert np.isclose(share(name, (2, 3), **changes)[0], short) == alone


@pytest.mark.parametrize(
  ("ratio", "advantage", "slope"), [(1.5, 1, 0.0), (0.5, 1, 0.5), (1.5, -1, -1.5), (0.5, -1, 0.0), (1.1, 1, 1.1), (0.9, -1, -0.9)]
)
def test_hard_clip_truth_table(x64, ratio, advantage, slope):
  gate, a = hard_clip(0.2, 0.2), jnp.full((1, 1), float(advantage))
  z = jnp.full((1, 1), np.log(ratio))
  found = jax.grad(lambda x: gate(x, a)[0].sum())(z)
  np.testing.assert_allclose(found, slope, rtol=1e-12)
  assert gate(z, a)[0] <= ratio * advantage + 1e-15
  assert (gate(z, a)[1]["actor/pg_clipfrac"] == 1) == (slope == 0)


def test_a_ratio_exactly_on_the_bound_keeps_its_gradient(x64):
  for ratio, advantage in ((1.5, 1.0), (0.5, -1.0)):
    slope = jax.grad(lambda x, a=advantage: hard_clip(0.5, 0.5)(x, jnp.full((1, 1), a))[0].sum())(jnp.log(jnp.full((1, 1), ratio)))
    np.testing.assert_allclose(slope, ratio * advantage, rtol=1e-12)


def test_without_bounds_all_token_methods_are_plain_importance_sampling(x64, make_batch):
  batch = make_batch()
  ratio, mask = np.exp(batch["logprobs"] - batch["old_logprobs"]), batch["mask"]
  expected = -mask / mask.sum(1, keepdims=True) / 4 * ratio * batch["advantages"]
  _, hard, _ = loss_and_grad(make("grpo", kl_coef=0, clip_low=1, clip_high=float("inf")), batch)
  np.testing.assert_allclose(hard, expected, rtol=1e-12)
  errors = [np.max(np.abs(loss_and_grad(make("sapo", tau_pos=t, tau_neg=t), batch)[1] - expected)) for t in (1e-2, 1e-3)]
  # w = 1 − τ²(r − 1)²/4 + ...: a tenth of τ is a hundredth of the error.
  np.testing.assert_allclose(errors[0] / errors[1], 100, rtol=1e-3)
  _, _, metrics = loss_and_grad(make("sapo", tau_pos=1e-4, tau_neg=1e-4), batch)
  np.testing.assert_allclose(metrics["sapo/centred_loss"], expected.sum(), rtol=1e-6)


def test_enlarging_a_bound_never_clips_more(x64, make_batch):
  batch = make_batch(lengths=(6, 6, 6, 6))
  bounds = (0.0, 0.1, 0.3, 0.6, 1.0)
  fractions = [value(make("dapo", clip_low=e, clip_high=e), **policy_args(batch))[1]["actor/pg_clipfrac"] for e in bounds]
  assert all(a >= b for a, b in zip(fractions, fractions[1:], strict=False))
  assert fractions[0] > 0.3 > fractions[-1]


@functools.partial(jax.jit, static_argnames="tau")
def gate_and_slope(log_ratio, tau, advantage):
  """Per-token surrogate, its gradient, and the gate w."""
  advantages = jnp.full_like(log_ratio, advantage)
  surrogate, vjp, metrics = jax.vjp(lambda z: soft_gate(tau, tau)(z, advantages), log_ratio, has_aux=True)
  w = jnp.where(advantages > 0, metrics["sapo/gate_pos"], metrics["sapo/gate_neg"])
  return surrogate, vjp(jnp.ones_like(surrogate))[0], w


def soft(ratio, tau, advantage=1.0):
  return [np.asarray(x)[0] for x in gate_and_slope(np.log(ratio)[None], tau=tau, advantage=advantage)]


def test_soft_gate_shape(x64):
  distance, weights = np.linspace(0, 0.99, 34), {}
  for tau in (0.3, 1.0, 1.05, 5.0):
    f, slope, w = soft(1 + distance, tau)
    f_left, slope_left, w_left = soft(1 - distance, tau)
    np.testing.assert_allclose(w, w_left, rtol=1e-12)
    np.testing.assert_allclose(w, 1 / np.cosh(tau * distance / 2) ** 2, rtol=1e-12)
    p = 1 / (1 + np.exp(-tau * distance))
    np.testing.assert_allclose(w, 4 * p * (1 - p), rtol=1e-12)
    assert np.all(np.diff(w) < 0) and w[0] == slope[0] == 1
    np.testing.assert_allclose(slope, w * (1 + distance), rtol=1e-12)
    np.testing.assert_allclose(slope_left, w * (1 - distance), rtol=1e-12)
    whole = np.concatenate([f_left[:0:-1], f])
    assert np.all(np.diff(whole) > 0) and np.all((whole > 0) & (whole < 4 / tau))
    np.testing.assert_allclose(f[0], 2 / tau, rtol=1e-14)
    weights[tau] = w[1:]
  assert np.all(weights[5.0] < weights[1.05]) and np.all(weights[1.05] < weights[1.0]) and np.all(weights[1.0] < weights[0.3])


def test_soft_gate_largest_coefficient(x64):
  ratio = np.linspace(0.01, 6, 60_000)
  for tau, largest, where in ((1.0, 1.5747, 2.060), (1.05, 1.5363, 1.992), (2.0, 1.199, 1.380), (5.0, 1.038, 1.075)):
    slope = soft(ratio, tau)[1]
    best = ratio[slope.argmax()]
    np.testing.assert_allclose([slope.max(), best], [largest, where], atol=6e-4)
    np.testing.assert_allclose(tau * best * np.tanh(tau * (best - 1) / 2), 1, atol=1e-3)


@given(z=st.floats(-20, 20, width=32), tau=st.sampled_from([0.02, 1.05, 16.0]), advantage=st.sampled_from([-2.0, 0.5]))
@settings(max_examples=60, deadline=None)
def test_soft_gate_is_finite_in_single_precision(z, tau, advantage):
  for x in gate_and_slope(np.full((1, 1), z, np.float32), tau=tau, advantage=np.float32(advantage)):
    assert x.dtype == np.float32 and np.isfinite(x[0, 0])


def test_soft_gate_underflows_late_in_single_precision():
  distance = np.array([1.0, 16.0, 20.0, 40.0, 80.0], np.float32)
  _, slope, w = soft(1 + distance, 1.0)
  assert slope.dtype == np.float32 and np.all(slope > 0) and np.all(w > 0)
  np.testing.assert_allclose(slope, (1 + distance) / np.cosh(distance.astype(np.float64) / 2) ** 2, rtol=5e-5)
  # The textbook form has long been 0 there.
  p = jax.nn.sigmoid(jnp.float32(20.0))
  assert p * (1 - p) == 0


def test_centred_sapo_loss_is_zero_on_policy_where_the_raw_one_is_not(x64, make_batch):
  batch = make_batch(lengths=(4, 4), spread=0, level="sequence") | {"advantages": np.array([1.0, -1.0])}
  _, metrics = value(make("sapo"), **policy_args(batch))
  np.testing.assert_allclose(metrics["sapo/centred_loss"], 0, atol=1e-15)
  np.testing.assert_allclose(metrics["actor/loss"], -2 * 0.5 * (1 / 1.0 - 1 / 1.05), rtol=1e-12)
  assert metrics["sapo/gate_pos"] == metrics["sapo/gate_neg"] == 1
