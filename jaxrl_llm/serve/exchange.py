"""One request and its answer over ASGI: bodies, refusals and JSON."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from jaxrl_llm.serve.refusals import Refusal

_DRAINED_BYTES, _DRAINED_SECONDS = 2**22, 2.0
_JSON = (("content-type", "application/json"), ("cache-control", "no-store"), ("x-content-type-options", "nosniff"))


class Gone(Exception):
  """The client has left."""


def header(scope: Any, name: bytes) -> bytes:
  """Returns the value of a header; b"" without one."""
  return next((value for key, value in scope["headers"] if key == name), b"")


class Arriving:
  """The bodies that are arriving, of which the oldest gives way to one too many.

  Args:
    most: Largest number of them.
  """

  def __init__(self, most: int):
    self._most, self._limits = most, {}

  @contextlib.asynccontextmanager
  async def place(self, seconds: float) -> AsyncIterator[None]:
    """Holds a place for a body that arrives within some seconds, or for as long as it is free.

    Raises:
      TimeoutError: If the body is late.
    """
    if len(self._limits) >= self._most:
      # One that is already late leaves by itself.
      oldest = next((key for key, limit in self._limits.items() if not limit.expired()), None)
      if oldest is not None:
        self._limits.pop(oldest).reschedule(0)
    key = object()
    try:
      async with asyncio.timeout(seconds) as limit:
        self._limits[key] = limit
        yield
    finally:
      self._limits.pop(key, None)


async def read_body(scope: Any, receive: Callable[..., Any], most: int, seconds: float, arriving: Arriving) -> bytes:
  """Reads the body of a request.

  Args:
    scope: ASGI scope.
    receive: ASGI callable.
    most: Largest number of bytes.
    seconds: Time for the whole body to arrive.
    arriving: Bodies that are arriving.

  Raises:
    Refusal: If the body is too large or too slow.
    Gone: If the client leaves.
  """
  too_large = Refusal(413, f"the body has more than {most:,} bytes, the limit of the service", code="body_too_large")
  declared = header(scope, b"content-length")
  if declared.isdigit() and (len(declared) > 18 or int(declared) > most):
    raise too_large
  parts, size = [], 0
  try:
    async with arriving.place(seconds):
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
    message = f"the body did not arrive within {seconds:g} seconds, or before too many others"
    raise Refusal(408, message, code="timeout") from error


async def refuse(refusal: Refusal, scope: Any, receive: Callable[..., Any], send: Callable[..., Any], *, is_read: bool) -> None:
  """Answers with a refusal.

  Unless the body has been read, some of it is thrown away first, because a client that is still
  sending would see a broken connection in place of the answer. The connection then ends.
  """
  headers = list(refusal.headers)
  if not is_read:
    headers.append(("connection", "close"))
    if refusal.status != 408 and scope["method"] == "POST" and not header(scope, b"expect"):
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
  await send_bytes(send, status, encode(value), [*_JSON, *headers])


async def send_bytes(send: Callable[..., Any], status: int, body: bytes, headers: Sequence[tuple[str, str]]) -> None:
  """Sends a whole answer."""
  await send(start(status, [*headers, ("content-length", str(len(body)))]))
  await send({"type": "http.response.body", "body": body, "more_body": False})


def start(status: int, headers: Sequence[tuple[str, str]]) -> dict[str, Any]:
  """Returns the message that begins an answer."""
  return {"type": "http.response.start", "status": status, "headers": [(key.encode(), value.encode()) for key, value in headers]}


def encode(value: Any) -> bytes:
  """Encodes a JSON value."""
  # ASCII, since a client may have sent a lone surrogate, which UTF-8 does not have.
  return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
