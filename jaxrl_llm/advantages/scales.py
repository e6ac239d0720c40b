"""Group-centred rewards on other scales than their group's deviation."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxrl_llm.advantages.group import by_group, centred_groups
from jaxrl_llm.advantages.inputs import at_least_zero, divide


def maxrl_advantages(rewards: ArrayLike, group_size: int, *, valid: ArrayLike | None = None) -> Float[Array, " N"]:
  """Returns each reward's distance from the mean reward of its prompt, in units of that mean.

  A_i = (R_i − mean R) / mean R, over the G consecutive samples of one prompt; 0 if mean R = 0

  For rewards of 0 and 1, R_i / mean R alone has the expected gradient of Σ_k (1/k)·pass@k with k
  from 1 to G, a truncation of the log-likelihood of a right answer: a hard prompt weighs more than
  in GRPO. The baseline keeps this expectation but for groups without a right answer, which have
  none.

  Args:
    rewards: Reward of each sample, [N], such as 1 for a right answer and 0 for a wrong one; a
      negative one counts as 0. The samples of one prompt are consecutive.
    group_size: Number of samples per prompt, G.
    valid: True for a sample that has a reward, [N], as in `group_advantages`. None if all are
      valid.

  Returns:
    The advantages, from −1 to G − 1. A group of equal rewards gets exact zeros. A NaN stays in its
    group.

  Raises:
    ValueError: If the rewards do not fall into whole groups.

  Example:
    >>> maxrl_advantages(jnp.array([1., 0., 0., 0.]), 4).tolist()
    [3.0, -1.0, -1.0, -1.0]

  References:
    Maximum Likelihood Reinforcement Learning (MaxRL), arXiv:2602.02710, 2026.

  Note:
    The paper's rewards are 0 or 1. With negative rewards a mean could be arbitrarily close to 0,
    and advantages would have no bound. A run refuses them (`Estimator.from_zero`).
  """
  groups = jnp.maximum(by_group(rewards, group_size), 0)
  centred, count = centred_groups(groups.reshape(-1), group_size, valid)
  if valid is not None:
    groups = jnp.where(jnp.asarray(valid).reshape(groups.shape), groups, 0)
  mean = jnp.sum(groups, axis=1, keepdims=True) / jnp.maximum(count, 1)
  # A comparison selects the groups that are left out: a NaN is not among them and stays.
  return jnp.where(mean == 0, 0, divide(centred, mean)).reshape(-1)


def batch_scaled_advantages(
  rewards: ArrayLike, group_size: int, *, eps: float = 1e-6, valid: ArrayLike | None = None
) -> Float[Array, " N"]:
  """Returns group-centred rewards, divided by the standard deviation of the batch (ScaleRL).

  A_i = D_i / (std D + eps),  D_i = R_i − mean R of its prompt;  the deviation is over all N samples

  A prompt that is nearly always or nearly never solved weighs less than if it were divided by its
  own deviation.

  Args:
    rewards: Reward of each sample, [N]. The samples of one prompt are consecutive.
    group_size: Number of samples per prompt, G.
    eps: Constant added to the standard deviation, in units of reward.
    valid: True for a sample that has a reward, [N], as in `group_advantages`. None if all are
      valid.

  Returns:
    The advantages. A group of equal rewards gets exact zeros. A NaN turns all of them to NaN.

  Raises:
    ValueError: If the rewards do not fall into whole groups, or `eps` is negative.

  Example:
    >>> batch_scaled_advantages(jnp.array([1., 0., 3., 3.]), 2, eps=0.0).round(4).tolist()
    [1.2247, -1.2247, 0.0, 0.0]

  References:
    Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning (Lite PPO), arXiv:2508.08221,
      2025; The art of scaling reinforcement learning compute for LLMs (ScaleRL), arXiv:2510.13786,
      2025.

  Note:
    The deviation is the unbiased one, as in `group_advantages`. It is over samples and over the
    whole rollout batch, not over tokens and not over one update's mini-batch.
  """
  centred, _ = centred_groups(rewards, group_size, valid)
  at_least_zero("eps", eps)
  count = centred.size if valid is None else jnp.sum(jnp.asarray(valid))
  # The mean of D is 0 in every group.
  deviation = jnp.sqrt(jnp.sum(jnp.square(centred)) / jnp.maximum(count - 1, 1))
  return divide(centred, deviation + eps).reshape(-1)
