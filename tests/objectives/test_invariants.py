"""Invariants on random inputs, the smallest batches, and the anchor of a batch's updates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.advantages import group_advantages
from jaxrl_llm.learner.train_step import init_state, make_train_step
from jaxrl_llm.objectives import OBJECTIVES, make
from jaxrl_llm.objectives.gates import soft_gate
from jaxrl_llm.types import TrainBatch
from tests.batches import bigram_outputs
from tests.marks import few, typical

NUM_TOKENS = 8

# SAPO's gate under the paper's two assumptions: ratios are near 1, and so are the tokens of a
# response to one another.


@functools.partial(jax.jit, static_argnames="tau")
def openness(log_ratio, tau):
  """Computes the gate's w = sech²(τ(r − 1)/2) at each log-ratio."""
  return soft_gate(tau, tau)(log_ratio, jnp.ones_like(log_ratio))[1]["sapo/gate_pos"]


def gate_of(log_ratio, tau):
  with jax.enable_x64(True):
    return np.asarray(openness(np.atleast_2d(log_ratio), tau))[0]


def smooth_gate(log_ratio, tau):
  """Computes g(z) = sech²(τz/2), to which small steps reduce the gate: log r replaces r − 1."""
  return gate_of(np.log1p(log_ratio), tau)


def spread_of(z, tau):
  """Returns the distance D of the mean gate from the mean's gate, its bound, and the variance."""
  variance = np.mean(np.square(z - z.mean()))
  at_mean = smooth_gate(np.full_like(z, z.mean()), tau)[0]
  return abs(np.mean(smooth_gate(z, tau)) - at_mean), tau**2 * variance / 4, variance


temperatures = st.sampled_from([0.3, 1.0, 1.05, 5.0])
# r − 1 replaces log r and must stay above −1.
log_ratios = st.lists(st.floats(-0.95, 3.0), min_size=NUM_TOKENS, max_size=NUM_TOKENS).map(np.array)


@given(z=log_ratios, tau=temperatures)
@settings(max_examples=150)
def test_the_mean_gate_is_near_the_gate_of_the_mean(z, tau):
  distance, bound, _ = spread_of(z, tau)
  assert distance <= bound * (1 + 1e-9) + 1e-15


def test_the_bound_on_the_mean_gate_is_tight():
  """The curvature is largest around 0: for two tokens at ±h, D / bound → 1."""
  quotients = []
  for h in (0.3, 0.1, 0.03):
    distance, bound, _ = spread_of(np.array([h, -h] * 4), 1.0)
    quotients.append(distance / bound)
  assert quotients[0] < quotients[1] < quotients[2] < 1 and quotients[2] > 0.999


@given(z=st.floats(-0.95, 3.0), tau=temperatures)
def test_equal_tokens_have_the_gate_of_their_mean(z, tau):
  assert spread_of(np.full(NUM_TOKENS, z), tau)[0] <= 1e-15


@given(z=log_ratios, tau=temperatures)
@settings(max_examples=150)
def test_small_steps_replace_the_ratio_by_its_logarithm(z, tau):
  """|sech²(τ(e^z − 1)/2) − sech²(τz/2)| ≤ (2τ/(3√3))·(e^z − 1 − z).

  The bound is the gate's steepest slope times the distance.
  """
  error = np.abs(gate_of(z, tau) - smooth_gate(z, tau))
  assert np.all(error <= 2 * tau / (3 * np.sqrt(3)) * (np.expm1(z) - z) * (1 + 1e-9) + 1e-15)


def test_one_outlier_by_hand():
  """Ratios 1.02, 1.01, 0.99, 2.5: the sequence is at 1.26, so GSPO drops all of it.

  SAPO's gates stay near .95 on average.
  """
  z = np.log([1.02, 1.01, 0.99, 2.5])
  distance, bound, variance = spread_of(z, 1.0)
  mean_gate, at_mean = np.mean(smooth_gate(z, 1.0)), smooth_gate(np.full(4, z.mean()), 1.0)[0]
  numbers = [np.exp(z.mean()), variance, mean_gate, at_mean, distance, bound]
  np.testing.assert_allclose(numbers, [1.26, 0.155, 0.954, 0.986, 0.0324, 0.0388], atol=6e-4, rtol=3e-3)


def test_the_outlier_takes_the_response_from_gspo_and_little_from_sapo(x64, gradient):
  ratios, ones = np.log([[1.02, 1.01, 0.99, 2.5]]), np.ones((1, 4))
  batch = {"logprobs": ratios - 3, "old_logprobs": 0 * ratios - 3, "advantages": ones, "mask": ones}
  gspo, sapo, grpo = (gradient(name, batch)[0] for name in ("gspo", "sapo", "grpo"))
  assert np.all(gspo == 0)
  assert grpo[3] == 0 and np.all(grpo[:3] != 0)
  np.testing.assert_allclose(-4 * sapo, np.exp(ratios[0]) / np.cosh((np.exp(ratios[0]) - 1) / 2) ** 2, rtol=1e-10)


# The smallest batches.


@pytest.mark.parametrize("name", typical(OBJECTIVES))
def test_responses_of_one_token_and_groups_of_one(name, evaluate, everything_on):
  """With |y| = 1 and G = 1 the advantage is 0 and all numbers are finite, even with one token."""
  advantages = np.asarray(group_advantages(np.array([0.7]), 1))
  assert advantages == 0
  scores = ("logprobs", "old_logprobs", "sampler_logprobs", "ref_logprobs", "entropy")
  batch = {field: np.full((1, 1), -0.5 - 0.1 * i) for i, field in enumerate(scores)} | {"mask": np.ones((1, 1))}
  evaluation = evaluate(name, batch | {"advantages": advantages}, **everything_on(name))
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(evaluation))
  if name != "sft":
    np.testing.assert_allclose(evaluation.metrics["ratio/sequence/mean"], evaluation.metrics["ratio/mean"], rtol=1e-6)
    np.testing.assert_allclose(evaluation.metrics["ratio/sequence/ess"], 1, rtol=1e-6)


# A small bigram policy in the train step.

PROMPT_TOKENS = 1


@pytest.fixture
def bigram(rng):
  """Params and a batch whose old log-probabilities are the policy's own."""
  params = {"table": jnp.asarray(rng.standard_normal((5, 5)), jnp.float32)}
  tokens = rng.integers(5, size=(4, 7))
  positions = np.broadcast_to(np.arange(7), (4, 7))
  advantages = np.repeat(rng.standard_normal((4, 1)), 7, axis=1)
  batch = TrainBatch(
    tokens=jnp.asarray(tokens),
    positions=jnp.asarray(positions),
    segments=jnp.ones((4, 7), int),
    mask=jnp.asarray(positions >= PROMPT_TOKENS, jnp.float32),
    advantages=jnp.asarray(advantages, jnp.float32),
    old_logprobs=jnp.zeros((4, 7)),
  )
  return params, batch._replace(old_logprobs=bigram_outputs(params, batch).logprobs)


@pytest.mark.parametrize("name", few(["grpo", "gspo", "sapo"], 1))
def test_all_updates_of_a_rollout_batch_compare_with_the_policy_at_its_start(bigram, penalties_off, name):
  params, batch = bigram
  optimizer = optax.sgd(0.5)
  objective = make(name, **penalties_off(name))
  step = jax.jit(make_train_step(bigram_outputs, objective, optimizer, learning_rate=lambda _: 0.5, rows_at_once=2))
  state, counted = init_state(params, optimizer), np.asarray(batch.mask) > 0
  tables = []
  for update in range(3):
    now = np.asarray(bigram_outputs(state.params, batch).logprobs, float)
    expected = np.exp(now - np.asarray(batch.old_logprobs))[counted]
    tables.append(state.params)
    state, metrics = step(state, batch)
    for statistic in ("mean", "min", "max"):
      np.testing.assert_allclose(metrics[f"ratio/{statistic}"], getattr(expected, statistic)(), rtol=1e-5)
    if update == 0:
      assert metrics["ratio/min"] == metrics["ratio/max"] == 1
    else:
      assert metrics["ratio/max"] > 1.01 and metrics["ratio/min"] < 0.99
  # The third ratio refers to the first policy; relative to the second it would differ.
  last_step = np.exp(now - np.asarray(bigram_outputs(tables[1], batch).logprobs))[counted]
  assert abs(last_step.max() - metrics["ratio/max"]) > 1e-3


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.5, "top_k": 1}])
def test_tokens_that_the_filter_removes_leave_no_infinity_behind(bigram, evaluate, filters):
  """With logits of −∞ elsewhere, log-probabilities, entropies and gradients stay finite."""
  params, batch = bigram

  def total(params):
    outputs = bigram_outputs(params, batch, **filters)
    return jnp.sum(outputs.logprobs + outputs.entropy), outputs

  (_, outputs), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
  assert np.all(np.isfinite(outputs.logprobs)) and np.all(np.isfinite(outputs.entropy)) and np.all(np.isfinite(grads["table"]))
  fields = {field: getattr(batch, field) for field in ("advantages", "mask")}
  old = bigram_outputs(jax.tree.map(lambda x: 0.9 * x, params), batch, **filters).logprobs
  evaluation = evaluate(
    "grpo", fields | {"logprobs": outputs.logprobs, "old_logprobs": old, "ref_logprobs": old}, wanted=()
  )
  assert np.isfinite(evaluation.loss) and np.all(np.isfinite(evaluation.grads["logprobs"]))
