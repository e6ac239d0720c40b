"""What all services of this room share: who may ask, limits on bodies, and refusals as answers."""

import asyncio
import hmac
import re
import sys
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxrl_llm.messages import one_line, shown
from jaxrl_llm.serve.exchange import Arriving, Gone, header, read_body, refuse
from jaxrl_llm.serve.refusals import Refusal, busy, hint

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")

Handler = Callable[[Any, Any, Any], Awaitable[None]]
"""Function `(scope, receive, send)` that answers a request."""


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


class Intake:
  """Bodies of requests, read and parsed within limits, so that no client holds up the others.

  Args:
    rules: What clients may do.
    most_bytes: Largest number of bytes of a body.
  """

  def __init__(self, rules: Rules, most_bytes: int):
    self._rules, self._most, self._arriving, self._parsing = rules, most_bytes, Arriving(rules.reading), 0
    # Parsing, templates and tokenizers, which must not hold up the loop of events.
    self.pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="serve")

  async def parsed(
    self, parse: Callable[[bytes], Any], scope: Any, receive: Any, media: str = "application/json"
  ) -> Any:
    """Reads the body of a request, and from it what the client asks for.

    Raises:
      Refusal: If the body is of another media type, too large or too slow, or `parse` refuses it.
    """
    if header(scope, b"content-type").split(b";")[0].strip().lower() != media.encode():
      raise Refusal(415, f"content-type: expected {media}", code="unsupported_media_type")
    body = await read_body(scope, receive, self._most, self._rules.body_seconds, self._arriving)
    if self._parsing >= self._rules.reading:
      raise busy(f"{self._rules.reading} requests are being read, expected fewer; try again")
    self._parsing += 1
    try:
      return await asyncio.get_running_loop().run_in_executor(self.pool, parse, body)
    finally:
      self._parsing -= 1

  def close(self) -> None:
    """Ends the threads."""
    self.pool.shutdown(wait=False, cancel_futures=True)


def make_asgi(
  routes: Mapping[tuple[str, str], Handler], rules: Rules, counts: dict[str, int], keyless: Collection[str]
) -> Callable[..., Awaitable[None]]:
  """Makes the ASGI callable of a service, which answers each request or refuses it.

  Args:
    routes: Handlers by method and path. A path that ends with "/" stands for all below it that have
      none of their own.
    rules: What clients may do.
    counts: Dictionary whose entry "open" counts the requests that have begun and not ended.
    keyless: Paths that need no key.
  """

  async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
      return
    counts["open"] += 1
    is_started = is_read = False
    given = header(scope, b"x-request-id")
    scope = {**scope, "request_id": given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex}

    async def named(message: Any) -> None:
      if message["type"] == "http.response.start":
        message = {
          **message,
          "headers": [*message["headers"], (b"x-request-id", scope["request_id"].encode())],
        }
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
      await _route(routes, rules, scope, keyless)(scope, receiving, sending)
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

  return app


def _route(
  routes: Mapping[tuple[str, str], Handler], rules: Rules, scope: Any, keyless: Collection[str]
) -> Handler:
  """Returns the handler of a request.

  Raises:
    Refusal: If the client may not ask, or asks for what is not there.
  """
  path, method = scope["path"], "GET" if scope["method"] == "HEAD" else scope["method"]
  if header(scope, b"transfer-encoding") and header(scope, b"content-length"):
    # A proxy may believe the other one, and take what follows for the request of another client.
    raise Refusal(
      400, "content-length: found with transfer-encoding, expected one of them", code="two_lengths"
    )
  if rules.api_key is None:
    _check_host(header(scope, b"host").decode("latin-1"), rules.hosts)
  elif path not in keyless:
    # The second header is that of the Tinker SDK.
    given = header(scope, b"authorization") or (
      b"Bearer " + own if (own := header(scope, b"x-api-key")) else b""
    )
    scheme, _, key = given.partition(b" ")
    # In constant time, so that the time of a refusal tells nothing of the key.
    if not hmac.compare_digest(key.strip(b" "), rules.api_key.encode()) or scheme.lower() != b"bearer":
      what = "a wrong API key" if given else "no API key"
      message = f"found {what}, expected the header Authorization: Bearer KEY"
      raise Refusal(401, message, code="invalid_api_key", headers=(("www-authenticate", "Bearer"),))
  known_paths = {known for _, known in routes}
  if path not in known_paths:
    above = [
      known for known in known_paths if len(known) > 1 and known.endswith("/") and path.startswith(known)
    ]
    path = max(above, key=len, default=path)
  if handler := routes.get((method, path)):
    return handler
  if allowed := [name for name, known in routes if known == path]:
    raise Refusal(
      405, f"{path}: found {method[:16]}, expected {allowed[0]}", headers=(("allow", ", ".join(allowed)),)
    )
  raise Refusal(404, f"no such path{hint(path, known_paths)}", code="not_found")


def _check_host(host: str, hosts: Collection[str]) -> None:
  name = host if host.endswith("]") else host.rpartition(":")[0] or host
  if name.lower() not in hosts:
    message = f"host: found a name that is not this machine's own, expected one of {', '.join(hosts)}; start the service with an API key"
    raise Refusal(403, message, code="unknown_host")
