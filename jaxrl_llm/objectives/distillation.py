"""Learning from a teacher: a term of the loss, and a term of the advantages."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.objectives.base import required
from jaxrl_llm.segments import segment_cumsum, segment_sum, token_mean
from jaxrl_llm.types import Objective, PolicyOutputs, TokenMetrics, TokenTerm, TrainBatch


def gkd(coef: float) -> Objective:
  """Builds the divergence from a teacher as a term of the loss with weights of its own.

  L = coef·(1/Σ|y|) Σ_t D(π, π_T),  at each token over the whole vocabulary

  D is computed in the output head (see `divergence.comparer`).

  Args:
    coef: Loss per nat of divergence.

  Returns:
    The objective, with the metrics `teacher/gkd_loss` (coefficient included), `teacher/divergence`
    (D, in nats), `teacher/kl` (the reverse KL, in nats), `teacher/entropy` (of the teacher, in
    nats) and `teacher/agreement` (fraction of tokens at which both have the same likeliest token).

  Example:
    >>> sorted(gkd(1.0).needs)
    ['comparison']

  References:
    On-policy distillation of language models (GKD), arXiv:2306.13649, 2023.
  """

  def token_loss(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    compared = outputs.comparison
    required(compared and compared.divergence, "comparison", f"gkd_coef is {coef}")
    compared = jax.tree.map(lambda x: jnp.where(batch.mask > 0, x, 0), compared)
    loss = coef * compared.divergence
    metrics = {
      "teacher/gkd_loss": loss,
      "teacher/divergence": compared.divergence,
      "teacher/kl": compared.kl,
      "teacher/entropy": compared.teacher_entropy,
      "teacher/agreement": compared.agreement,
    }
    return loss, jax.lax.stop_gradient(metrics)

  return Objective(weigh=token_mean, token_loss=token_loss, needs=frozenset({"comparison"}))


def distilled(gap: Float[Array, "B T"], batch: TrainBatch, *, coef: float) -> Float[Array, "B T"]:
  """Computes the advantage of a token that a teacher gives (on-policy distillation).

  A_t += coef·Δ_t,  Δ_t = log π_T(y_t) − log π_old(y_t)

  It is minus a one-sample estimate (k1) of the reverse KL(π_old‖π_T) at the token, so a policy
  gradient with these advantages lowers the divergence at each token, given its prefix.

  Args:
    gap: Δ at each token, 0 outside the mask, in nats.
    batch: Batch of the tokens, which only other rules read.
    coef: Advantage per nat.

  References:
    On-policy distillation, Thinking Machines Lab, 2025.
  """
  del batch
  return coef * gap


def early_weighted(gap: Float[Array, "B T"], batch: TrainBatch, *, coef: float, early: float = 0.5) -> Float[Array, "B T"]:
  """Computes a teacher's advantage that weighs early disagreement more (IW-OPD).

  A_t += coef·w_t·Δ_t,  w_t = 1 + γ·(1 − Σ_{j<t} |Δ_j| / Σ_j |Δ_j|),  over the tokens of a response

  Args:
    gap: Δ at each token, 0 outside the mask, in nats.
    batch: Batch of the tokens.
    coef: Advantage per nat.
    early: Additional weight γ of a response's first token.

  References:
    TRL, pull request 6191 (`experimental/iw_opd`), 2026.

  Note:
    Δ is relative to π_old; TRL takes the sampler's log-probabilities.
  """
  sizes = jnp.abs(gap)
  total = segment_sum(sizes, batch.segments)
  before = segment_cumsum(sizes, batch.segments) - sizes
  return coef * (1 + early * (1 - before / jnp.where(total > 0, total, 1))) * gap


def scaled_by_teacher(gap: Float[Array, "B T"], batch: TrainBatch, *, coef: float, clip: float = 0.2) -> Float[Array, "B T"]:
  """Computes what a teacher adds to an advantage that it scales, never flips (RLSD).

  A_t ← A_t·((1 − λ) + λ·clip(e^{sign(A_t)·Δ_t}, 1 − ε, 1 + ε)),  with λ `coef` and ε `clip`

  Args:
    gap: Δ at each token, 0 outside the mask, in nats.
    batch: Batch with the advantages A that the reward gives.
    coef: Share λ of the advantage that the teacher scales, from 0 to 1.
    clip: Largest change ε of that share, below 1.

  References:
    Self-Distilled RLVR (RLSD), arXiv:2604.03128, 2026.

  Note:
    The paper warms λ up and lets it decay; here it is constant, because only learning rates follow
    a schedule (the coefficients of divergence and entropy adapt to a target), and rules of advice
    have no settings of their own that could hold its steps.
  """
  counted = batch.mask > 0
  advantages = jnp.where(counted, batch.advantages, 0)
  low, high = jnp.log1p(-clip), jnp.log1p(clip)  # Clipped before `exp`, which could overflow.
  return coef * advantages * jnp.expm1(jnp.clip(jnp.sign(advantages) * gap, low, high))


def agreed(gap: Float[Array, "B T"], batch: TrainBatch, *, coef: float, slope: float = 5.0) -> Float[Array, "B T"]:
  """Computes an advantage of tokens that a teacher finds at least as likely as the policy (SDAR).

  A_t += coef·σ(β·Δ_t),  with β `slope`

  Args:
    gap: Δ at each token, 0 outside the mask, in nats.
    batch: Batch of the tokens.
    coef: Largest advantage.
    slope: Steepness β of the gate, per nat.

  References:
    SDAR, arXiv:2605.15155, 2026, with 0.1 and 5.

  Note:
    The paper adds the loss coef·(1/Σ|y|) Σ sg[σ(β·(log π_T − log π))]·(log π_T − log π). This has
    its gradient at π = π_old for weights that are a mean over tokens. Here the objective's own
    ratio, gate and weights hold for it, and the gate reads π_old.
  """
  return jnp.where(batch.mask > 0, coef * jax.nn.sigmoid(slope * gap), 0)


class Advice(NamedTuple):
  """A way in which a teacher's log-probabilities of sampled tokens change their advantages.

  Attributes:
    term: `(gap, batch, *, coef) -> what is added to the advantages`, 0 outside the mask.
    scales: Whether it only scales advantages, so that nothing is learned without a reward, and
      `coef` is a share of them.
  """

  term: Callable[..., Float[Array, "B T"]]
  scales: bool = False


ADVICE = {
  "opd": Advice(distilled),
  "iw_opd": Advice(early_weighted),
  "rlsd": Advice(scaled_by_teacher, scales=True),
  "sdar": Advice(agreed),
}
"""Rules by name."""


def teacher_advantages(
  batch: TrainBatch, teacher_logprobs: Float[Array, "B T"], teacher_entropy: Float[Array, "B T"], *, coef: float, advice: str = "opd"
) -> tuple[Float[Array, "B T"], TokenMetrics]:
  """Computes what a teacher adds to the advantage of each sampled token.

  Args:
    batch: Batch, of which `mask`, `old_logprobs`, and what the rule reads, are read.
    teacher_logprobs: Log-probabilities of the tokens under the teacher, in nats.
    teacher_entropy: Entropy of the teacher at each token, in nats.
    coef: Strength of the rule.
    advice: Key of `ADVICE`.

  Returns:
    The additions, 0 outside the mask, and the metrics `teacher/kl` (the estimate, in nats),
    `teacher/advantage_abs` and `teacher/entropy`.

  Example:
    >>> ones = jnp.ones((1, 2))
    >>> batch = TrainBatch(*3 * [jnp.ones((1, 2), int)], mask=jnp.array([[1., 0.]]), advantages=-ones, old_logprobs=-ones)
    >>> teacher_advantages(batch, -3 * ones, ones, coef=0.5)[0].tolist()
    [[-1.0, 0.0]]
    >>> teacher_advantages(batch, -3 * ones, ones, coef=0.5, advice="rlsd")[0].round(3).tolist()
    [[-0.1, 0.0]]
  """
  gap = jnp.where(batch.mask > 0, teacher_logprobs - batch.old_logprobs, 0)
  advantages = ADVICE[advice].term(gap, batch, coef=coef)
  return advantages, {"teacher/kl": -gap, "teacher/advantage_abs": jnp.abs(advantages), "teacher/entropy": teacher_entropy}
