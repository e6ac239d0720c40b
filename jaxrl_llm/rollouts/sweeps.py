"""Batches that the sampler draws: all responses in one sweep, conversations in one sweep per turn.

A sweep is one program over any mesh, in all processes of a run. It is dispatched at once, with the
weights that are there at that time, and copied to the host when a caller waits for it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from jaxrl_llm.decoding.sampler import Requests, SampleFn, no_partial
from jaxrl_llm.devices import hosts
from jaxrl_llm.rollouts.arrivals import Gathered
from jaxrl_llm.rollouts.jobs import Conversation, Job, PlayFn, Playing
from jaxrl_llm.rollouts.rollout import dispatch
from jaxrl_llm.rollouts.rounds import begin_conversations, take_turn, turn_requests
from jaxrl_llm.rollouts.rules import Rules
from jaxrl_llm.text_types import Tokenizer
from jaxrl_llm.types import Params, Rollouts, StopReason


class Sweeps:
  """A batch that the sampler draws: a `Playing` that hands over all of it at the end.

  Args:
    params: Weights of the policy, on the sampler's devices.
    job: Responses or conversations to draw. Those of `job.begun` continue, if `job.enough` is set.
    sample: The jitted sampler.
    tokenizer: The task's tokenizer.
    rules: Rules of conversations; None for responses of a single turn.
    **placing: Arguments of `dispatch`: the mesh, the buckets of prompts and the pictures.
  """

  def __init__(
    self, params: Params, job: Job, *, sample: SampleFn, tokenizer: Tokenizer, rules: Rules | None, **placing: Any
  ):
    self._tokenizer, self._rules, self._conversations, self._ask = tokenizer, rules, None, None
    ask = partial(dispatch, sample, params, job.examples, job.key, tokenizer=tokenizer, **placing)
    if rules is None:
      self._drawn = ask(requests=None if job.enough is None else continued(job))
    else:
      self._ask = ask  # It holds the weights, which are freed otherwise.
      self._conversations = begin_conversations(job.examples, rules, group_size=job.group_size, max_new_tokens=job.draws.max_new_tokens)
      self._drawn = ask(requests=turn_requests(self._conversations, rules))

  def __iter__(self) -> Iterator[list[Conversation]]:
    """Yields the batch, and before that an empty list for each further turn of conversations."""
    drawn = hosts.to_host(self._drawn)
    if self._conversations is None:
      yield _responses(drawn, self._tokenizer)
      return
    while len((conversations := take_turn(self._conversations, drawn, self._rules, self._tokenizer)).unfinished):
      self._conversations, self._drawn = conversations, self._ask(requests=turn_requests(conversations, self._rules))
      yield []
      drawn = hosts.to_host(self._drawn)
    prompts = _prompts(drawn)
    yield [conversation._replace(prompt=prompts[i], routes=_routes(drawn, i)) for i, conversation in enumerate(conversations.finished())]

  def wait(self) -> None:
    """Returns at once: new weights need not wait for what was dispatched with others."""

  def close(self) -> None:
    """Lets the sweep end by itself: a dispatched program cannot be given up."""


class SweepQueue:
  """The batches of a run that are drawn by sweeps, each with the weights that it was begun with.

  It has the methods of a `DrawingQueue`, whose players get the weights in place of an engine.
  """

  waits = joins = False

  def __init__(self):
    self._params: Params | None = None

  def publish(self, params: Params, version: int, *, between: Callable[[], None] = lambda: None) -> None:
    """Gives the batches that begin from now on new weights."""
    del version, between
    self._params = params

  def begin(self, play: PlayFn, job: Job, step: int, draw: int = 0) -> Playing:
    """Begins the rollouts of a step with the weights that were published last."""
    del step, draw
    playing, self._params = play(self._params, job), None  # They may be donated now.
    return playing

  def play(self, play: PlayFn, job: Job, params: Params, version: int) -> Playing:
    """Begins what is no training batch."""
    del version
    return play(params, job)

  def take(self, gathered: Gathered, step: int, draw: int = 0) -> Gathered:
    """Returns a complete batch as it is."""
    del step, draw
    return gathered

  def metrics(self) -> dict[str, float]:
    """Returns no measures."""
    return {}

  def __enter__(self) -> "SweepQueue":
    """Returns itself."""
    return self

  def __exit__(self, *error: Any) -> None:
    """Does nothing: sweeps end by themselves."""


def continued(job: Job) -> Requests:
  """Returns the sampler's requests for a batch that ends once enough groups are complete.

  They have the same shapes in every step.
  """
  partial = no_partial(len(job.seeds), job.draws.max_new_tokens, job.draws.routes)
  for row, conversation in enumerate(job.begun):
    size = partial.lengths[row] = len(conversation.tokens)
    partial.reasons[row] = conversation.reason
    for name in ("tokens", "logprobs", "raw_logprobs"):
      getattr(partial, name)[row, :size] = getattr(conversation, name)
    if partial.routing is not None and size:
      # Those of the token before each one.
      own = conversation.routes[max(len(conversation.prompt) - 1, 0) :][:size]
      partial.routing[row, : len(own)] = own
  return Requests(partial=partial, enough_groups=np.int32(job.enough))


def _responses(drawn: Rollouts, tokenizer: Tokenizer) -> list[Conversation]:
  """Returns the responses of a sweep, as views of its arrays."""
  responses, prompts = [], _prompts(drawn)
  for i, (mask, reason) in enumerate(zip(drawn.mask, drawn.reasons, strict=True)):
    here = slice(int(mask.sum()))
    tokens, logprobs, text = drawn.tokens[i, here], drawn.logprobs[i, here], tokenizer.decode(drawn.tokens[i, here].tolist())
    own = dict(text=text, raw_logprobs=drawn.raw_logprobs[i, here], routes=_routes(drawn, i))
    responses.append(Conversation(i, prompts[i], tokens, logprobs, mask[here], (), StopReason(int(reason)), **own))
  return responses


def _prompts(drawn: Rollouts) -> list[np.ndarray]:
  """Returns the ids of each sequence's prompt."""
  return [ids[mask] for ids, mask in zip(drawn.prompts, drawn.prompt_mask, strict=True)]


def _routes(drawn: Rollouts, row: int) -> np.ndarray | None:
  """Returns the routes of a sequence's prompt and response; None if not recorded."""
  if drawn.routing is None:
    return None
  begin = drawn.prompts.shape[1] - int(drawn.prompt_mask[row].sum())
  return drawn.routing[row, begin : drawn.prompts.shape[1] + int(drawn.mask[row].sum())]
