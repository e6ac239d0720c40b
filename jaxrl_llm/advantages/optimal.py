"""Baselines that minimise the variance of the policy gradient."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxrl_llm.advantages.group import by_group, first_valid
from jaxrl_llm.advantages.inputs import counted_tokens, divide, of_shape, real


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
  return jnp.where(there & (total != 0), groups - baseline, 0).reshape(-1)


def otb_advantages(
  rewards: ArrayLike, score_norms: ArrayLike, mask: ArrayLike, group_size: int, *, valid: ArrayLike | None = None
) -> Float[Array, "N R"]:
  """Returns rewards minus the baseline of least variance at each token (OTB).

  A_{i,t} = R_i − Σ_j R_j·W_{j,t} / Σ_j W_{j,t},  over the samples of one prompt with a token t
  W_{j,t} = Σ_{s≤t} ‖∇ log π(y_s)‖²,  ‖∇ log π(y)‖² = 1 − 2·π(y) + Σ_v π(v)² in the logits

  The W of a response is what the gradient of its tokens up to t has of squared norm, if those of
  different tokens are orthogonal.

  Args:
    rewards: Reward of each sample, [N]. The samples of one prompt are consecutive.
    score_norms: Squared norm of the gradient of each token's log-probability, [N, R]; times k² if a
      correction weighs the token by k.
    mask: 1 if a token counts, [N, R]. The t of the equation runs over counted tokens only.
    group_size: Number of samples per prompt, G.
    valid: True for a sample that has a reward, [N], as in `group_advantages`. None if all are
      valid.

  Returns:
    The advantages, 0 outside the mask. A group of equal rewards gets exact zeros, and so do tokens
    at places that no other sample reaches.

  Raises:
    ValueError: If the shapes do not fit together or the rewards do not fall into whole groups.

  Example:
    >>> norms, ones = jnp.array([[1.0, 1.0], [3.0, 1.0]]), jnp.array([[1, 1], [1, 0]])
    >>> otb_advantages(jnp.array([1.0, 0.0]), norms, ones, 2).tolist()
    [[0.75, 0.0], [-0.25, 0.0]]

  References:
    The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL, arXiv:2602.07078, 2026.

  Note:
    Nothing is added to the denominator; where it is 0, so are the advantages, because no token has
    a gradient. verl adds 1e-8, and subtracts nothing behind the end of the second longest sample of
    a prompt.
  """
  norms = real("score_norms", score_norms, shape="[N, R]", ndim=2)
  counted = counted_tokens(mask, "score_norms", norms)
  groups = by_group(rewards, group_size)
  of_shape("rewards", groups.reshape(-1), "the first axis of score_norms", norms[:, 0])
  there = jnp.ones(groups.shape, bool) if valid is None else of_shape("valid", jnp.asarray(valid), "rewards", groups.reshape(-1))
  there = there.reshape(groups.shape)
  relative = jnp.where(there, groups - first_valid(groups, there), 0).reshape(-1, 1)
  counted &= there.reshape(-1, 1)
  so_far = jax.lax.cumsum(jnp.where(counted, norms, 0), axis=1).astype(jnp.promote_types(norms.dtype, groups.dtype))
  # The place of a token among those of its prompt: its group, and the number of tokens before it.
  places = jnp.arange(len(norms))[:, None] // group_size * norms.shape[1] + jnp.maximum(jnp.cumsum(counted, axis=1) - 1, 0)

  def over_samples(x: Float[Array, "N R"]) -> Float[Array, "N R"]:
    return jax.ops.segment_sum(jnp.where(counted, x, 0).reshape(-1), places.reshape(-1), num_segments=counted.size)[places]

  total = over_samples(so_far)
  baseline = divide(over_samples(relative * so_far), total)
  alone = over_samples(jnp.ones_like(so_far)) < 2
  return jnp.where(counted & (total != 0), jnp.where(alone, 0 * baseline, relative - baseline), 0)
