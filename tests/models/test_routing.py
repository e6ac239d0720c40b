"""What two routings share, how experts are used, and what replaying costs: by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.models import routing


def routes(*rows):
  """`[1 T L K]` from T rows of L routes."""
  return jnp.array([rows], jnp.int16)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_overlap_is_a_fraction_symmetric_and_one_for_itself(seed, top_k):
  rng = np.random.default_rng(seed)
  a, b = (jnp.array([[rng.permutation(6)[:top_k] for _ in range(3)]]) for _ in range(2))
  found = routing.overlap(a, b)
  assert np.all((found >= 0) & (found <= 1))
  assert np.array_equal(found, routing.overlap(b, a))
  assert np.all(routing.overlap(a, a[..., ::-1]) == 1)  # The order does not count.
  expected = [[len(set(x) & set(y)) / top_k for x, y in zip(p, q, strict=True)] for p, q in zip(a.tolist(), b.tolist(), strict=True)]
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_unknown_experts_have_nothing_in_common():
  assert routing.overlap(jnp.array([[-1, -1]]), jnp.array([[-1, -1]])).tolist() == [0]


def test_expert_change_is_over_layers_that_both_know():
  a = routes([[0, 1], [2, 3], [-1, -1]], [[0, 1], [-1, -1], [-1, -1]])
  b = routes([[1, 4], [3, 2], [-1, -1]], [[-1, -1], [-1, -1], [-1, -1]])
  assert routing.expert_change(a, b).tolist() == [[0.25, 0.0]]


def test_fallback_counts_layers_with_experts_only():
  recorded = routes([[0, 1], [-1, -1], [2, 3]], [[0, -1], [-1, -1], [2, 3]])
  assert routing.fallback(recorded, (0, 2)).tolist() == [[0.0, 0.5]]


def test_replayed_falls_back_row_by_row():
  found = routing.replayed(jnp.array([[3, 4], [5, -1], [-1, -1]], jnp.int16), jnp.array([[0, 1]] * 3))
  assert found.tolist() == [[3, 4], [0, 1], [0, 1]] and found.dtype == jnp.int32
  live = jnp.array([[0, 1]])
  assert routing.replayed(None, live) is live


def test_usage_of_even_and_of_lopsided_loads():
  even = routes([[0, 1], [-1, -1]], [[2, 3], [-1, -1]])
  mask = jnp.ones((1, 2))
  found = routing.usage(even, mask, num_experts=4, sparse_layers=(0,))
  assert {k: pytest.approx(v, abs=1e-6) for k, v in {"moe/load_max": 1.0, "moe/load_entropy": 1.0, "moe/unused": 0.0}.items()} == found
  lopsided = routes([[0, 1], [-1, -1]], [[0, 2], [-1, -1]])
  found = routing.usage(lopsided, mask, num_experts=4, sparse_layers=(0,))
  assert float(found["moe/load_max"]) == pytest.approx(2.0) and float(found["moe/unused"]) == pytest.approx(0.25)
  # A token that does not count is not counted.
  found = routing.usage(lopsided, jnp.array([[1.0, 0.0]]), num_experts=4, sparse_layers=(0,))
  assert float(found["moe/load_max"]) == pytest.approx(2.0) and float(found["moe/unused"]) == pytest.approx(0.5)


def test_comparison_leaves_out_tokens_whose_routes_bear_on_nothing():
  segments = jnp.array([[1, 1, 1, 0]])
  a = routes([[0, 1]], [[0, 1]], [[0, 1]], [[0, 1]])
  b = routes([[0, 1]], [[0, 2]], [[4, 5]], [[4, 5]])  # Half of the second differs; the last of the sequence and padding do not count.
  assert float(routing.comparison(a, b, segments)) == pytest.approx(0.25)
  unknown = routes([[0, 1]], [[-1, -1]], [[4, 5]], [[4, 5]])
  assert float(routing.comparison(a, unknown, segments)) == 0


def test_replay_metrics_say_what_is_missing_and_what_it_costs():
  segments = jnp.array([[1, 1, 1, 0]])
  recorded = routes([[0, 1]], [[-1, -1]], [[-1, -1]], [[-1, -1]])
  found = routing.replay_metrics(recorded, segments, sparse_layers=(0,))
  assert float(found["moe/replay_fallback"]) == pytest.approx(0.5)
  assert float(found["moe/replay_mb"]) == pytest.approx(4 * 2 * 2 / 1e6)
