"""An engine without a model, whose faults are chosen by the test, and clients of the service."""

import contextlib
import http.client
import json
import socket
import threading
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxrl_llm.decoding.engine.requests import Decoded, EngineLimits, Handle, Piece, QueueFull, Request, Score
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.chat_template import ChatTemplate
from jaxrl_llm.serve import server

GENERATE, CHAT, COMPLETION = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
RESET = socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"  # The end becomes a reset.
EOS = ByteTokenizer().eos_id
LIMITS = EngineLimits(context=256, requests=64, likeliest=20)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'odd' %}{{ raise_exception('no odd roles') }}{% endif %}"
TEMPLATE += "{% endfor %}{% if shout %}!{% endif %}<assistant>"


class ChatBytes(ByteTokenizer):
  """Byte tokenizer with a chat template."""

  chat_template = ChatTemplate(TEMPLATE, "a secret path", {"bos_token": "<s>"})


class _Open(NamedTuple):
  request: Request
  on_piece: Any
  future: Future
  tokens: list[int]
  drawn: list[int]
  aborted: threading.Event


class FakeEngine:
  """Engine that writes a fixed text, for all requests in turn.

  A budget below the length of the text ends the completion. The i-th token has log-probability
  -(i + 1) / 8. In a score it is -(i + 1) / 4, and the likeliest ids are those after the token.

  Args:
    text: Text of every completion, or a function from a request to it.
    limits: Limits of the engine.
    delay: Time between draws, in seconds.
    step: Number of tokens of each request in a draw.
  """

  def __init__(self, text="hello", *, limits=LIMITS, delay=0.0, step=1):
    self.text, self.limits = text if callable(text) else lambda request: text, limits
    self.delay, self.step = delay, step
    self.open: list[_Open] = []
    self.requests: list[Request] = []
    self.aborts = 0
    self.error: Exception | None = None
    # If it is cleared, the engine hangs, but still takes requests and aborts.
    self.running = threading.Event()
    self.running.set()
    self._changed, self._closed = threading.Condition(), False
    self.thread = threading.Thread(target=self._loop, name="fake-engine", daemon=True)
    self.thread.start()

  def submit(self, request, on_piece=None):
    """Accepts a request."""
    with self._changed:
      if self.error is not None:
        raise self.error
      if len(self.open) >= self.limits.requests:
        raise QueueFull
      text = self.text(request)
      tokens = [*text.encode(), EOS] if isinstance(text, str) else list(text)
      opened = _Open(request, on_piece, Future(), tokens[: request.max_tokens], [], threading.Event())
      self.requests.append(request)
      self.open.append(opened)
      self._changed.notify()
    return Handle(opened.future, lambda: self._abort(opened))

  def fail(self, error):
    """Breaks the engine."""
    with self._changed:
      self.error = error
      self._changed.notify()

  def update(self, params, version):
    raise AssertionError("a service gets no new weights")

  def close(self):
    """Ends the loop."""
    with self._changed:
      self._closed = True
      self._changed.notify()
    self.running.set()
    self.thread.join()

  def _abort(self, opened):
    with self._changed:
      self.aborts += 1
      opened.aborted.set()
      self._changed.notify()

  @staticmethod
  def scores(tokens, count, start=0):
    """Returns the scores of tokens, the first of which has a number."""
    if count is None:
      return None
    return [Score(-(i + 1) / 4, 2, [(token + j, -(i + j) / 4) for j in range(count)]) for i, token in enumerate(tokens, start)]

  def _loop(self):
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self.open or self._closed or self.error)
        batch = list(self.open)
      if self._closed:
        for x in batch:
          self._end(x, "aborted")
        return
      if self.error is not None:
        for x in batch:
          self._end(x, self.error)
        if not batch:
          with self._changed:
            self._changed.wait(0.05)
        continue
      for x in [x for x in batch if x.aborted.is_set()]:
        self._end(x, "aborted")
      if not self.running.wait(0.01):
        continue
      if self.delay:
        threading.Event().wait(self.delay)
      for x in [x for x in batch if not x.future.done()]:
        start = len(x.drawn)
        tokens = x.tokens[start : start + self.step]
        x.drawn.extend(tokens)
        if x.on_piece is not None:
          logprobs = [-(start + i + 1) / 8 for i in range(len(tokens))]
          x.on_piece(Piece(tokens, logprobs, scores=self.scores(tokens, x.request.likeliest, start)))
        if tokens[-1] in x.request.stop_ids or any(stop.encode() in bytes(t for t in x.drawn if t < 256) for stop in x.request.stops):
          self._end(x, "stop")
        elif len(x.drawn) == len(x.tokens):
          self._end(x, "length")

  def _end(self, x, reason):
    with self._changed:
      self.open.remove(x)
    if isinstance(reason, Exception):
      x.future.set_exception(reason)
    else:
      scores, prompt = self.scores(x.drawn, x.request.likeliest), self.scores(x.request.tokens[1:], x.request.prompt_likeliest)
      counts, logprobs = (0, len(x.request.tokens), 0), [-(i + 1) / 8 for i in range(len(x.drawn))]
      x.future.set_result(Decoded(x.drawn, logprobs, reason, *counts, scores=scores, prompt_scores=prompt))


@contextlib.contextmanager
def serving(engine=None, *, tokenizer=None, **options):
  """Yields a service on a free port, and closes it and its engine."""
  engine = FakeEngine() if engine is None else engine
  service = server.start(engine, ChatBytes() if tokenizer is None else tokenizer, name="toy", **options)
  try:
    yield service
  finally:
    service.close()
    engine.close()


def port_of(service):
  """Returns the port of a service."""
  return int(service.url.rpartition(":")[2])


def ask(service, path, value=None, *, headers=None, method=None, body=None, timeout=20):
  """Sends one request and returns status, headers and body of the answer, parsed if it is JSON."""
  connection = http.client.HTTPConnection("127.0.0.1", port_of(service), timeout=timeout)
  try:
    body = json.dumps(value) if body is None and value is not None else body
    method = method or ("GET" if body is None else "POST")
    connection.request(method, path, body, {"content-type": "application/json", **(headers or {})})
    response = connection.getresponse()
    content, kind = response.read(), response.getheader("content-type", "")
    return response.status, response.headers, json.loads(content) if kind == "application/json" else content.decode()
  finally:
    connection.close()


def head(size):
  """Returns the head of a request for a completion, whose body has a number of bytes."""
  return f"POST {COMPLETION} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n".encode()


def whole(value):
  """Returns a request for a completion."""
  body = json.dumps(value).encode()
  return head(len(body)) + body


def connect(service):
  """Opens a connection to a service."""
  return socket.create_connection(("127.0.0.1", port_of(service)), timeout=30)


def events_of(text):
  """Returns the values of a stream of server-sent events, without its end."""
  lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
  assert lines[-1] == "[DONE]"
  return [json.loads(line) for line in lines[:-1]]
