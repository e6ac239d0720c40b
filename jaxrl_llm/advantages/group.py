"""Per-sample advantages from the rewards of samples drawn for the same prompt."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxrl_llm.advantages.inputs import at_least_zero, divide, of_shape, real, whole_groups, whole_number


def by_group(rewards: ArrayLike, group_size: int) -> Float[Array, "n G"]:
  """Returns rewards by group.

  Estimators take rewards relative to one reward of the group, so that equal rewards give exact
  zeros throughout. In float32 the mean of three values of 0.1 is not 0.1, and dividing that residue
  by eps would create an advantage out of nothing.
  """
  whole_number("group_size", group_size, low=1)
  rewards = real("rewards", rewards, shape=f"[N] with N a multiple of group_size = {group_size}", ndim=1)
  whole_groups("rewards", rewards.shape[0], group_size, rewards.shape, "[N]")
  return rewards.reshape(-1, group_size)


def first_valid(groups: Float[Array, "n G"], there: Bool[Array, "n G"]) -> Float[Array, "n 1"]:
  """Returns the first valid reward of each group, or the first one if none is valid."""
  return jnp.take_along_axis(groups, jnp.argmax(there, axis=1, keepdims=True), axis=1)


def centred_groups(rewards: ArrayLike, group_size: int, valid: ArrayLike | None) -> tuple[Float[Array, "n G"], Float[Array, "n _"] | int]:
  """Returns rewards by group minus the group's mean, and the number of valid ones per group.

  The mean is over valid rewards. Invalid rewards are not read and become zero.
  """
  groups = by_group(rewards, group_size)
  if valid is None:
    groups = groups - groups[:, :1]
    return groups - jnp.mean(groups, axis=1, keepdims=True), group_size
  there = of_shape("valid", jnp.asarray(valid), "rewards", groups.reshape(-1)).reshape(groups.shape)
  groups = jnp.where(there, groups - first_valid(groups, there), 0)
  count = jnp.sum(there, axis=1, keepdims=True).astype(groups.dtype)
  return jnp.where(there, groups - jnp.sum(groups, axis=1, keepdims=True) / jnp.maximum(count, 1), 0), count


def group_advantages(
  rewards: ArrayLike,
  group_size: int,
  *,
  normalize_std: bool = True,
  eps: float = 1e-6,
  unbiased: bool = True,
  valid: ArrayLike | None = None,
) -> Float[Array, " N"]:
  """Returns how much better each sample did than the others drawn for its prompt (GRPO).

  A_i = (R_i − mean R) / (std R + eps), over the G consecutive samples of one prompt

  Args:
    rewards: Reward of each sample, [N]. The samples of one prompt are consecutive.
    group_size: Number of samples per prompt, G.
    normalize_std: Whether to divide by the group's standard deviation. False gives Dr. GRPO's
      advantages.
    eps: Constant added to the standard deviation, in units of reward.
    unbiased: Whether to divide the squared deviations by G − 1 instead of G. This scales all
      advantages by √((G − 1)/G).
    valid: True for a sample that has a reward, [N]. The other samples get zero, and are left out of
      their group as if they had not been drawn. None if all are valid.

  Returns:
    The advantages. A group of equal rewards, or of one sample, gets exact zeros. A NaN or an
    infinity turns the advantages of its whole group, and of no other, to NaN. It thus surfaces in
    the loss instead of being averaged away.

  Raises:
    ValueError: If the rewards do not fall into whole groups, or a setting is illegal or has no
      effect.

  Example:
    >>> group_advantages(jnp.array([1., 0., 3., 3.]), 2, normalize_std=False).tolist()
    [0.5, -0.5, 0.0, 0.0]

  References:
    DeepSeekMath (GRPO), arXiv:2402.03300, 2024; without the standard deviation: Dr. GRPO,
      arXiv:2503.20783, 2025.

  Note:
    The paper does not say which standard deviation it uses. The unbiased one is the default because
    it is the most widely used.
  """
  advantages, count = centred_groups(rewards, group_size, valid)
  at_least_zero("eps", eps)
  if not normalize_std and not unbiased:
    raise ValueError("unbiased: found False, expected True, because normalize_std is False and would ignore it")
  if normalize_std:
    degrees = jnp.maximum(count - 1 if unbiased else count, 1)
    advantages = divide(advantages, jnp.sqrt(jnp.sum(jnp.square(advantages), axis=1, keepdims=True) / degrees) + eps)
  return advantages.reshape(-1)


def leave_one_out_advantages(
  rewards: ArrayLike, group_size: int, *, valid: ArrayLike | None = None, min_valid: int = 2
) -> Float[Array, " N"]:
  """Returns each reward minus the mean reward of the other samples of its prompt (RLOO).

  A_i = R_i − Σ_{j≠i} R_j / (G − 1) = G/(G − 1)·(R_i − mean R)

  Args:
    rewards: Reward of each sample, [N]. The samples of one prompt are consecutive.
    group_size: Number of samples per prompt, G ≥ 2.
    valid: True for a sample that has a reward, [N], as in `group_advantages`. None if all are
      valid.
    min_valid: Smallest number of valid samples that a group learns from, from 2 to G (RLOO-N). The
      baseline of a smaller group is left out as too noisy.

  Returns:
    The advantages. The baseline does not contain the sample's own reward, so the policy gradient is
    unbiased. A group of equal rewards, or with a single valid sample, gets exact zeros. A NaN stays
    in its group.

  Raises:
    ValueError: If a group has one sample and thus no others, the rewards do not fall into whole
      groups, or `min_valid` is out of range.

  Example:
    >>> leave_one_out_advantages(jnp.array([3., 0., 0.]), 3).tolist()
    [3.0, -1.5, -1.5]

  References:
    Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback (RLOO),
      arXiv:2402.14740, 2024.
  """
  whole_number("group_size", group_size, low=2, because=", because a group of one has no others")
  whole_number("min_valid", min_valid, low=2, high=group_size)
  advantages, count = centred_groups(rewards, group_size, valid)
  return jnp.where(count < min_valid, 0, count / jnp.maximum(count - 1, 1) * advantages).reshape(-1)


def pass_at_k_advantages(
  rewards: ArrayLike, group_size: int, *, k: int, normalize_std: bool = True, eps: float = 1e-6
) -> Float[Array, " N"]:
  """Returns what each sample adds to the best of k samples.

  A_i = (E[max over k-subsets with i] − E[max over k-subsets]) / (std[max over k-subsets] + eps)

  Subsets are drawn uniformly from the G samples of one prompt.

  Args:
    rewards: Reward of each sample, [N], any real number. The samples of one prompt are consecutive.
    group_size: Number of samples per prompt, G.
    k: Number of samples of which the best one counts, 1 ≤ k ≤ G.
    normalize_std: Whether to divide by the standard deviation of the maximum.
    eps: Constant added to that standard deviation, in units of reward.

  Returns:
    The advantages, which sum to zero in each group. Equal rewards have equal advantages. A group of
    equal rewards gets exact zeros. If k = G, so does every group, because there is only one subset.
    If k = 1, the result is that of `group_advantages` with the biased standard deviation.

  Raises:
    ValueError: If k is not from 1 to G, or the rewards do not fall into whole groups.

  Example:
    >>> pass_at_k_advantages(jnp.array([1., 0., 0., 0.]), 4, k=2, normalize_std=False).tolist()
    [0.5, -0.1667, -0.1667, -0.1667]

  References:
    Pass@k Training, arXiv:2508.10751, 2025. This is its analytic form for rewards of 0 and 1.

  Note:
    For other rewards the paper averages over subsets. Order statistics give the same result without
    drawing any.
  """
  groups = by_group(rewards, group_size)
  groups = groups - groups[:, :1]
  whole_number("k", k, low=1, high=group_size)
  at_least_zero("eps", eps)
  subsets, with_one = math.comb(group_size, k), math.comb(group_size - 1, k - 1)
  # Ratios of integers, constants of the trace: P(a k-subset lies among the j lowest | it contains
  # a given one of them), j < G, and P(the j-th lowest is the maximum of a k-subset), 1 ≤ j ≤ G.
  inside = np.array([math.comb(j - 1, k - 1) / with_one if j else 0.0 for j in range(group_size)])
  is_maximum = np.array([math.comb(j - 1, k - 1) / subsets for j in range(1, group_size + 1)])

  ordered = jnp.sort(groups, axis=1)
  # E[max | r-th lowest] = max R − Σ_{j≥r} (x_{j+1} − x_j)·inside_j, so these sums are
  # E[max | r-th lowest] − E[max | lowest].
  gaps = jnp.diff(ordered, axis=1, prepend=ordered[:, :1])
  gains = jax.lax.cumsum(gaps * inside.astype(groups.dtype), axis=1)
  # The mean over samples of E[max | i] is E[max].
  gains = gains - jnp.mean(gains, axis=1, keepdims=True)
  # A sample's place is the number of strictly worse samples, so that ties read the same entry.
  places = jnp.sum(groups[:, None, :] < groups[:, :, None], axis=2)
  advantages = jnp.take_along_axis(gains, places, axis=1)
  if normalize_std:
    weights = is_maximum.astype(groups.dtype)
    mean = jnp.sum(weights * ordered, axis=1, keepdims=True)
    variance = jnp.sum(weights * jnp.square(ordered - mean), axis=1, keepdims=True)
    advantages = divide(advantages, jnp.sqrt(variance) + eps)
  return advantages.reshape(-1)


def per_reward_advantages(
  parts: ArrayLike | Sequence[ArrayLike],
  weights: ArrayLike | Sequence[float],
  group_size: int,
  *,
  normalize_std: bool = True,
  eps: float = 1e-6,
  valid: ArrayLike | None = None,
) -> Float[Array, " N"]:
  """Returns group advantages of several rewards, each normalised separately.

  Separate normalisation prevents one reward from drowning another.

  S_i = Σ_k w_k·(R_ki − mean R_k)/(std R_k + eps) over the groups
  A_i = S_i / √(Var S + 1e-8) over the batch

  Args:
    parts: K rewards of each sample, [K, N], unweighted. The samples of one prompt are consecutive.
    weights: Weight of each reward, [K].
    group_size: Number of samples per prompt, G.
    normalize_std: Whether to divide each reward by its group's standard deviation.
    eps: Constant added to that standard deviation, in units of reward.
    valid: True for a sample that has its rewards, [N], as in `group_advantages`. The variance is
      over these samples. None if all are valid.

  Returns:
    The advantages, with mean 0 and variance 1 over the batch. A group in which every reward is
    constant gets exact zeros. A NaN reaches the whole batch through its variance.

  Raises:
    ValueError: If the shapes do not fit each other, or the samples do not fall into whole groups.

  Example:
    >>> parts = jnp.array([[1., 0., 1., 0.], [0., 100., 100., 0.]])
    >>> per_reward_advantages(parts, [1.0, 1.0], 2).tolist()
    [0.0, 0.0, 1.2247, -1.2247]

  References:
    GDPO: Group reward-Decoupled Normalization Policy Optimization, arXiv:2601.05242, 2026.

  Note:
    The variance is over samples, as in the paper, so a long response counts once; verl computes it
    over tokens. The batch's mean is not subtracted. It is 0 except for rounding, and subtracting it
    would destroy the exact zeros.
  """
  parts = real("parts", parts, shape="[K, N]", ndim=2)
  weights = real("weights", weights, shape="[K]", ndim=1)
  if not parts.shape[0] or weights.shape[0] != parts.shape[0]:
    raise ValueError(
      f"weights: found shape {weights.shape}, expected [K] = ({parts.shape[0]},), one per row of parts and at least one"
    )
  whole_groups("parts", parts.shape[1], group_size, parts.shape, "[K, N]")
  everywhere = None if valid is None else jnp.tile(jnp.asarray(valid), parts.shape[0])
  each = group_advantages(parts.reshape(-1), group_size, normalize_std=normalize_std, eps=eps, valid=everywhere).reshape(parts.shape)
  total = jnp.sum(weights.astype(parts.dtype)[:, None] * each, axis=0)
  count = total.shape[0] if valid is None else jnp.sum(jnp.asarray(valid))
  return total / jnp.sqrt(jnp.sum(jnp.square(total)) / jnp.maximum(count - 1, 1) + 1e-8)
