"""Single ratios and gates: values, gradient coefficients and clip masks against token loops."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives import make, value
from jaxrl_llm.objectives.gates import GATES, gaussian_gate, geometric_clip, hard_clip, unclipped
from jaxrl_llm.objectives.prefixes import before, segment_quantile
from jaxrl_llm.objectives.ratios import RATIOS, no_ratio, prefix_min_ratio, product_ratio, sequence_ratio
from jaxrl_llm.objectives.score_gates import binary_kl, capped_weight, divergence_ball, gamma_weight, prefix_budget
from jaxrl_llm.types import GateContext
from tests.marks import few
from tests.objectives import reference


class Tokens:
  """Two packed rows of 24 slots.

  They have holes in the mask, padding, a sequence of one token and one without counted tokens.
  """

  segments = np.array([[0, *[1] * 7, *[2] * 4, 0, *[3] * 10, 0], [*[1] * 13, *[2], *[3] * 2, *[4] * 8]])

  def __init__(self, seed=0, *, spread=0.5, dtype=float):
    rng = np.random.default_rng(seed)
    shape = self.segments.shape
    self.mask = (self.segments > 0).astype(dtype)
    self.mask[[0, 0, 0, 1, 1, 1, 1], [1, 4, 15, 6, 14, 15, 16]] = 0
    self.old_logprobs = -rng.uniform(0.1, 4, shape).astype(dtype)
    self.logprobs = np.minimum(self.old_logprobs + spread * rng.standard_normal(shape), -1e-3).astype(dtype)
    self.advantages = rng.standard_normal(shape).astype(dtype)
    self.old_logprobs, self.logprobs, self.advantages = (x * self.mask for x in (self.old_logprobs, self.logprobs, self.advantages))

  @property
  def log_ratio(self):
    return self.logprobs - self.old_logprobs

  def one_advantage_per_sequence(self):
    for sequence in self.sequences():
      for i in sequence:
        self.advantages[i] = self.advantages[sequence[0]]
    return self

  def sequences(self):
    """Returns the places of the counted tokens of each sequence, in order."""
    rows = range(len(self.mask))
    places = [
      [(b, t) for t in np.flatnonzero(self.segments[b] == s)]
      for b in rows
      for s in range(1, self.segments[b].max() + 1)
    ]
    return [kept for sequence in places if (kept := [i for i in sequence if self.mask[i]])]

  def apply(self, gate, ratio=RATIOS["token"]):
    """Computes the surrogate, the metrics, and the gradient of the summed surrogate."""
    mask, segments, old, advantages = map(jnp.asarray, (self.mask, self.segments, self.old_logprobs, self.advantages))

    def total(logprobs):
      log_ratio = ratio(jnp.clip(logprobs - old, -20, 20), mask, segments)
      surrogate, metrics = gate(log_ratio, advantages, GateContext(logprobs, old, mask, segments))
      return jnp.sum(jnp.where(mask > 0, surrogate, 0)), (surrogate, metrics)

    # A scan that runs operation by operation would be slow.
    (_, (surrogate, metrics)), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(jnp.asarray(self.logprobs))
    return np.asarray(surrogate), {key: np.asarray(x) for key, x in metrics.items()}, np.asarray(grad)


def of_reference(name, settings, tokens):
  """Returns C·A, whether a clip binds, and the surrogate, by the loops of `reference`."""
  slope, clipped, surrogate = (np.zeros(tokens.mask.shape) for _ in range(3))
  for sequence in tokens.sequences():
    now, old, z, a = ([x[i] for i in sequence] for x in (tokens.logprobs, tokens.old_logprobs, tokens.log_ratio, tokens.advantages))
    terms = reference.GATES[name](settings, reference.Tokens(now, now, old, a, z, z), reference.Bounds())
    for i, term in zip(sequence, terms, strict=True):
      slope[i], clipped[i], surrogate[i] = term.by_log_ratio + term.by_logprob, bool(term.clipped), term.value
  return slope, clipped, surrogate


CASES = [
  ("none", {}),
  ("hard", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}),
  ("hard", {"clip_low": 0.3, "clip_high": 0.1, "dual_clip": 1.3}),
  ("soft", {"tau_pos": 1.0, "tau_neg": 1.05}),
  ("soft", {"tau_pos": 3.0, "tau_neg": 5.0}),
  ("capped", {"clip_high": 0.3, "clip_low": 1.0}),
  ("capped", {"clip_high": 0.3, "clip_low": 0.4}),
  ("gamma", {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}),
  ("gamma", {"k_pos": 0.5, "lambda_pos": 1.0, "k_neg": 1.5, "lambda_neg": 4.0}),
  ("tv_ball", {"delta_low": 0.05, "delta_high": 0.1, "ratio_cap": 1.2}),
  ("kl_ball", {"delta_low": 0.02, "delta_high": 0.01, "ratio_cap": 1.2}),
  ("prefix_budget", {"delta": 0.15, "w_min": 0.8, "budget": 0.02}),
  ("prefix_budget", {"delta": 0.3, "w_min": 0.1, "budget": 0.05}),
  ("gaussian", {"sigma": 1.0, "alpha": 0.3, "beta": 0.03}),
  ("gaussian", {"sigma": 0.2, "alpha": 0.1, "beta": 0.5}),
  ("quadratic", {"pull": 0.5}),
  ("tapered", {"ratio_cap": 1.0}),
  ("future", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.3, "half_life": 2.0, "future_cap": 0.4, "safe_ratio": 1.2}),
  ("future", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None, "half_life": 32.0, "future_cap": 9.0, "safe_ratio": 9.0}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_gradient_is_the_coefficient_times_the_advantage(x64, name, settings):
  tokens = Tokens()
  slope, clipped, expected = of_reference(name, settings, tokens)
  surrogate, metrics, grad = tokens.apply(GATES[name](**settings))
  mask = tokens.mask > 0
  np.testing.assert_allclose(grad, slope, rtol=1e-10, atol=1e-14)
  np.testing.assert_allclose(surrogate[mask], expected[mask], rtol=1e-10, atol=1e-14)
  for statistic in ("mean", "min", "max", "p99"):
    np.testing.assert_allclose(metrics[f"gate/{statistic}"][mask], (slope / tokens.advantages)[mask], rtol=1e-10)
  if "actor/pg_clipfrac" in metrics:
    np.testing.assert_array_equal(metrics["actor/pg_clipfrac"][mask], clipped[mask])
    assert 0.1 < clipped[mask].mean() < 0.9
    for sign, population in (("_pos", tokens.advantages > 0), ("_neg", tokens.advantages < 0)):
      np.testing.assert_array_equal(metrics[f"actor/pg_clipfrac{sign}"][mask], np.where(population, clipped, np.nan)[mask])


# Every ratio with every gate.


def composed(gate, logprobs, old_logprobs, advantages, mask, segments):
  """Returns the summed surrogate, the coefficients and the gradient for each ratio."""

  def total(logprobs, ratio):
    log_ratio = RATIOS[ratio](jnp.clip(logprobs - old_logprobs, -20, 20), mask, segments)
    surrogate, metrics = GATES[gate]()(log_ratio, advantages, GateContext(logprobs, old_logprobs, mask, segments))
    return jnp.sum(jnp.where(mask > 0, surrogate, 0)), metrics["gate/mean"]

  return {ratio: jax.value_and_grad(functools.partial(total, ratio=ratio), has_aux=True)(logprobs) for ratio in RATIOS}


@pytest.mark.parametrize("gate", few(GATES, 0, 1, 2))
def test_every_ratio_goes_with_every_gate(gate):
  """In single precision, results are finite at extreme policies, and a NaN under the mask stays."""
  program = jax.jit(functools.partial(composed, gate))

  def run(tokens):
    return program(tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.mask, tokens.segments).items()

  tokens = Tokens(dtype=np.float32)
  for ratio, (_, grad) in run(tokens):
    assert grad.dtype == np.float32 and np.any(grad != 0) and np.all(grad[tokens.mask == 0] == 0), ratio

  tokens.logprobs[0, ::3], tokens.old_logprobs[0, 1::3], tokens.old_logprobs[1, ::4] = -1e3, -1e3, 0
  tokens.logprobs[1, 3:5], tokens.advantages[1, ::2] = 0, 1e4 * tokens.advantages[1, ::2]
  for ratio, ((total, coefficient), grad) in run(tokens):
    assert np.isfinite(total) and np.all(np.isfinite(coefficient)) and np.all(np.isfinite(grad)), ratio

  for field in ("logprobs", "advantages"):
    spoilt = Tokens(dtype=np.float32)
    getattr(spoilt, field)[0, 5] = np.nan
    assert all(np.isnan(total) for _, ((total, _), _) in run(spoilt)), field


# Ratios.


def test_no_ratio_is_one_with_the_gradient_of_the_token(x64):
  tokens = Tokens()
  surrogate, _, grad = tokens.apply(unclipped(), no_ratio)
  np.testing.assert_array_equal(surrogate, tokens.advantages)
  np.testing.assert_array_equal(grad, tokens.advantages)


def test_reinforce_ignores_the_old_policy(x64, make_batch):
  batch = make_batch()
  fields = {key: batch[key] for key in ("advantages", "mask")}
  loss_and_grad = jax.jit(jax.value_and_grad(lambda x, old: value(make("reinforce"), x, old, **fields)[0]))
  for old_logprobs in (batch["old_logprobs"], batch["logprobs"] + 1e3, np.full_like(batch["logprobs"], np.nan)):
    loss, grad = loss_and_grad(batch["logprobs"], old_logprobs)
    np.testing.assert_allclose(grad, -batch["advantages"] * batch["mask"] / 4, rtol=1e-14)
    np.testing.assert_allclose(loss, np.sum(grad), rtol=1e-14)


def test_product_ratio_is_the_product_and_ends_at_its_bound(x64):
  tokens = Tokens()
  _, _, grad = tokens.apply(unclipped(), product_ratio)
  log_ratio = np.asarray(product_ratio(*map(jnp.asarray, (tokens.log_ratio, tokens.mask, tokens.segments))))
  for sequence in tokens.sequences():
    rho = math.exp(sum(tokens.log_ratio[i] for i in sequence))
    for i in sequence:
      np.testing.assert_allclose(np.exp(log_ratio[i]), rho, rtol=1e-12)
      np.testing.assert_allclose(grad[i], rho * sum(tokens.advantages[j] for j in sequence), rtol=1e-11)
  far = jnp.array([[9.0, 9.0, 9.0], [-9.0, -9.0, -9.0], [9.0, 9.0, 1.0]])
  np.testing.assert_array_equal(product_ratio(far, jnp.ones((3, 3)), None)[:, 0], [20, -20, 19])
  grad = jax.grad(lambda z: jnp.sum(product_ratio(z, jnp.ones((3, 3)), None)))(far)
  np.testing.assert_array_equal(grad, [[0] * 3, [0] * 3, [3] * 3])


def test_prefix_min_ratio(x64):
  tokens = Tokens()
  actual = np.asarray(jax.jit(prefix_min_ratio)(*map(jnp.asarray, (tokens.log_ratio, tokens.mask, tokens.segments))))
  for sequence in tokens.sequences():
    for t, i in enumerate(sequence):
      expected = tokens.log_ratio[i] + (min(tokens.log_ratio[j] for j in sequence[:t]) if t else 0)
      np.testing.assert_allclose(actual[i], expected, rtol=1e-14)
  # The same holds at the first position of a row and with one row per sequence.
  one_row = jax.jit(lambda z: prefix_min_ratio(z, jnp.ones((1, 3)), None)[0])
  z = jnp.array([[2.0, -3.0, 1.0]])
  np.testing.assert_array_equal(one_row(z), [2.0, -1.0, -2.0])
  # Only a token and the least one before it have a gradient, which is positive: no smaller prefix
  # ratio makes a larger weight.
  np.testing.assert_array_equal(jax.jit(jax.jacobian(one_row))(z)[:, 0], [[1, 0, 0], [1, 1, 0], [0, 1, 1]])


# Statistics of the preceding tokens, and quantiles.


def test_before_and_quantiles_of_packed_sequences(x64):
  tokens = Tokens(seed=3)
  x, mask, segments = map(jnp.asarray, (np.abs(tokens.log_ratio), tokens.mask, tokens.segments))
  sums = np.asarray(jax.jit(lambda: before(jnp.add, x * mask, segments, 0.0))())
  quantile = jax.jit(segment_quantile, static_argnames="q")
  for q in (0.0, 0.3, 0.9, 1.0):
    quantiles = np.asarray(quantile(x, mask, segments, q=q))
    assert np.all(np.isfinite(quantiles))
    for sequence in tokens.sequences():
      values = [x[i] for i in sequence]
      for t, i in enumerate(sequence):
        np.testing.assert_allclose(quantiles[i], np.quantile(values, q), rtol=1e-12)
        np.testing.assert_allclose(sums[i], sum(values[:t]), rtol=1e-12, atol=0)
  one_row = segment_quantile(x[:1], jnp.ones_like(x[:1]), None, 0.9)
  np.testing.assert_allclose(one_row, np.full((1, 24), np.quantile(x[0], 0.9)), rtol=1e-12)


def largest_array(jaxpr):
  sizes = [math.prod(variable.aval.shape) for equation in jaxpr.eqns for variable in equation.outvars]
  inner = [leaf for equation in jaxpr.eqns for leaf in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns"))]
  return max([*sizes, *(largest_array(getattr(x, "jaxpr", x)) for x in inner if hasattr(x, "eqns"))], default=0)


@pytest.mark.parametrize("name", ["cppo", "minpro"])
def test_prefixes_need_no_quadratic_array(name):
  num_rows, num_tokens = 2, 256
  x, ids = jnp.zeros((num_rows, num_tokens)), jnp.ones((num_rows, num_tokens), int)
  jaxpr = jax.make_jaxpr(jax.grad(lambda lp: value(make(name), lp, x, x, ids, segments=ids, sampler_logprobs=x)[0]))(x)
  # The quantiles of all metrics share a loop, so that it holds several arrays of tokens at once.
  assert largest_array(jaxpr.jaxpr) <= 8 * num_rows * (num_tokens + 1)


# Gates.


def test_capped_weight_without_a_cap_is_importance_sampling_and_never_ends_a_gradient(x64):
  tokens = Tokens()
  _, metrics, grad = tokens.apply(capped_weight(math.inf))
  np.testing.assert_allclose(grad, tokens.apply(unclipped())[2], rtol=1e-12)
  assert not np.any(metrics["actor/pg_clipfrac"])
  grad = tokens.apply(capped_weight(0.0))[2]
  assert np.all((grad != 0) == (tokens.mask > 0))


def test_gamma_weight_is_one_on_policy_and_largest_at_k_over_lambda():
  z = jnp.linspace(-20, 20, 40_001)[None].at[0, 20_000].set(0)
  ones = jnp.ones_like(z)
  for sign, k, rate, largest in ((1, 2.0, 3.0, 1.2081), (-1, 3.0, 2.0, 1.2416)):
    phi = gamma_weight()(z, sign * ones, GateContext(-ones, -ones, ones))[1]["gate/mean"][0]
    assert phi.dtype == np.float32 and np.all(np.isfinite(phi)) and np.all(phi >= 0)
    assert phi[20_000] == 1 and phi[0] < 1e-16 and phi[-1] == 0
    np.testing.assert_allclose(np.exp(z[0, phi.argmax()]), k / rate, rtol=2e-3)
    np.testing.assert_allclose(phi.max(), largest, rtol=1e-4)


@pytest.mark.parametrize("name", ["tv_ball", "kl_ball"])
def test_a_divergence_ball_stops_tokens_that_leave_it_and_none_that_return(x64, name):
  pi = jnp.array([[0.7, 0.7, 0.3, 0.3, 0.55, 0.45, 0.7, 0.5]])
  advantages = jnp.array([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.0, 1.0]])
  kept = np.array([[0, 1, 1, 0, 1, 1, 1, 1]])
  logprobs, old = jnp.log(pi), jnp.log(jnp.full_like(pi, 0.5))
  gate = GATES[name](delta_low=0.06, delta_high=0.06, ratio_cap=1.3)
  _, metrics = gate(logprobs - old, advantages, GateContext(logprobs, old, jnp.ones_like(pi)))
  np.testing.assert_array_equal(metrics["actor/pg_clipfrac"], 1 - kept)
  np.testing.assert_allclose(metrics["gate/mean"], kept * np.minimum(pi / 0.5, 1.3), rtol=1e-12)
  np.testing.assert_array_equal(metrics["actor/pg_clipfrac_lower"], kept * (pi > 0.65))
  assert np.all(metrics["gate/divergence/max"][0, :4] > 0.06) and np.all(metrics["gate/divergence/max"][0, 4:6] < 0.06)


def test_a_divergence_ball_of_ratios_is_the_clip_of_ppo(x64):
  tokens = Tokens()
  ball = divergence_ball(lambda logprobs, old: jnp.abs(jnp.expm1(logprobs - old)), 0.2, 0.28, math.inf)
  _, metrics, grad = tokens.apply(ball)
  _, expected_metrics, expected = tokens.apply(hard_clip(0.2, 0.28))
  np.testing.assert_allclose(grad, expected, rtol=1e-12)
  for key, x in expected_metrics.items():
    np.testing.assert_allclose(metrics[key], x, rtol=1e-12, err_msg=key)
  assert 0.1 < metrics["actor/pg_clipfrac"].mean() < 0.9


def test_binary_kl_keeps_its_digits_in_single_precision():
  # Near 1 the probability of the other tokens is lost in 1 − p.
  other = np.array([[1e-3, 1e-5, 1e-8, 1e-12, 0.3]])
  for scale in (0.5, 2.0):
    expected = (1 - other) * (np.log1p(-other) - np.log1p(-scale * other)) + other * np.log(1 / scale)
    logs = [jnp.asarray(np.log1p(-x), jnp.float32) for x in (scale * other, other)]
    np.testing.assert_allclose(binary_kl(*logs), expected, rtol=2e-5, atol=1e-7)
    np.testing.assert_array_equal(binary_kl(logs[0], logs[0]), 0)
  certain, rare = jnp.zeros((1, 1)), jnp.full((1, 1), -1e3)
  assert np.isfinite(binary_kl(certain, rare)) and binary_kl(certain, jnp.log(jnp.full((1, 1), 0.5))) > 10
  np.testing.assert_allclose(binary_kl(rare, certain), 1e3, rtol=1e-6)


def test_a_prefix_budget_is_spent_token_by_token(x64):
  # Each shift of 0.1 alone is inside 0.15, but the budget of 0.02 to 0.04 per token runs out.
  old = jnp.log(jnp.full((1, 12), 0.3))
  now, ones = jnp.log(jnp.full((1, 12), 0.4)), jnp.ones((1, 12))

  @functools.partial(jax.jit, static_argnames=("length", "delta", "w_min"))
  def ended(advantage, length, delta=0.15, w_min=0.8):
    lp, mu, mask = now[:, :length], old[:, :length], ones[:, :length]
    return prefix_budget(delta, w_min, 0.02)(lp - mu, advantage * mask, GateContext(lp, mu, mask))[1]["actor/pg_clipfrac"][0]

  np.testing.assert_array_equal(ended(1.0, 12), [0] + [1] * 11)
  assert not np.any(ended(-1.0, 12))
  # The second of three tokens has weight 1/2 or 1 and costs 0.05 or 0.1, while 0.15 + 0.04 − 0.1 =
  # 0.09 is left. The third costs next to nothing, or 0.1.
  np.testing.assert_array_equal(ended(1.0, 3, w_min=1e-9), [0, 0, 0])
  np.testing.assert_array_equal(ended(1.0, 3, w_min=1.0), [0, 1, 1])
  # A sequence of one token has the plain bound.
  assert ended(1.0, 1) == 0 and ended(1.0, 1, delta=0.05) == 1


def test_geometric_clip_clips_tokens_and_weighs_the_sequence(x64):
  tokens = Tokens().one_advantage_per_sequence()
  surrogate, metrics, grad = tokens.apply(geometric_clip(0.2, 0.3))
  clips = 0
  for sequence in tokens.sequences():
    a = tokens.advantages[sequence[0]]
    z = [tokens.log_ratio[i] for i in sequence]
    bounded = [min(x, 0.3) if a > 0 else max(x, -0.2) for x in z]
    g = math.exp(sum(bounded) / len(z))
    for i, x, y in zip(sequence, z, bounded, strict=True):
      c = g if x == y else 0
      np.testing.assert_allclose(surrogate[i], g * a, rtol=1e-12)
      np.testing.assert_allclose([metrics["gate/mean"][i], metrics["actor/pg_clipfrac"][i]], [c, x != y], rtol=1e-12)
      np.testing.assert_allclose(grad[i], c * a, rtol=1e-11, atol=1e-15)
      clips += x != y
  assert 5 < clips < tokens.mask.sum() - 5


def test_geometric_clip_without_bounds_is_the_sequence_ratio_unclipped(x64):
  tokens = Tokens()
  surrogate, _, grad = tokens.apply(geometric_clip(math.inf, math.inf))
  expected, _, expected_grad = tokens.apply(unclipped(), sequence_ratio)
  mask = tokens.mask > 0
  np.testing.assert_allclose(surrogate[mask], expected[mask], rtol=1e-12)
  np.testing.assert_allclose(grad, expected_grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 0.03), (5.0, 1.0)])
def test_gaussian_gate_bounds_only_what_overshoots(alpha, beta):
  a, old, z = np.meshgrid([1e-6, 1.0, 1e6, -1e-6, -1.0, -1e6], [0.0, -5.0, -1e4], np.linspace(-20, 20, 101), indexing="ij")
  a, old, z = (jnp.asarray(x.reshape(-1, 101), jnp.float32) for x in (a, old, z))
  _, metrics = gaussian_gate(1.0, alpha, beta)(z, a, GateContext(z, old, jnp.ones_like(z)))
  weight = np.where(a > 0, metrics["maspo/gate_pos"], metrics["maspo/gate_neg"])
  assert weight.dtype == np.float32 and np.all((weight >= 0) & (weight <= 1))
  assert np.all(weight[np.asarray(z * a) <= 0] == 1)
  assert np.all(np.diff(weight) * np.sign(a[:, 1:]) <= 0)
  # Such a rare good token is not bounded at all: its width has left the range of floats, but the
  # inverse has not.
  assert np.all(weight[np.asarray((old == -1e4) & (a > 0))] == 1)
  assert np.all(weight[np.asarray((old == 0) & (a == 1) & (z > 5))] < 1e-6)
