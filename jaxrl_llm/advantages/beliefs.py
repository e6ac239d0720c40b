"""Advantages against a running belief of each prompt's pass rate: no group to wait for."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxrl_llm.advantages.group import by_group
from jaxrl_llm.advantages.inputs import of_shape, real
from jaxrl_llm.advantages.statistics import whiten

FIRST_BELIEF = (0.5, 0.5)
"""Belief in a prompt of which no response has been seen: the parameters of a Beta distribution."""


def spo_advantages(
  rewards: ArrayLike,
  beliefs: ArrayLike,
  drift: ArrayLike,
  group_size: int,
  *,
  half_drift: float = 0.06,
  memory_low: float = 0.875,
  memory_high: float = 0.96,
  valid: ArrayLike | None = None,
) -> tuple[Float[Array, " N"], Float[Array, "n 2"]]:
  """Returns the advantages of single-stream policy optimisation (SPO), and the beliefs after it.

  A_i = (D_i − mean D) / √(Var D + 1e-8) over the batch,  D_i = R_i − α/(α + β)
  ρ = clip(2^{−drift/half_drift}, memory_low, memory_high)
  α ← ρ·α + Σ R,  β ← ρ·β + Σ (1 − R),  over the samples of the prompt

  Args:
    rewards: Reward of each sample, [N]. The samples of one prompt are consecutive.
    beliefs: Parameters α and β of the prompt's Beta distribution before the batch, [N, 2]; of each
      prompt, those at its first sample are read.
    drift: Mean change of the log-probability of a token of the prompt's last response, |log π_then
      − log π_now| in nats, [N], read as `beliefs` are. 0 for a prompt without one.
    group_size: Number of samples per prompt, G; the method is meant for 1.
    half_drift: Drift after which half of a belief is forgotten, in nats.
    memory_low: Smallest share ρ of a belief that is kept.
    memory_high: Largest such share.
    valid: True for a sample that has a reward, [N]. The others get 0 and enter no statistic and no
      belief. None if all are valid.

  Returns:
    The advantages, and the beliefs of the n prompts. A prompt without a valid sample keeps its
    belief. A NaN reaches all advantages.

  Raises:
    ValueError: If the shapes do not fit together, or the settings are not above 0 and in order.

  Example:
    >>> beliefs = jnp.array([[3.0, 1.0], [0.5, 0.5]])
    >>> advantages, after = spo_advantages(jnp.array([1.0, 0.0]), beliefs, jnp.array([0.0, 9.0]), 1)
    >>> advantages.round(3).tolist(), after.round(3).tolist()
    ([0.707, -0.707], [[3.88, 0.96], [0.438, 1.438]])

  References:
    Single-stream Policy Optimization (SPO), arXiv:2509.13232, 2025.

  Note:
    The paper starts from eight samples of each prompt; here a prompt starts from (0.5, 0.5).
    Beliefs take a reward outside of [0, 1] as the nearer end, advantages as it is.
  """
  if not (half_drift > 0 and 0 < memory_low <= memory_high <= 1):
    given = f"{half_drift=}, {memory_low=}, {memory_high=}"
    raise ValueError(f"spo: found {given}, expected half_drift above 0 and 0 < memory_low <= memory_high <= 1")
  groups = by_group(rewards, group_size)
  flat = groups.reshape(-1)
  beliefs, drift = real("beliefs", beliefs, shape="[N, 2]", ndim=2), real("drift", drift, shape="[N]", ndim=1)
  of_shape("drift", drift, "rewards", flat)
  of_shape("beliefs", beliefs, "rewards and (alpha, beta)", jnp.stack([flat, flat], axis=1))
  there = jnp.ones(flat.shape, bool) if valid is None else of_shape("valid", jnp.asarray(valid), "rewards", flat)
  before = beliefs[::group_size].astype(flat.dtype)
  rates = before[:, :1] / jnp.sum(before, axis=1, keepdims=True)
  advantages = whiten(jnp.where(there.reshape(groups.shape), groups - rates, 0).reshape(-1), there)
  outcomes = jnp.where(there, jnp.clip(flat, 0, 1), 0).reshape(groups.shape)
  counts = jnp.sum(there.reshape(groups.shape), axis=1)
  passed = jnp.sum(outcomes, axis=1)
  kept = jnp.clip(jnp.exp2(-drift[::group_size].astype(flat.dtype) / half_drift), memory_low, memory_high)
  after = kept[:, None] * before + jnp.stack([passed, counts - passed], axis=1)
  return advantages, jnp.where(counts[:, None] > 0, after, before)
