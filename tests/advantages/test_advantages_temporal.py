"""Token rewards, returns, GAE and step rewards, each against a loop over the counted tokens."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import (
  generalized_advantages,
  group_advantages,
  length_adaptive_lambda,
  returns_to_go,
  role_advantages,
  step_advantages,
  token_rewards,
)
from tests.advantages import reference

# Rows: full; with holes at the start, in the middle and at the end; with a single token; with none.
MASK = np.array(
  [[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0], [0] * 7, [1, 0, 1, 0, 1, 0, 1]], bool
)
N, R = MASK.shape


@pytest.fixture
def arrays(rng):
  return {"rewards": rng.standard_normal((N, R)), "values": rng.standard_normal((N, R)), "mask": MASK}


def advantages_by_sum(rewards, values, mask, gamma, lam):
  """Computes A_t = Σ_l (γλ)^l δ_{t+l} as a double sum over the counted tokens."""
  result = np.zeros(mask.shape)
  for row in range(len(mask)):
    slots = [slot for slot in range(mask.shape[1]) if mask[row, slot]]
    v = [values[row, slot] for slot in slots] + [0.0]
    deltas = [rewards[row, slot] + gamma * v[t + 1] - v[t] for t, slot in enumerate(slots)]
    for t, slot in enumerate(slots):
      result[row, slot] = sum((gamma * lam[row]) ** l * deltas[t + l] for l in range(len(slots) - t))
  return result


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0, "one a sequence"])
def test_generalized_advantages_match_the_double_sum(x64, arrays, gamma, lam):
  if lam == "one a sequence":
    lam = np.linspace(0, 1, N)
  actual = generalized_advantages(**arrays, gamma=gamma, lam=lam)
  np.testing.assert_allclose(
    actual, advantages_by_sum(**arrays, gamma=gamma, lam=np.broadcast_to(lam, N)), rtol=1e-10, atol=1e-14
  )
  assert actual.dtype == np.float64


@hypothesis.given(
  st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=2, max_size=2),
  st.integers(0, 2**32 - 1),
  st.floats(0, 1),
  st.floats(0, 1),
)
def test_generalized_advantages_of_any_mask(mask, seed, gamma, lam):
  rewards, values = np.random.default_rng(seed).standard_normal((2, 2, 6))
  mask = np.array(mask)
  with jax.enable_x64(True):
    actual = generalized_advantages(rewards, values, mask, gamma=gamma, lam=lam)
  np.testing.assert_allclose(
    actual, advantages_by_sum(rewards, values, mask, gamma, [lam, lam]), rtol=1e-10, atol=1e-12
  )


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_returns_match_the_sum(x64, arrays, gamma):
  actual = returns_to_go(arrays["rewards"], MASK, gamma=gamma)
  # A critic of zeros and λ = 1 leave the return.
  expected = advantages_by_sum(arrays["rewards"], np.zeros((N, R)), MASK, gamma, np.ones(N))
  np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-14)


def test_token_rewards_are_at_the_last_counted_token(x64, rng):
  rewards, kl = rng.standard_normal(N), rng.standard_normal((N, R))
  expected = np.zeros((N, R))
  for row in range(N):
    slots = np.flatnonzero(MASK[row])
    if len(slots):
      expected[row, slots[-1]] = rewards[row]
  np.testing.assert_array_equal(token_rewards(rewards, MASK), expected)
  np.testing.assert_array_equal(token_rewards(rewards, MASK, kl), expected)
  for coef in (0.1, jnp.asarray(0.1)):
    np.testing.assert_allclose(token_rewards(rewards, MASK, kl, coef), np.where(MASK, expected - 0.1 * kl, 0), rtol=1e-12)


def test_a_traced_coefficient(rng):
  rewards, kl = rng.standard_normal(N).astype(np.float32), rng.standard_normal((N, R)).astype(np.float32)
  jitted = jax.jit(lambda coef: token_rewards(rewards, MASK, kl, coef))
  np.testing.assert_allclose(jitted(0.3), token_rewards(rewards, MASK, kl, 0.3), rtol=1e-6)
  with pytest.raises(ValueError, match="^kl: found None"):
    jax.jit(lambda coef: token_rewards(rewards, MASK, None, coef))(0.3)


@pytest.mark.parametrize("group_size", [1, 3])
def test_step_advantages_match_a_loop(x64, rng, group_size):
  for normalize_std in (True, False, True, False):
    rewards, ends = rng.integers(-3, 4, (N, R)) / 7, rng.random((N, R)) < 0.4
    inputs = {"mask": MASK.tolist(), "step_rewards": rewards.tolist(), "step_ends": (ends & MASK).tolist()}
    expected = reference.rows(reference.steps({"normalize_std": normalize_std}, inputs, group_size), inputs["mask"])
    actual = step_advantages(rewards, ends, MASK, group_size, normalize_std=normalize_std)
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-13)


def test_one_step_per_sample_is_the_group_advantage(x64, rng):
  rewards, mask = rng.standard_normal(6), np.arange(5) < np.array([5, 3, 1, 4, 2, 2])[:, None]
  ends = np.asarray(token_rewards(np.ones(6), mask)) > 0
  actual = step_advantages(np.asarray(token_rewards(rewards, mask)), ends, mask, 3)
  np.testing.assert_allclose(actual, np.where(mask, group_advantages(rewards, 3)[:, None], 0), rtol=1e-10)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_steps_without_signal(normalize_std, eps):
  """Groups with equal step rewards, without steps, or with a single step have exact zeros.

  The last group has a signal.
  """
  rewards, ends = np.full((8, 3), 0.1, np.float32), np.zeros((8, 3), bool)
  ends[:2] = [[True, True, False], [False, True, False]]
  ends[4, 1] = ends[6, 1] = ends[7, 1] = True
  rewards[7, 1] = 0.2
  a = np.asarray(step_advantages(rewards, ends, np.ones((8, 3)), 2, normalize_std=normalize_std, eps=eps))
  assert np.all(a[:6] == 0) and np.all(a[6, :2] < 0) and np.all(a[7, :2] > 0) and np.all(a[6:, 2] == 0)


def test_length_adaptive_lambda(x64):
  lengths = np.array([0, 1, 20, 21, 40, 100, 400])
  mask = np.arange(400) < lengths[:, None]
  lam = np.asarray(length_adaptive_lambda(mask.astype(float)))
  np.testing.assert_allclose(lam, [0, 0, 0, 1 - 1 / 1.05, 0.5, 0.8, 0.95], rtol=1e-10, atol=1e-15)
  # The sum of λ^t over a long response is α|y|.
  np.testing.assert_allclose(1 / (1 - lam[3:]), 0.05 * lengths[3:], rtol=1e-10)
  # The places of the counted tokens do not matter.
  np.testing.assert_array_equal(length_adaptive_lambda(mask[:, ::-1].astype(float)), lam)


@hypothesis.given(st.integers(0, 8), st.floats(1e-6, 1e12))
def test_length_adaptive_lambda_is_below_one(length, alpha):
  lam = length_adaptive_lambda(np.arange(8)[None] < length, alpha=alpha)
  assert lam.dtype == np.float32 and 0 <= lam[0] < 1


def test_only_new_shapes_compile_again(arrays):
  """Outside of jit a scan compiles at every call unless it has its own jit."""
  from jaxrl_llm.advantages import temporal

  generalized_advantages(**arrays)
  size = temporal._advantages_backwards._cache_size()
  generalized_advantages(**arrays, gamma=0.5, lam=0.5)
  returns_to_go(arrays["rewards"], MASK, gamma=0.25)
  assert temporal._advantages_backwards._cache_size() == size


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda x, m: generalized_advantages(x[0], x, m), r"^rewards: found shape \(7,\), expected \[N, R\]$"),
    (lambda x, m: generalized_advantages(x, x[:3], m), r"^values: found shape \(3, 7\), expected \(6, 7\), the shape of rewards$"),
    (lambda x, m: generalized_advantages(x, x, m[:, 1:]), r"^mask: found shape \(6, 6\), expected \(6, 7\), the shape of rewards$"),
    (lambda x, m: generalized_advantages(x, x, m, gamma=1.5), "^gamma: found 1.5, expected a number from 0 to 1$"),
    (lambda x, m: generalized_advantages(x, x, m, lam=-0.5), "^lam: found -0.5, expected a number from 0 to 1$"),
    (lambda x, m: generalized_advantages(x, x, m, lam=np.ones(7)), r"^lam: found shape \(7,\), expected \[\] or \[N\] = \(6,\)$"),
    (lambda x, m: returns_to_go(x, m, gamma=float("nan")), "^gamma: found nan"),
    (lambda x, m: returns_to_go(x.astype(complex), m), "^rewards: found complex64, expected real numbers$"),
    (lambda x, m: token_rewards(x, m), r"^rewards: found shape \(6, 7\), expected \[N\]$"),
    (lambda x, m: token_rewards(x[:, 0], m[:4]), r"^mask: found shape \(4, 7\), expected \[N, R\] with N = 6, the length of rewards$"),
    (lambda x, m: token_rewards(x[:, 0], m, kl_coef=0.1), r"^kl: found None, expected an array \[N, R\], because kl_coef is 0.1"),
    (lambda x, m: token_rewards(x[:, 0], m, x[:, 1:]), r"^kl: found shape \(6, 6\), expected \(6, 7\), the shape of mask$"),
    (lambda x, m: token_rewards(x[:, 0], m, x, np.ones(6)), r"^kl_coef: found shape \(6,\), expected \[\]$"),
    (lambda x, m: step_advantages(x, x, m, 2), "^step_ends: found float32, expected bool$"),
    (lambda x, m: step_advantages(x, m[1:], m, 2), r"^step_ends: found shape \(5, 7\), expected \(6, 7\), the shape of step_rewards$"),
    (lambda x, m: step_advantages(x, m, m, 4), r"^step_rewards: found shape \(6, 7\), expected \[N, R\] with N a multiple"),
    (lambda x, m: step_advantages(x, m, m, 2, eps=-1.0), "^eps: found -1.0"),
    (lambda x, m: role_advantages(x, x, m, np.zeros(2)), "^step_ends: found float32, expected bool$"),
    (lambda x, m: role_advantages(x, m, m, np.zeros(2), decay=1.5), "^decay: found 1.5, expected a number from 0 to 1$"),
    (lambda x, m: length_adaptive_lambda(m[0]), r"^mask: found shape \(7,\), expected \[N, R\]$"),
    (lambda x, m: length_adaptive_lambda(m, alpha=0.0), "^alpha: found 0.0, expected a number > 0$"),
  ],
)
def test_refusals(call, message):
  with pytest.raises(ValueError, match=message) as error:
    call(np.ones((N, R), np.float32), MASK)
  assert "\n" not in str(error.value)
