"""Supervised fine-tuning as an objective: the warm start before reinforcement learning."""

import functools

import jax

from jaxrl_llm.objectives.base import WEIGHTS, on_mask, weights_by_name
from jaxrl_llm.objectives.settings import checked, one_of
from jaxrl_llm.types import Objective, PolicyOutputs, TokenTerm, TrainBatch

# A demonstration is not one of several samples of a prompt.
_WEIGHTS = [name for name, make in WEIGHTS.items() if not hasattr(make(1), "needs")]


@functools.partial(checked, rules={"weights": one_of(_WEIGHTS)})
def sft(*, weights: str = "token_mean", max_tokens: int | None = None) -> Objective:
  """Builds the SFT objective: the negative log-likelihood of the counted tokens.

  L = −Σ_t w_t·log π(y_t)

  Advantages and old log-probabilities are not read.

  Args:
    weights: Weighting of tokens: "token_mean", "sequence_mean", "sequence_sum" or "constant".
    max_tokens: Generation budget in tokens, for weights="constant" only.

  Returns:
    The objective, with the metrics `actor/nll_loss` (nats per weighted token) and, if the entropy
    is given, `actor/entropy`.

  Raises:
    ValueError: If a setting is unknown, illegal or without effect.

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
