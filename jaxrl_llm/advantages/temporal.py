"""Per-token advantages and returns from rewards over time, with or without a critic.

All arrays are [N, R]: one row per response, slots in order of time, padded on the right. The mask
is 1 (or True) at the tokens that the policy chose. It may have holes, such as the output of a tool,
in which time does not advance. Values outside the mask are never read.
"""

import numbers

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxrl_llm.advantages.inputs import at_least_zero, booleans, counted_tokens, divide, fraction, of_shape, real, whole_groups
from jaxrl_llm.advantages.statistics import centred


def step_advantages(
  step_rewards: ArrayLike, step_ends: ArrayLike, mask: ArrayLike, group_size: int, *, normalize_std: bool = True, eps: float = 1e-6
) -> Float[Array, "N R"]:
  """Returns advantages from process supervision: the rewards of the steps that have not ended yet.

  r̃_s = (r_s − mean r) / (std r + eps), over all steps of all G samples of one prompt
  A_t = Σ r̃_s over the steps s that end at t or later

  Args:
    step_rewards: Reward of each step at its last token, [N, R].
    step_ends: True at the last token of each step, [N, R].
    mask: 1 if a token counts, [N, R]. Steps that end outside the mask are not read.
    group_size: Number of samples per prompt, G.
    normalize_std: Whether to divide by the (unbiased) standard deviation, as in `group_advantages`.
    eps: Constant added to the standard deviation, in units of reward.

  Returns:
    The advantages, 0 outside the mask. A group without steps, with a single step, or with equal
    rewards gets exact zeros.

  Raises:
    ValueError: If the shapes differ, the ends are not booleans, or the samples do not fall into
      whole groups.

  Example:
    >>> ends = jnp.array([[False, True, True], [False, False, True]])
    >>> rewards = jnp.array([[9., 1., 3.], [9., 9., 2.]])
    >>> step_advantages(rewards, ends, jnp.ones((2, 3)), 2, eps=0.0).tolist()
    [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]

  References:
    DeepSeekMath (GRPO), arXiv:2402.03300, 2024, section 4.1.3.
  """
  rewards = real("step_rewards", step_rewards, shape="[N, R]", ndim=2)
  ends = booleans("step_ends", step_ends, "step_rewards", rewards)
  counted = counted_tokens(mask, "step_rewards", rewards)
  whole_groups("step_rewards", rewards.shape[0], group_size, rewards.shape, "[N, R]")
  at_least_zero("eps", eps)

  groups = (rewards.shape[0] // group_size, group_size * rewards.shape[1])
  steps, ends = rewards.reshape(groups), (ends & counted).reshape(groups)
  steps, _ = centred(steps, ends, axis=1)
  if normalize_std:
    degrees = jnp.maximum(jnp.sum(ends, axis=1, keepdims=True) - 1, 1)
    steps = divide(steps, jnp.sqrt(jnp.sum(jnp.square(steps), axis=1, keepdims=True) / degrees) + eps)
  return jnp.where(counted, jax.lax.cumsum(steps.reshape(rewards.shape), axis=1, reverse=True), 0)


def token_rewards(rewards: ArrayLike, mask: ArrayLike, kl: ArrayLike | None = None, kl_coef: ArrayLike = 0.0) -> Float[Array, "N R"]:
  """Returns each response's reward at its last token, minus a divergence penalty at every token.

  r_t = R·[t is the last counted token] − kl_coef·kl_t

  Args:
    rewards: Reward of each response, [N].
    mask: 1 if a token counts, [N, R].
    kl: Estimated divergence from the reference at each token, in nats, [N, R].
    kl_coef: Reward lost per nat, a number or an array [].

  Returns:
    The rewards, 0 outside the mask and in a response without a counted token.

  Raises:
    ValueError: If an array has the wrong shape, or `kl_coef` is nonzero or traced without `kl`.

  Example:
    >>> token_rewards(jnp.array([1.]), jnp.array([[1, 1, 0]]), kl=jnp.array([[2., 4., jnp.nan]]), kl_coef=0.25).tolist()
    [[-0.5, 0.0, 0.0]]

  References:
    Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, 2019, eq. 2.
  """
  rewards = real("rewards", rewards, shape="[N]", ndim=1)
  mask = jnp.asarray(mask)
  if mask.ndim != 2 or mask.shape[0] != rewards.shape[0]:
    raise ValueError(f"mask: found shape {mask.shape}, expected [N, R] with N = {rewards.shape[0]}, the length of rewards")
  coef = real("kl_coef", kl_coef, shape="[]", ndim=0)
  counted = mask > 0
  last = counted & (jax.lax.cumsum(counted.astype(jnp.int32), axis=1, reverse=True) == 1)
  result = jnp.where(last, rewards[:, None], 0)
  if kl is None:
    # Check the argument itself, because under jit `coef` is traced even if the caller passed a
    # plain 0. A traced argument has no value to check, and a caller only traces one to use it.
    if isinstance(kl_coef, jax.core.Tracer) or kl_coef != 0:
      raise ValueError(f"kl: found None, expected an array [N, R], because kl_coef is {kl_coef!r} and would be ignored")
    return result
  kl = of_shape("kl", real("kl", kl, shape="[N, R]", ndim=2), "mask", mask)
  dtype = jnp.promote_types(result.dtype, kl.dtype)
  return jnp.where(counted, result.astype(dtype) - coef.astype(dtype) * kl.astype(dtype), 0)


def returns_to_go(rewards: ArrayLike, mask: ArrayLike, *, gamma: float = 1.0) -> Float[Array, "N R"]:
  """Returns the sum of all rewards still to come, discounted per counted token.

  R̂_t = r_t + γ·R̂_{t+1}

  Args:
    rewards: Reward of each token, [N, R].
    mask: 1 if a token counts, [N, R]. The t of the equation runs over counted tokens only.
    gamma: Discount γ per counted token, from 0 to 1.

  Returns:
    The returns, 0 outside the mask.

  Raises:
    ValueError: If the shapes differ, or the discount is not from 0 to 1.

  Example:
    >>> returns_to_go(jnp.array([[1., jnp.nan, 4., 0.]]), jnp.array([[1, 0, 1, 1]]), gamma=0.5).tolist()
    [[3.0, 0.0, 4.0, 0.0]]
  """
  rewards = real("rewards", rewards, shape="[N, R]", ndim=2)
  counted = counted_tokens(mask, "rewards", rewards)
  fraction("gamma", gamma)
  # With λ = 1 and no critic, the advantage equals the return.
  return _advantages_backwards(rewards, jnp.zeros_like(rewards), counted, jnp.asarray(gamma, rewards.dtype), jnp.ones((), rewards.dtype))


def generalized_advantages(
  rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, *, gamma: float = 1.0, lam: ArrayLike = 1.0
) -> Float[Array, "N R"]:
  """Returns generalized advantage estimates (GAE) from a critic's values.

  δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γλ·A_{t+1}

  With λ = 0 they look one step ahead, with λ = 1 at the whole future.

  Args:
    rewards: Reward of each token (`token_rewards`), [N, R].
    values: Critic's value of the state before each token, [N, R].
    mask: 1 if a token counts, [N, R]. The t of the equations runs over counted tokens only, so the
      value after a hole follows the one before it.
    gamma: Discount γ per counted token, from 0 to 1.
    lam: Decay λ, from 0 to 1: a number, or one per response, [N] (`length_adaptive_lambda`).

  Returns:
    The advantages, 0 outside the mask. The state after the last counted token is terminal, with
    value 0. The critic's targets are `advantages + values` at the counted tokens.

  Raises:
    ValueError: If an array has the wrong shape, or γ or a single number λ is not from 0 to 1.

  Example:
    >>> rewards, values = jnp.array([[0., 0., 1.]]), jnp.array([[.5, .25, .75]])
    >>> generalized_advantages(rewards, values, jnp.ones((1, 3))).tolist()
    [[0.5, 0.75, 0.25]]
    >>> generalized_advantages(rewards, values, jnp.ones((1, 3)), lam=0.0).tolist()
    [[-0.25, 0.5, 0.25]]

  References:
    High-Dimensional Continuous Control Using Generalized Advantage Estimation, arXiv:1506.02438,
      2015, eq. 16.

  Note:
    The advantages are not whitened. Compose with `whiten` if needed.
  """
  rewards, values = real("rewards", rewards, shape="[N, R]", ndim=2), real("values", values, shape="[N, R]", ndim=2)
  of_shape("values", values, "rewards", rewards)
  counted = counted_tokens(mask, "rewards", rewards)
  fraction("gamma", gamma)
  if isinstance(lam, numbers.Real):
    fraction("lam", lam)
  lam = real("lam", lam, shape="[] or [N]")
  if lam.shape not in ((), rewards.shape[:1]):
    raise ValueError(f"lam: found shape {lam.shape}, expected [] or [N] = {rewards.shape[:1]}")
  dtype = jnp.promote_types(rewards.dtype, values.dtype)
  return _advantages_backwards(rewards.astype(dtype), values.astype(dtype), counted, jnp.asarray(gamma, dtype), lam.astype(dtype))


@jax.jit  # Otherwise every call outside jit would compile its scan again.
def _advantages_backwards(
  rewards: Float[Array, "N R"], values: Float[Array, "N R"], counted: Bool[Array, "N R"], gamma: Float[Array, ""], lam: Float[Array, "..."]
) -> Float[Array, "N R"]:
  """Computes the recursion of `generalized_advantages`, from the last token to the first."""

  def step(carry, token):
    next_value, next_advantage = carry
    reward, value, counts = token
    advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
    carry = jnp.where(counts, value, next_value), jnp.where(counts, advantage, next_advantage)
    return carry, jnp.where(counts, advantage, 0)

  terminal = jnp.zeros(rewards.shape[:1], rewards.dtype)
  _, advantages = jax.lax.scan(step, (terminal, terminal), (rewards.T, values.T, counted.T), reverse=True)
  return advantages.T


def length_adaptive_lambda(mask: ArrayLike, *, alpha: float = 0.05) -> Float[Array, " N"]:
  """Returns a λ for each response, such that credit fades over a fixed fraction of the response.

  λ = max(0, 1 − 1/(α·|y|)),  so that Σ_t λ^t → α·|y|

  Args:
    mask: 1 if a token counts, [N, R]; |y| is the number of counted tokens.
    alpha: Fraction α of a response over which credit fades.

  Returns:
    λ in [0, 1); 0 for up to 1/α tokens.

  Raises:
    ValueError: If the mask is not [N, R], or α is not above 0.

  Example:
    >>> length_adaptive_lambda(jnp.array([[1, 1, 1, 1], [1, 0, 0, 0]]), alpha=0.5).tolist()
    [0.5, 0.0]

  References:
    VAPO: Efficient and Reliable Reinforcement Learning for Advanced Reasoning Tasks,
      arXiv:2504.05118, 2025.
  """
  if not alpha > 0:
    raise ValueError(f"alpha: found {alpha!r}, expected a number > 0")
  mask = real("mask", mask, shape="[N, R]", ndim=2)
  lengths = jnp.sum(mask > 0, axis=1).astype(mask.dtype)
  # Keep λ below 1 even if float32 rounds it up.
  return jnp.clip(1 - 1 / (alpha * jnp.maximum(lengths, 1)), 0, 1 - jnp.finfo(mask.dtype).epsneg)
