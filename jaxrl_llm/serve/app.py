"""The service's routes as an ASGI application: limits, refusals, and answers as tokens arrive."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from jaxrl_llm.decoding.engine.requests import Counting, Decoded, Engine
from jaxrl_llm.serve import answers, calls, metrics
from jaxrl_llm.serve import completions as completions_lib
from jaxrl_llm.serve.calls import Call, Served
from jaxrl_llm.serve.completions import State
from jaxrl_llm.serve.exchange import reply, send_bytes
from jaxrl_llm.serve.refusals import Refusal, broken
from jaxrl_llm.serve.shell import App, Intake, Rules, make_asgi
from jaxrl_llm.serve.text import make_spelling

_MIB = 2**20
_BYTES_PER_TOKEN = 16
_MODELS = "/v1/models/"


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
  intake = Intake(rules, _MIB + _BYTES_PER_TOKEN * served.limits.context)
  counts, state = {"open": 0}, State()

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

  async def parsed(parse: Callable[..., Any], scope: Any, receive: Any) -> Any:
    return await intake.parsed(lambda body: parse(calls.parse_json(body), served), scope, receive)

  async def tokenize(scope: Any, receive: Any, send: Any) -> None:
    ids, names = await parsed(lambda values, served: (calls.tokenize(values, served), values.get("return_token_strs")), scope, receive)
    texts = [spelling.bytes_of(i).decode("utf-8", "replace") for i in ids] if names else None
    await reply(send, 200, {"count": len(ids), "max_model_len": served.limits.context, "tokens": ids, "token_strs": texts})

  async def detokenize(scope: Any, receive: Any, send: Any) -> None:
    await reply(send, 200, {"prompt": await parsed(calls.detokenize, scope, receive)})

  async def post(parse: Callable[..., Call], answer: Callable[..., Awaitable[None]], scope: Any, receive: Any, send: Any) -> None:
    call = await parsed(parse, scope, receive)
    call = call._replace(request_id=call.request_id or scope["request_id"])
    await completions_lib.draw(engine, call, intake.pool, receive, partial(answer, send, call), state)

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

  asgi = make_asgi(routes, rules, counts, keyless=("/", "/health"))
  return App(asgi, lambda: counts["open"], state.end, intake.close)
