"""Per-token advantages that redistribute an outcome by the policy's entropy."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxrl_llm.advantages.inputs import at_least_zero, counted_tokens, of_shape, real, whole_groups
from jaxrl_llm.advantages.statistics import whiten

SMALLEST_ENTROPY = 1e-6
"""Smallest entropy that is inverted, in nats."""


def gtpo_advantages(
  rewards: ArrayLike, entropy: ArrayLike, mask: ArrayLike, group_size: int, *, entropy_share: float = 0.1, right_above: float = 0.5
) -> Float[Array, "N R"]:
  """Returns advantages that favour uncertain tokens if right, and punish certain ones if wrong.

  right: r_{i,t} = 1 + share·d_t·H_{i,t}/Σ_k H_{k,t},  over the d_t right responses with a token t
  wrong: r_{j,t} = −1 − share·h_t·(1/H_{j,t})/Σ_k (1/H_{k,t}),  over the h_t wrong ones
  A_{i,t} = (r_{i,t} − mean r) / std r, separately over all right and over all wrong tokens

  Sums are over the samples of one prompt, means and deviations over the batch.

  Args:
    rewards: Reward of each sample, [N]. The samples of one prompt are consecutive.
    entropy: Entropy of the policy that drew the tokens, [N, R], in nats.
    mask: 1 if a token counts, [N, R].
    group_size: Number of samples per prompt.
    entropy_share: Weight of the entropy's part of a token's reward, beside 1 for the outcome.
    right_above: Reward above which a response counts as right.

  Returns:
    The advantages; zero outside the mask.

  Raises:
    ValueError: If the arrays do not fit together or `entropy_share` is negative.

  Example:
    >>> ones, entropy = jnp.ones((2, 2)), jnp.array([[3.0, 1.0], [1.0, 1.0]])
    >>> gtpo_advantages(jnp.array([1.0, 1.0]), entropy, ones, 2).round(3).tolist()
    [[1.225, 0.0], [-1.225, 0.0]]

  References:
    GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy, arXiv:2508.04349,
      2025, eqs. 3, 5 and 6.

  Note:
    This follows implementations of the paper. Since right and wrong tokens are normalised apart,
    the outcome itself cancels: what remains is which tokens were more or less certain than others
    at their place. On the small bed of `experiments/claims/staleness` this unlearns the task.
  """
  entropy = real("entropy", entropy, shape="[N, R]", ndim=2)
  counted = counted_tokens(mask, "entropy", entropy)
  rewards = of_shape("rewards", real("rewards", rewards, shape="[N]", ndim=1), "the first axis of entropy", entropy[:, 0])
  whole_groups("rewards", rewards.shape[0], group_size, rewards.shape, "[N]")
  at_least_zero("entropy_share", entropy_share)
  entropy = jnp.maximum(jnp.where(counted, entropy, 1), SMALLEST_ENTROPY)
  right = rewards[:, None] > right_above

  def of_group(x: Float[Array, "N R"]) -> Float[Array, "N R"]:
    """Returns the sum at each token's place over the samples of its prompt."""
    sums = jnp.sum(x.reshape(-1, group_size, x.shape[1]), axis=1)
    return jnp.repeat(sums, group_size, axis=0)

  def shaped(tokens: Array, weight: Float[Array, "N R"]) -> Float[Array, "N R"]:
    weight = jnp.where(tokens, weight, 0)
    number = of_group(tokens.astype(weight.dtype))
    shares = 1 + entropy_share * number * weight / jnp.where(tokens, of_group(weight), 1)
    return whiten(jnp.where(tokens, shares, 0), tokens)

  # A NaN reward is on neither side of a comparison and reaches the result.
  advantages = shaped(counted & right, entropy) - shaped(counted & ~right, 1 / entropy)
  return jnp.where(counted, advantages + 0 * rewards[:, None], 0)
