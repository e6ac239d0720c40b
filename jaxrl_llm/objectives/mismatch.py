"""The mismatch k = π_old/μ of learner and sampler, and weights that are computed from it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.objectives.base import on_mask, require_correctable, required
from jaxrl_llm.objectives.ratios import bounded_log_ratio, product_ratio, token_ratio
from jaxrl_llm.segments import once_per_sequence, segment_sum
from jaxrl_llm.types import Objective, PolicyOutputs, TokenTerm, TrainBatch

MISMATCH = frozenset({"old_logprobs", "sampler_logprobs"})
"""Fields that the mismatch k is computed from."""

LEVELS = {"token": token_ratio, "sequence": product_ratio}
"""Levels at which the mismatch is weighed: each token's own k, or the product over its sequence."""


def log_mismatch(batch: TrainBatch) -> Float[Array, "B T"]:
  """Computes log k = log π_old − log μ at each token, bounded."""
  sampler_logprobs = required(batch.sampler_logprobs, "sampler_logprobs", "the mismatch of learner and sampler is corrected")
  return bounded_log_ratio(batch.old_logprobs, sampler_logprobs)


def weighted(objective: Objective, correction: Callable[[PolicyOutputs, TrainBatch], TokenTerm], needs: frozenset[str]) -> Objective:
  """Wraps an objective to multiply each token's policy term by a further weight.

  `correction` computes the weight from arrays that are 0 outside the mask.
  """
  require_correctable(objective)

  def token_loss(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    outputs, batch = on_mask(outputs, batch)
    weight, metrics = jax.lax.stop_gradient(correction(outputs, batch))
    importance = weight if batch.importance is None else batch.importance * weight
    loss, inner_metrics = objective.token_loss(outputs, batch._replace(importance=importance))
    return loss, inner_metrics | metrics

  return objective._replace(token_loss=token_loss, needs=objective.needs | needs)


def weighted_by_mismatch(
  objective: Objective,
  weigh: Callable[[Float[Array, "B T"], TrainBatch], TokenTerm],
  *,
  level: str = "token",
  band: tuple[float, float] | None = None,
) -> Objective:
  """Wraps an objective to weigh it by a function of the mismatch.

  Args:
    objective: Objective to wrap.
    weigh: Function `(k, batch) -> (weight, further metrics)`.
    level: Key of `LEVELS`.
    band: Smallest and largest k that counts as inside, for metrics; None for no band.

  Returns:
    The wrapped objective, with the metrics of `corrections.tis`.
  """
  level_ratio = LEVELS[level]

  def correction(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    del outputs
    k = jnp.exp(level_ratio(log_mismatch(batch), batch.mask, batch.segments))
    weight, further = weigh(k, batch)
    of_sequences = lambda x: once_per_sequence(x, batch.mask, batch.segments)
    fraction = lambda condition: jnp.where(jnp.isnan(k), k, condition.astype(k.dtype))
    changed = (weight != k) & ~jnp.isnan(k)
    in_sequence = segment_sum(jnp.where(changed, batch.mask, 0), batch.segments) > 0
    over = {"token": lambda x: x, "sequence": of_sequences}[level]
    metrics = {
      "rollout_corr/rollout_is_mean": over(weight),
      **{f"rollout_corr/rollout_is/{statistic}": over(weight) for statistic in ("min", "max", "p99", "ess")},
      "rollout_corr/rollout_is_oob_ratio": fraction(changed),
      "rollout_corr/rollout_is_oob_seq_ratio": of_sequences(fraction(in_sequence)),
    }
    if band is not None:
      low, high = band
      metrics["rollout_corr/rollout_is_ratio_fraction_high"] = over(fraction(k > high))
      metrics["rollout_corr/rollout_is_ratio_fraction_low"] = over(fraction(k < low))
    return weight, metrics | further

  return weighted(objective, correction, MISMATCH)._replace(corrects_mismatch=True)
