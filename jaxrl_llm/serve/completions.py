"""Completions for a client's call: its requests at the engine, and its answer as tokens arrive."""

import asyncio
import dataclasses
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from jaxrl_llm.decoding.engine.requests import Decoded, Engine, GrammarError, Handle, Piece, QueueFull
from jaxrl_llm.messages import one_line
from jaxrl_llm.serve import answers
from jaxrl_llm.serve.calls import Call, Served
from jaxrl_llm.serve.exchange import Gone, encode, start
from jaxrl_llm.serve.refusals import Refusal, broken, busy, ending
from jaxrl_llm.serve.text import Spelling, TextStream

_EVENTS = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-store"), ("x-content-type-options", "nosniff"))
_GONE, _ENDING = object(), object()


@dataclasses.dataclass
class State:
  """What the calls of an application share.

  Attributes:
    failure: Failure of the engine; "" if its last completion went well.
    drawing: Queues of events of the calls that are answered.
  """

  failure: str = ""
  drawing: set[asyncio.Queue] = dataclasses.field(default_factory=set)

  def end(self) -> None:
    """Ends the calls that are answered, in the thread of the event loop."""
    for events in self.drawing:
      events.put_nowait((0, _ENDING))


async def draw(
  engine: Engine,
  call: Call,
  pool: ThreadPoolExecutor,
  receive: Callable[..., Any],
  answer: Callable[[asyncio.Queue], Awaitable[None]],
  state: State,
) -> None:
  """Submits a call's requests, answers from their events, and leaves none of them open."""
  events: asyncio.Queue = asyncio.Queue()
  loop = asyncio.get_running_loop()

  def post(*event: Any) -> None:
    try:
      loop.call_soon_threadsafe(events.put_nowait, event)
    except RuntimeError:
      return  # The service has ended, and with it the loop.

  async def watch() -> None:
    while (await receive())["type"] != "http.disconnect":
      continue
    events.put_nowait((0, _GONE))

  watching = loop.create_task(watch())
  state.drawing.add(events)
  accepted = pool.submit(_submit, engine, call, post)
  try:
    try:
      await asyncio.wrap_future(accepted)
    except QueueFull as error:
      raise busy("the queue is full, expected fewer open requests; try again") from error
    except ValueError as error:
      raise Refusal(400, one_line(error, typed=False, limit=500)) from error
    except Exception as error:
      raise _failed(error, state) from error
    await answer(events)
  finally:
    watching.cancel()
    state.drawing.discard(events)
    accepted.add_done_callback(_abort)


def _submit(engine: Engine, call: Call, post: Callable[..., None]) -> list[Handle]:
  """Submits all requests of a call, or none."""
  handles = []
  try:
    for i, request in enumerate(call.requests):
      handles.append(engine.submit(request, partial(post, i) if call.stream else None))
      handles[-1].completion.add_done_callback(partial(post, i))
  except BaseException:
    for handle in handles:
      handle.abort()
    raise
  return handles


def _abort(accepted: "Future[list[Handle]]") -> None:
  if accepted.cancelled() or accepted.exception() is not None:
    return
  for handle in accepted.result():
    if not handle.completion.done():
      handle.abort()


def _opened(index: int, event: Any, state: State) -> tuple[int, Piece | Decoded]:
  """Returns the number of a choice, and its new tokens or its completion.

  Raises:
    Gone: If the client has left.
    Refusal: If the engine has failed.
  """
  if event is _GONE:
    raise Gone
  if event is _ENDING:
    raise ending()
  if isinstance(event, Future):
    try:
      event = event.result()
    except GrammarError as error:  # Of this call alone: its schema takes too much time or memory.
      raise Refusal(400, one_line(error, typed=False, limit=500), code="grammar_failed") from error
    except (Exception, CancelledError) as error:
      raise _failed(error, state) from error
    if event.reason == "aborted":
      raise ending()
    state.failure = ""
  return index, event


def _failed(error: BaseException, state: State) -> Refusal:
  """Notes a failure of the engine, prints it once, and returns the refusal."""
  text = one_line(error, limit=1000)
  if text != state.failure:
    state.failure = text
    print(f"error: the engine cannot decode: {text}", file=sys.stderr, flush=True)
  return broken()


async def whole(call: Call, events: asyncio.Queue, state: State) -> list[Decoded]:
  """Waits for all completions of a call."""
  completions: dict[int, Decoded] = {}
  while len(completions) < len(call.requests):
    index, event = _opened(*await events.get(), state)
    completions[index] = event._replace(tokens=[], logprobs=[], scores=None, reason="length", parts=()) if call.is_cut else event
  return [completions[i] for i in range(len(call.requests))]


def _text_stream(call: Call, index: int, spelling: Spelling) -> TextStream:
  request = call.requests[index]
  return TextStream(spelling, stops=request.stops, stop_ids=request.stop_ids, skip_special=call.skip_special)


def text_of(call: Call, index: int, spelling: Spelling, completion: Decoded) -> tuple[str, str | None]:
  """Returns the text of a whole completion, and the stop string that ended it or None.

  With `echo`, that of the prompt comes first.
  """
  before = ""
  if call.echo:
    prompt = TextStream(spelling, skip_special=call.skip_special)
    before = prompt.feed(call.requests[index].tokens) + prompt.finish()
  stream = _text_stream(call, index, spelling)
  return before + stream.feed(completion.tokens) + stream.finish(), stream.stopped_by


def _joined(pieces: Sequence[Piece]) -> Piece:
  scores = [x for piece in pieces for x in piece.scores or ()]
  return Piece([x for piece in pieces for x in piece.tokens], [x for piece in pieces for x in piece.logprobs], scores=scores or None)


async def stream(send: Callable[..., Any], call: Call, events: asyncio.Queue, served: Served, spelling: Spelling, state: State) -> None:
  """Sends the completions of a call as server-sent events while they are drawn."""
  shared = answers.envelope(call, call.form.chunk, served)
  streams = [_text_stream(call, i, spelling) for i in range(len(call.requests))]
  sent, lengths = [0] * len(call.requests), [0] * len(call.requests)
  held = [""] * len(call.requests)
  completions: dict[int, Decoded] = {}
  is_open, header = False, ()

  def with_usage(value: dict[str, Any], drawn: int) -> dict[str, Any]:
    return value | ({"usage": answers.usage_so_far(call, drawn)} if call.running_usage else {})

  async def write(*values: Any) -> None:
    nonlocal is_open
    if not is_open:
      is_open = True
      await send(start(200, (*_EVENTS, *header)))
      # Before any token; `sent` already counts those of the values.
      values = (*(with_usage(first, 0) for first in answers.first_chunks(call, shared)), *values)
    lines = b"".join(b"data: " + (value if isinstance(value, bytes) else encode(value)) + b"\n\n" for value in values)
    await send({"type": "http.response.body", "body": lines, "more_body": True})

  def chunk(index: int, piece: Piece, completion: Decoded | None) -> dict[str, Any]:
    text = streams[index].feed(piece.tokens) + ("" if completion is None else streams[index].finish())
    if call.tools:  # A call of a tool is known when it is whole.
      held[index] += text
      text = held[index] if completion is not None else ""
    options = dict(index=index, text=text, piece=piece, offset=lengths[index], is_first=not sent[index])
    lengths[index] += len(text)
    sent[index] += len(piece.tokens)
    value = answers.chunk(call, served, spelling, shared, completion=completion, string=streams[index].stopped_by, **options)
    return with_usage(value, sum(sent))

  try:
    while len(completions) < len(call.requests):
      arrived = [_opened(*await events.get(), state)]
      # A client that reads slowly gets fewer and larger chunks.
      while not events.empty():
        arrived.append(_opened(*events.get_nowait(), state))
      pieces: dict[int, list[Piece]] = {}
      for index, event in arrived:
        if index in completions:
          continue
        if isinstance(event, Piece):
          pieces.setdefault(index, []).append(event)
        else:
          completions[index] = event
          # What the pieces did not hold.
          drawn = sent[index] + sum(len(piece.tokens) for piece in pieces.get(index, []))
          scores = None if event.scores is None else event.scores[drawn:]
          pieces.setdefault(index, []).append(Piece(event.tokens[drawn:], event.logprobs[drawn:], scores=scores))
      if not is_open:
        header = answers.version_header(event.version for _, event in arrived if event.version is not None)
      await write(*(chunk(i, _joined(own), completions.get(i)) for i, own in pieces.items()))
    if call.usage:
      ordered = [completions[i] for i in range(len(call.requests))]
      await write({**shared, "choices": [], "usage": answers.usage(call, served, ordered)})
    await write(b"[DONE]")
  except Refusal as refusal:
    if not is_open:
      raise
    await write(refusal.body, b"[DONE]")
  await send({"type": "http.response.body", "body": b"", "more_body": False})
