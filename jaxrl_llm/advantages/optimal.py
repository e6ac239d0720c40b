"""Baselines that minimise the variance of the policy gradient."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxrl_llm.advantages.group import by_group, first_valid
from jaxrl_llm.advantages.inputs import divide, of_shape, real


def opo_advantages(rewards: ArrayLike, lengths: ArrayLike, group_size: int, *, valid: ArrayLike | None = None) -> Float[Array, " N"]:
  """Returns each reward minus the length-weighted mean reward of its prompt.

  A_i = R_i − Σ_j L_j·R_j / Σ_j L_j, over the G consecutive samples of one prompt

  If the squared norm of a response's gradient is proportional to its length, no other constant
  baseline gives the policy gradient less variance.

  Args:
    rewards: Reward of each sample, [N]. The samples of one prompt are consecutive.
    lengths: Number of tokens of each sample, [N].
    group_size: Number of samples per prompt, G.
    valid: True for a sample that has a reward, [N], as in `group_advantages`. None if all are
      valid.

  Returns:
    The advantages. A group of equal rewards, or without tokens, gets exact zeros. A NaN stays in
    its group.

  Raises:
    ValueError: If the shapes differ or the rewards do not fall into whole groups.

  Example:
    >>> opo_advantages(jnp.array([1., 0.]), jnp.array([1, 3]), 2).tolist()
    [0.75, -0.25]

  References:
    On-Policy RL with Optimal Reward Baseline (OPO), arXiv:2505.23585, 2025.

  Note:
    The baseline contains the sample's own reward, as in the paper. Lengths are those of what the
    policy wrote, learned from or not. The method is meant for one update per rollout batch.
  """
  groups = by_group(rewards, group_size)
  lengths = of_shape("lengths", real("lengths", lengths, shape="[N]", ndim=1), "rewards", groups.reshape(-1)).reshape(groups.shape)
  there = jnp.ones(groups.shape, bool) if valid is None else of_shape("valid", jnp.asarray(valid), "rewards", groups.reshape(-1))
  there = there.reshape(groups.shape)
  groups = jnp.where(there, groups - first_valid(groups, there), 0)
  lengths = jnp.where(there, lengths, 0).astype(groups.dtype)
  total = jnp.sum(lengths, axis=1, keepdims=True)
  baseline = divide(jnp.sum(lengths * groups, axis=1, keepdims=True), total)
  return jnp.where(there & (total > 0), groups - baseline, 0).reshape(-1)
