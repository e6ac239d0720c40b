"""Shared metrics of gates: statistics of the coefficient, and fractions on which a clip binds."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.segments import once_per_sequence, segment_sum
from jaxrl_llm.types import GateContext, TokenMetrics


def gate_metrics(coefficient: Float[Array, "B T"]) -> TokenMetrics:
  """Returns statistics of C, the weight of A·∇log_ratio in the gradient."""
  return {f"gate/{statistic}": coefficient for statistic in ("mean", "min", "max", "p99")}


def clip_metrics(clipped: Bool[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext | None) -> TokenMetrics:
  """Returns fractions of tokens and of sequences on which a clip binds, by sign of the advantage.

  Args:
    clipped: Whether a clip binds at each token.
    advantages: Advantage of each token.
    context: Context that says which tokens form a sequence; None leaves out the fractions of
      sequences.

  Returns:
    `actor/pg_clipfrac` (over all tokens), `_pos` and `_neg` (over those with A > 0 and A < 0);
    `actor/pg_clipfrac_seq`, `_seq_pos` and `_seq_neg`, the fractions of sequences in which a clip
    binds at least once.
  """
  populations = {"": jnp.ones_like(clipped), "_pos": advantages > 0, "_neg": advantages < 0}

  def fraction(condition: Bool[Array, "B T"], population: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.where(population, condition.astype(advantages.dtype), jnp.nan)

  metrics = {f"actor/pg_clipfrac{sign}": fraction(clipped, tokens) for sign, tokens in populations.items()}
  if context is not None:
    mask, segments = context.mask, context.segments
    anywhere = lambda condition: segment_sum(jnp.where(condition, mask, 0), segments) > 0
    for sign, tokens in populations.items():
      # A sequence with advantages of both signs belongs to both populations.
      in_sequences = fraction(anywhere(clipped & tokens), anywhere(tokens))
      metrics[f"actor/pg_clipfrac_seq{sign}"] = once_per_sequence(in_sequences, mask, segments)
  return metrics
