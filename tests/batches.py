"""Batches without the places of their sequences, and the plain computation of log-probabilities that `Model.score` is tested against."""

import jax
import jax.numpy as jnp

from jaxrl_llm.learner.packing import arrange, pack
from jaxrl_llm.segments import at_slots
from jaxrl_llm.types import Forward


def pack_rows(sequences, **settings):
  """Packs sequences in the layout of `arrange`."""
  return pack(sequences, arrange(sequences, **settings))


def scores_of(logits_fn):
  """Makes a score function of anything that has logits: all of them at once, where `Model.score` never has more than a piece.

  Args:
    logits_fn: `(params, tokens, positions, segments) -> logits`; those at t score token t + 1. It is told nothing of prefixes.
  """

  def score(params, batch, sources, *, filter_logits, learns_entropy=True, router_losses=False):
    del learns_entropy, router_losses
    logits = at_slots(logits_fn(params, batch.tokens, batch.positions, batch.segments), sources, in_order=batch.prefixes is None)
    scores = jax.nn.log_softmax(filter_logits(logits, batch.tokens), axis=-1)
    logprobs = jnp.take_along_axis(scores, batch.tokens[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(scores) * scores, axis=-1)
    counted = lambda x: jnp.where((batch.mask > 0) & (sources >= 0), x, 0)
    return counted(logprobs), counted(entropy), Forward()

  return score
