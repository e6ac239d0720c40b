"""KL penalties, their estimates for a reward, the KL controller, and the critic's metrics."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives.base import policy_objective
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.grpo import grpo
from jaxrl_llm.objectives.penalties import (
  KL_ESTIMATORS,
  KL_VALUES,
  adapted_coef,
  adapted_entropy_coef,
  entropy_bonus,
  kl_estimate,
  kl_penalty,
  value_loss,
)
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.segments import reduce_metrics, token_mean
from jaxrl_llm.types import PolicyOutputs, TrainBatch
from tests.objectives.batches import as_batch, with_junk

every_estimator = pytest.mark.parametrize("estimator", KL_ESTIMATORS)


def batch_of(old_logprobs, ref_logprobs, **changes):
  old_logprobs, ref_logprobs = jnp.atleast_2d(jnp.asarray(old_logprobs)), jnp.atleast_2d(jnp.asarray(ref_logprobs))
  ids, ones = jnp.ones(old_logprobs.shape, jnp.int32), jnp.ones(old_logprobs.shape, old_logprobs.dtype)
  batch = TrainBatch(ids, ids, ids, ones, advantages=ones, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
  return batch._replace(**changes)


@functools.partial(jax.jit, static_argnums=0)
def penalty_and_gradient(estimator, logprobs, batch):
  """Computes the value at each token and its derivative in that token's log-probability."""
  values, vjp, metrics = jax.vjp(lambda x: kl_penalty(0.5, estimator)(PolicyOutputs(x), batch), logprobs, has_aux=True)
  return values, vjp(jnp.ones_like(values))[0], metrics


# Results of verl 0.9.1 (`kl_penalty`) and, for weighted_k3, of TRL 1.16.0
# (`use_bias_correction_kl`) on the arrays below.
LOGPROBS, REF, OLD = [-1.0, -2.0, -0.5, -3.0], [-1.2, -1.0, -0.5, -2.5], [-1.1, -1.9, -0.9, -3.3]
K3 = [0.018730753077982, 0.718281828459045, 0.0, 0.148721270700128]
PEERS = {
  "k1": ([0.2, -1.0, 0.0, -0.5], [1.0, 1.0, 1.0, 1.0]),
  "k2": ([0.02, 0.5, 0.0, 0.125], [0.2, -1.0, 0.0, -0.5]),
  "k3": (K3, [0.181269246922018, -1.718281828459045, 0.0, -0.648721270700128]),
  "k1+": ([0.2, -1.0, 0.0, -0.5], [0.2, -1.0, 0.0, -0.5]),
  "k3+": (K3, [0.2, -1.0, 0.0, -0.5]),
  "weighted_k3": (
    [0.020700683575442, 0.64992827508503, 0.0, 0.200752717128463],
    [0.221034183615129, -0.90483741803596, 0.0, -0.674929403788002],
  ),
}


@every_estimator
def test_values_and_gradients_are_those_of_the_peers(x64, estimator):
  penalty, gradient, metrics = penalty_and_gradient(estimator, jnp.array([LOGPROBS]), batch_of(OLD, REF))
  kl, slope = PEERS[estimator]
  np.testing.assert_allclose(penalty[0], 0.5 * np.array(kl), rtol=1e-12, atol=1e-15)
  np.testing.assert_allclose(gradient[0], 0.5 * np.array(slope), rtol=1e-12, atol=1e-15)
  np.testing.assert_array_equal(metrics["actor/kl_loss"], penalty)
  np.testing.assert_array_equal(metrics["actor/kl_coef"], np.full((1, 4), 0.5))
  np.testing.assert_allclose(metrics["actor/ref_kl"][0], kl, rtol=1e-12, atol=1e-15)
  for name in KL_VALUES:
    np.testing.assert_allclose(metrics[f"actor/ref_kl_{name}"][0], PEERS[name][0], rtol=1e-12, atol=1e-15)


# By enumeration of a small vocabulary -------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def expectations(estimator, logits, sampling_logprobs, ref_logprobs):
  """Computes the expected penalty, and its gradient in the logits of π, over drawn tokens."""
  probabilities = jnp.exp(sampling_logprobs)
  batch = batch_of(sampling_logprobs, ref_logprobs)

  def mean(logits):
    return jnp.sum(probabilities * kl_penalty(1.0, estimator)(PolicyOutputs(jax.nn.log_softmax(logits)[None]), batch)[0][0])

  return jax.value_and_grad(mean)(logits)


def divergence(p_logprobs, q_logprobs):
  return jnp.sum(jnp.exp(p_logprobs) * (p_logprobs - q_logprobs))


@pytest.fixture
def policies(x64):
  """Logits of π, and log-probabilities of π, an older policy and the reference, over 7 tokens."""
  rng = np.random.default_rng(3)
  logits, old, ref = jnp.asarray(rng.standard_normal((3, 7)))
  return logits, *map(jax.nn.log_softmax, (logits, old, ref))


REVERSE, FORWARD, NONE = "KL(pi||ref)", "KL(ref||pi)", "0"


@pytest.mark.parametrize(
  ("estimator", "unbiased_value", "gradient_of"),
  [
    ("k1", True, NONE),
    ("k2", False, REVERSE),
    ("k3", True, FORWARD),
    ("k1+", True, REVERSE),
    ("k3+", True, REVERSE),
    ("weighted_k3", True, REVERSE),
  ],
)
def test_mean_value_and_mean_gradient_on_policy(policies, estimator, unbiased_value, gradient_of):
  logits, logprobs, _, ref = policies
  mean, gradient = expectations(estimator, logits, logprobs, ref)
  assert np.isclose(mean, divergence(logprobs, ref), rtol=1e-12) == unbiased_value
  targets = {
    REVERSE: jax.grad(lambda x: divergence(jax.nn.log_softmax(x), ref))(logits),
    FORWARD: jax.grad(lambda x: divergence(ref, jax.nn.log_softmax(x)))(logits),
    NONE: jnp.zeros_like(logits),
  }
  for name, target in targets.items():
    assert np.allclose(gradient, target, rtol=1e-10, atol=1e-14) == (name == gradient_of)


@every_estimator
def test_only_the_weighted_estimator_is_right_off_policy(policies, estimator):
  logits, logprobs, old, ref = policies
  mean, gradient = expectations(estimator, logits, old, ref)
  target = jax.grad(lambda x: divergence(jax.nn.log_softmax(x), ref))(logits)
  right = estimator == "weighted_k3"
  assert np.isclose(mean, divergence(logprobs, ref), rtol=1e-12) == right
  assert np.allclose(gradient, target, rtol=1e-10, atol=1e-14) == right


def test_k3_is_never_negative_and_zero_for_equal_policies_only(x64):
  log_u = np.concatenate([np.linspace(-30, 30, 41), [1e-9, -1e-9, 1e-4]])
  k3 = np.asarray(kl_estimate(np.zeros_like(log_u), log_u, "k3"))
  assert np.all(k3[log_u != 0] > 0) and np.all(k3[log_u == 0] == 0)
  # In single precision u − 1 − log u would be lost to rounding.
  small = kl_estimate(np.float32(0), np.float32(1e-3), "k3")
  np.testing.assert_allclose(small, 0.5e-6, rtol=1e-2)


# In an objective ----------------------------------------------------------------------------------


@every_estimator
def test_coefficients_of_the_batch_replace_the_penalty_s_own(x64, estimator):
  coefs = jnp.array([[0.0, 1.0, 2.0, 0.25]])
  plain, adaptive = (penalty_and_gradient(estimator, jnp.array([LOGPROBS]), batch_of(OLD, REF, kl_coefs=x)) for x in (None, coefs))
  for actual, expected in zip(adaptive[:2], plain[:2], strict=True):
    np.testing.assert_allclose(actual, coefs / 0.5 * expected, rtol=1e-14)
  np.testing.assert_array_equal(adaptive[2]["actor/kl_coef"], coefs)
  np.testing.assert_array_equal(adaptive[2]["actor/ref_kl"], plain[2]["actor/ref_kl"])


def test_entropy_coefficients_of_the_batch_replace_the_bonus_s_own():
  outputs, coefs = PolicyOutputs(jnp.zeros((1, 4)), jnp.array([[1.0, 2.0, 3.0, 4.0]])), jnp.array([[0.0, 1.0, 2.0, 0.25]])
  loss, metrics = entropy_bonus(0.5)(outputs, batch_of(OLD, REF, entropy_coefs=coefs))
  np.testing.assert_allclose(loss, [[0, -2, -6, -1]])
  np.testing.assert_array_equal(metrics["actor/entropy_coef"], coefs)
  assert np.all(entropy_bonus(0.5)(outputs, batch_of(OLD, REF))[1]["actor/entropy_coef"] == 0.5)
  next_coef = functools.partial(adapted_entropy_coef, target=1.0, step=0.125)
  assert [next_coef(0.25, x) for x in (0.5, 1.0, 1.5, float("nan"))] == [0.375, 0.25, 0.125, 0.25] and next_coef(0.0625, 2.0) == 0


@every_estimator
def test_extreme_policies_stay_finite(estimator):
  logprobs = jnp.array([[-1.0, -1e3, -1.0, -1e30, -1.0, -1e3]], jnp.float32)
  ref, old = jnp.array([[-1e3, -1.0, -1.0, -1.0, -1e30, -1.0]], jnp.float32), jnp.array([[-1e3, -1e3, -1e30, -1, -1, -1]], jnp.float32)
  penalty, gradient, metrics = penalty_and_gradient(estimator, logprobs, batch_of(old, ref))
  for x in (penalty, gradient, *metrics.values()):
    assert x.dtype == np.float32 and np.all(np.isfinite(x))
  broken = penalty_and_gradient(estimator, logprobs.at[0, 0].set(jnp.nan), batch_of(old, ref))[0]
  assert np.isnan(broken[0, 0]) and np.all(np.isfinite(broken[0, 1:]))


def test_in_an_objective_junk_outside_the_mask_changes_nothing_and_the_coefficient_scales(x64, make_batch):
  arrays, objective = make_batch(), grpo(kl_coef=0.5, kl_estimator="weighted_k3")
  arrays["kl_coefs"] = np.full(arrays["mask"].shape, 0.25)

  @jax.jit
  def run(outputs, batch):
    weights = objective.weigh(batch.mask, batch.segments)

    def loss_fn(logprobs):
      losses, metrics = objective.token_loss(outputs._replace(logprobs=logprobs), batch)
      return jnp.sum(weights * losses), reduce_metrics(metrics, batch.mask, weights)

    return jax.value_and_grad(loss_fn, has_aux=True)(outputs.logprobs)

  (loss, metrics), gradient = run(*as_batch(arrays))
  np.testing.assert_allclose(loss, metrics["actor/pg_loss"] + metrics["actor/kl_loss"], rtol=1e-14)
  np.testing.assert_allclose(metrics["actor/kl_coef"], 0.25, rtol=1e-15)
  (dirty_loss, _), dirty_gradient = run(*as_batch(with_junk(arrays)))
  np.testing.assert_array_equal(dirty_loss, loss)
  np.testing.assert_array_equal(dirty_gradient, gradient)


@pytest.mark.parametrize("anchor", ["old", "sampler"])
def test_the_weighted_estimator_uses_the_ratio_to_the_objective_s_anchor(x64, anchor):
  objective = policy_objective(
    ratio=token_ratio, gate=hard_clip(1.0, math.inf), weigh=token_mean, penalties=[kl_penalty(0.5, "weighted_k3")], anchor=anchor
  )
  batch = batch_of(OLD, REF, sampler_logprobs=jnp.array([OLD]) + 0.3)
  actual = jax.jit(lambda batch: objective.token_loss(PolicyOutputs(jnp.array([LOGPROBS])), batch)[1]["actor/ref_kl"])(
    batch
  )
  np.testing.assert_allclose(
    actual[0], np.array(PEERS["weighted_k3"][0]) * np.exp({"old": 0.0, "sampler": -0.3}[anchor]), rtol=1e-12
  )


# Outside the loss ---------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_estimate_for_a_reward(x64, estimator):
  for shape in ((4,), (2, 2), (1, 4)):
    estimate = kl_estimate(np.reshape(LOGPROBS, shape), np.reshape(REF, shape), estimator)
    np.testing.assert_allclose(estimate, np.reshape(PEERS[estimator][0], shape), rtol=1e-12, atol=1e-15)
  assert np.isfinite(kl_estimate(0.0, 1e30, estimator)) and np.isnan(kl_estimate(0.0, np.nan, estimator))
  assert kl_estimate(jnp.zeros(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16), estimator).dtype == jnp.float32


@pytest.mark.parametrize("estimator", ["k3+", "weighted_k3", "k4", ""])
def test_an_estimator_that_a_reward_cannot_use_is_named(estimator):
  with pytest.raises(ValueError, match=r"^estimator: found .*, expected one of 'k1', 'k2', 'k3', because a reward"):
    kl_estimate(np.zeros(2), np.zeros(2), estimator)


def test_the_adapted_coefficient_is_that_of_verl():
  coef, coefs = 0.1, []
  for kl, num_sequences in ((9.0, 500), (6.6, 256), (3.0, 512), (-1.0, 100)):
    coef = adapted_coef(coef, kl, target=6.0, horizon=10_000, num_sequences=num_sequences)
    coefs.append(coef)
  np.testing.assert_allclose(coefs, [0.101, 0.10125856, 0.10022167234559999, 0.10002122900090879], rtol=1e-14)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_non_finite_divergence_keeps_the_coefficient(kl):
  assert adapted_coef(0.1, kl, target=6.0, horizon=100, num_sequences=64) == 0.1


def test_the_controller_moves_the_right_way_and_rests_at_its_target():
  settings = {"target": 0.5, "horizon": 100, "num_sequences": 10}
  assert adapted_coef(0.1, 0.5, **settings) == 0.1
  assert adapted_coef(0.1, 0.4, **settings) < 0.1 < adapted_coef(0.1, 0.6, **settings)
  # The error is bounded at 0.2 on both sides.
  np.testing.assert_allclose([adapted_coef(1, kl, **settings) for kl in (1e9, 0.7, 0.0, -5.0)], [1.02, 1.02, 0.98, 0.98], rtol=1e-14)
  assert type(adapted_coef(1, np.float64(0.5), **settings)) is float
  assert adapted_coef(0.0, 9.0, **settings) == 0


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"target": 0.0}, r"^target: found 0\.0, expected a finite number of nats > 0"),
    ({"horizon": math.inf}, "^horizon: found inf"),
    ({"horizon": 2.0}, r"^horizon: found 2\.0, expected a finite number of sequences > 0\.2 \* num_sequences = 2\.0"),
    ({"num_sequences": 0}, "^num_sequences: found 0, expected a whole number"),
    ({"coef": math.nan}, "^coef: found nan, expected a finite number >= 0"),
    ({"coef": -1.0, "target": -1.0}, r"^coef: found -1\.0.*; target: found -1\.0"),
  ],
)
def test_illegal_settings_of_the_controller_are_named(settings, message):
  settings = {"coef": 0.1, "kl": 0.5, "target": 0.5, "horizon": 100.0, "num_sequences": 10} | settings
  with pytest.raises(ValueError, match=message):
    adapted_coef(settings.pop("coef"), settings.pop("kl"), **settings)


def test_metrics_of_the_critic(x64):
  values, old_values, returns = (jnp.array([x]) for x in ([1.0, 2.0, 3.0], [0.0, 2.5, 3.0], [1.5, 0.0, 3.5]))
  batch = batch_of(np.zeros((1, 3)), np.zeros((1, 3)), returns=returns, old_values=old_values)
  loss, metrics = value_loss(0.5, 0.2)(PolicyOutputs(jnp.zeros((1, 3)), values=values), batch)
  # The clipped predictions are 0.2, 2.3, 3; the squares 1.69 > 0.25, 5.29 > 4, 0.25.
  np.testing.assert_allclose(loss, 0.5 * np.array([[1.69, 5.29, 0.25]]), rtol=1e-12)
  reduced = reduce_metrics(metrics, batch.mask, batch.mask / 3)
  expected = {
    "critic/vf_loss": 0.5 * 7.23 / 3,
    "critic/vf_clipfrac": 2 / 3,
    "critic/vpred_mean": 2.0,
    "critic/values/mean": 5.5 / 3,
    "critic/values/min": 0.0,
    "critic/values/max": 3.0,
    "critic/returns/mean": 5 / 3,
    "critic/returns/min": 0.0,
    "critic/returns/max": 3.5,
  }
  assert reduced.keys() == expected.keys()
  for name, x in expected.items():
    np.testing.assert_allclose(reduced[name], x, rtol=1e-12, err_msg=name)
