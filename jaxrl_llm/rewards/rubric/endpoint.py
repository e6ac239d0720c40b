"""One request to an OpenAI-compatible chat endpoint, and what its failures mean."""

import contextlib
import email.utils
import http.client
import json
import math
import socket
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from jaxrl_llm.messages import one_line

_MAX_ANSWER_BYTES = 4 << 20
_MAX_WAIT_SECONDS = 60.0


class EndpointFault(Exception):
  """A request without a usable answer.

  Attributes:
    cause: Key of `judge.CAUSES`.
    detail: Description in one line, without secrets.
    retries: Whether another request may succeed.
    wait_s: Seconds to wait first that the endpoint asked for, at most a minute; 0 if it did not.
  """

  def __init__(self, cause: str, detail: str, *, retries: bool, wait_s: float = 0.0):
    super().__init__(detail)
    self.cause, self.detail, self.retries, self.wait_s = cause, detail, retries, wait_s


class JudgeAnswer(NamedTuple):
  """Text of an answer, and the tokens that it cost; 0 if the endpoint does not say."""

  text: str
  num_tokens: int


class JudgeRequest:
  """A request in progress, which another thread may cut short.

  A timeout of a socket limits the wait for the next byte only. `cut` limits the request as a whole,
  and so also ends an answer that trickles.

  Args:
    url: Base URL of the endpoint.
    body: JSON of the request.
    key: API key; None sends none.
    timeout_s: Limit on the wait for a byte, in seconds.

  Attributes:
    is_cut: Whether `cut` was called.
  """

  def __init__(self, url: str, body: bytes, *, key: str | None, timeout_s: float):
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    self._connection = connect(parts.hostname, parts.port, timeout=timeout_s)
    self._path, self._body, self._key, self._url = f"{parts.path.rstrip('/')}/chat/completions", body, key, url
    self.is_cut = False

  def cut(self) -> None:
    """Ends the request; the thread that waits for it sees a fault of the cause judge_timeout."""
    self.is_cut = True
    if (connected := self._connection.sock) is not None:
      with contextlib.suppress(OSError):
        # That of the plain socket: another thread may be reading from a TLS socket.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)

  def send(self) -> JudgeAnswer:
    """Sends the request and waits for the answer.

    Raises:
      EndpointFault: If there is no answer with a text.
    """
    headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
    if self._key is not None:
      headers["Authorization"] = f"Bearer {self._key}"
    try:
      with contextlib.closing(self._connection):
        self._connection.connect()
        if self.is_cut:
          raise TimeoutError
        self._connection.request("POST", self._path, self._body, headers)
        response = self._connection.getresponse()
        data = response.read(_MAX_ANSWER_BYTES + 1)
        if response.length:
          raise http.client.IncompleteRead(b"", response.length)
        if self.is_cut:
          raise TimeoutError
    except (OSError, ValueError, http.client.HTTPException) as error:
      if self.is_cut or isinstance(error, TimeoutError):
        raise EndpointFault("judge_timeout", f"{self._url} did not answer in time", retries=True) from None
      detail = self._clean(f"{self._url}: {one_line(error)}")
      raise EndpointFault("judge_unreachable", detail, retries=True) from None
    if response.status != 200:
      raise self._status_fault(response, data)
    return _answer(self._url, data)

  def _status_fault(self, response: http.client.HTTPResponse, data: bytes) -> EndpointFault:
    status = response.status
    detail = f"{self._url} answered HTTP {status}"
    if status in (408, 425, 429) or status >= 500:
      return EndpointFault("judge_busy", detail, retries=True, wait_s=_wait_s(response.getheader("Retry-After")))
    if status in (401, 403):  # The text of such an answer may hold a part of the key.
      detail += " (the API key is missing or wrong)" if self._key is None else " (it refuses the API key)"
    elif 300 <= status < 400:
      detail += ", a redirection, which is not followed; give the final URL"
    else:
      detail += f": {one_line(data[:400].decode('utf-8', 'replace'))}" if data.strip() else ""
      detail += "; are the URL and the model right?" if status == 404 else ""
    return EndpointFault("judge_refused", self._clean(detail), retries=False)

  def _clean(self, text: str) -> str:
    """Removes the key from a text that others wrote."""
    return text if self._key is None else text.replace(self._key, "***")


def _answer(url: str, data: bytes) -> JudgeAnswer:
  malformed = lambda what: EndpointFault("judge_malformed", f"{url} answered with {what}", retries=True)
  if len(data) > _MAX_ANSWER_BYTES:
    raise malformed(f"more than {_MAX_ANSWER_BYTES} bytes")
  try:
    document: Any = json.loads(data)
    choice = document["choices"][0]
    text = choice["message"]["content"]
  except (ValueError, TypeError, LookupError, RecursionError):
    raise malformed("no chat completion") from None
  if not isinstance(text, str) or not text.strip():
    raise malformed("an empty text")
  if choice.get("finish_reason") == "length":
    raise malformed("a text that was cut off (max_tokens)")
  usage = document.get("usage")
  tokens = usage.get("total_tokens") if isinstance(usage, dict) else 0
  return JudgeAnswer(text, tokens if isinstance(tokens, int) and 0 <= tokens < 2**40 else 0)


def _wait_s(text: str | None) -> float:
  """Returns the wait of a header Retry-After, a number of seconds or a date; at most a minute."""
  seconds = 0.0
  if text:
    try:
      seconds = float(text)
    except ValueError:
      with contextlib.suppress(TypeError, ValueError, OverflowError):
        seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
  return min(max(seconds, 0.0), _MAX_WAIT_SECONDS) if math.isfinite(seconds) else 0.0
