"""Environments that run as OpenEnv servers, by address: `openenv:URL`.

The client sends a JSON object over a WebSocket, at `URL/ws`, and reads one in reply. A connection
is a session with one episode at a time:

  {"type": "reset", "data": {"seed": 3}}
  {"type": "step", "data": {"move": "up"}}
  {"type": "close"}

  {"type": "observation", "data": {"observation": {...}, "reward": 0.0, "done": false}}
  {"type": "error", "data": {"message": "...", "code": "EXECUTION_ERROR"}}

Many servers allow one session only. An episode here is therefore a plain value, its seed and the
actions so far, and the sessions are a pool: an episode whose session has gone to another one is
played again, up to where it was, in the next session that is free.

References:
  OpenEnv, github.com/huggingface/OpenEnv: the packages openenv 0.10 and openenv-core 0.3, whose
  client speaks the same messages but brings the server's packages with it.
"""

import contextlib
import json
import os
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.messages import MissingPackageError, Problem, one_line
from jaxrl_llm.rollouts.environments.actions import action_reader, json_object, observation_text
from jaxrl_llm.rollouts.environments.protocol import Environment, Reply
from jaxrl_llm.text_types import Completion

MOST_SESSIONS = 8
_MOST_BYTES = 4 * 2**20
_ROOM_SECONDS = 0.05


class Episode(NamedTuple):
  """An episode in progress, independent of any session.

  Attributes:
    key: Object that no other episode has.
    settings: Settings of its reset.
    first: First observation that it must begin with, as text; None for any.
    played: Actions so far, each with the observation that followed.
  """

  key: object
  settings: Mapping[str, Any]
  first: str | None = None
  played: tuple[tuple[Mapping[str, Any], str], ...] = ()

  @property
  def position(self) -> tuple[object, int]:
    """Position of a session that can go on with the episode."""
    return self.key, len(self.played)


class ServerError(RuntimeError):
  """An error that the server reports; `code` is its kind, such as EXECUTION_ERROR."""

  def __init__(self, code: str, message: str):
    super().__init__(f"{code}: {message}")
    self.code = code


class Session:
  """A connection to the server; `position` says which episode it holds, and how far."""

  def __init__(self, url: str, timeout_s: float):
    self.url, self.timeout_s = url, timeout_s
    self.connect()

  def connect(self) -> None:
    """Opens a connection, which holds no episode."""
    from websockets.sync.client import connect

    limits = dict(open_timeout=self.timeout_s, close_timeout=1, ping_timeout=None, max_size=_MOST_BYTES)
    self.socket = connect(self.url, **limits, proxy=None if _is_local(self.url) else True).__enter__()
    self.position = None

  def reset(self, settings: Mapping[str, Any], patience_s: float) -> tuple[dict[str, Any], float, bool]:
    """Resets the session. For `patience_s` it asks again, should the server have no room.

    A server counts a session that has been cut off until it notices.
    """
    until = time.monotonic() + patience_s
    while True:
      try:
        return self.ask("reset", settings)
      except ServerError as error:
        if error.code != "CAPACITY_REACHED" or time.monotonic() > until:
          raise
      self.close()
      time.sleep(_ROOM_SECONDS)
      self.connect()

  def ask(self, kind: str, data: Mapping[str, Any]) -> tuple[dict[str, Any], float, bool]:
    """Sends a message. Returns the observation, the reward and whether the episode has ended.

    Raises:
      ServerError: If the server reports an error.
      ValueError: If its reply is not what the protocol says.
      OSError, TimeoutError, websockets.exceptions.ConnectionClosed: If no reply arrives.
    """
    from websockets.exceptions import ConnectionClosed

    with contextlib.suppress(ConnectionClosed):  # `recv` then returns why the server closed it.
      self.socket.send(json.dumps({"type": kind, "data": data}))
    # Later than the limit on a step, so that a step that is late is counted as such.
    reply = json.loads(self.socket.recv(timeout=self.timeout_s + 1))
    data = reply.get("data") if isinstance(reply, dict) else None
    if isinstance(data, dict) and reply.get("type") == "error":
      detail = "; ".join(f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in data.get("errors", ()))
      raise ServerError(str(data.get("code")), one_line(detail or str(data.get("message"))))
    observation, reward, done = map((data if isinstance(data, dict) else {}).get, ("observation", "reward", "done"))
    reward, done = 0 if reward is None else reward, False if done is None else done
    if not isinstance(observation, dict) or not isinstance(reward, int | float) or not isinstance(done, bool):
      shown = one_line(json.dumps(reply), limit=80)
      raise ValueError(f"found {shown}, expected an object 'observation', a number 'reward' and a flag 'done'")
    return observation, float(reward), done

  def close(self) -> None:
    """Ends the session, and waits until the server has room for another one."""
    from websockets.exceptions import WebSocketException

    with contextlib.suppress(OSError, TimeoutError, WebSocketException):
      self.socket.send('{"type": "close"}')
      self.socket.recv(timeout=1)
    self.socket.close()


class ConnectionPool:
  """Up to `limit` sessions for any number of episodes.

  An idle session goes to the next episode that needs one.
  """

  def __init__(self, open_session: Callable[[], Session], limit: int, timeout_s: float):
    self.open_session, self.limit, self.timeout_s = open_session, limit, timeout_s
    self.idle: list[Session] = []  # The one that has been idle longest comes first.
    self.num_open, self.changed = 0, threading.Condition()

  @contextlib.contextmanager
  def session(self, position: Any) -> Iterator[Session]:
    """Lends a session, if possible one at `position`; closes it if the caller raises."""
    session, keep = self._take(position), False
    try:
      session = session or self.open_session()
      yield session
      keep = True
    finally:
      if session is not None and not keep:
        session.close()
      with self.changed:
        self.num_open -= not keep
        self.idle += [session] if keep else []
        self.changed.notify()

  def _take(self, position: Any) -> Session | None:
    """Returns an idle session, or None if there is room to open one."""
    with self.changed:
      if not self.changed.wait_for(lambda: self.idle or self.num_open < self.limit, self.timeout_s):
        raise TimeoutError(f"all {self.limit} sessions have been busy for {self.timeout_s:g} s")
      # The server has ended these, or has itself ended.
      lost = [x for x in self.idle if x.socket.state.name != "OPEN"]
      self.idle, self.num_open = [x for x in self.idle if x not in lost], self.num_open - len(lost)
      own = next((x for x in self.idle if x.position == position), None)
      if own is None and self.num_open < self.limit:
        self.num_open += 1
        return None
      own = own or self.idle[0]
      self.idle.remove(own)
      return own

  def close(self) -> None:
    """Closes the idle sessions."""
    with self.changed:
      idle, self.idle, self.num_open = self.idle, [], self.num_open - len(self.idle)
    for session in idle:
      session.close()


def openenv(
  url: str,
  *,
  timeout_s: float = 60.0,
  action: str | None = None,
  reset: str | None = None,
  observation_field: str | None = None,
  sessions: int | None = None,
) -> Environment:
  """Connects to an environment that runs as an OpenEnv server.

  An action that the environment does not accept is answered with what is wrong with it, at a reward
  of 0. Any other error of the server, and a reply that is not what the protocol says, raises.

  Args:
    url: Address of the server: http, https, ws or wss.
    timeout_s: Limit on one reply of the server, in seconds.
    action: Action as a JSON object, with `{text}` where the policy's turn goes. None is the turn in
      the action's only field, or a JSON object in the turn if the action has several fields.
    reset: Settings of each reset, as a JSON object, besides the seed.
    observation_field: Field of an observation that the policy reads, with dots for nested ones, as
      in `result.data`. None, or an observation without it, is the text of a single field, or all
      fields as JSON.
    sessions: Number of sessions open at once in this process; None is as many as the server allows,
      at most 8.

  Raises:
    MissingPackageError: If the package websockets is missing.
    ValueError: If a setting is wrong, or the server cannot be reached or reset. One line.
  """
  check_openenv(url, action=action, reset=reset)
  address = _address(url)
  read, settings = action_reader(action, _schema(address, timeout_s)), json_object(reset or "{}")
  pool = ConnectionPool(lambda: Session(f"{address}/ws", timeout_s), sessions or MOST_SESSIONS, timeout_s)

  def begin(session: Session, episode: Episode, patience_s: float = timeout_s) -> str:
    session.position = None
    observation, _, done = session.reset(episode.settings, patience_s)
    if done:
      raise ValueError("the episode has ended at its reset")
    session.position = episode.key, 0
    return observation_text(observation, observation_field)

  def same(text: str, expected: str | None) -> None:
    if expected is not None and text != expected:
      raise RuntimeError(
        f"the same seed and actions gave another observation, {_where_they_differ(text, expected)}; an environment that does not repeat "
        "itself needs a session for each conversation (environment.sessions), and prompts from a task"
      )

  def first_observation(settings: Mapping[str, Any]) -> str:
    with pool.session(None) as session:
      return begin(session, Episode(object(), settings))

  def reset_episode(row: Mapping[str, Any]) -> Episode:
    seed = {"seed": row["seed"]} if isinstance(row.get("seed"), int) else {}
    return Episode(object(), settings | seed, row.get("opening"))

  def step(episode: Episode, turn: Completion) -> tuple[Episode, Reply]:
    action = read(turn.text)
    if isinstance(action, str):
      return episode, Reply(f"invalid action: {action}")
    with pool.session(episode.position) as session:
      if session.position != episode.position:
        same(begin(session, episode), episode.first)
        for earlier, seen in episode.played:
          same(observation_text(session.ask("step", earlier)[0], observation_field), seen)
      session.position = episode.position
      try:
        observation, reward, done = session.ask("step", action)
      except ServerError as error:
        if error.code != "VALIDATION_ERROR":
          raise
        return episode, Reply(f"invalid action: {error.args[0].partition(': ')[2]}")
      text = observation_text(observation, observation_field)
      after = episode._replace(played=(*episode.played, (action, text)))
      session.position = None if done else after.position
    return after, Reply(text, reward, done)

  def problems(seeds: Sequence[int]) -> list[dict[str, Any]]:
    try:
      openings = [first_observation(settings | {"seed": seed}) for seed in (*seeds, *seeds[:1])]
    except Exception as error:  # The server is foreign, and may do anything.
      raise ValueError(f"environment.name: {url} failed at a reset: {one_line(error)}") from error
    finally:
      pool.close()
    if openings[0] != openings[-1]:
      both = f"two first observations for the seed {seeds[0]}, {_where_they_differ(openings[0], openings[-1])}"
      raise ValueError(
        f"environment.name: {url} gave {both}, expected one, which a group's conversations share; is a setting of its resets missing "
        "(environment.reset)?"
      )
    return [{"question": opening, "opening": opening, "seed": seed} for seed, opening in zip(seeds, openings, strict=False)]

  pool.limit = _probe(url, pool, lambda session: begin(session, Episode(object(), settings | {"seed": 0}), 0), required=sessions)
  # What the policy sees of a state is all that is known of it.
  seen = lambda episode: episode.played[-1][1] if episode.played else episode.first or ""
  return Environment(reset_episode, step, state_key=seen, concurrency=pool.limit, problems=problems)


def check_openenv(url: str, *, action: str | None = None, reset: str | None = None, **others: Any) -> None:
  """Checks an address and the settings without connecting.

  Raises:
    MissingPackageError: If the package websockets is missing.
    ValueError: If the address or a setting is wrong. One line, with the fix.
  """
  del others
  parts = urllib.parse.urlsplit(url)
  if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
    raise ValueError(Problem("environment.name", repr(f"openenv:{url}"), "an address such as 'openenv:http://127.0.0.1:8000'"))
  for name, value in (("action", action), ("reset", reset)):
    if value is not None and json_object(value) is None:
      raise ValueError(Problem(f"environment.{name}", repr(value), "an object in JSON"))
  if action is not None and "{text}" not in action:
    raise ValueError(Problem("environment.action", repr(action), "{text} in it, where the policy's turn goes"))
  try:
    import websockets.sync.client  # noqa: F401
  except ImportError as error:
    raise MissingPackageError("environments openenv:URL need the package websockets: pip install 'jaxrl-llm[openenv]'") from error


def _address(url: str) -> str:
  """Returns the address of the server's WebSockets, without their path."""
  return url.rstrip("/").replace("http", "ws", 1) if url.startswith("http") else url.rstrip("/")


def _where_they_differ(text: str, other: str) -> str:
  start = max(len(os.path.commonprefix([text, other])) - 10, 0)
  return f"{text[start : start + 40]!r} and {other[start : start + 40]!r}"


def _is_local(url: str) -> bool:
  return urllib.parse.urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def _schema(address: str, timeout_s: float) -> Mapping[str, Any] | None:
  """Returns the JSON schema of the actions; None if the server publishes none."""
  opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if _is_local(address) else ()))
  try:
    with opener.open(f"{address.replace('ws', 'http', 1)}/schema", timeout=timeout_s) as reply:
      return json.loads(reply.read(_MOST_BYTES))["action"]
  except (OSError, ValueError, LookupError, TypeError):
    return None


def _probe(url: str, pool: ConnectionPool, begin: Callable[[Session], str], *, required: int | None) -> int:
  """Opens the sessions, and resets each of them. Returns how many the server allows.

  Raises:
    ValueError: If there is none, or fewer than required. One line.
  """

  @contextlib.contextmanager
  def begun() -> Iterator[None]:
    with pool.session(None) as session:
      begin(session)
      yield

  with contextlib.ExitStack() as stack:
    for number in range(pool.limit):
      try:
        stack.enter_context(begun())
      except Exception as error:  # The server is foreign, and may do anything.
        full = isinstance(error, ServerError) and error.code == "CAPACITY_REACHED"
        if full and number and required is None:
          return number
        if full and number:
          expected = f"at most {number}, the number of sessions that the server allows, or None"
          raise ValueError(Problem("environment.sessions", str(required), expected)) from error
        raise ValueError(f"environment.name: the OpenEnv server at {url} could not be reset: {one_line(error)}") from error
  return pool.limit
