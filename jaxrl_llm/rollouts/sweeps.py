"""Batches that the sampler draws, all responses in one sweep.

A sweep is one program over any mesh, in all processes of a run. It is dispatched at once, with the
weights that are there at that time, and copied to the host when a caller waits for it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.decoding.sampler import Requests, SampleFn, no_partial
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices.mesh import place_rows
from jaxrl_llm.rollouts.arrivals import Gathered
from jaxrl_llm.rollouts.gallery import Gallery
from jaxrl_llm.rollouts.jobs import Conversation, Job, PlayFn, Playing, turn_seed
from jaxrl_llm.tasks.pipeline import encode_prompts
from jaxrl_llm.text_types import Tokenizer
from jaxrl_llm.types import Params, Rollouts, StopReason


class Sweep:
  """A batch that the sampler draws: a `Playing` that hands over all of it at the end.

  Args:
    params: Weights of the policy, on the sampler's devices.
    job: Responses to draw. Those of `job.begun` continue, if `job.enough` is set.
    sample: The jitted sampler.
    tokenizer: The task's tokenizer.
    **placing: The sampler's mesh, the buckets of prompts and the pictures.
  """

  def __init__(self, params: Params, job: Job, *, sample: SampleFn, tokenizer: Tokenizer, **placing: Any):
    self._tokenizer, self._drawn = tokenizer, _dispatch(sample, params, job, tokenizer=tokenizer, **placing)

  def __iter__(self) -> Iterator[list[Conversation]]:
    """Yields the batch."""
    yield _responses(hosts.to_host(self._drawn), self._tokenizer)

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

  def begin(self, play: PlayFn, job: Job, step: int | None = None, draw: int = 0) -> Playing:
    """Begins a batch with the weights that were published last, which it takes."""
    del step, draw
    playing, self._params = play(self._params, job), None  # They may be donated now.
    return playing

  def order(self, step: int) -> tuple[int, ...]:
    """Returns no groups: no schedule repeats sweeps."""
    del step
    return ()

  def take(self, gathered: Gathered, step: int, draw: int = 0, groups: Sequence[int] = ()) -> tuple[Gathered, dict[str, float]]:
    """Returns a complete batch as it is, and no measures."""
    del step, draw, groups
    return gathered, {}

  def __enter__(self) -> "SweepQueue":
    """Returns itself."""
    return self

  def __exit__(self, *error: Any) -> None:
    """Does nothing: sweeps end by themselves."""


def _dispatch(
  sample: SampleFn, params: Params, job: Job, *, mesh: Mesh, tokenizer: Tokenizer, prompt_buckets: Sequence[int],
  gallery: Gallery | None = None,
) -> Rollouts:  # fmt: skip
  """Dispatches a sweep over all prompts of a batch, and returns its rollouts on the devices.

  Args:
    sample: The jitted sampler.
    params: Weights of the policy, on the sampler's devices.
    job: The batch; the mesh must divide the number of its prompts.
    mesh: The sampler's mesh, over which the rows of the prompts are split.
    tokenizer: The task's tokenizer.
    prompt_buckets: Numbers of prompt slots to choose from.
    gallery: Pictures of the problems; None if there are none.
  """
  prompts = encode_prompts(job.examples, tokenizer, buckets=prompt_buckets, pictures=gallery and gallery.settings)
  shown = () if gallery is None else (place_rows(mesh, gallery.shown(job.pictures, prompts[1])),)
  seeds = np.array([turn_seed(seed, 0) for seed in job.seeds], "<u8").view("<u4").reshape(-1, 2)
  requests = (Requests() if job.enough is None else continued(job))._replace(seeds=seeds)
  # They belong to no sequence.
  alone = {name: getattr(requests, name) for name in ("max_steps", "enough_groups")}
  requests = place_rows(mesh, requests._replace(max_steps=None, enough_groups=None))._replace(**alone)
  return sample(params, *place_rows(mesh, prompts), requests, *shown)


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
  responses, width, decode = [], drawn.prompts.shape[1], tokenizer.decode
  for i, (prompt, mask, reason) in enumerate(zip(drawn.prompt_mask, drawn.mask, drawn.reasons, strict=True)):
    here = slice(size := int(mask.sum()))
    tokens, logprobs = drawn.tokens[i, here], drawn.logprobs[i, here]
    routes = None if drawn.routing is None else drawn.routing[i, width - int(prompt.sum()) : width + size]
    own = dict(text=decode, raw_logprobs=drawn.raw_logprobs[i, here], routes=routes)
    responses.append(Conversation(i, drawn.prompts[i][prompt], tokens, logprobs, mask[here], (), StopReason(int(reason)), **own))
  return responses
