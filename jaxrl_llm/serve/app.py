"""The service's routes as an ASGI application: limits, refusals, and answers as tokens arrive."""

import asyncio
import dataclasses
import hmac
import json
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from jaxrl_llm.messages import one_line, shown
from jaxrl_llm.serve import answers, calls
from jaxrl_llm.serve.answers import CHAT, COMPLETION, Format
from jaxrl_llm.serve.calls import Call, Served
from jaxrl_llm.serve.refusals import Refusal, broken, busy, hint
from jaxrl_llm.serve.requests import Completion, Engine, Handle, Piece, QueueFull
from jaxrl_llm.serve.text import Spelling, TextStream, make_spelling

_MIB = 2**20
_BYTES_PER_TOKEN = 16
_DRAINED_BYTES, _DRAINED_SECONDS = 4 * _MIB, 2.0
_JSON = (("content-type", "application/json"), ("cache-control", "no-store"), ("x-content-type-options", "nosniff"))
_EVENTS = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-store"), ("x-content-type-options", "nosniff"))


class Rules(NamedTuple):
  """What clients may do.

  Attributes:
    api_key: Key that every call must carry; None for none.
    hosts: Names under which browsers may reach a service without a key, so that no page of another
      site can read its answers.
    body_seconds: Time for the body of a request to arrive, in seconds.
    reading: Largest number of requests whose bodies are read at the same time.
  """

  api_key: str | None = None
  hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")
  body_seconds: float = 30.0
  reading: int = 256


@dataclasses.dataclass
class _State:
  """What the calls of an application share.

  Attributes:
    failure: Failure of the engine; "" if its last completion went well.
    drawing: Queues of events of the calls that are answered.
  """

  failure: str = ""
  drawing: set[asyncio.Queue] = dataclasses.field(default_factory=set)


class Gone(Exception):
  """The client has left."""


class App(NamedTuple):
  """The application.

  Attributes:
    asgi: ASGI callable.
    open: Function that returns the number of requests that have begun and not ended.
    end: Function that ends the calls that are answered, in the thread of the event loop.
    close: Function that ends the application's threads.
  """

  asgi: Callable[..., Awaitable[None]]
  open: Callable[[], int]
  end: Callable[[], None]
  close: Callable[[], None]


def make_app(engine: Engine, served: Served, *, page: str = "", rules: Rules | None = None, created: int = 0) -> App:
  """Makes the application.

  Args:
    engine: Engine that draws.
    served: Checkpoint.
    page: HTML of the page at "/".
    rules: What clients may do; None for the defaults.
    created: Time of the checkpoint, in seconds since 1970.
  """
  rules = Rules() if rules is None else rules
  spelling = make_spelling(served.tokenizer)
  # Parsing, templates and tokenizers, which must not hold up other clients.
  pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="serve")
  most_bytes = _MIB + _BYTES_PER_TOKEN * served.limits.context
  counts = {"open": 0, "reading": 0}
  state = _State()

  async def models(scope: Any, receive: Any, send: Any) -> None:
    card = {"id": served.name, "object": "model", "created": created, "owned_by": "jaxrl_llm", "max_model_len": served.limits.context}
    card["has_chat_template"] = served.chat_template is not None
    await reply(send, 200, {"object": "list", "data": [card]})

  async def health(scope: Any, receive: Any, send: Any) -> None:
    if state.failure:
      raise broken()
    await reply(send, 200, {"status": "ok", "open_requests": counts["open"]})

  async def front(scope: Any, receive: Any, send: Any) -> None:
    policy = "default-src 'none'; frame-ancestors 'none'"
    headers = [("content-type", "text/html; charset=utf-8"), ("cache-control", "no-store"), ("x-content-type-options", "nosniff")]
    # The page states its own, longer policy, with the hashes of its script and style.
    headers += [("x-frame-options", "DENY"), ("referrer-policy", "no-referrer"), *([] if page else [("content-security-policy", policy)])]
    await send_bytes(send, 200, page.encode(), headers)

  def read(parse: Callable[..., Call], body: bytes) -> Call:
    return parse(calls.parse_json(body), served)

  async def post(parse: Callable[..., Call], answer: Callable[..., Awaitable[None]], scope: Any, receive: Any, send: Any) -> None:
    if _header(scope, b"content-type").split(b";")[0].strip().lower() != b"application/json":
      raise Refusal(415, "content-type: expected application/json", code="unsupported_media_type")
    if counts["reading"] >= rules.reading:
      raise busy(f"{rules.reading} requests are arriving, expected fewer; try again")
    counts["reading"] += 1
    try:
      body = await read_body(scope, receive, most_bytes, rules.body_seconds)
      call = await asyncio.get_running_loop().run_in_executor(pool, read, parse, body)
    finally:
      counts["reading"] -= 1
    await _draw(engine, call, pool, receive, partial(answer, send, call), state)

  async def answer_generate(send: Any, call: Call, events: asyncio.Queue) -> None:
    await reply(send, 200, answers.generated(call, await _whole(call, events, state)))

  async def answer_openai(form: Format, send: Any, call: Call, events: asyncio.Queue) -> None:
    if call.stream:
      await _stream(send, call, events, form, served, spelling, state)
      return
    completions = await _whole(call, events, state)
    texts = [_text_of(call, i, spelling, completion) for i, completion in enumerate(completions)]
    await reply(send, 200, answers.whole(call, form, served, spelling, completions, texts))

  routes = {
    ("GET", "/"): front,
    ("GET", "/health"): health,
    ("GET", "/v1/models"): models,
    ("POST", "/inference/v1/generate"): partial(post, calls.generate, answer_generate),
    ("POST", "/v1/chat/completions"): partial(post, calls.chat, partial(answer_openai, CHAT)),
    ("POST", "/v1/completions"): partial(post, calls.completion, partial(answer_openai, COMPLETION)),
  }

  async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
      return
    counts["open"] += 1
    is_started = is_read = False

    async def sending(message: Any) -> None:
      nonlocal is_started
      is_started = True
      await send(message)

    async def receiving() -> Any:
      nonlocal is_read
      message = await receive()
      is_read = is_read or not message.get("more_body", False)
      return message

    try:
      await _route(routes, rules, scope)(scope, receiving, sending)
    except Gone:
      return
    except Refusal as refusal:
      await refuse(refusal, scope, receiving, send, is_read=is_read)
    except Exception as error:
      print(f"error: {shown(scope['path'])}: {one_line(error)}", file=sys.stderr, flush=True)
      # Else the server cuts the connection, so that the client sees an end too early.
      if not is_started:
        failure = Refusal(500, "the service failed on this request; its log says why", kind="server_error")
        await refuse(failure, scope, receiving, send, is_read=is_read)
    finally:
      counts["open"] -= 1

  def end() -> None:
    for events in state.drawing:
      events.put_nowait((0, _ENDING))

  return App(app, lambda: counts["open"], end, lambda: pool.shutdown(wait=False, cancel_futures=True))


def _route(routes: Mapping[tuple[str, str], Callable[..., Any]], rules: Rules, scope: Any) -> Callable[..., Any]:
  """Returns the handler of a request.

  Raises:
    Refusal: If the client may not ask, or asks for what is not there.
  """
  path, method = scope["path"], "GET" if scope["method"] == "HEAD" else scope["method"]
  if rules.api_key is None:
    _check_host(_header(scope, b"host").decode("latin-1"), rules.hosts)
  elif path not in ("/", "/health"):
    given = _header(scope, b"authorization")
    # In constant time, so that the time of a refusal tells nothing of the key.
    if not hmac.compare_digest(given, b"Bearer " + rules.api_key.encode()):
      what = "a wrong API key" if given else "no API key"
      message = f"found {what}, expected the header Authorization: Bearer KEY"
      raise Refusal(401, message, code="invalid_api_key", headers=(("www-authenticate", "Bearer"),))
  if handler := routes.get((method, path)):
    return handler
  if allowed := [name for name, known in routes if known == path]:
    raise Refusal(405, f"{path}: found {method[:16]}, expected {allowed[0]}", headers=(("allow", ", ".join(allowed)),))
  raise Refusal(404, f"no such path{hint(path, [known for _, known in routes])}", code="not_found")


def _check_host(host: str, hosts: Collection[str]) -> None:
  name = host if host.endswith("]") else host.rpartition(":")[0] or host
  if name.lower() not in hosts:
    message = f"host: found a name that is not this machine's own, expected one of {', '.join(hosts)}; start the service with an API key"
    raise Refusal(403, message, code="unknown_host")


def _header(scope: Any, name: bytes) -> bytes:
  return next((value for key, value in scope["headers"] if key == name), b"")


async def read_body(scope: Any, receive: Callable[..., Any], most: int, seconds: float) -> bytes:
  """Reads the body of a request.

  Args:
    scope: ASGI scope.
    receive: ASGI callable.
    most: Largest number of bytes.
    seconds: Time for the whole body to arrive.

  Raises:
    Refusal: If the body is too large or too slow.
    Gone: If the client leaves.
  """
  too_large = Refusal(413, f"the body has more than {most:,} bytes, the limit of the service", code="body_too_large")
  declared = _header(scope, b"content-length")
  if declared.isdigit() and (len(declared) > 18 or int(declared) > most):
    raise too_large
  parts, size = [], 0
  try:
    async with asyncio.timeout(seconds):
      while True:
        message = await receive()
        if message["type"] == "http.disconnect":
          raise Gone
        parts.append(message["body"])
        size += len(message["body"])
        if size > most:
          raise too_large
        if not message["more_body"]:
          return b"".join(parts)
  except TimeoutError as error:
    raise Refusal(408, f"the body did not arrive within {seconds:g} seconds", code="timeout") from error


async def refuse(refusal: Refusal, scope: Any, receive: Callable[..., Any], send: Callable[..., Any], *, is_read: bool) -> None:
  """Answers with a refusal.

  Unless the body has been read, some of it is thrown away first, because a client that is still
  sending would see a broken connection in place of the answer. The connection then ends.
  """
  headers = list(refusal.headers)
  if not is_read:
    headers.append(("connection", "close"))
    if refusal.status != 408 and scope["method"] == "POST" and not _header(scope, b"expect"):
      await _drain(receive)
  await reply(send, refusal.status, refusal.body, headers)


async def _drain(receive: Callable[..., Any]) -> None:
  size = 0
  try:
    async with asyncio.timeout(_DRAINED_SECONDS):
      while size < _DRAINED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect" or not message["more_body"]:
          return
        size += len(message["body"])
  except TimeoutError:
    return


async def reply(send: Callable[..., Any], status: int, value: Any, headers: Sequence[tuple[str, str]] = ()) -> None:
  """Sends a JSON answer."""
  await send_bytes(send, status, _encode(value), [*_JSON, *headers])


async def send_bytes(send: Callable[..., Any], status: int, body: bytes, headers: Sequence[tuple[str, str]]) -> None:
  """Sends a whole answer."""
  await send(_start(status, [*headers, ("content-length", str(len(body)))]))
  await send({"type": "http.response.body", "body": body, "more_body": False})


def _start(status: int, headers: Sequence[tuple[str, str]]) -> dict[str, Any]:
  return {"type": "http.response.start", "status": status, "headers": [(key.encode(), value.encode()) for key, value in headers]}


def _encode(value: Any) -> bytes:
  # ASCII, since a client may have sent a lone surrogate, which UTF-8 does not have.
  return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


_GONE, _ENDING = object(), object()


async def _draw(
  engine: Engine,
  call: Call,
  pool: ThreadPoolExecutor,
  receive: Callable[..., Any],
  answer: Callable[[asyncio.Queue], Awaitable[None]],
  state: _State,
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


async def _next(events: asyncio.Queue, state: _State) -> tuple[int, Piece | Completion]:
  """Returns the next event: the number of a choice, and its new tokens or its completion.

  Raises:
    Gone: If the client has left.
    Refusal: If the engine has failed.
  """
  return _opened(*await events.get(), state)


def _opened(index: int, event: Any, state: _State) -> tuple[int, Piece | Completion]:
  if event is _GONE:
    raise Gone
  if event is _ENDING:
    raise broken("the service is ending")
  if isinstance(event, Future):
    try:
      event = event.result()
    except (Exception, CancelledError) as error:
      raise _failed(error, state) from error
    if event.reason == "aborted":
      raise broken("the service is ending")
    state.failure = ""
  return index, event


def _failed(error: BaseException, state: _State) -> Refusal:
  """Notes a failure of the engine, prints it once, and returns the refusal."""
  text = one_line(error, limit=1000)
  if text != state.failure:
    state.failure = text
    print(f"error: the engine cannot decode: {text}", file=sys.stderr, flush=True)
  return broken()


async def _whole(call: Call, events: asyncio.Queue, state: _State) -> list[Completion]:
  """Waits for all completions of a call."""
  completions: dict[int, Completion] = {}
  while len(completions) < len(call.requests):
    index, event = await _next(events, state)
    completions[index] = event
  return [completions[i] for i in range(len(call.requests))]


def _text_stream(call: Call, index: int, spelling: Spelling) -> TextStream:
  request = call.requests[index]
  return TextStream(spelling, stops=request.stops, stop_ids=request.stop_ids, skip_special=call.skip_special)


def _text_of(call: Call, index: int, spelling: Spelling, completion: Completion) -> str:
  stream = _text_stream(call, index, spelling)
  return stream.feed(completion.tokens) + stream.finish()


async def _stream(
  send: Callable[..., Any],
  call: Call,
  events: asyncio.Queue,
  form: Format,
  served: Served,
  spelling: Spelling,
  state: _State,
) -> None:
  """Sends the completions of a call as server-sent events while they are drawn."""
  shared = answers.envelope(form.prefix, form.chunk, served)
  streams = [_text_stream(call, i, spelling) for i in range(len(call.requests))]
  sent, lengths = [0] * len(call.requests), [0] * len(call.requests)
  completions: dict[int, Completion] = {}
  is_open = False

  async def write(*values: Any) -> None:
    nonlocal is_open
    if not is_open:
      is_open = True
      await send(_start(200, _EVENTS))
      values = (*answers.first_chunks(call, form, shared), *values)
    lines = b"".join(b"data: " + (value if isinstance(value, bytes) else _encode(value)) + b"\n\n" for value in values)
    await send({"type": "http.response.body", "body": lines, "more_body": True})

  def chunk(index: int, piece: Piece, completion: Completion | None) -> dict[str, Any]:
    text = streams[index].feed(piece.tokens) + ("" if completion is None else streams[index].finish())
    reason = None if completion is None else completion.reason
    options = dict(index=index, text=text, piece=piece, offset=lengths[index], reason=reason, is_first=not sent[index])
    lengths[index] += len(text)
    sent[index] += len(piece.tokens)
    return answers.chunk(call, form, spelling, shared, **options)

  try:
    while len(completions) < len(call.requests):
      arrived = [await _next(events, state)]
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
          pieces.setdefault(index, []).append(Piece(event.tokens[drawn:], event.logprobs[drawn:]))
      joined = {i: Piece([x for p in ps for x in p.tokens], [x for p in ps for x in p.logprobs]) for i, ps in pieces.items()}
      await write(*(chunk(i, piece, completions.get(i)) for i, piece in joined.items()))
    if call.usage:
      ordered = [completions[i] for i in range(len(call.requests))]
      await write({**shared, "choices": [], "usage": answers.usage(call, ordered)})
    await write(b"[DONE]")
  except Refusal as refusal:
    if not is_open:
      raise
    await write(refusal.body, b"[DONE]")
  await send({"type": "http.response.body", "body": b"", "more_body": False})
