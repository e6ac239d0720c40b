"""A chat endpoint on loopback that answers as a test says: well, badly, late, or not at all."""

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxrl_llm.rewards.rubric import Criterion, Rubric
from jaxrl_llm.text_types import Completion

CRITERIA = (Criterion("correct", "Is the answer right?", 3.0), Criterion("clear", "How clear is it?", 1.0, 1, 5, False))


class Reply(NamedTuple):
  """What the endpoint does with a request.

  Attributes:
    text: Text of the judge's answer.
    status: HTTP status.
    headers: Further headers.
    body: Body of the HTTP answer in place of a chat completion.
    fault: None, "hang", "half", "close", "trickle" or "trickle_headers".
    delay_s: Seconds before the answer.
  """

  text: str = ""
  status: int = 200
  headers: dict[str, str] = {}  # noqa: RUF012 (a NamedTuple)
  body: bytes | None = None
  fault: str | None = None
  delay_s: float = 0.0


def scores(correct: Any = "yes", clear: Any = 5) -> str:
  return json.dumps({"reason": "It is.", "scores": {"correct": correct, "clear": clear}})


class Endpoint:
  """An endpoint that is open, and what it has seen."""

  def __init__(self, reply: Callable[[int, dict[str, Any]], Reply | str]):
    self.reply, self.over, self.lock = reply, threading.Event(), threading.Lock()
    self.bodies: list[dict[str, Any]] = []
    self.headers: list[dict[str, str]] = []
    self.paths: list[str] = []
    self.now = self.most_at_once = 0
    self.url = ""


@contextlib.contextmanager
def serving(reply: Callable[[int, dict[str, Any]], Reply | str] = lambda number, body: scores()) -> Iterator[Endpoint]:
  """Opens an endpoint whose answer to request NUMBER, from 0, is `reply(number, body)`."""
  endpoint = Endpoint(reply)

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
      with endpoint.lock:
        number = len(endpoint.bodies)
        endpoint.bodies.append(body)
        endpoint.headers.append(dict(self.headers))
        endpoint.paths.append(self.path)
        endpoint.now += 1
        endpoint.most_at_once = max(endpoint.most_at_once, endpoint.now)
      reply = endpoint.reply(number, body)
      reply = reply if isinstance(reply, Reply) else Reply(reply)
      endpoint.over.wait(reply.delay_s)
      with endpoint.lock:  # Before the answer, after which the client may begin another request.
        endpoint.now -= 1
      try:
        answer(self, endpoint, reply)
      except OSError:
        self.close_connection = True  # The client has gone.

    def log_message(self, *args):
      pass

  class Server(http.server.ThreadingHTTPServer):
    daemon_threads, request_queue_size, block_on_close = True, 128, False

  server = Server(("127.0.0.1", 0), Handler)
  endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
  thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
  thread.start()
  try:
    yield endpoint
  finally:
    endpoint.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


def answer(handler: http.server.BaseHTTPRequestHandler, endpoint: Endpoint, reply: Reply) -> None:
  data = reply.body
  if data is None:
    choice = {"message": {"role": "assistant", "content": reply.text}, "finish_reason": "stop"}
    data = json.dumps({"choices": [choice], "usage": {"total_tokens": 10}}).encode()
  if reply.fault == "hang":
    endpoint.over.wait(60)
  if reply.fault in ("hang", "close"):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)
    return
  if reply.fault == "trickle_headers":
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not endpoint.over.wait(0.02):
      handler.wfile.write(b"x")
  handler.send_response(reply.status)
  for name, value in (reply.headers | {"Content-Type": "application/json", "Content-Length": str(len(data))}).items():
    handler.send_header(name, value)
  handler.end_headers()
  if reply.fault == "half":
    handler.wfile.write(data[: len(data) // 2])
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)
    return
  if reply.fault == "trickle":
    while not endpoint.over.wait(0.02):
      handler.wfile.write(b" ")
  handler.wfile.write(data)


def rubric(url: str, **fields: Any) -> Rubric:
  """Returns a rubric for tests, with short waits."""
  values = dict(
    path="rubric.json", name="test", url=url, model="judge-8b", api_key_env=None, criteria=CRITERIA, instructions="",
    template="{problem} {reference} {response}", temperature=0.0, max_tokens=64, timeout_s=5.0, deadline_s=20.0, concurrency=8, tries=4,
    first_wait_s=0.01, max_chars=1000, extra={},
  )  # fmt: skip
  return Rubric(**values | fields)


def written(path: Any, url: str | None, **fields: Any) -> str:
  """Writes a rubric file in JSON and returns its path."""
  criteria = [
    {"name": "correct", "description": "Is the answer right?", "weight": 3},
    {"name": "clear", "description": "How clear is it?", "scale": "1..5"},
  ]
  document = {"url": url, "model": "judge-8b", "criteria": criteria, "first_wait_s": 0.01} | fields
  path.write_text(json.dumps({name: value for name, value in document.items() if value is not None}), encoding="utf-8")
  return str(path)


def completion(text: str, **fields: Any) -> Completion:
  return Completion(text, (1,), 1, True, **fields)
