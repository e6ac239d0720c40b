"""Players of tests, and what tests make of rollouts."""

import numpy as np

from jaxrl_llm.rollouts.arrivals import gather
from jaxrl_llm.rollouts.jobs import Draws, Job, sequence_seeds
from jaxrl_llm.rollouts.sweeps import Sweep
from jaxrl_llm.text_types import Completion
from jaxrl_llm.types import StopReason


def completions(rollouts, decode):
  """Makes the completions of single-turn rollouts by themselves."""
  ids = [tuple(tokens[mask].tolist()) for tokens, mask in zip(rollouts.tokens, rollouts.mask, strict=True)]
  return [Completion(decode(own), own, len(own), bool(stopped)) for own, stopped in zip(ids, rollouts.stopped, strict=True)]


def with_reasons(rollouts):
  """Adds what the sampler always returns to handmade rollouts."""
  reasons = np.where(np.asarray(rollouts.stopped), StopReason.TOKEN, StopReason.LENGTH).astype(np.int8)
  return rollouts._replace(reasons=reasons, raw_logprobs=rollouts.logprobs)


def swept(sample, params, examples, key, *, group_size, new_tokens, tokenizer, mesh, prompt_buckets):
  """Draws single-turn responses with a sampler, as a run does."""
  draws = Draws(new_tokens, max(prompt_buckets), stop_ids=tokenizer.stop_ids)
  job = Job(examples, group_size, sequence_seeds(key, len(examples) * group_size), "", draws)
  playing = Sweep(params, job, sample=sample, tokenizer=tokenizer, mesh=mesh, prompt_buckets=prompt_buckets)
  drawn, _ = gather(playing, job, tokenizer, prompt_buckets=prompt_buckets)
  return drawn.rollouts, drawn.responses


class Handing:
  """A `Playing` that hands over parts of a batch."""

  def __init__(self, *parts):
    self._parts = parts

  def __iter__(self):
    return iter(self._parts)

  def wait(self):
    """Has nothing to wait for."""

  def close(self):
    """Has nothing to give up."""
