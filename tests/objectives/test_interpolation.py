"""Decoupled PPO and its interpolated old policy (A-3PO), against loops in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives import make
from jaxrl_llm.objectives.corrections import bypass, mis, tis
from jaxrl_llm.objectives.gate_weight import gate_weight
from jaxrl_llm.objectives.interpolation import interpolated
from jaxrl_llm.types import PolicyOutputs
from tests.objectives.batches import as_batch, with_junk

LOW, HIGH, CAP = 0.2, 0.28, 1.15
LAG = np.array([[0, 0, 1, 2, 4, 9], [3, 1, 0, 7, 7, 7], [2, 0, 0, 0, 0, 0], [1, 2, 3, 0, 1, 2]])


def evaluate(objective, arrays, lag=LAG):
  """Returns the loss and its gradient in the log-probabilities."""
  outputs, batch = as_batch(arrays | ({} if lag is None else {"lag": lag}))
  weights = objective.weigh(batch.mask, batch.segments)
  loss = lambda logprobs: jnp.sum(weights * objective.token_loss(outputs._replace(logprobs=logprobs), batch)[0])
  return jax.device_get(jax.value_and_grad(loss)(outputs.logprobs))


def decoupled(arrays, proximal, cap, beyond):
  """Returns the loss of decoupled PPO and its gradient, token by token.

  −Σ k·min(r·A, clip(r, 1−low, 1+high)·A) / n,  r = π/π_prox

  The weight k is π_prox/μ up to the cap, and `beyond` above it.
  """
  mask, total = arrays["mask"], arrays["mask"].sum()
  loss, grads = 0.0, np.zeros(mask.shape)
  for b, t in np.argwhere(mask > 0):
    log_pi, log_mu, advantage = (float(arrays[name][b, t]) for name in ("logprobs", "sampler_logprobs", "advantages"))
    ratio, weight = math.exp(log_pi - proximal[b, t]), math.exp(proximal[b, t] - log_mu)
    weight = weight if weight <= cap else beyond
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    loss -= weight * min(ratio * advantage, clipped * advantage) / total
    if ratio * advantage <= clipped * advantage:
      grads[b, t] = -weight * ratio * advantage / total
  return loss, grads


def proximal_of(arrays):
  """Returns A-3PO's proximal policy, token by token."""
  result = np.zeros(LAG.shape)
  for b, t in np.ndindex(*LAG.shape):
    alpha = 1 / LAG[b, t] if LAG[b, t] >= 1 else 0.0
    result[b, t] = alpha * arrays["sampler_logprobs"][b, t] + (1 - alpha) * arrays["logprobs"][b, t]
  return result


def drifted(make_batch):
  """Returns a batch whose sampler is as far from the old policy as that from the current one."""
  arrays = make_batch()
  gap = 0.4 * np.random.default_rng(3).standard_normal(arrays["mask"].shape)
  return arrays | {"sampler_logprobs": arrays["old_logprobs"] + gap}


@pytest.mark.parametrize(("correct", "beyond"), [(tis, CAP), (mis, 0.0)])
def test_a_weight_beside_the_clip_is_decoupled_ppo_with_either_old_policy(x64, make_batch, correct, beyond):
  arrays, objective = drifted(make_batch), correct(make("dapo", clip_low=LOW, clip_high=HIGH), cap=CAP)
  # The old policy of the learner, and an interpolated one, for which that was not computed.
  unknown = arrays | {"old_logprobs": np.full_like(arrays["mask"], np.nan)}
  cases = ((objective, arrays, None, arrays["old_logprobs"]), (interpolated(objective), unknown, LAG, proximal_of(arrays)))
  for with_either, given, lag, proximal in cases:
    loss, grads = evaluate(with_either, given, lag)
    expected_loss, expected = decoupled(arrays, proximal, CAP, beyond)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    np.testing.assert_allclose(grads, expected, rtol=1e-11, atol=1e-15)
    assert 0 < np.sum(grads[arrays["mask"] > 0] == 0) < np.sum(arrays["mask"])


def test_a_lag_of_one_compares_with_the_sampler_and_none_with_the_policy_itself(x64, make_batch):
  arrays, objective = drifted(make_batch), make("gspo", clip_low=LOW, clip_high=HIGH)
  ones = np.ones(LAG.shape, int)
  for actual, expected in zip(evaluate(interpolated(tis(objective)), arrays, ones), evaluate(bypass(objective), arrays), strict=True):
    np.testing.assert_array_equal(actual, expected)
  now = arrays | {"old_logprobs": arrays["logprobs"]}
  for actual, expected in zip(evaluate(interpolated(tis(objective)), arrays, 0 * ones), evaluate(tis(objective), now), strict=True):
    np.testing.assert_array_equal(actual, expected)


def test_nothing_outside_the_mask_reaches_the_loss_and_a_nan_under_it_does(x64, make_batch):
  arrays, objective = drifted(make_batch), interpolated(tis(make("dapo")))
  dirty = evaluate(objective, with_junk(arrays), np.where(arrays["mask"] > 0, LAG, -7))
  for actual, expected in zip(dirty, evaluate(objective, arrays), strict=True):
    np.testing.assert_array_equal(actual, expected)
  for name in ("logprobs", "sampler_logprobs"):
    broken = arrays[name].copy()
    broken[0, 3] = np.nan
    assert np.isnan(evaluate(objective, arrays | {name: broken})[0])
  far = arrays | {"sampler_logprobs": arrays["sampler_logprobs"] - 1e3}
  assert np.all(np.isfinite(evaluate(objective, far)[1]))


def test_what_an_interpolated_policy_reads_and_what_it_keeps(make_batch):
  arrays = drifted(make_batch)
  objective = interpolated(tis(make("clip_cov")))
  assert objective.needs == {"sampler_logprobs", "lag"} and objective.corrects_mismatch and objective.ratio_level == "token"
  # Tokens are selected before the current policy is known.
  _, batch = as_batch(arrays | {"lag": LAG})
  with_sampler = make("clip_cov").prepare(batch._replace(old_logprobs=batch.sampler_logprobs))
  prepared = objective.prepare(batch)
  np.testing.assert_array_equal(prepared.selected, with_sampler.selected)
  np.testing.assert_array_equal(prepared.old_logprobs, batch.old_logprobs)
  for name in ("lag", "sampler_logprobs"):
    with pytest.raises(ValueError, match=rf"^{name}: found None, expected an array"):
      objective.token_loss(PolicyOutputs(batch.mask), batch._replace(**{name: None}))


def test_ratio_and_weight_make_up_the_whole_ratio_to_the_sampler(x64, make_batch):
  """Their product (π/μ)^α · (π/μ)^(1 − α) is the viewer's weight of a token if no limit binds."""
  arrays = drifted(make_batch)
  arrays |= {"sampler_logprobs": arrays["logprobs"] - 0.1}
  weights = gate_weight(interpolated(tis(make("dapo"), cap=2.0)), *as_batch(arrays | {"lag": LAG}))
  np.testing.assert_allclose(weights[arrays["mask"] > 0], math.exp(0.1), rtol=1e-6)
