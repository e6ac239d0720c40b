"""What every policy objective shares: clean inputs, ratio x gate x weights, penalties, metrics."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.objectives.ratios import bounded_log_ratio
from jaxrl_llm.segments import constant, sequence_mean, token_mean
from jaxrl_llm.types import GateFn, Objective, PenaltyFn, PolicyOutputs, RatioFn, TokenMetrics, TrainBatch, WeighFn

WEIGHTS = {
  "token_mean": lambda max_tokens: token_mean,
  "sequence_mean": lambda max_tokens: sequence_mean,
  "constant": constant,
}
"""Ways to weigh tokens by name, as functions of the generation budget in tokens."""


def weights_by_name(weights: str, max_tokens: int | None = None) -> WeighFn:
  """Third slot of an objective, by name.

  Args:
    weights: a key of `WEIGHTS`.
    max_tokens: the generation budget in tokens; read by "constant" only.

  Returns:
    The function of `segments` that computes the weights of a global batch.

  Example:
    >>> weights_by_name("constant", 8)(jnp.ones((2, 2)), None).tolist()
    [[0.0625, 0.0625], [0.0625, 0.0625]]
  """
  return WEIGHTS[weights](max_tokens)


def on_mask(outputs: PolicyOutputs, batch: TrainBatch) -> tuple[PolicyOutputs, TrainBatch]:
  """Zeroes every float array off the mask and raises bfloat16 to float32.

  Done on the inputs: a NaN, an infinity or a 1e4 that reaches an `exp` would come back through its gradient, 0·∞, even where a later mask
  hides its value. A NaN under the mask is left alone, to surface in the loss.

  Args:
    outputs: the current policy on the batch.
    batch: the batch; mask 1 where a token counts.

  Returns:
    Both, cleaned.

  Example:
    >>> zeros = jnp.zeros((1, 2), int)
    >>> batch = TrainBatch(zeros, zeros, zeros, jnp.array([[1., 0.]]), *2 * [jnp.array([[jnp.nan, jnp.nan]])])
    >>> on_mask(PolicyOutputs(jnp.array([[-1., -jnp.inf]])), batch)[0].logprobs.tolist()
    [[-1.0, 0.0]]
  """
  counted = batch.mask > 0

  def clean(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.where(counted, x, 0).astype(jnp.promote_types(x.dtype, jnp.float32))

  floats = ("advantages", "old_logprobs", "sampler_logprobs", "ref_logprobs", "returns", "old_values")
  present = {field: x for field in floats if (x := getattr(batch, field)) is not None}
  return jax.tree.map(clean, outputs), batch._replace(**jax.tree.map(clean, present))


def policy_objective(
  *, ratio: RatioFn, gate: GateFn, weigh: WeighFn, penalties: Sequence[PenaltyFn] = (), needs: frozenset[str] = frozenset()
) -> Objective:
  """Composes an objective: loss = Σ w·(−gate(ratio(log π − log π_old), A) + penalties).

  Args:
    ratio: level at which the policies are compared (`ratios`).
    gate: how far a ratio may carry the policy (`gates`).
    weigh: weights of all tokens of the global batch (`segments`).
    penalties: further per-token losses (`penalties`).
    needs: optional fields of `TrainBatch` and `PolicyOutputs` that the parts read.

  Returns:
    The objective. Metrics of its own: `actor/pg_loss`, `actor/ppo_kl` (estimate of KL(π_old‖π), in nats), `ratio/mean`, `/min`, `/max` and
    `/p99` of the token ratio, and `actor/entropy` where the entropy is given.

  Example:
    >>> from jaxrl_llm.objectives.gates import hard_clip
    >>> from jaxrl_llm.objectives.ratios import token_ratio
    >>> reinforce = policy_objective(ratio=token_ratio, gate=hard_clip(1.0, float("inf")), weigh=token_mean)
    >>> reinforce.needs
    frozenset()

  Note:
    The token log-ratio is bounded at ±20 before anything else, which ends the gradient out there (`ratios.bounded_log_ratio`).
  """

  def token_loss(outputs: PolicyOutputs, batch: TrainBatch) -> tuple[Float[Array, "B T"], TokenMetrics]:
    outputs, batch = on_mask(outputs, batch)
    log_ratio = bounded_log_ratio(outputs.logprobs, batch.old_logprobs)
    surrogate, gate_metrics = gate(ratio(log_ratio, batch.mask, batch.segments), batch.advantages)
    loss = -surrogate
    token_ratios = jnp.exp(log_ratio)
    metrics = {
      "actor/pg_loss": loss,
      "actor/ppo_kl": -log_ratio,
      **{f"ratio/{statistic}": token_ratios for statistic in ("mean", "min", "max", "p99")},
      **gate_metrics,
    }
    if outputs.entropy is not None:
      metrics["actor/entropy"] = outputs.entropy
    for penalty in penalties:
      extra_loss, extra_metrics = penalty(outputs, batch)
      loss, metrics = loss + extra_loss, metrics | extra_metrics
    return jnp.where(batch.mask > 0, loss, 0), jax.lax.stop_gradient(metrics)

  return Objective(weigh=weigh, token_loss=token_loss, needs=frozenset(needs))
