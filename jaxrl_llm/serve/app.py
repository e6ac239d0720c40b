"""The service's routes as an ASGI application: limits, refusals, and answers as tokens arrive."""

import asyncio
import hmac
import re
import sys
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from jaxrl_llm.decoding.engine.requests import Counting, Decoded, Engine
from jaxrl_llm.messages import one_line, shown
from jaxrl_llm.serve import answers, calls, metrics
from jaxrl_llm.serve import completions as completions_lib
from jaxrl_llm.serve.calls import Call, Served
from jaxrl_llm.serve.completions import State
from jaxrl_llm.serve.exchange import Arriving, Gone, header, read_body, refuse, reply, send_bytes
from jaxrl_llm.serve.refusals import Refusal, broken, busy, hint
from jaxrl_llm.serve.text import make_spelling

_MIB = 2**20
_BYTES_PER_TOKEN = 16
_MODELS = "/v1/models/"
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class Rules(NamedTuple):
  """What clients may do.

  Attributes:
    api_key: Key that every call must carry; None for none.
    hosts: Names under which browsers may reach a service without a key, so that no page of another
      site can read its answers.
    body_seconds: Time for the body of a request to arrive, in seconds.
    reading: Largest number of bodies that arrive at the same time, and of those that are parsed.
  """

  api_key: str | None = None
  hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")
  body_seconds: float = 30.0
  reading: int = 256


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


def make_app(engine: Engine, served: Served, *, page: str, rules: Rules, created: int) -> App:
  """Makes the application.

  Args:
    engine: Engine that draws.
    served: Checkpoint.
    page: HTML of the page at "/".
    rules: What clients may do.
    created: Time of the checkpoint, in seconds since 1970.
  """
  spelling = make_spelling(served.tokenizer)
  # Parsing, templates and tokenizers, which must not hold up other clients.
  pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="serve")
  most_bytes = _MIB + _BYTES_PER_TOKEN * served.limits.context
  counts = {"open": 0, "parsing": 0}
  state, arriving = State(), Arriving(rules.reading)

  def card() -> dict[str, Any]:
    values = {"id": served.name, "object": "model", "created": created, "owned_by": "jaxrl_llm", "max_model_len": served.limits.context}
    return values | {"has_chat_template": served.chat_template is not None}

  async def models(scope: Any, receive: Any, send: Any) -> None:
    await reply(send, 200, {"object": "list", "data": [card()]})

  async def model(scope: Any, receive: Any, send: Any) -> None:
    calls.check_model(scope["path"].removeprefix(_MODELS), served)
    await reply(send, 200, card())

  async def health(scope: Any, receive: Any, send: Any) -> None:
    if state.failure:
      raise broken()
    await reply(send, 200, {"status": "ok", "open_requests": counts["open"]})

  async def numbers(scope: Any, receive: Any, send: Any) -> None:
    if not isinstance(engine, Counting):
      raise Refusal(501, "/metrics: the engine counts nothing", code="not_supported")
    text = metrics.exposition(engine.counts(), model=served.name, tells_cached=served.tells_cached)
    await send_bytes(send, 200, text.encode(), [("content-type", metrics.CONTENT_TYPE), ("cache-control", "no-store")])

  async def front(scope: Any, receive: Any, send: Any) -> None:
    headers = [("content-type", "text/html; charset=utf-8"), ("cache-control", "no-store"), ("x-content-type-options", "nosniff")]
    # The page states its own policy, with the hashes of its script and style.
    headers += [("x-frame-options", "DENY"), ("referrer-policy", "no-referrer")]
    await send_bytes(send, 200, page.encode(), headers)

  def read(parse: Callable[..., Any], body: bytes) -> Any:
    return parse(calls.parse_json(body), served)

  async def parsed(parse: Callable[..., Any], scope: Any, receive: Any) -> Any:
    """Reads the body of a request, and from it what the client asks for."""
    if header(scope, b"content-type").split(b";")[0].strip().lower() != b"application/json":
      raise Refusal(415, "content-type: expected application/json", code="unsupported_media_type")
    body = await read_body(scope, receive, most_bytes, rules.body_seconds, arriving)
    if counts["parsing"] >= rules.reading:
      raise busy(f"{rules.reading} requests are being read, expected fewer; try again")
    counts["parsing"] += 1
    try:
      return await asyncio.get_running_loop().run_in_executor(pool, read, parse, body)
    finally:
      counts["parsing"] -= 1

  async def tokenize(scope: Any, receive: Any, send: Any) -> None:
    ids, names = await parsed(lambda values, served: (calls.tokenize(values, served), values.get("return_token_strs")), scope, receive)
    texts = [spelling.bytes_of(i).decode("utf-8", "replace") for i in ids] if names else None
    await reply(send, 200, {"count": len(ids), "max_model_len": served.limits.context, "tokens": ids, "token_strs": texts})

  async def detokenize(scope: Any, receive: Any, send: Any) -> None:
    await reply(send, 200, {"prompt": await parsed(calls.detokenize, scope, receive)})

  async def post(parse: Callable[..., Call], answer: Callable[..., Awaitable[None]], scope: Any, receive: Any, send: Any) -> None:
    call = await parsed(parse, scope, receive)
    call = call._replace(request_id=call.request_id or scope["request_id"])
    await completions_lib.draw(engine, call, pool, receive, partial(answer, send, call), state)

  def texts_of(call: Call, completions: Sequence[Decoded]) -> list[tuple[str, str | None]]:
    return [completions_lib.text_of(call, i, spelling, completion) for i, completion in enumerate(completions)]

  def header_of(completions: Sequence[Decoded]) -> tuple[tuple[str, str], ...]:
    return answers.version_header(version for completion in completions for version, _ in answers.versions(completion))

  async def answer_generate(send: Any, call: Call, events: asyncio.Queue) -> None:
    completions = await completions_lib.whole(call, events, state)
    strings = [string for _, string in texts_of(call, completions)] if call.requests[0].stops else [None] * len(completions)
    await reply(send, 200, answers.generated(call, served, completions, strings), header_of(completions))

  async def answer_openai(send: Any, call: Call, events: asyncio.Queue) -> None:
    if call.stream:
      await completions_lib.stream(send, call, events, served, spelling, state)
      return
    completions = await completions_lib.whole(call, events, state)
    answer = answers.whole(call, served, spelling, completions, texts_of(call, completions))
    await reply(send, 200, answer, header_of(completions))

  routes = {
    ("GET", "/"): front,
    ("GET", "/health"): health,
    ("GET", "/metrics"): numbers,
    ("GET", "/v1/models"): models,
    ("GET", _MODELS): model,
    ("POST", "/inference/v1/generate"): partial(post, calls.generate, answer_generate),
    ("POST", "/v1/chat/completions"): partial(post, calls.chat, answer_openai),
    ("POST", "/detokenize"): detokenize,
    ("POST", "/tokenize"): tokenize,
    ("POST", "/v1/completions"): partial(post, calls.completion, answer_openai),
  }

  async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
      return
    counts["open"] += 1
    is_started = is_read = False
    given = header(scope, b"x-request-id")
    scope = {**scope, "request_id": given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex}

    async def named(message: Any) -> None:
      if message["type"] == "http.response.start":
        message = {**message, "headers": [*message["headers"], (b"x-request-id", scope["request_id"].encode())]}
      await send(message)

    async def sending(message: Any) -> None:
      nonlocal is_started
      is_started = True
      await named(message)

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
      await refuse(refusal, scope, receiving, named, is_read=is_read)
    except Exception as error:
      print(f"error: {shown(scope['path'])}: {one_line(error)}", file=sys.stderr, flush=True)
      # Else the server cuts the connection, so that the client sees an end too early.
      if not is_started:
        failure = Refusal(500, "the service failed on this request; its log says why", kind="server_error")
        await refuse(failure, scope, receiving, named, is_read=is_read)
    finally:
      counts["open"] -= 1

  return App(app, lambda: counts["open"], state.end, lambda: pool.shutdown(wait=False, cancel_futures=True))


def _route(routes: Mapping[tuple[str, str], Callable[..., Any]], rules: Rules, scope: Any) -> Callable[..., Any]:
  """Returns the handler of a request.

  Raises:
    Refusal: If the client may not ask, or asks for what is not there.
  """
  path, method = scope["path"], "GET" if scope["method"] == "HEAD" else scope["method"]
  if header(scope, b"transfer-encoding") and header(scope, b"content-length"):
    # A proxy may believe the other one, and take what follows for the request of another client.
    raise Refusal(400, "content-length: found with transfer-encoding, expected one of them", code="two_lengths")
  if rules.api_key is None:
    _check_host(header(scope, b"host").decode("latin-1"), rules.hosts)
  elif path not in ("/", "/health"):
    given = header(scope, b"authorization")
    scheme, _, key = given.partition(b" ")
    # In constant time, so that the time of a refusal tells nothing of the key.
    if not hmac.compare_digest(key.strip(b" "), rules.api_key.encode()) or scheme.lower() != b"bearer":
      what = "a wrong API key" if given else "no API key"
      message = f"found {what}, expected the header Authorization: Bearer KEY"
      raise Refusal(401, message, code="invalid_api_key", headers=(("www-authenticate", "Bearer"),))
  path = _MODELS if path.startswith(_MODELS) and path != _MODELS else path
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
