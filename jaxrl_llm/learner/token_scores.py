"""What the updated policy says of each token of a batch, for the viewer of rollouts: nothing that is trained depends on it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.learner.train_step import in_pieces
from jaxrl_llm.objectives.gate_weight import gate_weight
from jaxrl_llm.types import Objective, Params, PolicyOutputs, TrainBatch


class TokenScores(NamedTuple):
  """Numbers of each token, NaN where the mask is 0.

  Attributes:
    log_ratio: log π − log π_old, in nats.
    gate_weight: how much its gradient would count in one more update; see `objectives.gate_weight`.
    entropy: of the distribution that it is drawn from, in nats.
  """

  log_ratio: Float[Array, "B T"]
  gate_weight: Float[Array, "B T"]
  entropy: Float[Array, "B T"]


def make_token_scores(
  outputs_fn: Callable[[Params, TrainBatch], PolicyOutputs], objective: Objective, *, num_micro_batches: int = 1
) -> Callable[[Params, TrainBatch], TokenScores]:
  """`(params, batch) -> TokenScores`, a forward pass to be jitted; it takes what `make_train_step` does, corrections included."""

  def of_outputs(params: Params, batch: TrainBatch) -> PolicyOutputs:
    outputs = outputs_fn(params, batch)
    return PolicyOutputs(outputs.logprobs, outputs.entropy)

  def token_scores(params: Params, batch: TrainBatch) -> TokenScores:
    outputs = in_pieces(partial(of_outputs, params), batch, num_micro_batches)
    batch = batch._replace(routing=None)
    counted = lambda x: jnp.where(batch.mask > 0, x, jnp.nan)
    entropy = jnp.full_like(outputs.logprobs, jnp.nan) if outputs.entropy is None else outputs.entropy
    log_ratio = outputs.logprobs - batch.old_logprobs
    return TokenScores(counted(log_ratio), gate_weight(objective, outputs, batch), counted(entropy))

  return token_scores
