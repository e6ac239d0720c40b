"""What every policy objective shares: clean inputs, ratio x gate x weights, penalties, metrics."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.objectives.ratios import bounded_log_ratio
from jaxrl_llm.segments import constant, once_per_sequence, segment_mean, segment_sum, sequence_mean, sequence_sum, token_mean
from jaxrl_llm.types import GateContext, GateFn, Objective, PenaltyFn, PolicyOutputs, RatioFn, TokenMetrics, TokenTerm, TrainBatch, WeighFn

STATISTICS = ("mean", "min", "max", "p99")

WEIGHTS = {
  "token_mean": lambda max_tokens: token_mean,
  "sequence_mean": lambda max_tokens: sequence_mean,
  "sequence_sum": lambda max_tokens: sequence_sum,
  "constant": constant,
}
"""Ways to weigh tokens by name, as functions of the generation budget in tokens."""


def weights_by_name(weights: str, max_tokens: int | None = None) -> WeighFn:
  """Third slot of an objective, by its name in `WEIGHTS`; "constant" alone reads the generation budget in tokens.

  Example:
    >>> weights_by_name("constant", 8)(jnp.ones((2, 2)), None).tolist()
    [[0.0625, 0.0625], [0.0625, 0.0625]]
  """
  return WEIGHTS[weights](max_tokens)


def on_mask(outputs: PolicyOutputs, batch: TrainBatch) -> tuple[PolicyOutputs, TrainBatch]:
  """Zeroes every float array off the mask and raises bfloat16 to float32.

  Done on the inputs: a NaN, an infinity or a 1e4 that reaches an `exp` would come back through its gradient, 0·∞, even where a later mask
  hides its value. A NaN under the mask is left alone, to surface in the loss.

  Example:
    >>> zeros = jnp.zeros((1, 2), int)
    >>> batch = TrainBatch(zeros, zeros, zeros, jnp.array([[1., 0.]]), *2 * [jnp.array([[jnp.nan, jnp.nan]])])
    >>> on_mask(PolicyOutputs(jnp.array([[-1., -jnp.inf]])), batch)[0].logprobs.tolist()
    [[-1.0, 0.0]]
  """
  counted = batch.mask > 0

  def clean(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.where(counted, x, 0).astype(jnp.promote_types(x.dtype, jnp.float32))

  floats = ("advantages", "old_logprobs", "sampler_logprobs", "ref_logprobs", "returns", "old_values", "importance", "kl_coefs")
  present = {field: x for field in floats if (x := getattr(batch, field)) is not None}
  return jax.tree.map(clean, outputs), batch._replace(**jax.tree.map(clean, present))


def required(x: Array | None, field: str, reason: str) -> Array:
  """`x`, or a ValueError that names the field where it is None."""
  if x is None:
    raise ValueError(f"{field}: found None, expected an array [B, T], because {reason}")
  return x


def policy_objective(
  *,
  ratio: RatioFn,
  gate: GateFn,
  weigh: WeighFn,
  penalties: Sequence[PenaltyFn] = (),
  needs: frozenset[str] = frozenset(),
  value_loss: PenaltyFn | None = None,
  anchor: str | None = "old",
) -> Objective:
  """Composes an objective: loss = Σ w·(−k·gate(ratio(log π − log π_old), A) + penalties).

  Args:
    ratio: level at which the policies are compared (`ratios`); a function that does not say its level is taken for a ratio of tokens.
    gate: how far a ratio may carry the policy (`gates`).
    weigh: weights of all tokens of the global batch (`segments`).
    penalties: further per-token losses (`penalties`).
    needs: fields that the penalties read.
    value_loss: the critic's loss (`penalties.value_loss`).
    anchor: "old" compares with the learner's policy at the start of the rollout batch's updates, "sampler" with the sampler's;
      None with none, so that the loss needs neither (metrics still compare with `old_logprobs`).

  Returns:
    The objective. Metrics of its own:
    - `actor/pg_loss`; `actor/ppo_kl` and `actor/ppo_kl_k3`, estimates of KL(π_old‖π) in nats; `actor/entropy` where the entropy is given;
    - of the token ratio r `ratio/mean`, `/min`, `/max`, `/p99`; over sequences of the length-normalised ratio s `ratio/sequence/mean`, ...;
    - `ratio/ess` and `ratio/sequence/ess`, effective sample sizes of r over tokens and of Πr over sequences, as fractions;
    - `actor/nan_tokens`, the fraction of counted tokens with a NaN among the inputs or for a log-ratio.
    The k of the loss is `TrainBatch.importance`.

  Example:
    >>> from jaxrl_llm.objectives.gates import hard_clip
    >>> from jaxrl_llm.objectives.ratios import token_ratio
    >>> unclipped = policy_objective(ratio=token_ratio, gate=hard_clip(1.0, float("inf")), weigh=token_mean)
    >>> unclipped.needs
    frozenset({'old_logprobs'})

  Note:
    The token log-ratio is bounded at ±20 before anything else, which ends the gradient out there (`ratios.bounded_log_ratio`).
  """

  def token_loss(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    if anchor == "sampler":
      batch = batch._replace(old_logprobs=required(batch.sampler_logprobs, "sampler_logprobs", "the anchor is the sampler's policy"))
    outputs, batch = on_mask(outputs, batch)
    log_ratio = bounded_log_ratio(outputs.logprobs, batch.old_logprobs)
    context = GateContext(outputs.logprobs, batch.old_logprobs, batch.mask, batch.segments)
    surrogate, gate_metrics = gate(ratio(log_ratio, batch.mask, batch.segments), batch.advantages, context)
    loss = -surrogate
    if batch.importance is not None:
      loss = jax.lax.stop_gradient(batch.importance) * loss
    metrics = {"actor/pg_loss": loss, "actor/nan_tokens": _is_nan(outputs, batch, log_ratio), **ratio_metrics(log_ratio, batch)}
    metrics |= gate_metrics
    if outputs.entropy is not None:
      metrics["actor/entropy"] = outputs.entropy
    terms = [*penalties, value_loss] if value_loss is not None and outputs.values is not None else penalties
    for penalty in terms:
      extra_loss, extra_metrics = penalty(outputs, batch)
      loss, metrics = loss + extra_loss, metrics | extra_metrics
    return jnp.where(batch.mask > 0, loss, 0), jax.lax.stop_gradient(metrics)

  anchored = {"old": {"old_logprobs"}, "sampler": {"sampler_logprobs"}, None: set()}[anchor]
  return Objective(
    weigh=weigh,
    token_loss=token_loss,
    needs=frozenset(needs) | anchored,
    value_loss=value_loss,
    correctable=True,
    ratio_level=getattr(ratio, "level", "token"),
  )


def critic_objective(objective: Objective) -> Objective:
  """The `value_loss` of an objective as one with the same weights, for a critic with parameters of its own.

  Raises:
    ValueError: the objective has no critic.
  """
  if objective.value_loss is None:
    raise ValueError("value_loss: found None, expected an objective with a critic, such as ppo")

  def token_loss(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    outputs, batch = on_mask(outputs, batch)
    loss, metrics = objective.value_loss(outputs, batch)
    return jnp.where(batch.mask > 0, loss, 0), jax.lax.stop_gradient(metrics)

  return Objective(weigh=objective.weigh, token_loss=token_loss, needs=frozenset({"values", "returns", "old_values"}))


def ratio_metrics(log_ratio: Float[Array, "B T"], batch: TrainBatch) -> TokenMetrics:
  """How far the policy has moved, for any objective: see `policy_objective`."""
  token, of_sequences = jnp.exp(log_ratio), lambda x: once_per_sequence(x, batch.mask, batch.segments)
  sequence = of_sequences(jnp.exp(segment_mean(log_ratio, batch.mask, batch.segments)))
  product = of_sequences(jnp.exp(jnp.clip(segment_sum(log_ratio, batch.segments), -20.0, 20.0)))
  return {
    "actor/ppo_kl": -log_ratio,
    "actor/ppo_kl_k3": jnp.expm1(log_ratio) - log_ratio,
    **{f"ratio/{statistic}": token for statistic in (*STATISTICS, "ess")},
    **{f"ratio/sequence/{statistic}": sequence for statistic in STATISTICS},
    "ratio/sequence/ess": product,
  }


def _is_nan(outputs: PolicyOutputs, batch: TrainBatch, log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """1 where any input or the log-ratio is NaN (−∞ − −∞ is). Means of other metrics leave such a token out; this one counts it."""
  inputs = [x for x in (*outputs, *batch, log_ratio) if x is not None and jnp.issubdtype(x.dtype, jnp.floating)]
  return sum(jnp.isnan(x) for x in inputs).astype(bool).astype(outputs.logprobs.dtype)
