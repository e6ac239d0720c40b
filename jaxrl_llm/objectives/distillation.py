"""Learning from a teacher: a term of the loss, and a term of the advantages."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.objectives.base import required
from jaxrl_llm.segments import token_mean
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


def teacher_advantages(
  batch: TrainBatch, teacher_logprobs: Float[Array, "B T"], teacher_entropy: Float[Array, "B T"], *, coef: float
) -> tuple[Float[Array, "B T"], TokenMetrics]:
  """Computes the advantage of each sampled token that a teacher gives (on-policy distillation).

  A_t = coef·(log π_T(y_t) − log π_old(y_t))

  It is minus a one-sample estimate (k1) of the reverse KL(π_old‖π_T) at the token, so a policy
  gradient with these advantages lowers the divergence at each token, given its prefix.

  Args:
    batch: Batch, of which `mask` and `old_logprobs` are read.
    teacher_logprobs: Log-probabilities of the tokens under the teacher, in nats.
    teacher_entropy: Entropy of the teacher at each token, in nats.
    coef: Advantage per nat.

  Returns:
    The advantages, 0 outside the mask, and the metrics `teacher/kl` (the estimate, in nats),
    `teacher/advantage_abs` and `teacher/entropy`.

  Example:
    >>> ones = jnp.ones((1, 2))
    >>> batch = TrainBatch(*3 * [jnp.ones((1, 2), int)], mask=jnp.array([[1., 0.]]), advantages=0 * ones, old_logprobs=-ones)
    >>> teacher_advantages(batch, -3 * ones, ones, coef=0.5)[0].tolist()
    [[-1.0, 0.0]]

  References:
    On-policy distillation, Thinking Machines Lab, 2025.
  """
  counted = batch.mask > 0
  gap = jnp.where(counted, teacher_logprobs - batch.old_logprobs, 0)
  advantages = coef * gap
  return advantages, {"teacher/kl": -gap, "teacher/advantage_abs": jnp.abs(advantages), "teacher/entropy": teacher_entropy}
