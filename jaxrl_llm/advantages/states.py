"""Advantages of steps, compared with other steps that began in the same state."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.advantages.group import group_advantages
from jaxrl_llm.advantages.inputs import at_least_zero, booleans, counted_tokens, divide, of_shape, real
from jaxrl_llm.advantages.temporal import returns_to_go


def gigpo_advantages(
  rewards: ArrayLike,
  step_rewards: ArrayLike,
  step_ends: ArrayLike,
  step_states: ArrayLike,
  mask: ArrayLike,
  group_size: int,
  *,
  episode_weight: float = 1.0,
  step_weight: float = 1.0,
  gamma: float = 0.95,
  normalize_std: bool = True,
  eps: float = 1e-6,
  valid: ArrayLike | None = None,
) -> Float[Array, "N R"]:
  """Returns group-in-group advantages (GiGPO): of the whole response, and of each step.

  A_t = episode_weight·(R_i − mean R)/(std R + eps) + step_weight·(Q_s − mean Q)/(std Q + eps)
  Q_s = r_s + γ·Q_{s+1}

  R is compared over the G samples of a prompt, and Q_s, of the step s that token t belongs to, over
  the steps that began in the same state.

  Args:
    rewards: Total reward of each response, [N]. The samples of one prompt are consecutive.
    step_rewards: Reward of each step at its last token, [N, R].
    step_ends: True at the last token of each step, [N, R].
    step_states: Number of the state in which the step began, at its last token, [N, R], from 0 to
      N·R − 1; other numbers are not read.
    mask: 1 if a token counts, [N, R]. Steps that end outside the mask are left out.
    group_size: Number of samples per prompt, G.
    episode_weight: Weight of the response's advantage.
    step_weight: Weight of the step's advantage.
    gamma: Discount γ per step, from 0 to 1.
    normalize_std: Whether to divide by the (unbiased) standard deviations.
    eps: Constant added to the standard deviations, in units of reward.
    valid: True for a response that has a reward, [N], as in `group_advantages`.

  Returns:
    The advantages, 0 outside the mask. A step that no other shares its state with has that of its
    response alone.

  Raises:
    ValueError: If the shapes do not fit together, the ends are not booleans, the states are not
      whole numbers, a weight is negative, or both are 0.

  Example:
    >>> ends, states = jnp.array([[True, True], [True, True]]), jnp.array([[0, 1], [0, 2]])
    >>> gains = jnp.array([[0., 1.], [0., 0.]])
    >>> settings = dict(gamma=0.5, normalize_std=False)
    >>> gigpo_advantages(jnp.array([1., 0.]), gains, ends, states, jnp.ones((2, 2)), 2, **settings).tolist()
    [[0.75, 0.5], [-0.75, -0.5]]

  References:
    Group-in-Group Policy Optimization for LLM Agent Training (GiGPO), arXiv:2505.10978, 2025, eqs.
      3 to 8.

  Note:
    The paper's code by default compares a response once per step that it has, so that long ones
    weigh more in mean and deviation. Here each response counts once, as in the paper.
  """
  at_least_zero("episode_weight", episode_weight)
  at_least_zero("step_weight", step_weight)
  if episode_weight == step_weight == 0:
    raise ValueError("step_weight: found 0, expected a number above 0, because episode_weight is 0 and nothing would be learned")
  of_steps = state_advantages(step_rewards, step_ends, step_states, mask, gamma=gamma, normalize_std=normalize_std, eps=eps)
  of_responses = group_advantages(rewards, group_size, normalize_std=normalize_std, eps=eps, valid=valid)
  return jnp.where(jnp.asarray(mask) > 0, episode_weight * of_responses[:, None] + step_weight * of_steps, 0)


def hierarchical_advantages(
  step_rewards: ArrayLike, step_ends: ArrayLike, step_states: ArrayLike, mask: ArrayLike, *, challenge: float = 1.0
) -> Float[Array, "N R"]:
  """Returns the advantages of a proposer and of those who try to solve its problems.

  A_t = R_s − mean R over the steps that began in the same state as s, the step of token t
  R_s = r_s + challenge·4p(1 − p) for a proposal, r_s for an attempt

  A response proposes a problem and then tries to solve it. A proposal is a step that another one
  follows, and p is the mean reward of all attempts at its problem: the steps that begin in the
  state of the one behind it. So an attempt is compared with the other attempts at the same problem,
  and a proposal with the other proposals from the same source.

  Args:
    step_rewards: Reward of each step at its last token, [N, R]; that of an attempt is 1 for a right
      one and 0 for a wrong one.
    step_ends: True at the last token of each step, [N, R].
    step_states: Number of the state in which the step began, at its last token, [N, R], from 0 to
      N·R − 1; other numbers are not read.
    mask: 1 if a token counts, [N, R]. Steps that end outside the mask are left out.
    challenge: Reward of a proposal that half of the attempts solve.

  Returns:
    The advantages, 0 outside the mask. A step that shares its state with no other gets zero.

  Raises:
    ValueError: If the shapes do not fit together, the ends are not booleans, the states are not
      whole numbers, or `challenge` is negative.

  Example:
    >>> ends, states = jnp.array([[True, True]] * 3), jnp.array([[0, 1], [0, 1], [0, 2]])
    >>> gains = jnp.array([[0., 1.], [0., 0.], [0., 0.]])
    >>> hierarchical_advantages(gains, ends, states, jnp.ones((3, 2)), challenge=3.0).tolist()
    [[1.0, 0.5], [1.0, -0.5], [-2.0, 0.0]]

  Note:
    The comparison is that of prime-rl's `hierarchical_grpo` (pull request 3138). The reward of a
    proposal is ours: 4p(1 − p) is the variance of an attempt's reward, in units of the largest.
  """
  at_least_zero("challenge", challenge)
  rewards, ends, states, _ = _steps(step_rewards, step_ends, step_states, mask)
  compared = jnp.where(ends, states, states.size)
  rates = _sum_by(compared, jnp.where(ends, jnp.clip(rewards, 0, 1), 0)) / jnp.maximum(_sum_by(compared, ends.astype(rewards.dtype)), 1)
  # A step's last token sees only the steps behind it.
  follows = jnp.pad(_of_next_end(ends, jnp.where(ends, rates, 0))[:, 1:], ((0, 0), (0, 1)))
  paid = rewards + challenge * 4 * follows * (1 - follows)
  return state_advantages(paid, ends, states, mask, gamma=0.0, normalize_std=False)


def state_advantages(
  step_rewards: ArrayLike,
  step_ends: ArrayLike,
  step_states: ArrayLike,
  mask: ArrayLike,
  *,
  gamma: float = 1.0,
  normalize_std: bool = True,
  eps: float = 1e-6,
) -> Float[Array, "N R"]:
  """Returns how much better each step did than the others that began in the same state.

  The second term of `gigpo_advantages`, which explains the arguments.

  Returns:
    The advantages, 0 outside the mask and behind the last step. Steps of one state with equal
    returns get exact zeros. A NaN stays among the steps of its state.

  Raises:
    ValueError: See `gigpo_advantages`.

  Example:
    >>> ends, states = jnp.array([[False, True], [True, True]]), jnp.array([[-1, 0], [0, 0]])
    >>> state_advantages(jnp.array([[9., 2.], [0., 1.]]), ends, states, jnp.ones((2, 2)), normalize_std=False).tolist()
    [[0.666..., 0.666...], [-0.333..., -0.333...]]
  """
  rewards, ends, states, counted = _steps(step_rewards, step_ends, step_states, mask)
  at_least_zero("eps", eps)
  returns = returns_to_go(rewards, ends, gamma=gamma)
  compared = jnp.where(ends, states, states.size)
  # Relative to one of them, so that equal returns give exact zeros.
  least = jnp.full(states.size + 1, jnp.inf, returns.dtype).at[compared].min(returns)
  relative = jnp.where(ends, returns - least[compared], 0)
  counts = jnp.maximum(_sum_by(compared, ends.astype(returns.dtype)), 1)
  distances = jnp.where(ends, relative - _sum_by(compared, relative) / counts, 0)
  if normalize_std:
    distances = divide(distances, jnp.sqrt(_sum_by(compared, jnp.square(distances)) / jnp.maximum(counts - 1, 1)) + eps)
  return jnp.where(counted, _of_next_end(ends, distances), 0)


def steps_per_state(step_ends: Bool[Array, "N R"], step_states: Int[Array, "N R"]) -> Float[Array, ""]:
  """Returns the mean number of steps that are compared with each other; 0 without a step.

  Example:
    >>> steps_per_state(jnp.array([[True, True, False]]), jnp.array([[4, 4, 5]])).item()
    2.0
  """
  present = jnp.zeros(step_states.size + 1, bool).at[jnp.where(step_ends, step_states, step_states.size)].set(True)[:-1]
  return jnp.sum(step_ends) / jnp.maximum(jnp.sum(present), 1)


def _steps(
  step_rewards: ArrayLike, step_ends: ArrayLike, step_states: ArrayLike, mask: ArrayLike
) -> tuple[Float[Array, "N R"], Bool[Array, "N R"], Int[Array, "N R"], Bool[Array, "N R"]]:
  """Returns the checked rewards, the ends that count, the states, and the counted tokens."""
  rewards = real("step_rewards", step_rewards, shape="[N, R]", ndim=2)
  ends = booleans("step_ends", step_ends, "step_rewards", rewards)
  states = of_shape("step_states", jnp.asarray(step_states), "step_rewards", rewards)
  if not jnp.issubdtype(states.dtype, jnp.integer):
    raise ValueError(f"step_states: found {states.dtype}, expected whole numbers")
  counted = counted_tokens(mask, "step_rewards", rewards)
  ends = ends & counted & (states >= 0) & (states < states.size)
  return jnp.where(ends, rewards, 0), ends, states, counted


def _sum_by(states: Int[Array, "N R"], x: Float[Array, "N R"]) -> Float[Array, "N R"]:
  """Returns the sum over all places with the same state, at each of them."""
  return jnp.zeros(states.size + 1, x.dtype).at[states].add(x)[states]


def _of_next_end(ends: Bool[Array, "N R"], x: Float[Array, "N R"]) -> Float[Array, "N R"]:
  """Returns the number at the first end from each token on; 0 if none follows."""
  places = jnp.where(ends, jnp.arange(ends.shape[1]), ends.shape[1])
  nearest = jax.lax.cummin(places, axis=1, reverse=True)
  return jnp.where(nearest < ends.shape[1], jnp.take_along_axis(x, jnp.minimum(nearest, ends.shape[1] - 1), axis=1), 0)
