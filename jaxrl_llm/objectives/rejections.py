"""Corrections that drop tokens or sequences by an estimate of KL(μ‖π_old), and weigh nothing.

A dropped token stays in the denominators (see `corrections`).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.objectives.base import keep_unless
from jaxrl_llm.objectives.mismatch import MISMATCH, log_mismatch, weighted
from jaxrl_llm.segments import once_per_sequence, segment_max, segment_mean, segment_sum
from jaxrl_llm.types import Objective, PolicyOutputs, TokenTerm, TrainBatch

MISMATCH_ESTIMATORS = {
  "k1": lambda log_k: -log_k,
  "k2": lambda log_k: jnp.square(log_k) / 2,
  "k3": lambda log_k: jnp.expm1(log_k) - log_k,
}
"""Estimates of KL(μ‖π_old) from one token that μ drew, in nats, as functions of log k."""

OVER = {
  "token": lambda x, mask, segments: x,
  "sequence_sum": lambda x, mask, segments: segment_sum(jnp.where(mask > 0, x, 0), segments),
  "sequence_mean": segment_mean,
  "sequence_max": lambda x, mask, segments: segment_max(jnp.where(mask > 0, jnp.abs(x), 0), segments),
}
"""Statistics that decide whether a token is kept: of the token itself, or of its sequence."""


def rejection(objective: Objective, *, limit: float, estimator: str = "k3", over: str = "sequence_mean") -> Objective:
  """Drops tokens, or whole sequences, that the learner and the sampler disagree on.

  1 if |f(x)| ≤ limit, else 0
  x = −log k (k1), (log k)²/2 (k2) or k − 1 − log k (k3), with k = π_old/μ

  Args:
    limit: Largest estimate that is kept, in nats.
    estimator: Estimate of the divergence at each token: "k1", "k2" or "k3".
    over: What is compared with the limit: the estimate of the "token" itself; or, to drop all of a
      sequence, its "sequence_sum", "sequence_mean" or "sequence_max", which is of |x|.

  Returns:
    The wrapped objective, with the metrics `rollout_corr/rollout_rs_masked_fraction` (of tokens),
    `_seq_masked_fraction` (of sequences with a dropped token), and `rollout_corr/rollout_rs/mean`,
    `/min` and `/max`, of f(x) over sequences, or over tokens for over="token".

  Example:
    >>> from jaxrl_llm.objectives.gspo import gspo
    >>> chained = rejection(rejection(gspo(), limit=0.01), limit=4.6, estimator="k1", over="token")
    >>> sorted(chained.needs)
    ['old_logprobs', 'sampler_logprobs']

  References:
    When speed kills stability: demystifying RL collapse from the training-inference mismatch, Li et
      al., 2025.
    Approximating KL divergence (k1, k2, k3), Schulman, 2020.

  Note:
    k1 has either sign, so its absolute value is compared. verl takes a bound c of the ratio for it,
    which is limit=log(c) here, and has no "sequence_max" of k1. It takes the dropped tokens out of
    the denominators.
  """
  return _rejected(objective, estimator, over, lambda x: jnp.abs(x) > limit)


def geometric_rejection(objective: Objective, *, low: float = 0.999, high: float = 1.001) -> Objective:
  """Drops whole sequences whose length-normalised mismatch leaves a band.

  1 if low ≤ exp((1/|y|) Σ_t log k_t) ≤ high, else 0

  This is `rejection` by the mean of k1, with a bound for either sign.

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
  return _rejected(
    objective, "k1", "sequence_mean", lambda ratio: (ratio < low) | (ratio > high), compared=lambda x: jnp.exp(-x)
  )


def _rejected(
  objective: Objective,
  estimator: str,
  over: str,
  outside: Callable[[Float[Array, "B T"]], Bool[Array, "B T"]],
  compared: Callable[[Float[Array, "B T"]], Float[Array, "B T"]] = lambda x: x,
) -> Objective:
  """Wraps an objective to drop what is outside of a bound; `compared` gives the bound's unit."""
  estimate, combine = MISMATCH_ESTIMATORS[estimator], OVER[over]

  def correction(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    del outputs
    statistic = compared(combine(estimate(log_mismatch(batch)), batch.mask, batch.segments))
    keep = keep_unless(outside(statistic), statistic)
    of_sequences = lambda x: once_per_sequence(x, batch.mask, batch.segments)
    dropped = (segment_sum(jnp.where(keep == 0, batch.mask, 0), batch.segments) > 0).astype(keep.dtype)
    population = statistic if over == "token" else of_sequences(statistic)
    return keep, {
      "rollout_corr/rollout_rs_masked_fraction": 1 - keep,
      "rollout_corr/rollout_rs_seq_masked_fraction": of_sequences(dropped),
      **{f"rollout_corr/rollout_rs/{bound}": population for bound in ("mean", "min", "max")},
    }

  return weighted(objective, correction, MISMATCH)
