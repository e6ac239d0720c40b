"""Importance sampling by exact enumeration of every response of a small policy.

The policy is a table of logits, one row per prefix. Expectations are sums over all responses with
their probabilities, so no test depends on chance.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.advantages import group_advantages
from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.objectives import make, value
from jaxrl_llm.objectives.ratios import product_ratio, sequence_ratio, token_ratio

VOCAB, LENGTH = 3, 3
RESPONSES = np.array(list(itertools.product(range(VOCAB), repeat=LENGTH)))
# Prefixes are ordered by length: the empty one is 0, token a is 1 + a, tokens a, b are 4 + 3a + b.
PREFIXES = np.stack([np.zeros(27, int), 1 + RESPONSES[:, 0], 4 + 3 * RESPONSES[:, 0] + RESPONSES[:, 1]], axis=1)
NUM_PREFIXES = 13
MASK = np.ones(RESPONSES.shape)
REWARDS = np.random.default_rng(5).standard_normal(27)


def logits_of(seed, scale=1.0):
  return scale * np.random.default_rng(seed).standard_normal((NUM_PREFIXES, VOCAB))


def log_softmax(logits):
  return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def logprobs_of(logits):
  """Returns the log-probability of every token of every response, [27, LENGTH]."""
  return jax.nn.log_softmax(logits)[PREFIXES, RESPONSES]


def probabilities(logprobs):
  return np.exp(np.sum(logprobs, axis=1))


def pair(seed, scale, step):
  """Log-probabilities of all responses under an old policy and a distant one, and both tables."""
  old = log_softmax(logits_of(seed, scale))
  new = log_softmax(old + step * logits_of(seed + 1))
  return old[PREFIXES, RESPONSES], new[PREFIXES, RESPONSES], old, new


# Three tokens with steps up to 1.5 stay within ±20; the bound of the log-ratio would break the
  # identities.
policies = given(seed=st.integers(0, 10**6), scale=st.floats(0.0, 3.0), step=st.floats(0.0, 1.5))


def log_ratios(old, new, ratio):
  with jax.enable_x64(True):
    return np.asarray(ratio(jnp.asarray(new - old), jnp.asarray(MASK), None))


# Levels of comparison as weights.


@policies
def test_a_token_ratio_is_a_weight_at_every_prefix(seed, scale, step):
  old, new, _, _ = pair(seed, scale, step)
  ratio = np.exp(log_ratios(old, new, token_ratio))
  for t in range(LENGTH):
    for prefix in np.unique(PREFIXES[:, t]):
      # One response per next token: the one that continues with 0 from there.
      rows = (PREFIXES[:, t] == prefix) & np.all(RESPONSES[:, t + 1 :] == 0, axis=1)
      assert rows.sum() == VOCAB
      np.testing.assert_allclose(np.sum(np.exp(old[rows, t]) * ratio[rows, t]), 1, rtol=1e-12)


@policies
def test_the_product_is_a_weight_and_its_expected_logarithm_the_divergence(seed, scale, step):
  old, new, old_table, new_table = pair(seed, scale, step)
  p = probabilities(old)
  log_rho = log_ratios(old, new, product_ratio)[:, 0]
  np.testing.assert_allclose(np.sum(p * np.exp(log_rho)), 1, rtol=1e-12)
  # KL of the sequences by the chain rule: the KL at each prefix, weighed by the prefix's
  # probability.
  at_prefix = np.sum(np.exp(old_table) * (old_table - new_table), axis=1)
  divergence = np.sum(p * np.sum(at_prefix[PREFIXES], axis=1))
  np.testing.assert_allclose(np.sum(p * log_rho), -divergence, rtol=1e-10, atol=1e-13)


@given(seed=st.integers(0, 10**6), step=st.floats(0.0, 2.0))
def test_the_variance_of_the_product_is_that_of_independent_tokens(seed, step):
  """Var ρ = Π_t E[r_t²] − 1 if tokens are independent: it grows exponentially with the length."""
  rng = np.random.default_rng(seed)
  old_table = log_softmax(rng.standard_normal((LENGTH, VOCAB)))
  new_table = log_softmax(old_table + step * rng.standard_normal((LENGTH, VOCAB)))
  steps = np.arange(LENGTH)
  old, new = old_table[steps, RESPONSES], new_table[steps, RESPONSES]
  rho = np.exp(log_ratios(old, new, product_ratio)[:, 0])
  variance = np.sum(probabilities(old) * np.square(rho - 1))
  second_moments = np.sum(np.exp(2 * new_table - old_table), axis=1)
  np.testing.assert_allclose(variance, np.prod(second_moments) - 1, rtol=1e-9, atol=1e-12)


@policies
def test_the_sequence_ratio_is_not_a_weight_but_below_one_on_average(seed, scale, step):
  """E_old[s] ≤ 1 at a fixed length by Jensen; E_old[log s] is minus the divergence per token."""
  old, new, _, _ = pair(seed, scale, step)
  p, log_s = probabilities(old), log_ratios(old, new, sequence_ratio)[:, 0]
  mean = np.sum(p * np.exp(log_s))
  assert mean <= 1 + 1e-12
  np.testing.assert_allclose(np.sum(p * log_s), np.sum(p * np.sum(new - old, axis=1)) / LENGTH, rtol=1e-10, atol=1e-13)
  if np.sum(p * np.square(new - old).sum(axis=1)) > 1e-4:
    assert mean < 1


@policies
def test_the_sequence_ratio_is_a_quotient_of_perplexities_between_the_least_token_and_their_mean(seed, scale, step):
  old, new, _, _ = pair(seed, scale, step)
  s = np.exp(log_ratios(old, new, sequence_ratio)[:, 0])
  perplexity = lambda logprobs: np.exp(-np.mean(logprobs, axis=1))
  np.testing.assert_allclose(s, perplexity(old) / perplexity(new), rtol=1e-12)
  r = np.exp(new - old)
  assert np.all(r.min(axis=1) * (1 - 1e-12) <= s) and np.all(s <= r.mean(axis=1) * (1 + 1e-12))


@given(st.lists(st.floats(-0.9, 3.0), min_size=1, max_size=8))
def test_the_first_order_expansion_of_the_product_has_its_remainder(deltas):
  """|Π(1 + δ) − 1 − Σδ| ≤ e^S − 1 − S with S = Σ|δ|: good for small steps and short responses."""
  # Padding to one shape gives all examples the same program.
  deltas, mask = (np.pad(x, (0, 8 - len(deltas)))[None] for x in (np.array(deltas), np.ones(len(deltas))))
  with jax.enable_x64(True):
    log_ratio, mask = jnp.asarray(np.log1p(deltas)), jnp.asarray(mask)
    product = float(jnp.expm1(product_ratio(log_ratio, mask, None))[0, 0])
    tokens = float(jnp.sum(mask * jnp.expm1(token_ratio(log_ratio, mask, None))))
  size = np.sum(np.abs(deltas))
  assert abs(product - tokens) <= (np.expm1(size) - size) * (1 + 1e-9) + 1e-12


def test_the_estimated_divergence_is_the_divergence(x64, evaluate):
  """`actor/ppo_kl` and its k3 over all responses, each repeated as often as it is drawn in 64ths.

  The mean is then the expectation.
  """
  # Logits whose probabilities are 1/2, 1/4, 1/4 at every prefix.
  rng = np.random.default_rng(0)
  old_table = np.log(rng.permuted(np.tile([0.5, 0.25, 0.25], (NUM_PREFIXES, 1)), axis=1))
  new_table = log_softmax(old_table + 0.5 * rng.standard_normal(old_table.shape))
  old, new = old_table[PREFIXES, RESPONSES], new_table[PREFIXES, RESPONSES]
  often = np.round(64 * probabilities(old)).astype(int)
  assert often.sum() == 64
  old, new = np.repeat(old, often, axis=0), np.repeat(new, often, axis=0)
  metrics = evaluate("reinforce", {"logprobs": new, "old_logprobs": old, "advantages": np.ones(64), "mask": np.ones_like(old)}).metrics
  at_prefix = np.sum(np.exp(old_table) * (old_table - new_table), axis=1)
  expected = np.mean(np.repeat(at_prefix[PREFIXES], often, axis=0))
  np.testing.assert_allclose([metrics["actor/ppo_kl"], metrics["actor/ppo_kl_k3"]], expected, rtol=1e-12)
  np.testing.assert_allclose(metrics["ratio/mean"], 1, rtol=1e-12)
  rho = np.exp(np.sum(new - old, axis=1))
  np.testing.assert_allclose(metrics["ratio/sequence/ess"], 1 / np.mean(np.square(rho)), rtol=1e-12)


# Gradients of the expected reward.


@pytest.fixture
def expected_gradient():
  """`(name, settings) -> (logits, old_logits, advantages) -> ∇` of the expected objective."""

  def of_objective(name, settings):
    objective = make(name, **settings)

    def surrogate(logits, old_logits, advantages):
      old = logprobs_of(old_logits)
      # All objectives here are linear in the advantages, so these may contain a response's
      # probability.
      weighted = 27 * jnp.exp(jnp.sum(old, axis=1)) * advantages
      return -value(objective, logprobs_of(logits), old, weighted, MASK)[0]

    return jax.jit(jax.grad(surrogate))

  return of_objective


@jax.jit
def true_gradient(logits):
  return jax.grad(lambda x: jnp.sum(jnp.exp(jnp.sum(logprobs_of(x), axis=1)) * REWARDS))(logits)


UNCLIPPED = {"clip_low": 1.0, "clip_high": float("inf")}


def test_the_product_gives_the_true_gradient_off_policy(x64, expected_gradient):
  old, new = logits_of(0), logits_of(1)
  gradient = expected_gradient("rloo", UNCLIPPED)(new, old, REWARDS)
  np.testing.assert_allclose(gradient, true_gradient(new), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
  ("name", "settings"),
  [
    ("reinforce", {}),
    ("rloo", UNCLIPPED),
    ("grpo", UNCLIPPED | {"kl_coef": 0.0, "weights": "sequence_sum"}),
    ("cispo", {"clip_high": float("inf"), "weights": "sequence_sum"}),
    ("luspo", UNCLIPPED),
    ("vespo", {"weights": "sequence_sum"}),
  ],
)
def test_on_policy_the_gradient_is_the_true_one(x64, expected_gradient, name, settings):
  logits = logits_of(0)
  gradient = expected_gradient(name, settings)(logits, logits, REWARDS)
  np.testing.assert_allclose(gradient, true_gradient(logits), rtol=1e-10, atol=1e-14)


def test_a_constant_baseline_leaves_the_expected_gradient_alone(x64, expected_gradient):
  old, new = logits_of(0), logits_of(1)
  for name, settings, logits in (("reinforce", {}, old), ("rloo", UNCLIPPED, new)):
    gradient = expected_gradient(name, settings)
    np.testing.assert_allclose(gradient(logits, old, REWARDS + 7.0), gradient(logits, old, REWARDS), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
  ("name", "settings"),
  [
    ("grpo", UNCLIPPED | {"kl_coef": 0.0, "weights": "sequence_sum"}),
    ("cispo", {"clip_high": float("inf"), "weights": "sequence_sum"}),
    ("luspo", UNCLIPPED),
  ],
)
def test_token_weights_are_the_first_order_of_the_sequence_weight(x64, expected_gradient, name, settings):
  """Half the step gives half the error.

  The same holds for the sequence ratio: it is biased, but not on-policy.
  """
  old, direction, gradient = logits_of(0), logits_of(1), expected_gradient(name, settings)
  errors = []
  for step in (0.04, 0.02, 0.01, 0.005):
    new = old + step * direction
    errors.append(np.linalg.norm(gradient(new, old, REWARDS) - true_gradient(new)))
  ratios = np.array(errors[:-1]) / errors[1:]
  assert errors[-1] > 1e-6 and np.all(np.abs(ratios - 2) < 0.15) and np.all(np.diff(np.abs(ratios - 2)) < 0)


# Distribution that the tokens are drawn from.


@pytest.mark.parametrize("settings", [{"temperature": 0.6}, {"top_p": 0.8}, {"temperature": 1.7, "top_p": 0.7}, {"top_k": 2}])
def test_a_ratio_is_a_weight_only_if_learner_and_sampler_filter_alike(x64, settings):
  filter_logits, plain = make_filter(**settings), make_filter()
  old_logits = jnp.asarray(logits_of(2))
  # The step is so small that both policies have the same nucleus at every prefix.
  new_logits = old_logits + 0.01 * logits_of(3)

  def table(logits, filtered):
    tokens = jnp.arange(VOCAB)
    # The learner always keeps the drawn token, whatever the filter decides.
    rows = [jax.nn.log_softmax(filtered(logits, jnp.full(NUM_PREFIXES, token)))[:, token] for token in tokens]
    return np.stack(rows, axis=1)

  drawn = np.asarray(jax.nn.softmax(filter_logits(old_logits)), float)
  removed = drawn < 1e-30
  assert np.any(removed) == (settings.keys() != {"temperature"})
  np.testing.assert_array_equal(removed, np.asarray(jax.nn.softmax(filter_logits(new_logits))) < 1e-30)
  old, new = table(old_logits, filter_logits), table(new_logits, filter_logits)
  alike = np.sum(drawn * np.exp(new - old), axis=1)
  np.testing.assert_allclose(alike, 1, rtol=1e-6)
  # With an unfiltered learner and a filtered sampler, the mass that was never drawn is missing at
  # every prefix that has such mass.
  unlike = np.sum(drawn * np.exp(table(new_logits, plain) - np.log(np.where(removed, 1, drawn))), axis=1)
  missing = np.sum(np.where(removed, np.exp(table(new_logits, plain)), 0), axis=1)
  np.testing.assert_allclose(unlike, 1 - missing, rtol=1e-5)
  if np.any(removed):
    assert np.all(unlike[np.any(removed, axis=1)] < 0.995)
  else:
    # Temperature alone removes nothing: π/μ is still a weight. Only π_old at another temperature is
    # not.
    skewed = np.sum(drawn * np.exp(new - table(old_logits, plain)), axis=1)
    assert np.max(np.abs(skewed - 1)) > 0.05


# Signal of a group.


@pytest.mark.parametrize("group_size", [1, 2, 5])
def test_the_probability_of_a_group_with_signal(group_size):
  """A fraction 1 − p^G − (1 − p)^G of all groups of binary rewards has non-zero advantages."""
  groups = np.array(list(itertools.product([0.0, 1.0], repeat=group_size)))
  advantages = np.asarray(group_advantages(groups.ravel(), group_size)).reshape(groups.shape)
  mixed = np.any(advantages != 0, axis=1)
  num_right = groups.sum(axis=1)
  for p in (0.05, 0.5, 0.98):
    probability = np.sum(mixed * p**num_right * (1 - p) ** (group_size - num_right))
    np.testing.assert_allclose(probability, 1 - p**group_size - (1 - p) ** group_size, rtol=1e-10, atol=1e-15)
