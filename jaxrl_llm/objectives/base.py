"""Shared parts of policy objectives: clean inputs, ratio x gate x weights, penalties, metrics."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.objectives.ratios import bounded_log_ratio
from jaxrl_llm.segments import (
  constant,
  once_per_sequence,
  prompt_mean,
  segment_mean,
  segment_sum,
  sequence_mean,
  sequence_sum,
  token_mean,
)
from jaxrl_llm.types import GateContext, GateFn, Objective, PenaltyFn, PolicyOutputs, RatioFn, TokenMetrics, TokenTerm, TrainBatch, WeighFn

STATISTICS = ("mean", "min", "max", "p99")

WEIGHTS = {
  "token_mean": lambda max_tokens: token_mean,
  "prompt_mean": lambda max_tokens: prompt_mean,
  "sequence_mean": lambda max_tokens: sequence_mean,
  "sequence_sum": lambda max_tokens: sequence_sum,
  "constant": constant,
}
"""Token weightings by name, as functions of the generation budget in tokens."""


def weights_by_name(weights: str, max_tokens: int | None = None) -> WeighFn:
  """Returns the token weighting of this name in `WEIGHTS`, the third slot of an objective.

  Only "constant" reads the generation budget in tokens.

  Example:
    >>> weights_by_name("constant", 8)(jnp.ones((2, 2)), None).tolist()
    [[0.0625, 0.0625], [0.0625, 0.0625]]
  """
  return WEIGHTS[weights](max_tokens)


def on_mask(outputs: PolicyOutputs, batch: TrainBatch) -> tuple[PolicyOutputs, TrainBatch]:
  """Zeroes every float array outside the mask and raises bfloat16 to float32.

  The inputs are cleaned, not the outputs: a NaN, an infinity or a 1e4 that reaches an `exp` would
  come back through its gradient as 0·∞, even if a later mask hides its value. A NaN inside the mask
  is kept, so that it surfaces in the loss.

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
  floats += ("importance", "kl_coefs", "entropy_coefs", "selected")
  present = {field: x for field in floats if (x := getattr(batch, field)) is not None}
  return jax.tree.map(clean, outputs), batch._replace(**jax.tree.map(clean, present))


def required(x: Array | None, field: str, reason: str) -> Array:
  """Returns `x`, or raises a ValueError that names the field if `x` is None."""
  if x is None:
    raise ValueError(f"{field}: found None, expected an array [B, T], because {reason}")
  return x


def require_correctable(objective: Objective) -> None:
  """Raises a ValueError if an objective ignores the weights of its policy term."""
  if not objective.correctable:
    raise ValueError("objective: found one that ignores TrainBatch.importance (correctable=False), expected one made by policy_objective")


def keep_unless(dropped: Bool[Array, "B T"], statistic: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """Returns 0 for dropped tokens and 1 for others, with NaN kept if the statistic is NaN.

  A comparison alone would hide the NaN.
  """
  return jnp.where(jnp.isnan(statistic), statistic, 1 - dropped.astype(statistic.dtype))


def policy_objective(
  *,
  ratio: RatioFn,
  gate: GateFn,
  weigh: WeighFn,
  penalties: Sequence[PenaltyFn] = (),
  needs: frozenset[str] = frozenset(),
  value_loss: PenaltyFn | None = None,
  anchor: str | None = "old",
  prepare: Callable[[TrainBatch], TrainBatch] | None = None,
  teaches_without_advantage: bool = False,
) -> Objective:
  """Composes an objective: loss = Σ w·(−k·gate(ratio(log π − log π_old), A) + penalties).

  Args:
    ratio: Level at which the policies are compared (see `ratios`). A function that does not state
      its level counts as a ratio of tokens.
    gate: Limit on how far a ratio may move the policy (see `gates`).
    weigh: Weights of all tokens of the global batch (see `segments`).
    penalties: Further per-token losses (see `penalties`).
    needs: Fields that the penalties read.
    value_loss: Loss of the critic (see `penalties.value_loss`).
    anchor: Policy that the ratio compares with: "old" for the learner's at the start of the rollout
      batch's updates, "sampler" for the sampler's. With None the loss needs neither, but metrics
      still compare with `old_logprobs`.
    prepare: Selection of tokens on the whole global batch (see `selections`), for the gate.
    teaches_without_advantage: Whether the gate moves tokens whose advantage is 0.

  Returns:
    The objective, with these metrics:
    - `actor/pg_loss`; `actor/ppo_kl` and `actor/ppo_kl_k3`, estimates of KL(π_old‖π) in nats;
      `actor/entropy` if the entropy is given;
    - `ratio/mean`, `/min`, `/max` and `/p99` of the token ratio r; `ratio/sequence/mean`, ... of
      the length-normalised ratio s over sequences;
    - `ratio/ess` and `ratio/sequence/ess`, the effective sample sizes of r over tokens and of Πr
      over sequences, as fractions;
    - `actor/nan_tokens`, the fraction of counted tokens with a NaN in an input or in the log-ratio.
    The k of the loss is `TrainBatch.importance`.

  Example:
    >>> from jaxrl_llm.objectives.gates import hard_clip
    >>> from jaxrl_llm.objectives.ratios import token_ratio
    >>> unclipped = policy_objective(ratio=token_ratio, gate=hard_clip(1.0, float("inf")), weigh=token_mean)
    >>> unclipped.needs
    frozenset({'old_logprobs'})

  Note:
    The token log-ratio is bounded at ±20 before any other use; its gradient is 0 beyond the bound
    (see `ratios.bounded_log_ratio`).
  """

  def token_loss(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    if anchor == "sampler":
      batch = batch._replace(old_logprobs=required(batch.sampler_logprobs, "sampler_logprobs", "the anchor is the sampler's policy"))
    if prepare is not None and batch.selected is None:
      batch = prepare(batch)
    outputs, batch = on_mask(outputs, batch)
    log_ratio = bounded_log_ratio(outputs.logprobs, batch.old_logprobs)
    context = GateContext(outputs.logprobs, batch.old_logprobs, batch.mask, batch.segments, batch.selected)
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
    needs=frozenset(needs) | anchored | getattr(weigh, "needs", frozenset()),
    value_loss=value_loss,
    correctable=True,
    ratio_level=getattr(ratio, "level", "token"),
    prepare=prepare,
    teaches_without_advantage=teaches_without_advantage,
  )


def with_old_policy(
  objective: Objective, logprobs_of: Callable[[PolicyOutputs, TrainBatch], Float[Array, "B T"]], needs: set[str]
) -> Objective:
  """Wraps an objective to compare with another policy than the learner's old one.

  A selection of tokens (`Objective.prepare`) is made before the current policy is known, and
  compares with the sampler's.
  """

  def token_loss(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    return objective.token_loss(outputs, batch._replace(old_logprobs=logprobs_of(outputs, batch)))

  def prepare(batch: TrainBatch) -> TrainBatch:
    # A selection by the mismatch of the two finds one policy, and says so.
    prepared = objective.prepare(batch._replace(old_logprobs=batch.sampler_logprobs, sampler_logprobs=None))
    return prepared._replace(old_logprobs=batch.old_logprobs, sampler_logprobs=batch.sampler_logprobs)

  needs = objective.needs - {"old_logprobs"} | needs
  return objective._replace(token_loss=token_loss, needs=needs, prepare=None if objective.prepare is None else prepare)


def critic_objective(objective: Objective) -> Objective:
  """Returns the `value_loss` of an objective as an objective with the same weights.

  It trains a critic that has parameters of its own.

  Raises:
    ValueError: If the objective has no critic.
  """
  if objective.value_loss is None:
    raise ValueError("value_loss: found None, expected an objective with a critic, such as ppo")

  def token_loss(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    outputs, batch = on_mask(outputs, batch)
    loss, metrics = objective.value_loss(outputs, batch)
    return jnp.where(batch.mask > 0, loss, 0), jax.lax.stop_gradient(metrics)

  needs = frozenset({"values", "returns", "old_values"}) | (objective.needs & {"groups"})
  return Objective(weigh=objective.weigh, token_loss=token_loss, needs=needs)


def ratio_metrics(log_ratio: Float[Array, "B T"], batch: TrainBatch) -> TokenMetrics:
  """Returns metrics of how far the policy has moved, for any objective (see `policy_objective`)."""
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
  """Returns 1 at tokens with a NaN in any input or in the log-ratio (−∞ − (−∞) is NaN).

  Means of other metrics leave these tokens out; this metric counts them.
  """
  inputs = [x for x in (*outputs, *batch, log_ratio) if x is not None and jnp.issubdtype(x.dtype, jnp.floating)]
  return sum(jnp.isnan(x) for x in inputs).astype(bool).astype(outputs.logprobs.dtype)
