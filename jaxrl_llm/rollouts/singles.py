"""Responses of a single turn over the decoding engine, each a request of its own."""

from concurrent.futures import Future
from functools import partial

from jaxrl_llm.decoding.engine.requests import Engine
from jaxrl_llm.pretrained.pictures import PictureConfig
from jaxrl_llm.rollouts.drafts import Draft, Drafts
from jaxrl_llm.rollouts.jobs import Job
from jaxrl_llm.tasks.image_prompts import prompt_ids
from jaxrl_llm.text_types import Tokenizer


def play_singles(engine: Engine, job: Job, *, tokenizer: Tokenizer, pictures: PictureConfig | None = None) -> Drafts:
  """Begins all responses of a batch.

  Args:
    engine: Engine that draws them.
    job: Prompts and settings.
    tokenizer: The task's tokenizer.
    pictures: Settings of the checkpoint's pictures; None for a policy that reads text alone.
  """
  drafts, prompts = Drafts(engine, job), [prompt_ids(example, tokenizer, pictures) for example in job.examples]

  def take(draft: Draft, future: Future) -> None:
    """Hands a response over, in the thread of the engine."""
    try:
      if (reason := drafts.take(draft, future)) is not None:
        drafts.end(draft, reason, tokenizer.decode(tuple(draft.tokens)))
    except BaseException as error:  # The caller must not wait for ever.
      drafts.fail(error)

  for draft in drafts.all:
    draft.prompt = prompts[draft.sequence // job.group_size]
    if (handle := drafts.ask(draft, job.draws.max_new_tokens)) is not None:
      handle.completion.add_done_callback(partial(take, draft))
  return drafts
