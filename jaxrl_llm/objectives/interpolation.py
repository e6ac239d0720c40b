"""The old policy without a pass of its own: an interpolation between the sampler and the policy."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.objectives.base import required, with_old_policy
from jaxrl_llm.objectives.ratios import bounded_log_ratio
from jaxrl_llm.types import Objective, PolicyOutputs, TrainBatch


def interpolated(objective: Objective) -> Objective:
  """Uses a policy between the sampler's and the current one as π_old (A-3PO).

  log π_old := α·log μ + (1 − α)·log π without gradient,  α = 1/d for a lag of d ≥ 1 steps, else 0

  With d = 1 this is the sampler's policy μ, and the older a token is, the closer it comes to the
  current π; a token without lag has a ratio of 1. Corrections inside the objective see the new
  π_old: `tis` and the others weigh by π_old/μ outside, and the clip acts on π/π_old, as in
  decoupled PPO, but no forward pass under π_old is needed.

  Returns:
    The wrapped objective. It needs `sampler_logprobs` and `lag` instead of `old_logprobs`.

  Example:
    >>> from jaxrl_llm.objectives.corrections import tis
    >>> from jaxrl_llm.objectives.dapo import dapo
    >>> sorted(interpolated(tis(dapo())).needs)
    ['lag', 'sampler_logprobs']

  References:
    A-3PO: accelerating asynchronous LLM training with staleness-aware proximal policy
      approximation, arXiv:2512.06547v3, 2026.
    AReaL (decoupled PPO, with a pass for π_old), arXiv:2505.24298, 2025.

  Note:
    The lag counts RL steps, from the weights that drew a token to those at the start of the step's
    updates, and stays the same over these updates. AReaL's own code keeps μ for a token without
    lag. A selection of tokens (`Objective.prepare`) is made before π is known, and compares with μ.
  """

  def old_logprobs(outputs: PolicyOutputs, batch: TrainBatch) -> Float[Array, "B T"]:
    sampler = required(batch.sampler_logprobs, "sampler_logprobs", "the old policy is interpolated from it")
    lag = required(batch.lag, "lag", "it says how far the old policy is from the sampler's")
    return between(sampler, outputs.logprobs, lag)

  return with_old_policy(objective, old_logprobs, {"sampler_logprobs", "lag"})


def between(
  sampler_logprobs: Float[Array, "B T"], logprobs: Float[Array, "B T"], lag: Int[Array, "B T"]
) -> Float[Array, "B T"]:
  """Returns the interpolated log-probabilities of `interpolated`, without gradient.

  Example:
    >>> lag = jnp.array([[0, 1, 2, 4]])
    >>> between(jnp.full((1, 4), -3.0), jnp.full((1, 4), -1.0), lag).tolist()
    [[-1.0, -3.0, -2.0, -1.5]]
  """
  logprobs, sampler = jax.lax.stop_gradient((logprobs, sampler_logprobs))
  moved = (1 - 1 / jnp.maximum(lag, 1)) * bounded_log_ratio(logprobs, sampler)
  return jnp.where(lag > 0, sampler + moved, logprobs)
