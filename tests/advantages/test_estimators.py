"""Metrics beside the advantages of an estimator; `test_advantages_golden` checks the advantages."""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.estimators import Evidence, make_credit


def test_the_baselines_of_roles_are_metrics():
  """Two games of two turns each, of which the second role wins the first."""
  ones, won = jnp.ones((2, 2)), jnp.array([[0.0, 1.0], [0.0, 0.0]])
  credit = make_credit("rae", 2, decay=0.5)(Evidence(jnp.ones(2), jnp.ones((1, 2)), ones, step_rewards=won, step_ends=ones > 0))
  assert {name: float(x) for name, x in credit.metrics.items()} == {"critic/baseline/role_0": -0.25, "critic/baseline/role_1": 0.25}
  assert credit.role_baselines.tolist() == [-0.25, 0.25]


def test_the_explained_variance_is_that_of_the_targets(rng):
  values = rng.normal(size=(4, 3)).astype(np.float32)
  mask, rewards = np.ones((4, 3), np.float32), rng.normal(size=4).astype(np.float32)
  credit = make_credit("gae", 2)(Evidence(rewards, rewards[None], mask, values=values))
  targets = np.repeat(rewards[:, None], 3, axis=1)  # γ = λ = 1: the return itself, at every token.
  assert credit.metrics.keys() == {"critic/vf_explained_var"}
  expected = 1 - np.var(targets - values) / np.var(targets)
  np.testing.assert_allclose(credit.metrics["critic/vf_explained_var"], expected, rtol=1e-4)
