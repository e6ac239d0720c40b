"""Relations of the kind A = B when c = 0, in double precision; on-policy equalities are exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.objectives.gates import hard_clip, soft_gate
from jaxrl_llm.objectives.ratios import product_ratio, sequence_ratio, sequence_ratio_token_gradient
from jaxrl_llm.objectives.score_gates import binary_kl, binary_tv
from tests.marks import typical

UNCLIPPED = {"clip_low": 1.0, "clip_high": float("inf")}
NEVER = float("inf")


@pytest.fixture
def loss_and_grad(evaluate, penalties_off):
  """`(name, batch, **settings) -> (loss, gradient in logprobs, metrics)` of the policy term."""

  def of_policy_term(name, batch, **changes):
    fields = ("logprobs", "old_logprobs", "sampler_logprobs", "advantages", "mask")
    wanted = ("actor/loss", "actor/pg_clipfrac", "sapo/")
    evaluation = evaluate(
      name, {field: batch[field] for field in fields}, wanted=wanted, **(penalties_off(name) | changes)
    )
    return evaluation.loss, evaluation.grads["logprobs"], evaluation.metrics

  return of_policy_term


# On-policy no gate has an effect, not even one without width. The defaults are in
# `test_objectives_common`.
ON_POLICY = [
  ("ppo", {"clip_low": 0, "clip_high": 0, "dual_clip": 1.5}),
  ("gspo", {"clip_low": 0, "clip_high": 0}),
  ("sapo", {"tau_pos": 5.0, "tau_neg": 0.2}),
  ("cispo", {"clip_low": 0, "clip_high": 0}),
  ("gmpo", {"log_clip_low": 0, "log_clip_high": 0}),
  ("minirl", {"tis_cap": 1.0}),
  ("vespo", {"k_pos": 7.0, "lambda_neg": 0.1}),
  ("dppo_tv", {"delta_low": 0, "delta_high": 0, "ratio_cap": 1.0}),
  ("dppo_kl", {"delta_low": 0, "delta_high": 0}),
  ("cppo", {"budget": 0, "delta": 0}),
  ("minpro", {"clip_high": 0}),
  ("maspo", {"sigma": 1e-3}),
  ("fipo", {"half_life": 0.1, "future_cap": 9.0, "safe_ratio": 1.0}),
  ("topr", {"ratio_cap": 1.0}),
  ("custom", {"ratio": "product", "gate": "soft"}),
]


@pytest.mark.parametrize(("name", "changes"), typical(ON_POLICY))
def test_on_policy_every_gradient_is_reinforce(x64, make_batch, gradient, name, changes):
  batch = make_batch(level="sequence")
  batch["old_logprobs"] = batch["sampler_logprobs"] = batch["logprobs"]
  actual = gradient(name, batch, weights="sequence_mean", **changes)
  mask = batch["mask"]
  expected = -mask * batch["advantages"][:, None] / mask.sum(1, keepdims=True) / len(mask)
  if changes.get("ratio") == "product":
    expected *= mask.sum(1, keepdims=True)
  # Ratios of sequences sum the shares of their tokens, which rounds; all others are exact.
  np.testing.assert_allclose(actual, expected, rtol=1e-14)


def test_gspo_token_is_gspo_for_one_advantage_per_sequence(x64, make_batch, loss_and_grad):
  batch = make_batch(seed=4, level="sequence", spread=0.1)
  changes = {"clip_low": 0.03, "clip_high": 0.04}
  loss, grad, metrics = loss_and_grad("gspo", batch, **changes)
  token_loss, token_grad, token_metrics = loss_and_grad("gspo_token", batch, **changes)
  assert 0 < metrics["actor/pg_clipfrac"] < 1
  np.testing.assert_allclose(token_loss, loss, rtol=1e-12)
  np.testing.assert_allclose(token_grad, grad, rtol=1e-12, atol=1e-16)
  assert token_metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac"]


def test_gspo_token_differs_from_gspo_for_unequal_advantages(x64, make_batch, loss_and_grad):
  batch = make_batch(level="token", spread=0.1)
  changes = {"clip_low": 1, "clip_high": float("inf")}
  loss, grad, _ = loss_and_grad("gspo", batch, **changes)
  token_loss, token_grad, _ = loss_and_grad("gspo_token", batch, **changes)
  np.testing.assert_allclose(token_loss, loss, rtol=1e-12)
  assert np.max(np.abs(token_grad - grad)) > 1e-3


def test_gspo_weighs_all_tokens_of_a_response_alike_and_clips_it_as_a_whole(x64, make_batch, loss_and_grad):
  batch = make_batch(seed=4, level="sequence", spread=0.1)
  _, grad, _ = loss_and_grad("gspo", batch, clip_low=0.03, clip_high=0.04)
  kept = 0
  for row, length in enumerate((5, 3, 1, 6)):
    log_ratio = (batch["logprobs"] - batch["old_logprobs"])[row, :length]
    s, advantage = np.exp(log_ratio.mean()), batch["advantages"][row]
    clipped = s > 1.04 if advantage > 0 else s < 0.97
    expected = 0 if clipped else -s * advantage / (4 * length)
    np.testing.assert_allclose(grad[row, :length], expected, rtol=1e-12)
    kept += not clipped
  assert 0 < kept < 4


def test_the_token_gradient_leaves_the_value_of_the_sequence_ratio(x64, make_batch):
  batch = make_batch()
  log_ratio, mask = jnp.asarray(batch["logprobs"] - batch["old_logprobs"]), jnp.asarray(batch["mask"])
  np.testing.assert_array_equal(sequence_ratio_token_gradient(log_ratio, mask, None), sequence_ratio(log_ratio, mask, None))


@pytest.mark.parametrize("lengths, equal", [((4, 4, 4, 4), True), ((4, 2, 6, 6), False)])
def test_dapo_is_grpo_for_equal_lengths_and_clips(x64, make_batch, lengths, equal, loss_and_grad):
  batch = make_batch(lengths=lengths)
  dapo, grpo = loss_and_grad("dapo", batch, clip_high=0.2), loss_and_grad("grpo", batch, kl_coef=0)
  assert np.allclose(dapo[1], grpo[1], rtol=1e-12, atol=0) == equal
  assert np.isclose(dapo[0], grpo[0], rtol=1e-12) == equal


def test_weight_of_a_token_as_its_own_and_other_responses_grow(x64, make_batch, loss_and_grad):
  def share(name, lengths, **changes):
    batch = make_batch(lengths=(*lengths, 1, 1), spread=0, level="sequence") | {"advantages": np.ones(4)}
    grad = loss_and_grad(name, batch, **changes)[1]
    return [-grad[row, 0] for row in (0, 1)]

  cases = (("dapo", {}, True, False), ("grpo", {"kl_coef": 0}, False, True), ("dr_grpo", {"max_tokens": 9}, True, True))
  for name, changes, even, alone in cases:
    short, long = share(name, (2, 6), **changes)
    assert np.isclose(short, long) == even
    assert np.isclose(share(name, (2, 3), **changes)[0], short) == alone


def test_a_ratio_exactly_on_the_bound_keeps_its_gradient(x64):
  for ratio, advantage in ((1.5, 1.0), (0.5, -1.0)):
    slope = jax.grad(lambda x, a=advantage: hard_clip(0.5, 0.5)(x, jnp.full((1, 1), a))[0].sum())(jnp.log(jnp.full((1, 1), ratio)))
    np.testing.assert_allclose(slope, ratio * advantage, rtol=1e-12)


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("grpo", UNCLIPPED),
    ("cispo", {"clip_high": NEVER}),
    ("minirl", UNCLIPPED | {"tis_cap": NEVER}),
    ("dppo_tv", {"delta_low": NEVER, "delta_high": NEVER, "ratio_cap": NEVER}),
    ("dppo_kl", {"delta_low": NEVER, "delta_high": NEVER, "ratio_cap": NEVER}),
    ("cppo", {"delta": 1.0, "budget": 1.0}),
    ("maspo", {"sigma": 1e9}),
    ("custom", {"gate": "none"}),
  ],
)
def test_without_bounds_all_token_methods_are_plain_importance_sampling(x64, make_batch, gradient, name, changes):
  """If the sampler takes part, by its mismatch or as the anchor, the weight is the full π/μ."""
  batch = make_batch()
  anchor = batch["sampler_logprobs" if name in ("minirl", "dppo_tv", "dppo_kl", "cppo") else "old_logprobs"]
  ratio, mask = np.exp(batch["logprobs"] - anchor), batch["mask"]
  expected = -mask / mask.sum(1, keepdims=True) / 4 * ratio * batch["advantages"]
  np.testing.assert_allclose(gradient(name, batch, weights="sequence_mean", **changes), expected, rtol=1e-12)


def test_sapo_opens_into_plain_importance_sampling(x64, make_batch, loss_and_grad, gradient):
  """w = 1 − τ²(r − 1)²/4 + ..., and f − 2/τ + 1 = r − τ²(r − 1)³/12 + ...

  A tenth of τ gives a hundredth of the error.
  """
  batch = make_batch()
  ratio, mask = np.exp(batch["logprobs"] - batch["old_logprobs"]), batch["mask"]
  weights = mask / mask.sum(1, keepdims=True) / 4
  plain = -weights * ratio * batch["advantages"]
  for tau in (1e-2, 1e-3):
    _, grad, metrics = loss_and_grad("sapo", batch, tau_pos=tau, tau_neg=tau)
    np.testing.assert_allclose(grad - plain, -plain * np.square(tau * (ratio - 1)) / 4, rtol=2e-3, atol=1e-15)
    expected = np.sum(weights * batch["advantages"] * tau**2 * (ratio - 1) ** 3 / 12)
    np.testing.assert_allclose(metrics["sapo/centred_loss"] - plain.sum(), expected, rtol=2e-3)


def test_cispo_keeps_every_gradient_that_ppo_ends(x64, make_batch, gradient):
  batch = make_batch(lengths=(6, 6, 6, 6))
  capped, clipped = gradient("cispo", batch, clip_high=0.2), gradient("dapo", batch, clip_high=0.2)
  assert np.all(capped != 0) and 0.1 < np.mean(clipped == 0) < 0.9
  # Where PPO's upper clip binds, the weight is at the bound. Where nothing binds, the two are
  # equal.
  ratio, advantages = np.exp(batch["logprobs"] - batch["old_logprobs"]), batch["advantages"]
  bound = (ratio > 1.2) & (advantages > 0)
  np.testing.assert_allclose(capped[bound], -1.2 * advantages[bound] / 24, rtol=1e-12)
  inside = (ratio < 1.2) & (ratio > 0.8)
  np.testing.assert_allclose(capped[inside], clipped[inside], rtol=1e-12)


# Methods that agree if their levels, lengths or clips do.


@pytest.mark.slow
def test_one_token_responses_make_gmpo_grpo_and_rloo_gspo(x64, make_batch, loss_and_grad):
  batch = make_batch(seed=2, lengths=(1, 1, 1, 1, 1, 1))
  clip = {"clip_low": 1 - np.exp(-0.2), "clip_high": np.exp(0.3) - 1}
  pairs = [
    (("gmpo", {"log_clip_low": 0.2, "log_clip_high": 0.3}), ("grpo", clip)),
    (("rloo", clip), ("gspo", clip)),
    (("gspo", clip), ("grpo", clip)),
    (("minpro", {}), ("cispo", {})),
    (("luspo", clip), ("gspo", clip)),
    (("reinforce", {}), ("reinforce", {"weights": "token_mean"})),
  ]
  for (name, changes), (other, other_changes) in pairs:
    actual, expected = loss_and_grad(name, batch, **changes), loss_and_grad(other, batch, **other_changes)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-12, err_msg=name)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-12, atol=1e-16, err_msg=name)
    if "actor/pg_clipfrac" in actual[2]:
      assert actual[2]["actor/pg_clipfrac"] == expected[2]["actor/pg_clipfrac"]
      assert name == "minpro" or 0 < actual[2]["actor/pg_clipfrac"] < 1


def test_luspo_is_gspo_with_each_response_times_its_length(x64, make_batch, gradient):
  batch, clip = make_batch(seed=4, level="sequence"), {"clip_low": 0.05, "clip_high": 0.1}
  lengths = batch["mask"].sum(axis=1, keepdims=True)
  luspo, gspo = gradient("luspo", batch, **clip), gradient("gspo", batch, **clip)
  np.testing.assert_allclose(luspo, lengths * gspo, rtol=1e-12)
  assert 0 < np.mean(np.all(luspo == 0, axis=1)) < 1


def test_a_mismatch_weighs_minirl_beside_the_clip(x64, make_batch, gradient):
  """k and the clip are independent.

  Without a mismatch the loss is the clipped sum; with one each token has a factor min(k, 5).
  """
  batch = make_batch()
  core = gradient("custom", batch, weights="sequence_sum", clip_high=0.27)
  np.testing.assert_allclose(gradient("minirl", batch | {"sampler_logprobs": batch["old_logprobs"]}), core, rtol=1e-12)
  k = np.exp(np.resize([0.5, -0.5, 3.0], (4, 6)))
  mismatched = batch | {"sampler_logprobs": batch["old_logprobs"] - np.log(k)}
  np.testing.assert_allclose(gradient("minirl", mismatched), np.minimum(k, 5) * core, rtol=1e-12)


def test_fipo_without_a_cap_is_dapo_with_a_dual_clip(x64, make_batch, loss_and_grad):
  batch, band = make_batch(seed=3), {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.3}
  expected = loss_and_grad("dapo", batch, **band)
  for changes in ({"future_cap": 0.0}, {"future_cap": 9.0, "half_life": 1e-3, "safe_ratio": 1.0}):
    actual = loss_and_grad("fipo", batch, **band, **changes)
    same = np.allclose(actual[1], expected[1], rtol=1e-14, atol=0) and np.isclose(actual[0], expected[0], rtol=1e-14)
    # Without a half-life F is the token's own log-ratio, which is above 0 for some.
    assert same == (changes["future_cap"] == 0)
    assert actual[2]["actor/pg_clipfrac"] == expected[2]["actor/pg_clipfrac"] > 0


def test_the_future_of_fipo_ends_with_the_response(x64, make_batch, gradient):
  """Packed behind one another, responses have the weights of one response a row."""
  batch = make_batch(lengths=(3, 3), num_tokens=3, spread=0.3)
  apart = gradient("fipo", batch | {"segments": np.ones((2, 3), int)}, future_cap=9.0)
  fields = ("logprobs", "old_logprobs", "sampler_logprobs", "advantages", "mask")
  packed = {field: batch[field].reshape(1, 6) for field in fields} | {"segments": np.array([[1, 1, 1, 2, 2, 2]])}
  np.testing.assert_allclose(gradient("fipo", packed, future_cap=9.0).reshape(2, 3), apart, rtol=1e-12)
  as_one = gradient("fipo", packed | {"segments": np.ones((1, 6), int)}, future_cap=9.0)
  assert np.any(np.abs(as_one.reshape(2, 3)[0] - apart[0]) > 1e-4)
  np.testing.assert_allclose(as_one.reshape(2, 3)[1], apart[1], rtol=1e-12)


def test_topr_is_reinforce_on_good_responses_and_tapers_off_on_bad_ones(x64, make_batch, gradient):
  batch = make_batch(lengths=(6, 6, 6, 6), level="sequence") | {"advantages": np.array([-1.0, -1.0, -2.0, 0.5])}
  topr, plain = (gradient(name, batch) for name in ("topr", "reinforce"))
  weight = np.exp(np.sum(batch["logprobs"] - batch["sampler_logprobs"], axis=1, keepdims=True))
  bad = batch["advantages"][:, None] < 0
  np.testing.assert_allclose(topr, plain * np.where(bad, np.minimum(weight, 1), 1), rtol=1e-12)
  assert 0 < np.mean(weight[bad] < 1) < 1
  # Without a cap, bad responses have their whole importance weight.
  np.testing.assert_allclose(gradient("topr", batch, ratio_cap=NEVER)[bad[:, 0]], (plain * weight)[bad[:, 0]], rtol=1e-12)


# Clip fractions.

CLIPPING = [
  ("dapo", ("clip_low", "clip_high"), "token"),
  ("gspo", ("clip_low", "clip_high"), "sequence"),
  ("gmpo", ("log_clip_low", "log_clip_high"), "sequence"),
  ("dppo_kl", ("delta_low", "delta_high"), "token"),
]


@pytest.mark.parametrize(("name", "bounds", "level"), typical(CLIPPING))
def test_enlarging_either_bound_never_clips_more(x64, make_batch, loss_and_grad, name, bounds, level):
  batch = make_batch(seed=4, lengths=4 * (6, 5, 2, 6), level=level)
  small, middle, large = (0.0, 0.01, 0.05) if name == "dppo_kl" else (0.0, 0.05, 0.2)
  signs = ("", "_seq", "_neg", "_seq_neg", "_pos", "_seq_pos")

  def fractions(low, high):
    metrics = loss_and_grad(name, batch, **dict(zip(bounds, (low, high), strict=True)))[2]
    return np.array([metrics[f"actor/pg_clipfrac{sign}"] for sign in signs])

  # Each bound is for advantages of one sign.
  lows = [fractions(low, middle) for low in (small, middle, large)]
  highs = [fractions(middle, high) for high in (small, middle, large)]
  for swept, own, other in ((lows, 2, 4), (highs, 4, 2)):
    assert np.all(np.diff(swept, axis=0) <= 0) and np.all(swept[0] >= 0)
    assert swept[0][own] > swept[2][own] and np.all(swept[0][other : other + 2] == swept[2][other : other + 2])


def test_clip_fractions_count_tokens_and_responses_at_which_a_clip_binds(x64, loss_and_grad):
  """By hand: 1, 2, 3, 4, 6 tokens, ratios 2, 2, 1/2, 1/2, 1 and advantages +, −, +, −, +."""
  lengths, ratios, advantages = (1, 2, 3, 4, 6), (2, 2, 0.5, 0.5, 1), (1.0, -1.0, 2.0, -2.0, 1.0)
  mask = (np.arange(6) < np.array(lengths)[:, None]).astype(float)
  logprobs = np.repeat(np.log(np.array(ratios))[:, None], 6, axis=1)
  batch = {"logprobs": logprobs, "old_logprobs": 0 * logprobs, "sampler_logprobs": 0 * logprobs, "advantages": np.array(advantages)}
  _, grad, metrics = loss_and_grad("gspo", batch | {"mask": mask}, clip_low=0.2, clip_high=0.2)
  # The first (up, and gained) and the fourth (down, and lost) have left the band in the advantage's
  # direction; the others return.
  expected = {"": 5 / 16, "_pos": 1 / 10, "_neg": 4 / 6, "_seq": 2 / 5, "_seq_pos": 1 / 3, "_seq_neg": 1 / 2}
  for sign, fraction in expected.items():
    np.testing.assert_allclose(metrics[f"actor/pg_clipfrac{sign}"], fraction, rtol=1e-12, err_msg=sign)
  np.testing.assert_allclose(np.all(grad == 0, axis=1), [True, False, False, True, False])

  # At token level, one clipped token makes its response count, whatever its length.
  logprobs = np.zeros_like(logprobs)
  logprobs[4, 2] = logprobs[3, :3] = np.log(2)
  _, _, metrics = loss_and_grad("dapo", batch | {"mask": mask, "logprobs": logprobs})
  expected = {"": 1 / 16, "_pos": 1 / 10, "_neg": 0, "_seq": 1 / 5, "_seq_pos": 1 / 3, "_seq_neg": 0}
  for sign, fraction in expected.items():
    np.testing.assert_allclose(metrics[f"actor/pg_clipfrac{sign}"], fraction, rtol=1e-12, err_msg=sign)


def test_a_response_with_advantages_of_both_signs_belongs_to_both_populations(x64, loss_and_grad):
  logprobs = np.log([[2.0, 0.5, 2.0], [1.0, 1.0, 2.0]])
  batch = {"logprobs": logprobs, "old_logprobs": 0 * logprobs, "sampler_logprobs": 0 * logprobs, "mask": np.ones((2, 3))}
  _, _, metrics = loss_and_grad("dapo", batch | {"advantages": np.array([[1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])})
  fractions = [metrics[f"actor/pg_clipfrac{sign}"] for sign in ("", "_pos", "_neg", "_seq", "_seq_pos", "_seq_neg")]
  np.testing.assert_allclose(fractions, [2 / 6, 2 / 3, 0, 1, 1, 0], rtol=1e-12)


# DPPO.


def test_dppo_is_ppo_if_the_sampler_is_indifferent(x64, make_batch, gradient):
  """If μ is the same for all tokens, |π − μ| = μ·|r − 1|: a ball of radius μ·ε is the clip of ε."""
  batch = make_batch(seed=1, lengths=(6, 5, 6, 6))
  probability = 0.25
  indifferent = np.full((4, 6), np.log(probability))
  batch |= {"logprobs": indifferent + batch["logprobs"] - batch["old_logprobs"]}
  batch |= {"old_logprobs": indifferent, "sampler_logprobs": indifferent}
  dppo = gradient("dppo_tv", batch, delta_low=0.2 * probability, delta_high=0.28 * probability, ratio_cap=NEVER)
  dapo = gradient("dapo", batch)
  np.testing.assert_allclose(dppo, dapo, rtol=1e-12)
  assert 0.1 < np.mean(dppo == 0) < 0.9


def random_policies(seed, vocab, spread):
  rng = np.random.default_rng(seed)
  policies = np.exp(spread * rng.standard_normal((2, vocab)))
  return policies / policies.sum(axis=1, keepdims=True)


@given(seed=st.integers(0, 10**6), vocab=st.integers(2, 9), spread=st.floats(0.0, 4.0))
@settings(max_examples=60)
def test_the_divergence_of_the_sampled_token_is_at_most_the_whole_divergence(seed, vocab, spread):
  """Data processing: the event "this token or another" forgets which other token."""
  pi, mu = random_policies(seed, vocab, spread)
  # A row of nine tokens, whatever the vocabulary, needs only one program.
  log_pi, log_mu = (np.pad(np.log(p), (0, 9 - vocab), constant_values=-1.0)[None] for p in (pi, mu))
  with jax.enable_x64(True):
    tv, kl = (np.asarray(of(jnp.asarray(log_pi), jnp.asarray(log_mu)))[0, :vocab] for of in (binary_tv, binary_kl))
  full_tv, full_kl = np.sum(np.abs(pi - mu)) / 2, np.sum(mu * np.log(mu / pi))
  assert np.all(tv <= full_tv + 1e-12) and np.all(kl <= full_kl + 1e-12) and np.all(kl >= -1e-12)
  # Pinsker's inequality. With two tokens nothing is forgotten.
  assert np.all(2 * np.square(tv) <= kl + 1e-12)
  if vocab == 2:
    np.testing.assert_allclose(tv, full_tv, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(kl, full_kl, rtol=1e-9, atol=1e-13)


# VESPO.


def test_vespo_chooses_its_constants_by_the_sign_of_the_advantage(x64, make_batch, gradient):
  batch = make_batch(level="sequence", lengths=(6, 6, 6, 6), spread=0.2)
  up, down = (gradient("vespo", batch | {"advantages": sign * np.ones(4)}) for sign in (1, -1))
  rho = np.exp(np.sum(batch["logprobs"] - batch["old_logprobs"], axis=1, keepdims=True))
  np.testing.assert_allclose(up, np.broadcast_to(-(rho**2) * np.exp(3 * (1 - rho)) / 24, up.shape), rtol=1e-10)
  np.testing.assert_allclose(down, np.broadcast_to(rho**3 * np.exp(2 * (1 - rho)) / 24, down.shape), rtol=1e-10)


def test_repeating_a_response_squares_its_product_and_leaves_its_mean(x64):
  z = np.random.default_rng(0).standard_normal(6)
  once, twice = jnp.asarray(z)[None], jnp.asarray(np.concatenate([z[::-1], z]))[None]
  for ratio, factor in ((sequence_ratio, 1), (product_ratio, 2)):
    a, b = ratio(once, jnp.ones((1, 6)), None)[0, 0], ratio(twice, jnp.ones((1, 12)), None)[0, 0]
    np.testing.assert_allclose(b, factor * a, rtol=1e-13)


# Beyond the bound of the log-ratio.

THROUGH_THE_RATIO = tuple("ppo grpo dapo gspo gspo_token sapo rloo reinforce_plus_plus gmpo minirl luspo cppo maspo fipo custom".split())
THROUGH_THE_SCORE = ("reinforce", "cispo", "minpro", "vespo", "dppo_tv", "dppo_kl", "topr")


@pytest.mark.parametrize("name", typical(THROUGH_THE_RATIO + THROUGH_THE_SCORE))
def test_the_bound_of_the_log_ratio_ends_the_gradient_through_a_ratio_and_not_through_the_score(x64, make_batch, gradient, name):
  batch = make_batch(lengths=(6, 6, 6, 6), level="sequence")
  far = np.where(np.arange(4)[:, None] < 2, np.array([[1e3], [-1e3], [0], [0]]), 0.1)
  batch |= {"old_logprobs": batch["logprobs"] - far, "sampler_logprobs": batch["logprobs"] - far}
  # Two tokens move back, where no clip binds: a rare token loses again and a common one regains.
  actual = gradient(name, batch | {"advantages": np.array([-1.0, 1.0, 1.0, -1.0])})
  assert np.all(actual[2:] != 0) or name in ("gspo", "gspo_token", "luspo", "rloo")
  assert np.all(actual[:2] == 0) if name in THROUGH_THE_RATIO else np.any(actual[:2] != 0) or name == "vespo"


# SAPO's gate.


@functools.partial(jax.jit, static_argnames="tau")
def gate_and_slope(log_ratio, tau, advantage):
  """Computes the per-token surrogate, its gradient, and the gate w."""
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
  # The textbook form has long underflowed to 0 there.
  p = jax.nn.sigmoid(jnp.float32(20.0))
  assert p * (1 - p) == 0


def test_centred_sapo_loss_is_zero_on_policy_where_the_raw_one_is_not(x64, make_batch, loss_and_grad):
  batch = make_batch(lengths=(4, 4), spread=0, level="sequence") | {"advantages": np.array([1.0, -1.0])}
  _, _, metrics = loss_and_grad("sapo", batch)
  np.testing.assert_allclose(metrics["sapo/centred_loss"], 0, atol=1e-15)
  np.testing.assert_allclose(metrics["actor/loss"], -2 * 0.5 * (1 / 1.0 - 1 / 1.05), rtol=1e-12)
  assert metrics["sapo/gate_pos"] == metrics["sapo/gate_neg"] == 1
