"""Weight of each token's gradient, which shows the effect of any objective's gate on one scale."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.segments import token_weights
from jaxrl_llm.types import Objective, PolicyOutputs, TrainBatch


def gate_weight(objective: Objective, outputs: PolicyOutputs, batch: TrainBatch) -> Float[Array, "B T"]:
  """Computes the weight of each token's policy gradient, relative to the on-policy gradient.

  c_t = (g_t(A) − g_t(0)) / (g⁼_t(A) − g⁼_t(0)),  g = ∂(Σ w·l)/∂log π
  g⁼ is the same with log π in place of log π_old and of the sampler's log-probabilities

  If the sampler's, the old and the current policy are identical (on-policy), every objective is
  REINFORCE, and c = 1. Otherwise, PPO's c is r if the clip does not bind and 0 if it does, GSPO's c
  is s of the whole sequence, and a soft gate's c falls smoothly. Corrections count: a token that
  they drop has c = 0. Penalties do not count, because they remain when the advantages are 0.

  Returns:
    The coefficients c; NaN at tokens that do not count or have a gradient of 0 anyway, as for an
    advantage of 0.

  Example:
    >>> from jaxrl_llm.objectives.gspo import gspo
    >>> ones = jnp.ones((1, 2))
    >>> batch = TrainBatch(*3 * [jnp.ones((1, 2), int)], mask=ones, advantages=2 * ones, old_logprobs=-ones)
    >>> gate_weight(gspo(), PolicyOutputs(-ones), batch).tolist()
    [[1.0, 1.0]]
    >>> gate_weight(gspo(), PolicyOutputs(-ones + 0.1), batch).tolist()
    [[0.0, 0.0]]
  """
  batch = batch if objective.prepare is None else objective.prepare(batch)
  weights = token_weights(objective, batch.mask, batch.segments, batch.groups)
  sampler = batch.old_logprobs if batch.sampler_logprobs is None else batch.sampler_logprobs

  def loss(logprobs: Float[Array, "B T"], old: Float[Array, "B T"], drawn: Float[Array, "B T"], advantages: Float[Array, "B T"]):
    of = batch._replace(old_logprobs=old, advantages=advantages, sampler_logprobs=None if batch.sampler_logprobs is None else drawn)
    losses, _ = objective.token_loss(outputs._replace(logprobs=logprobs), of)
    return jnp.sum(jnp.where(weights > 0, weights * losses, 0))

  def gated(logprobs: Float[Array, "B T"], old: Float[Array, "B T"], drawn: Float[Array, "B T"]) -> Float[Array, "B T"]:
    # Maps one program over both, so that it is compiled once.
    scales = jnp.stack([batch.advantages, jnp.zeros_like(batch.advantages)])
    of_advantages, of_penalties = jax.vmap(jax.grad(loss), (None, None, None, 0))(logprobs, old, drawn, scales)
    return of_advantages - of_penalties

  now = outputs.logprobs
  weight, at_one = jax.vmap(gated, (None, 0, 0))(now, jnp.stack([batch.old_logprobs, now]), jnp.stack([sampler, now]))
  known = (batch.mask > 0) & (at_one != 0)
  return jnp.where(known, weight / jnp.where(known, at_one, 1), jnp.nan)
