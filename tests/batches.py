"""Packing of test batches, and a reference computation of log-probabilities."""

import jax
import jax.numpy as jnp

from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.learner.packing import arrange, pack
from jaxrl_llm.learner.train_step import policy_outputs
from jaxrl_llm.segments import at_slots
from jaxrl_llm.types import Forward


def pack_rows(sequences, **settings):
  """Packs sequences in the layout of `arrange`."""
  return pack(sequences, arrange(sequences, **settings))


def logprobs_of(logits_fn):
  """Makes a log-probability function, the reference of `Model.logprobs`, from a function of logits.

  It computes all logits at once, whereas `Model.logprobs` computes them in chunks.

  Args:
    logits_fn: Function `(params, tokens, positions, segments) -> logits`. The logits at t score
      token t + 1. It does not know the prefixes.
  """

  def logprobs_and_entropy(params, batch, sources, *, filter_logits, learns_entropy=True, router_losses=False):
    del learns_entropy, router_losses
    logits = at_slots(logits_fn(params, batch.tokens, batch.positions, batch.segments), sources, in_order=batch.prefixes is None)
    log_softmax = jax.nn.log_softmax(filter_logits(logits, batch.tokens), axis=-1)
    logprobs = jnp.take_along_axis(log_softmax, batch.tokens[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1)
    counted = lambda x: jnp.where((batch.mask > 0) & (sources >= 0), x, 0)
    return counted(logprobs), counted(entropy), Forward()

  return logprobs_and_entropy


def bigram_outputs(params, batch, **filters):
  """Computes the outputs of a policy whose logits after a token are a row of its table."""
  logits = lambda table, tokens, positions, segments: table[tokens]
  return policy_outputs(logprobs_of(logits), make_filter(**filters), params["table"], batch)
