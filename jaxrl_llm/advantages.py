"""Advantages from rewards."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def group_advantages(
  rewards: Float[Array, " N"] | Float[np.ndarray, " N"],
  group_size: int,
  *,
  normalize_std: bool = True,
  eps: float = 1e-6,
  unbiased: bool = True,
) -> Float[Array, " N"]:
  """How much better a sample did than the others drawn for its prompt.

  A_i = (R_i − mean R) / (std R + eps), over the G consecutive samples of one prompt

  Args:
    rewards: reward of each sample; samples of one prompt stand together.
    group_size: G, samples per prompt.
    normalize_std: divide by the group's standard deviation; False gives Dr. GRPO's advantages.
    eps: added to the standard deviation, in units of reward.
    unbiased: divide the squared deviations by G − 1 instead of G; scales all advantages by √((G − 1)/G).

  Returns:
    The advantages. A group whose rewards are all equal gets exact zeros, and so does a group of one. A NaN or an infinity turns its whole
    group's advantages to NaN, and no other's, so that it surfaces in the loss instead of being averaged away.

  Raises:
    ValueError: for rewards that do not fall into whole groups, and for settings that are illegal or without effect.

  Example:
    >>> group_advantages(jnp.array([1., 0., 3., 3.]), 2, normalize_std=False).tolist()
    [0.5, -0.5, 0.0, 0.0]

  References:
    DeepSeekMath (GRPO), arXiv:2402.03300, 2024; without the deviation: Dr. GRPO, arXiv:2503.20783, 2025.

  Note:
    The paper does not say which deviation it uses. The unbiased one is the default because that is what is mostly run.
  """
  rewards = jnp.asarray(rewards)
  if isinstance(group_size, bool) or not isinstance(group_size, (int, np.integer)) or group_size < 1:
    raise ValueError(f"group_size: found {group_size!r}, expected a whole number >= 1")
  if rewards.ndim != 1 or rewards.shape[0] % group_size:
    raise ValueError(f"rewards: found shape {rewards.shape}, expected [N] with N a multiple of group_size = {group_size}")
  if not eps >= 0:
    raise ValueError(f"eps: found {eps!r}, expected a number >= 0")
  if not normalize_std and not unbiased:
    raise ValueError("unbiased: found False, expected True, because normalize_std is False and would ignore it")

  groups = rewards.astype(jnp.promote_types(rewards.dtype, jnp.float32)).reshape(-1, group_size)
  # Relative to the group's first reward equal rewards are exact zeros, and then so is all that follows. The mean of three times 0.1 is
  # not 0.1 in float32, and dividing that residue by eps would make an advantage out of nothing.
  groups = groups - groups[:, :1]
  advantages = groups - jnp.mean(groups, axis=1, keepdims=True)
  if normalize_std:
    degrees = max(group_size - 1, 1) if unbiased else group_size
    scale = jnp.sqrt(jnp.sum(jnp.square(advantages), axis=1, keepdims=True) / degrees) + eps
    advantages = advantages / jnp.where(scale > 0, scale, 1)
  return advantages.reshape(-1)
