"""Supervised fine-tuning as one more objective: the warm start before reinforcement learning."""

import jax

from jaxrl_llm.objectives.base import on_mask, weights_by_name
from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.types import Objective, PolicyOutputs, TokenTerm, TrainBatch


@checked
def sft(*, weights: str = "token_mean", max_tokens: int | None = None) -> Objective:
  """Negative log-likelihood of the counted tokens; advantages and old log-probabilities are not read.

  L = −Σ_t w_t·log π(y_t)

  Args:
    weights: "token_mean", "sequence_mean" or "constant".
    max_tokens: generation budget in tokens, for weights="constant" only.

  Returns:
    The objective. Its metrics: `actor/nll_loss` (nats per weighted token), and `actor/entropy` where the entropy is given.

  Raises:
    ValueError: for a setting that is unknown, illegal or without effect.

  Example:
    >>> sft(weights="sequence_mean").needs
    frozenset()
  """

  def token_loss(outputs: PolicyOutputs, batch: TrainBatch) -> TokenTerm:
    outputs, _ = on_mask(outputs, batch)
    loss = -outputs.logprobs
    metrics = {"actor/nll_loss": loss}
    if outputs.entropy is not None:
      metrics["actor/entropy"] = outputs.entropy
    return loss, jax.lax.stop_gradient(metrics)

  return Objective(weigh=weights_by_name(weights, max_tokens), token_loss=token_loss, imitates=True)
