"""Responses of a single turn over the decoding engine, each a request of its own."""

import threading
from concurrent.futures import Future

from jaxrl_llm.decoding.engine import requests
from jaxrl_llm.decoding.engine.requests import Engine, Handle
from jaxrl_llm.messages import one_line
from jaxrl_llm.rollouts.playing import Conversation, Job, Player, reason_of, request_of, turn_seed
from jaxrl_llm.tasks.image_prompts import prompt_ids
from jaxrl_llm.text_types import Tokenizer
from jaxrl_llm.types import StopReason


class Singles(Player):
  """A batch of responses that are being drawn: a `Playing`, begun at once.

  Args:
    engine: Engine that draws them.
    job: Prompts and settings; all its responses are begun together.
    tokenizer: The task's tokenizer.
  """

  def __init__(self, engine: Engine, job: Job, *, tokenizer: Tokenizer):
    super().__init__(len(job.seeds))
    self._job, self._tokenizer, self._lock = job, tokenizer, threading.Lock()
    self._num_open, self._is_closed = len(job.seeds), False
    self._handles: list[Handle] = []
    self._prompts = [prompt_ids(example, tokenizer) for example in job.examples]
    for sequence, seed in enumerate(job.seeds):
      own = dict(seed=turn_seed(seed, 0), salt=job.salt, owner=str(sequence))
      handle = engine.submit(request_of(job.draws, self._prompts[sequence // job.group_size], job.draws.max_new_tokens, **own))
      self._handles.append(handle)
      handle.completion.add_done_callback(lambda future, sequence=sequence: self._take(sequence, future))

  def _take(self, sequence: int, future: "Future[requests.Completion]") -> None:
    """Hands a response over, in the thread of the engine."""
    try:
      self._finished.put(self._response(sequence, future.result()))
    except FloatingPointError as error:
      failed, prompt = ("not_finite", f"the policy: {one_line(error)}"), self._prompts[sequence // self._job.group_size]
      self._finished.put(Conversation(sequence, prompt, (), (), (), (), StopReason.ABORTED, failed, text=""))
    except BaseException as error:  # The caller must not wait for ever.
      self._finished.put(error)
      self._over.set()
    with self._lock:
      self._num_open -= 1
      is_last = not self._num_open
    if is_last:
      self._over.set()

  def _response(self, sequence: int, drawn: requests.Completion) -> Conversation:
    if drawn.reason == "aborted" and not self._is_closed:
      raise RuntimeError("the decoding engine was closed while responses were drawn")
    reason = reason_of(drawn, self._job.draws)
    counts = dict(cached_tokens=drawn.cached_tokens, computed_tokens=drawn.computed_tokens)
    routes = None if self._job.draws.routes is None else drawn.routes
    written, text = [True] * len(drawn.tokens), self._tokenizer.decode(tuple(drawn.tokens))
    prompt = self._prompts[sequence // self._job.group_size]
    return Conversation(sequence, prompt, drawn.tokens, drawn.logprobs, written, (), reason, text=text, routes=routes, **counts)

  def close(self) -> None:
    """Gives up the responses that have not finished."""
    self._is_closed = True
    for handle in self._handles:
      handle.abort()
    self._over.set()
