"""Per-token scores of a batch under the updated policy, for the rollout viewer only."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.learner.train_step import map_micro_batches
from jaxrl_llm.objectives.gate_weight import gate_weight
from jaxrl_llm.types import Objective, Params, PolicyOutputs, TrainBatch


class TokenScores(NamedTuple):
  """Scores of each token, NaN if the mask is 0.

  Attributes:
    log_ratio: Log-ratio log π − log π_old, in nats.
    gate_weight: Weight of the token's gradient in one more update; see `objectives.gate_weight`.
    entropy: Entropy of the token's sampling distribution, in nats.
  """

  log_ratio: Float[Array, "B T"]
  gate_weight: Float[Array, "B T"]
  entropy: Float[Array, "B T"]


def make_token_scores(
  outputs_fn: Callable[[Params, TrainBatch], PolicyOutputs], objective: Objective, *, rows_at_once: int | None = None
) -> Callable[[Params, TrainBatch], TokenScores]:
  """Makes `(params, batch) -> TokenScores`, a forward pass to be jitted.

  The arguments are those of `make_train_step`; the objective includes its corrections.
  """

  def of_outputs(params: Params, batch: TrainBatch) -> PolicyOutputs:
    outputs = outputs_fn(params, batch)
    return PolicyOutputs(outputs.logprobs, outputs.entropy)

  def token_scores(params: Params, batch: TrainBatch) -> TokenScores:
    outputs = map_micro_batches(partial(of_outputs, params), batch, rows_at_once)
    batch = batch._replace(routing=None, images=None)
    counted = lambda x: jnp.where(batch.mask > 0, x, jnp.nan)
    entropy = jnp.full_like(outputs.logprobs, jnp.nan) if outputs.entropy is None else outputs.entropy
    log_ratio = outputs.logprobs - batch.old_logprobs
    return TokenScores(counted(log_ratio), gate_weight(objective, outputs, batch), counted(entropy))

  return token_scores
