"""Responses of a single turn over the decoding engine, each a request of its own."""

from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

from jaxrl_llm.decoding.engine.requests import Engine
from jaxrl_llm.rollouts.drafts import Draft, Drafts
from jaxrl_llm.rollouts.jobs import Conversation, Job
from jaxrl_llm.tasks.image_prompts import prompt_ids
from jaxrl_llm.text_types import Tokenizer


class Singles:
  """A batch of responses that are being drawn: a `Playing`, begun at once.

  Args:
    engine: Engine that draws them.
    job: Prompts and settings; all its responses are begun together.
    tokenizer: The task's tokenizer.
  """

  def __init__(self, engine: Engine, job: Job, *, tokenizer: Tokenizer):
    self._job, self._tokenizer, self._drafts = job, tokenizer, Drafts(engine, job)
    prompts = [prompt_ids(example, tokenizer) for example in job.examples]
    for draft in self._drafts.all:
      draft.prompt = prompts[draft.sequence // job.group_size]
      if (handle := self._drafts.ask(draft, job.draws.max_new_tokens)) is not None:
        handle.completion.add_done_callback(partial(self._take, draft))

  def _take(self, draft: Draft, future: Future) -> None:
    """Hands a response over, in the thread of the engine."""
    try:
      if (reason := self._drafts.take(draft, future)) is not None:
        self._drafts.end(draft, reason, self._tokenizer.decode(tuple(draft.tokens)))
    except BaseException as error:  # The caller must not wait for ever.
      self._drafts.fail(error)

  def __iter__(self) -> Iterator[list[Conversation]]:
    return iter(self._drafts)

  def wait(self) -> None:
    """Waits until nothing is drawn any more."""
    self._drafts.over.wait()

  def close(self) -> None:
    """Gives up the responses that have not finished."""
    self._drafts.close()
