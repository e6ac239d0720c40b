"""The service's HTTP server: uvicorn in a thread, with limits on connections that do nothing."""

import asyncio
import importlib.util
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_llm.decoding.engine.requests import Engine
from jaxrl_llm.devices.addresses import check_address, is_loopback
from jaxrl_llm.serve.app import make_app
from jaxrl_llm.serve.calls import Served
from jaxrl_llm.serve.chat_page import build_chat_page
from jaxrl_llm.serve.shell import App, Rules
from jaxrl_llm.text_types import Tokenizer


class Patience(NamedTuple):
  """How long and for how many connections the server waits.

  Attributes:
    keep_alive: Time that a connection may stay open between two requests, in seconds.
    idle: Time for the head of a request to arrive, in seconds.
    stalled: Time for a client to read any part of an answer, in seconds.
    connections: Largest number of connections.
    ending: Time for answers to end when the service closes, in seconds.
  """

  keep_alive: float = 20.0
  idle: float = 30.0
  stalled: float = 30.0
  connections: int = 1024
  ending: float = 2.0


class Service(NamedTuple):
  """A running service.

  Attributes:
    url: Address of the service.
    open_requests: Function that returns the number of requests that have begun and not ended.
    open_connections: Function that returns the number of connections.
    is_alive: Function that returns whether the server runs.
    close: Function that ends the server and its threads. The engine stays open.
  """

  url: str
  open_requests: Callable[[], int]
  open_connections: Callable[[], int]
  is_alive: Callable[[], bool]
  close: Callable[[], None]


def start(
  engine: Engine,
  tokenizer: Tokenizer,
  *,
  name: str,
  vocab_size: int | None = None,
  host: str = "127.0.0.1",
  port: int = 0,
  api_key: str | None = None,
  tells_cached: bool | None = None,
  rules: Rules | None = None,
  patience: Patience | None = None,
) -> Service:
  """Starts the service in a thread and returns when it accepts connections.

  Args:
    engine: Engine that draws.
    tokenizer: Tokenizer of the checkpoint.
    name: Name of the model.
    vocab_size: Number of ids of the model; None for the tokenizer's. A model may have more.
    host: Address to listen on.
    port: Port to listen on; 0 chooses a free one.
    api_key: Key that every call must carry; None for none, on loopback only.
    tells_cached: Whether answers tell how many tokens of a prompt were cached. None tells it where
      no other person asks: on loopback, without a key.
    rules: Other rules for clients; None for the defaults.
    patience: Waiting times; None for the defaults.

  Raises:
    ValueError: If others reach the host and there is no key. One line.
    OSError: If the address cannot be used.
    ImportError: If the package uvicorn is not installed.
  """
  rules = rules_of(host, api_key, rules)
  tells_cached = api_key is None and is_loopback(host) if tells_cached is None else tells_cached
  served = Served(name, tokenizer, engine.limits, tokenizer.vocab_size if vocab_size is None else vocab_size, tells_cached)
  app = make_app(engine, served, page=build_chat_page(), rules=rules, created=int(time.time()))
  return listen(app, host=host, port=port, patience=patience)


def rules_of(host: str, api_key: str | None, rules: Rules | None = None) -> Rules:
  """Returns the rules for clients of a host.

  Args:
    host: Address to listen on.
    api_key: Key that every call must carry; None for none, on loopback only.
    rules: Other rules; None for the defaults.

  Raises:
    ValueError: If others reach the host and there is no key. One line.
    ImportError: If the package uvicorn is not installed.
  """
  check_address(host, api_key)
  check_installed()
  rules = Rules() if rules is None else rules
  return rules._replace(api_key=api_key, hosts=tuple(dict.fromkeys([*rules.hosts, _in_url(host).lower()])))


def _in_url(host: str) -> str:
  return f"[{host}]" if ":" in host else host


def listen(app: App, *, host: str, port: int, patience: Patience | None = None) -> Service:
  """Serves an application in a thread and returns when it accepts connections.

  Args:
    app: Application, which the service's `close` closes.
    host: Address to listen on.
    port: Port to listen on; 0 chooses a free one.
    patience: Waiting times; None for the defaults.

  Raises:
    OSError: If the address cannot be used.
  """
  patience = Patience() if patience is None else patience
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  listener = socket.create_server((host, port), family=family, backlog=patience.connections)
  server = _make_server(app, patience)
  thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="serve-http", daemon=True)
  thread.start()
  while not server.started and thread.is_alive():
    time.sleep(0.01)

  def close() -> None:
    server.should_exit = True
    thread.join()
    app.close()
    listener.close()

  url = f"http://{_in_url(host)}:{listener.getsockname()[1]}"
  return Service(url, app.open, lambda: len(server.server_state.connections), thread.is_alive, close)


def _make_server(app: App, patience: Patience) -> Any:
  """Makes the server of an application."""
  import uvicorn

  config = uvicorn.Config(
    app.asgi,
    access_log=False,
    http=_protocol(patience),
    lifespan="off",
    log_config=None,
    log_level="error",  # A client must not be able to fill the log.
    loop="asyncio",
    proxy_headers=False,
    server_header=False,
    timeout_graceful_shutdown=patience.ending + 2,
    timeout_keep_alive=patience.keep_alive,
    ws="none",
  )

  class Server(uvicorn.Server):
    """Server that ends soon, whatever its clients and the engine do."""

    async def shutdown(self, sockets: Any = None) -> None:
      """Waits a while for answers, then ends them, then cuts connections."""
      loop = asyncio.get_running_loop()
      timers = [loop.call_later(patience.ending, app.end), loop.call_later(patience.ending + 0.5, self.cut)]
      await super().shutdown(sockets=sockets)
      for timer in timers:
        timer.cancel()
      self.cut()

    def cut(self) -> None:
      """Cuts all connections."""
      for connection in list(self.server_state.connections):
        connection.transport.abort()

  return Server(config)


def _protocol(patience: Patience) -> type:
  """Returns uvicorn's protocol with a watch on each connection.

  uvicorn limits neither the time for a request's head nor the time for reading an answer, and so
  keeps the connection of a client that hangs for ever.
  """
  from uvicorn.protocols.http.h11_impl import H11Protocol

  class Watched(H11Protocol):
    """Connection that is cut when it does nothing."""

    def connection_made(self, transport: Any) -> None:
      """Begins the watch. Of one connection too many, the longest idle one ends, or the new one."""
      super().connection_made(transport)
      self.idle_since, self.stalled_since, self.least_unread = self.loop.time(), None, 0
      self.watch = self.loop.call_later(_tick(patience), self.look)
      if len(self.connections) > patience.connections:
        idle = [other for other in self.connections if not other.is_busy() and other is not self]
        min(idle, key=lambda other: other.idle_since or other.loop.time(), default=self).transport.abort()

    def is_busy(self) -> bool:
      """Returns whether a request of the connection is being answered."""
      return self.cycle is not None and not self.cycle.response_complete

    def look(self) -> None:
      """Cuts the connection if it is idle or its client does not read; else looks again later."""
      if self not in self.connections:
        return
      now, unread = self.loop.time(), self.transport.get_write_buffer_size()
      self.idle_since = None if self.is_busy() else self.idle_since or now
      if not unread or self.stalled_since is None or unread < self.least_unread:
        self.stalled_since, self.least_unread = (now if unread else None), unread
      is_idle = self.idle_since is not None and now - self.idle_since > patience.idle
      if is_idle or (self.stalled_since is not None and now - self.stalled_since > patience.stalled):
        self.transport.abort()
      else:
        self.watch = self.loop.call_later(_tick(patience), self.look)

    def connection_lost(self, exc: Exception | None) -> None:
      """Ends the watch."""
      if (watch := getattr(self, "watch", None)) is not None:
        watch.cancel()
      super().connection_lost(exc)

  return Watched


def _tick(patience: Patience) -> float:
  return min(1.0, patience.idle / 4, patience.stalled / 4)


def check_installed() -> None:
  """Checks that uvicorn is installed, without importing it.

  Raises:
    ImportError: If it is not. One line.
  """
  if importlib.util.find_spec("uvicorn") is None:
    raise ImportError("the service needs the package uvicorn: pip install 'jaxrl-llm[serve]'")
