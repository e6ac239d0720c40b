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

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.objectives.base import keep_unless, required, with_old_policy
from jaxrl_llm.objectives.mismatch import weighted, weighted_by_mismatch
from jaxrl_llm.objectives.ratios import bounded_log_ratio
from jaxrl_llm.objectives.rejections import geometric_rejection, rejection
from jaxrl_llm.objectives.score_gates import binary_kl
from jaxrl_llm.objectives.selections import m2po, top_entropy
from jaxrl_llm.segments import once_per_sequence, segment_mean, segment_sum
from jaxrl_llm.types import Objective, PolicyOutputs, TokenTerm, TrainBatch


def tis(objective: Objective, *, cap: float = 2.0, floor: float = 0.0, level: str = "token") -> Objective:
  """Weighs each token by its mismatch, up to a cap (truncated importance sampling).

  clip(k, floor, cap),  k = π_old/μ of the token, or its product Π_t over the sequence

  Args:
    cap: Largest weight; a smaller cap gives less variance and more bias.
    floor: Smallest weight; 0 never binds.
    level: Level of the weight: "token" or "sequence".

  Returns:
    The wrapped objective. It adds these metrics, over tokens, or over sequences at level
    "sequence":
    - `rollout_corr/rollout_is_mean`, and `rollout_corr/rollout_is/min`, `/max`, `/p99` and `/ess`,
      of the applied weight;
    - `rollout_corr/rollout_is_ratio_fraction_high` (k > cap) and `_low` (k < floor; without a floor
      k < 1/cap, where nothing binds).
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
  weigh = lambda k, batch: (jnp.clip(k, floor, cap), {})
  return weighted_by_mismatch(objective, weigh, level=level, band=(floor or 1 / cap, cap))


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
  weigh = lambda k, batch: (jnp.where(k > cap, 0, k), {})
  return weighted_by_mismatch(objective, weigh, level=level, band=(1 / cap, cap))


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
  weigh = lambda k, batch: (jnp.where((k < low) | (k > high), 0, k), {})
  return weighted_by_mismatch(objective, weigh, band=(low, high))


SMALLEST_PROBABILITY = 1e-8
"""Smallest probability that `kpop` compares, and the distance of the largest from 1."""


def kpop(objective: Objective, *, bound: float = 2.0) -> Objective:
  """Weighs each token by its mismatch and drops it if the two policies are far apart (KPop).

  k if max(b(π_old, μ), b(μ, π_old)) ≤ bound, else 0
  b(p, q) = p·log(p/q) + (1 − p)·log((1 − p)/(1 − q)) of the token's probabilities

  A ratio of rare tokens moves little probability, so it is kept where `icepop` drops it.

  Args:
    bound: Largest divergence of "this token or another" that is kept, in nats.

  Returns:
    The wrapped objective, with the metrics of `tis` but the fractions of high and low ratios, and
    with `rollout_corr/kpop/mean` and `/max`, of the divergence over tokens.

  Example:
    >>> from jaxrl_llm.objectives.gspo import gspo
    >>> kpop(gspo()).corrects_mismatch
    True

  References:
    KPop, in AReaL 2.0 (`areal/utils/functional`), 2026; there is no paper.

  Note:
    Probabilities are bounded to 1e-8 … 1 − 1e-8, in log space. AReaL takes the dropped tokens out
    of the denominators.
  """

  def weigh(k: Float[Array, "B T"], batch: TrainBatch) -> TokenTerm:
    bounds = math.log(SMALLEST_PROBABILITY), math.log1p(-SMALLEST_PROBABILITY)
    old, sampler = (jnp.clip(x, *bounds) for x in (batch.old_logprobs, batch.sampler_logprobs))
    divergence = jnp.maximum(binary_kl(old, sampler), binary_kl(sampler, old))
    return jnp.where(divergence > bound, 0, k), {f"rollout_corr/kpop/{statistic}": divergence for statistic in ("mean", "max")}

  return weighted_by_mismatch(objective, weigh)


def sequence_tv(objective: Objective, *, low: float, high: float, cap: float = 2.0) -> Objective:
  """Weighs each token by its mismatch, and drops those that widen that of a whole sequence.

  0 if d leaves [low, high] and log k_t·A_t > 0, else min(k_t, cap)
  d = (1/|y|) Σ_t |k_t − 1|, twice an estimate of the total variation of μ and π_old

  Args:
    low: Smallest d of a sequence that keeps all of its tokens; 0 never binds.
    high: Largest such d; infinity never binds.
    cap: Largest weight.

  Returns:
    The wrapped objective, with the metrics of `tis`, and with `rollout_corr/sequence_tv/mean` and
    `/max`, of d over sequences.

  Example:
    >>> from jaxrl_llm.objectives.gspo import gspo
    >>> sorted(sequence_tv(gspo(), low=0.0, high=0.1).needs)
    ['old_logprobs', 'sampler_logprobs']

  References:
    open-instruct, pull request 1681, 2026; there is no paper.

  Note:
    open-instruct has no bounds by default, so they have no default here.
  """

  def weigh(k: Float[Array, "B T"], batch: TrainBatch) -> TokenTerm:
    distance = segment_mean(jnp.abs(k - 1), batch.mask, batch.segments)
    widens = ((k > 1) & (batch.advantages > 0)) | ((k < 1) & (batch.advantages < 0))
    dropped = widens & ((distance < low) | (distance > high))
    sequences = once_per_sequence(distance, batch.mask, batch.segments)
    metrics = {f"rollout_corr/sequence_tv/{statistic}": sequences for statistic in ("mean", "max")}
    return jnp.where(dropped, 0, jnp.minimum(k, cap)), metrics

  return weighted_by_mismatch(objective, weigh, band=(1 / cap, cap))


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

  return weighted(objective, correction, frozenset({field}))


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
  "m2po": m2po,
  "off_policy_mask": off_policy_mask,
  "geometric_rejection": geometric_rejection,
  "rejection": rejection,
  "tis": tis,
  "mis": mis,
  "icepop": icepop,
  "kpop": kpop,
  "sequence_tv": sequence_tv,
  "bypass": bypass,
}
"""Corrections by name, from the innermost to the outermost."""
