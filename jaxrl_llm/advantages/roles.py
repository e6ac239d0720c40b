"""Advantages in self-play: one policy plays all roles of a game, and each has its own baseline."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxrl_llm.advantages.inputs import booleans, counted_tokens, fraction, real


def role_advantages(
  step_rewards: ArrayLike, step_ends: ArrayLike, mask: ArrayLike, baselines: ArrayLike, *, decay: float = 0.95, zero_sum: bool = True
) -> tuple[Float[Array, "N R"], Float[Array, " P"]]:
  """Returns the advantages of role-conditioned estimation (RAE), and the baselines after the batch.

  R_{i,p} = Σ of the rewards of p's turns − Σ of the other roles' rewards / (P − 1)
  b_p ← decay·b_p + (1 − decay)·R_{i,p}, then A_{i,p} = R_{i,p} − b_p, game by game

  The roles take turns: turn k belongs to role k mod P. A token has the advantage of the role that
  wrote it. A game that ended before a role's first turn leaves that role's baseline unchanged.

  Args:
    step_rewards: Reward of each turn at its last token, [N, R].
    step_ends: True at the last token of each turn, [N, R].
    mask: 1 if a token counts, [N, R]. Games without such a token are left out.
    baselines: Baseline of each of the P roles before the batch, [P].
    decay: Share of a baseline that one game leaves in place.
    zero_sum: Whether a role loses what the others win; False makes R_{i,p} the first sum alone.

  Returns:
    The advantages, 0 outside the mask, and the new baselines.

  Raises:
    ValueError: If the shapes do not fit together, the ends are not booleans, or `decay` is not from
      0 to 1.

  Example:
    >>> ends, ones = jnp.array([[True, True]]), jnp.ones((1, 2))
    >>> advantages, baselines = role_advantages(jnp.array([[0.0, 1.0]]), ends, ones, jnp.zeros(2), decay=0.5)
    >>> advantages.tolist(), baselines.tolist()
    ([[-0.5, 0.5]], [-0.5, 0.5])

  References:
    SPIRAL: Self-Play on Zero-Sum Games Incentivizes Reasoning via Multi-Agent Multi-Turn
      Reinforcement Learning, arXiv:2506.24119, 2025, section 3.3 and algorithm 1.

  Note:
    The paper keeps a baseline for each pair of game and role; here all games of a run share those
    of the roles.
  """
  rewards = real("step_rewards", step_rewards, shape="[N, R]", ndim=2)
  ends = booleans("step_ends", step_ends, "step_rewards", rewards)
  counted = counted_tokens(mask, "step_rewards", rewards)
  baselines = real("baselines", baselines, shape="[P]", ndim=1)
  fraction("decay", decay)
  num_roles = len(baselines)
  turns = jnp.cumsum(ends, axis=1) - ends  # Turns that ended before the token.
  roles = jax.nn.one_hot(turns % num_roles, num_roles, dtype=rewards.dtype) * counted[:, :, None]
  own = jnp.sum(roles * jnp.where(ends & counted, rewards, 0)[:, :, None], axis=1)
  if zero_sum and num_roles > 1:
    own = own - (jnp.sum(own, axis=1, keepdims=True) - own) / (num_roles - 1)

  def game(baseline: Float[Array, " P"], reward_and_plays: tuple[Array, Array]) -> tuple[Array, Array]:
    reward, plays = reward_and_plays
    baseline = jnp.where(plays, decay * baseline + (1 - decay) * reward, baseline)
    return baseline, reward - baseline

  after, advantages = jax.lax.scan(game, baselines.astype(own.dtype), (own, jnp.any(roles > 0, axis=1)))
  return jnp.sum(roles * advantages[:, None], axis=2), after
