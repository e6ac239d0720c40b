"""Tests of routings: overlap of two routings, usage of experts, and the cost of replay."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.models import routing


def routes(*rows):
  """Makes a routing `[1 T L K]` from T rows of L routes."""
  return jnp.array([rows], jnp.int16)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_overlap_is_a_symmetric_fraction_and_one_for_equal_sets(seed, top_k):
  rng = np.random.default_rng(seed)
  a, b = (jnp.array([[rng.permutation(6)[:top_k] for _ in range(3)]]) for _ in range(2))
  overlap = routing.overlap(a, b)
  assert np.all((overlap >= 0) & (overlap <= 1))
  assert np.array_equal(overlap, routing.overlap(b, a))
  assert np.all(routing.overlap(a, a[..., ::-1]) == 1)  # The order does not matter.
  expected = [[len(set(x) & set(y)) / top_k for x, y in zip(p, q, strict=True)] for p, q in zip(a.tolist(), b.tolist(), strict=True)]
  np.testing.assert_allclose(overlap, expected, rtol=1e-6)


def test_unrecorded_routes_have_no_overlap():
  assert routing.overlap(jnp.array([[-1, -1]]), jnp.array([[-1, -1]])).tolist() == [0]


def test_expert_change_is_over_layers_recorded_in_both():
  a = routes([[0, 1], [2, 3], [-1, -1]], [[0, 1], [-1, -1], [-1, -1]])
  b = routes([[1, 4], [3, 2], [-1, -1]], [[-1, -1], [-1, -1], [-1, -1]])
  assert routing.expert_change(a, b).tolist() == [[0.25, 0.0]]


def test_fallback_counts_layers_with_experts_only():
  recorded = routes([[0, 1], [-1, -1], [2, 3]], [[0, -1], [-1, -1], [2, 3]])
  assert routing.fallback(recorded, (0, 2)).tolist() == [[0.0, 0.5]]


def test_replayed_falls_back_row_by_row():
  experts = routing.replayed(jnp.array([[3, 4], [5, -1], [-1, -1]], jnp.int16), jnp.array([[0, 1]] * 3))
  assert experts.tolist() == [[3, 4], [0, 1], [0, 1]] and experts.dtype == jnp.int32
  live = jnp.array([[0, 1]])
  assert routing.replayed(None, live) is live


def test_usage_of_even_and_of_lopsided_loads():
  even = routes([[0, 1], [-1, -1]], [[2, 3], [-1, -1]])
  mask = jnp.ones((1, 2))
  metrics = routing.usage(even, mask, num_experts=4, sparse_layers=(0,))
  expected = {"moe/load_max": 1.0, "moe/load_entropy": 1.0, "moe/unused": 0.0}
  assert metrics == pytest.approx(expected, abs=1e-6)
  lopsided = routes([[0, 1], [-1, -1]], [[0, 2], [-1, -1]])
  metrics = routing.usage(lopsided, mask, num_experts=4, sparse_layers=(0,))
  assert float(metrics["moe/load_max"]) == pytest.approx(2.0) and float(metrics["moe/unused"]) == pytest.approx(0.25)
  # Tokens outside the mask are ignored.
  metrics = routing.usage(lopsided, jnp.array([[1.0, 0.0]]), num_experts=4, sparse_layers=(0,))
  assert float(metrics["moe/load_max"]) == pytest.approx(2.0) and float(metrics["moe/unused"]) == pytest.approx(0.5)


def test_comparison_ignores_tokens_whose_routes_affect_no_later_token():
  segments = jnp.array([[1, 1, 1, 0]])
  a = routes([[0, 1]], [[0, 1]], [[0, 1]], [[0, 1]])
  # Half of the second token's route differs. The sequence's last token and padding are ignored.
  b = routes([[0, 1]], [[0, 2]], [[4, 5]], [[4, 5]])
  assert float(routing.comparison(a, b, segments)) == pytest.approx(0.25)
  unknown = routes([[0, 1]], [[-1, -1]], [[4, 5]], [[4, 5]])
  assert float(routing.comparison(a, unknown, segments)) == 0


def test_replay_metrics_measure_missing_routes_and_size():
  segments = jnp.array([[1, 1, 1, 0]])
  recorded = routes([[0, 1]], [[-1, -1]], [[-1, -1]], [[-1, -1]])
  metrics = routing.replay_metrics(recorded, segments, sparse_layers=(0,))
  assert float(metrics["moe/replay_fallback"]) == pytest.approx(0.5)
  assert float(metrics["moe/replay_mb"]) == pytest.approx(4 * 2 * 2 / 1e6)
