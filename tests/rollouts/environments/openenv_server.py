"""A small server that speaks OpenEnv's messages, as recorded from openenv 0.10.0's own.

Its game counts: `reset(seed)` begins at the seed, and a turn that is a number is added. What an
unfit server might do it does on request.
"""

import contextlib
import json
import threading
import time

from websockets.sync.server import serve

SCHEMA = {"action": {"properties": {"metadata": {"type": "object"}, "message": {"type": "string"}}, "required": ["message"]}}


class Server:
  """The server, with what it has seen.

  Attributes:
    capacity: Number of sessions allowed at once.
    schema: Schemas that it publishes; None publishes none.
    judge: Function `message -> reward` of a game of one turn, in place of counting.
    first: Function `(seed, number of resets) -> message` of a first observation.
    log: Messages received, as pairs (type, data).
    num_sessions: Number of sessions opened so far.
    linger_s: Time until a session that was cut off is noticed, in seconds.
  """

  def __init__(self, capacity=8, schema=SCHEMA, judge=None, first=lambda seed, n: f"at {seed}"):
    self.capacity, self.schema, self.judge, self.first = capacity, schema, judge, first
    self.linger_s = 0.0
    self.log, self.open, self.num_sessions, self.lock = [], set(), 0, threading.Lock()
    self.hang = threading.Event()
    self.server = serve(self.session, "127.0.0.1", 0, process_request=self.respond)
    self.url = f"http://127.0.0.1:{self.server.socket.getsockname()[1]}"
    threading.Thread(target=self.server.serve_forever, daemon=True).start()

  def respond(self, connection, request):
    if request.path == "/ws":
      return None
    return connection.respond(404 if self.schema is None else 200, json.dumps(self.schema))

  def session(self, socket):
    with self.lock:
      full = len(self.open) >= self.capacity
      if not full:
        self.open.add(socket)
        self.num_sessions += 1
    if full:
      return self.error(socket, "CAPACITY_REACHED", f"Server at capacity: {self.capacity}/{self.capacity} sessions active.")
    total = 0
    with contextlib.suppress(Exception):
      for raw in socket:
        message = json.loads(raw)
        self.log.append((message["type"], message.get("data")))
        if message["type"] == "close":
          break
        total = self.reset(socket, message["data"]) if message["type"] == "reset" else self.step(socket, message["data"], total)
    time.sleep(self.linger_s)
    with self.lock:
      self.open.discard(socket)
    return None

  def reset(self, socket, data):
    seed = data.get("seed", 0)
    self.send(socket, self.first(seed, sum(kind == "reset" for kind, _ in self.log)), 0.0)
    return seed

  def step(self, socket, data, total):
    said = data.get("message")
    if not isinstance(said, str):
      errors = [{"type": "missing", "loc": ["message"], "msg": "Field required", "input": data}]
      self.error(socket, "VALIDATION_ERROR", "Invalid message", errors=errors)
    elif self.judge is not None:
      self.send(socket, "", self.judge(said), done=True)
    elif said.lstrip("-").isdigit():
      total += int(said)
      self.send(socket, f"now {total}", total / 10, done=total >= 10)
    elif said == "raise":
      self.error(socket, "EXECUTION_ERROR", "division\nby zero")
    elif said == "hang":
      self.hang.wait(30)
    elif said == "hang up":
      socket.close()
    elif said == "long":
      self.send(socket, "x" * 2**22, 1.0)
    elif said == "utf-8":
      socket.send(b"\xff\xfe{", text=True)
    elif said == "surrogate":
      socket.send('{"type": "observation", "data": {"observation": {"message": "\\ud800!"}, "reward": true, "done": false}}')
    else:  # The text of a reply.
      socket.send(said)
    return total

  def send(self, socket, message, reward, *, done=False):
    observation = {"metadata": {}, "message": message, "note": None}
    socket.send(json.dumps({"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}))

  def error(self, socket, code, message, **more):
    with contextlib.suppress(Exception):
      socket.send(json.dumps({"type": "error", "data": {"message": message, "code": code} | more}))

  def close(self):
    self.hang.set()
    for socket in list(self.open):
      socket.close()
    self.server.shutdown()


@contextlib.contextmanager
def serving(**settings):
  """Runs a server."""
  server = Server(**settings)
  try:
    yield server
  finally:
    server.close()
