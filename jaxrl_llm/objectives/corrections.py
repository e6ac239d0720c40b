"""Corrections for data that another policy drew, as wrappers `(objective, *, ...) -> Objective`.

Three policies are kept apart: the sampler's μ, the learner's π_old before the step's updates, and
the current π. The mismatch k_t = π_old/μ comes from differing engines, the staleness π/π_old from
the updates since. A correction computes a weight for each token, without gradient, and multiplies
it into `TrainBatch.importance`. This weighs the policy term alone: penalties, the critic's loss and
the weights of the tokens stay as they are. Corrections compose:

  tis(off_policy_mask(gspo(), delta=0.1), cap=2.0)

All corrections but `off_policy_mask` with anchor "old" read `TrainBatch.sampler_logprobs`. The loss
of a batch without them raises a ValueError.

A dropped token has weight 0 and stays in the denominators. The weights of a batch are computed
before any log-probability is known, so dropping shrinks the loss and never raises the share of the
rest. (verl's rejection takes tokens out of the mask, and so out of the denominators and the
penalties too. Its importance weights of 0, IcePop's, stay in, as here.)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.objectives.base import keep_unless, on_mask, require_correctable, required, with_old_policy
from jaxrl_llm.objectives.ratios import bounded_log_ratio, product_ratio, token_ratio
from jaxrl_llm.objectives.selections import top_entropy
from jaxrl_llm.segments import once_per_sequence, segment_mean, segment_sum
from jaxrl_llm.types import Objective, PolicyOutputs, TokenTerm, TrainBatch

MISMATCH = frozenset({"old_logprobs", "sampler_logprobs"})
"""Fields that the mismatch k is computed from."""

LEVELS = {"token": token_ratio, "sequence": product_ratio}
"""Levels at which the mismatch is weighed: each token's own k, or the product over its sequence."""


def tis(objective: Objective, *, cap: float = 2.0, level: str = "token") -> Objective:
  """Weighs each token by its mismatch, up to a cap (truncated importance sampling).

  min(k, cap),  k = π_old/μ of the token, or its product Π_t over the sequence

  Args:
    cap: Largest weight; a smaller cap gives less variance and more bias.
    level: Level of the weight: "token" or "sequence".

  Returns:
    The wrapped objective. It adds these metrics, over tokens, or over sequences at level
    "sequence":
    - `rollout_corr/rollout_is_mean`, and `rollout_corr/rollout_is/min`, `/max`, `/p99` and `/ess`,
      of the applied weight;
    - `rollout_corr/rollout_is_ratio_fraction_high` (k > cap) and `_low` (k < 1/cap, where nothing
      binds).
    At either level it also adds `rollout_corr/rollout_is_oob_ratio` and `_oob_seq_ratio`, the
    fractions of tokens and of sequences with a k that is changed before it is applied.

  Example:
    >>> from jaxrl_llm.objectives.gspo import gspo
    >>> sorted(tis(gspo(), cap=2.0).needs)
    ['old_logprobs', 'sampler_logprobs']

  References:
    Your efficient RL framework secretly brings you off-policy RL training (TIS), Yao et al., 2025.
    IMPALA (truncation of importance weights), arXiv:1802.01561, 2018.

  Note:
    log k is bounded at ±20 for each token; at level "sequence", so is the sum. The names follow
    verl, except that it has `_min`, `_max` and `_eff_sample_size`. verl also weighs the mean of
    sequence weights by length.
  """
  return _weighted_by_mismatch(objective, level, 1 / cap, cap, lambda k: jnp.minimum(k, cap))


def mis(objective: Objective, *, cap: float = 2.0, level: str = "token") -> Objective:
  """Weighs each token by its mismatch and drops it above a cap (masked importance sampling).

  k if k ≤ cap, else 0

  Args:
    cap: Largest weight that is kept.
    level: Level of the weight: "token" or "sequence" (see `tis`).

  Returns:
    The wrapped objective, with the metrics of `tis`.

  References:
    When speed kills stability: demystifying RL collapse from the training-inference mismatch, Li et
      al., 2025.
  """
  return _weighted_by_mismatch(objective, level, 1 / cap, cap, lambda k: jnp.where(k > cap, 0, k))


def icepop(objective: Objective, *, low: float = 0.5, high: float = 5.0) -> Objective:
  """Weighs each token by its mismatch and drops it outside a band (IcePop).

  k if low ≤ k ≤ high, else 0

  Args:
    low: Smallest k that is kept, at most 1.
    high: Largest k that is kept, at least 1.

  Returns:
    The wrapped objective, with the metrics of `tis`. `_ratio_fraction_low` counts k < low.

  References:
    Every step evolves: scaling reinforcement learning for trillion-scale thinking model (Ring-1T),
      arXiv:2510.18855, 2025.

  Note:
    Inside the band the weight stays k, as in the paper, verl and slime; it is not a mask of ones.
  """
  # As in `mis`, the comparison selects the outside: a NaN is on neither side and reaches the loss.
  return _weighted_by_mismatch(objective, "token", low, high, lambda k: jnp.where((k < low) | (k > high), 0, k))


def geometric_rejection(objective: Objective, *, low: float = 0.999, high: float = 1.001) -> Objective:
  """Drops whole sequences whose length-normalised mismatch leaves a band.

  1 if low ≤ exp((1/|y|) Σ_t log k_t) ≤ high, else 0

  Args:
    low: Smallest ratio that is kept, at most 1.
    high: Largest ratio that is kept, at least 1.

  Returns:
    The wrapped objective, with the metrics `rollout_corr/rollout_rs_masked_fraction` (of tokens)
    and `_seq_masked_fraction`, and `rollout_corr/rollout_rs/mean`, `/min` and `/max`, of the ratio
    over sequences.

  References:
    When speed kills stability: demystifying RL collapse from the training-inference mismatch, Li et
      al., 2025.

  Note:
    The defaults are verl's, for responses of thousands of tokens. The spread of the ratio falls as
    1/√|y|, so widen them for short responses. verl compares the inverse ratio with the same bounds,
    which is another band unless high is 1/low. It also takes the dropped tokens out of the
    denominators.
  """

  def correction(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    del outputs
    ratio = jnp.exp(segment_mean(_log_mismatch(batch), batch.mask, batch.segments))
    keep = keep_unless((ratio < low) | (ratio > high), ratio)
    sequences = once_per_sequence(ratio, batch.mask, batch.segments)
    return keep, {
      "rollout_corr/rollout_rs_masked_fraction": 1 - keep,
      "rollout_corr/rollout_rs_seq_masked_fraction": once_per_sequence(1 - keep, batch.mask, batch.segments),
      **{f"rollout_corr/rollout_rs/{statistic}": sequences for statistic in ("mean", "min", "max")},
    }

  return _weighted(objective, correction, MISMATCH)


def off_policy_mask(objective: Objective, *, delta: float, anchor: str = "old") -> Objective:
  """Drops tokens with A < 0 from responses that the current policy has already left behind.

  0 if A_t < 0 and (1/|y|) Σ_t log(π_old/π)_t > delta, else 1

  Args:
    delta: Largest divergence at which negative advantages still count, in nats per token.
    anchor: Policy that the divergence is measured from: "old" measures staleness alone; "sampler"
      uses μ in place of π_old, which adds the mismatch.

  Returns:
    The wrapped objective, with the metrics `off_policy/masked_fraction` (of tokens),
    `off_policy/seq_masked_fraction` (of sequences with a dropped token), and `off_policy/kl/mean`
    and `/max`, of the divergence over sequences in nats per token.

  Example:
    >>> from jaxrl_llm.objectives.gspo import gspo
    >>> tis(off_policy_mask(gspo(), delta=0.1), cap=2.0).needs == {"old_logprobs", "sampler_logprobs"}
    True

  References:
    DeepSeek-V3.2, arXiv:2512.02556, 2025, eq. 9.

  Note:
    If TRL has the sampler's log-probabilities, it measures from the sampler (anchor="sampler") and
    treats a NaN there as no divergence; here the NaN reaches the loss. The mask follows the current
    policy, so it can change at each update of a rollout batch.
  """
  field = {"old": "old_logprobs", "sampler": "sampler_logprobs"}[anchor]

  def correction(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    anchor_logprobs = required(getattr(batch, field), field, "off_policy_mask compares the current policy with it")
    divergence = -segment_mean(bounded_log_ratio(outputs.logprobs, anchor_logprobs), batch.mask, batch.segments)
    keep = keep_unless((batch.advantages < 0) & (divergence > delta), divergence)
    dropped = (segment_sum(jnp.where(keep == 0, batch.mask, 0), batch.segments) > 0).astype(keep.dtype)
    sequences = once_per_sequence(divergence, batch.mask, batch.segments)
    return keep, {
      "off_policy/masked_fraction": 1 - keep,
      "off_policy/seq_masked_fraction": once_per_sequence(dropped, batch.mask, batch.segments),
      **{f"off_policy/kl/{statistic}": sequences for statistic in ("mean", "max")},
    }

  return _weighted(objective, correction, frozenset({field}))


def bypass(objective: Objective) -> Objective:
  """Uses the sampler's policy as π_old, so that one ratio π/μ covers mismatch and staleness.

  π_old := μ

  This needs no forward pass under π_old. Corrections inside the objective see the new π_old. The
  wrapped objective needs `sampler_logprobs` instead of `old_logprobs`.

  Example:
    >>> from jaxrl_llm.objectives.gspo import gspo
    >>> bypass(gspo()).needs
    frozenset({'sampler_logprobs'})

  References:
    Rethinking the trust region in LLM reinforcement learning (DPPO), arXiv:2602.04879, 2026, which
      anchors its trust region in this way.
  """
  sampled = lambda outputs, batch: required(batch.sampler_logprobs, "sampler_logprobs", "bypass uses the sampler's policy as the old one")
  return with_old_policy(objective, sampled, {"sampler_logprobs"})


CORRECTIONS = {
  "top_entropy": top_entropy,
  "off_policy_mask": off_policy_mask,
  "geometric_rejection": geometric_rejection,
  "tis": tis,
  "mis": mis,
  "icepop": icepop,
  "bypass": bypass,
}
"""Corrections by name, from the innermost to the outermost."""


def _weighted(objective: Objective, correction: Callable[[PolicyOutputs, TrainBatch], TokenTerm], needs: frozenset[str]) -> Objective:
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


def _log_mismatch(batch: TrainBatch) -> Float[Array, "B T"]:
  """Computes log k = log π_old − log μ at each token, bounded."""
  sampler_logprobs = required(batch.sampler_logprobs, "sampler_logprobs", "the mismatch of learner and sampler is corrected")
  return bounded_log_ratio(batch.old_logprobs, sampler_logprobs)


def _weighted_by_mismatch(
  objective: Objective, level: str, low: float, high: float, weigh: Callable[[Float[Array, "B T"]], Float[Array, "B T"]]
) -> Objective:
  """Wraps an objective to weigh it by a function of k, with metrics for k's band [low, high]."""
  level_ratio = LEVELS[level]

  def correction(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    del outputs
    k = jnp.exp(level_ratio(_log_mismatch(batch), batch.mask, batch.segments))
    weight = weigh(k)
    of_sequences = lambda x: once_per_sequence(x, batch.mask, batch.segments)
    fraction = lambda condition: jnp.where(jnp.isnan(k), k, condition.astype(k.dtype))
    changed = (weight != k) & ~jnp.isnan(k)
    in_sequence = segment_sum(jnp.where(changed, batch.mask, 0), batch.segments) > 0
    over = {"token": lambda x: x, "sequence": of_sequences}[level]
    return weight, {
      "rollout_corr/rollout_is_mean": over(weight),
      **{f"rollout_corr/rollout_is/{statistic}": over(weight) for statistic in ("min", "max", "p99", "ess")},
      "rollout_corr/rollout_is_ratio_fraction_high": over(fraction(k > high)),
      "rollout_corr/rollout_is_ratio_fraction_low": over(fraction(k < low)),
      "rollout_corr/rollout_is_oob_ratio": fraction(changed),
      "rollout_corr/rollout_is_oob_seq_ratio": of_sequences(fraction(in_sequence)),
    }

  return _weighted(objective, correction, MISMATCH)._replace(corrects_mismatch=True)
