"""The universal gradient: every method is −Σ w·sg[C·A]·∇log π with its own coefficient C.

The coefficients are written in NumPy, mostly in a line or two per method. In methods that weigh a
response as a whole, C is for one advantage per response.
"""

import inspect
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives import OBJECTIVES, make
from tests.marks import typical

LENGTHS = (5, 3, 1, 6, 6, 4, 2, 6)
HOLES = ((3, 2), (4, 0), (5, 3))


def hard(ratio, a, low, high, dual_clip=None):
  """Returns the ratio where no clip binds, else 0."""
  binds = ((a > 0) & (ratio > 1 + high)) | ((a < 0) & (ratio < 1 - low))
  return np.where(binds | ((a < 0) & (ratio > (dual_clip or np.inf))), 0, ratio)


def token_clip(y, s):
  return hard(np.exp(y.z), y.a, s.clip_low, s.clip_high, s.dual_clip)


def sequence_clip(y, s):
  return hard(np.exp(np.full_like(y.z, y.z.mean())), y.a, s.clip_low, s.clip_high, s.dual_clip)


def product_clip(y, s):
  # Each of the |y| tokens has ρ, which depends on all of them, so their equal weights add up.
  return len(y.z) * hard(np.exp(np.full_like(y.z, y.z.sum())), y.a, s.clip_low, s.clip_high, s.dual_clip)


def soft(y, s):
  tau = np.where(y.a > 0, s.tau_pos, s.tau_neg)
  return np.exp(y.z) / np.cosh(tau * (np.exp(y.z) - 1) / 2) ** 2


def geometric(y, s):
  ended = ((y.a > 0) & (y.z > s.log_clip_high)) | ((y.a < 0) & (y.z < -s.log_clip_low))
  bounded = np.where(y.a > 0, np.minimum(y.z, s.log_clip_high), np.maximum(y.z, -s.log_clip_low))
  return np.where(ended, 0, np.exp(bounded.mean()))


def truncated_mismatch(y, s):
  return np.minimum(np.exp(y.old - y.sampler), s.tis_cap) * token_clip(y, s)


def gamma(y, s):
  rho = np.exp(y.z.sum())
  k, rate = np.where(y.a > 0, s.k_pos, s.k_neg), np.where(y.a > 0, s.lambda_pos, s.lambda_neg)
  return rho**k * np.exp(rate * (1 - rho))


def ball(distance):
  def coefficient(y, s):
    pi, mu = np.exp(y.now), np.exp(y.anchor)
    d = distance(pi, mu)
    leaves = ((y.a > 0) & (pi > mu) & (d > s.delta_high)) | ((y.a < 0) & (pi < mu) & (d > s.delta_low))
    return np.where(leaves, 0, np.minimum(np.exp(y.z), s.ratio_cap))

  return coefficient


def total_variation(pi, mu):
  return np.abs(pi - mu)


def divergence(pi, mu):
  return mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi))


def prefix_budget(y, s):
  pi, mu, n = np.exp(y.now), np.exp(y.anchor), len(y.z)
  shift, allowance = np.abs(pi - mu), np.clip(np.quantile(np.abs(pi - mu), 0.9), s.budget, 2 * s.budget)
  kept, weight_before, spent = np.exp(y.z), 0.0, 0.0
  for t in range(n):
    weight = 1 - (1 - s.w_min) * t / max(n - 1, 1)
    if y.a[t] * (pi[t] - mu[t]) > 0 and weight * shift[t] > min(s.delta, s.delta + allowance * weight_before - spent):
      kept[t] = 0
    weight_before, spent = weight_before + weight, spent + weight * shift[t]
  return kept


def prefix_minimum(y, s):
  least = [min([1.0] if t == 0 else np.exp(y.z[:t])) for t in range(len(y.z))]
  return np.minimum(np.exp(y.z) * least, 1 + s.clip_high)


def gaussian(y, s):
  r = np.exp(y.z)
  width = s.sigma * np.exp(y.old) ** -s.alpha * (1 + s.beta * np.abs(y.a)) ** np.sign(y.a)
  return r * np.where(y.a * (r - 1) > 0, np.exp(-((r - 1) ** 2) / (2 * width**2)), 1)


COEFFICIENTS = {
  "ppo": token_clip,
  "grpo": token_clip,
  "dr_grpo": token_clip,
  "dapo": token_clip,
  "reinforce_plus_plus": token_clip,
  "gspo": sequence_clip,
  "gspo_token": sequence_clip,
  "luspo": sequence_clip,
  "rloo": product_clip,
  "sapo": soft,
  "reinforce": lambda y, s: np.ones_like(y.z),
  "cispo": lambda y, s: np.clip(np.exp(y.z), 1 - s.clip_low, 1 + s.clip_high),
  "gmpo": geometric,
  "minirl": truncated_mismatch,
  "vespo": gamma,
  "dppo_tv": ball(total_variation),
  "dppo_kl": ball(divergence),
  "cppo": prefix_budget,
  "minpro": prefix_minimum,
  "maspo": gaussian,
  "dro": lambda y, s: 1 - s.pull * y.z / y.a,
  "custom": lambda y, s: hard(np.exp(y.z), y.a, 0.2, 0.2),
  # The advantage is 1.
  "sft": lambda y, s: 1 / y.a,
}

# These take one advantage per response; all others take one per token.
WHOLE_RESPONSE = ("gspo", "luspo", "rloo", "gmpo")

# Settings under which the gates act on such short responses and wide ratios. Other methods have the
# paper's.
NARROW = {
  "ppo": {"dual_clip": 1.3},
  "gspo": {"clip_low": 0.05, "clip_high": 0.1},
  "gspo_token": {"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.15},
  "luspo": {"clip_low": 0.05, "clip_high": 0.1},
  "rloo": {"clip_low": 0.4, "clip_high": 0.7},
  "sapo": {"tau_pos": 3.0, "tau_neg": 5.0},
  "cispo": {"clip_low": 0.3, "clip_high": 0.2},
  "gmpo": {"log_clip_low": 0.2, "log_clip_high": 0.3},
  "minirl": {"tis_cap": 1.05},
  "vespo": {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 0.5, "lambda_neg": 1.0},
  "dppo_tv": {"delta_low": 0.05, "delta_high": 0.08, "ratio_cap": 1.3},
  "dppo_kl": {"delta_low": 0.01, "delta_high": 0.02, "ratio_cap": 1.3, "anchor": "old"},
  "cppo": {"delta": 0.1, "w_min": 0.5, "budget": 0.05, "anchor": "old"},
  "minpro": {"clip_high": 0.1},
  "maspo": {"sigma": 0.3, "alpha": 0.5, "beta": 0.4},
  "dro": {"pull": 0.5},
}
CASES = [(name, {}) for name in COEFFICIENTS] + list(NARROW.items())


def coefficients(name, changes, batch):
  """Returns C at each token, 0 outside the mask."""
  defaults = {key: parameter.default for key, parameter in inspect.signature(OBJECTIVES[name]).parameters.items()}
  settings = SimpleNamespace(**(defaults | changes))
  sampled = getattr(settings, "anchor", "old") == "sampler"
  anchor = batch["sampler_logprobs" if sampled else "old_logprobs"]
  values = np.zeros(batch["mask"].shape)
  for row, counted in enumerate(batch["mask"] > 0):
    take = lambda x, row=row, counted=counted: x[row, counted]
    response = SimpleNamespace(
      a=take(batch["advantages"]),
      now=take(batch["logprobs"]),
      old=take(batch["old_logprobs"]),
      sampler=take(batch["sampler_logprobs"]),
      anchor=take(anchor),
      z=take(batch["logprobs"] - anchor),
    )
    values[row, counted] = COEFFICIENTS[name](response, settings)
  return values


@pytest.fixture
def batch(make_batch):
  def make_level(level):
    arrays = make_batch(seed=3, lengths=LENGTHS, level=level)
    for hole in HOLES:
      arrays["mask"][hole] = 0
    if level == "sequence":
      arrays["advantages"] = np.repeat(arrays["advantages"][:, None], 6, axis=1)
    return arrays

  return make_level


def test_the_table_names_objectives():
  """An objective without a row is checked only by its closed form in `reference.py`."""
  assert set(COEFFICIENTS) <= set(OBJECTIVES)


@pytest.mark.parametrize(("name", "changes"), typical(CASES), ids=[f"{name}{'-narrow' if changes else ''}" for name, changes in CASES])
def test_the_gradient_is_the_coefficient_times_the_advantage_times_the_score(x64, batch, evaluate, penalties_off, name, changes):
  arrays = batch("sequence" if name in WHOLE_RESPONSE else "token")
  expected = coefficients(name, changes, arrays)
  weights = np.asarray(make(name, **changes).weigh(jnp.asarray(arrays["mask"]), None))
  arrays = {key: x for key, x in arrays.items() if key not in ("values", "returns", "old_values", "entropy")}
  evaluation = evaluate(
    name, arrays, wanted=("gate/", "actor/pg_clipfrac") if changes else (), **(penalties_off(name) | changes)
  )
  np.testing.assert_allclose(
    evaluation.grads["logprobs"], -weights * expected * arrays["advantages"], rtol=1e-10, atol=1e-16
  )

  # The gate reports its own part of C. A mismatch is a further weight, and the tokens of a product
  # add up after the gate.
  if changes:
    aside = np.where(arrays["mask"] > 0, 1.0, np.nan)
    if name == "minirl":
      aside = aside * np.minimum(np.exp(arrays["old_logprobs"] - arrays["sampler_logprobs"]), changes.get("tis_cap", 5.0))
    if name == "rloo":
      aside = aside * arrays["mask"].sum(axis=1, keepdims=True)
    reported = expected / aside
    statistics = {"mean": np.nanmean, "min": np.nanmin, "max": np.nanmax, "p99": lambda x: np.nanquantile(x, 0.99)}
    for statistic, of in statistics.items():
      np.testing.assert_allclose(
        evaluation.metrics[f"gate/{statistic}"], of(reported), rtol=1e-10, atol=1e-15, err_msg=statistic
      )
    # The clip fraction counts the gradients that a hard bound ends. `cispo` and `minpro` bound the
    # weight and end none.
    if "actor/pg_clipfrac" in evaluation.metrics and name not in ("cispo", "minpro"):
      ended = evaluation.metrics["actor/pg_clipfrac"] + (
        evaluation.metrics["actor/pg_clipfrac_lower"] if changes.get("dual_clip") else 0
      )
      np.testing.assert_allclose(ended, np.mean(reported[arrays["mask"] > 0] == 0), rtol=1e-12)
      assert 0 < ended < 1
