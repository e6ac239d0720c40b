"""The door of a learner, by which samplers in other processes join its crew."""

import contextlib
import hashlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm import __version__
from jaxrl_llm.decoding.apart import wire
from jaxrl_llm.decoding.apart.crew import Crew
from jaxrl_llm.decoding.apart.remote import RemoteEngine, SamplerLost
from jaxrl_llm.decoding.engine.frames import Frame, WireError
from jaxrl_llm.decoding.engine.requests import EngineLimits
from jaxrl_llm.messages import one_line, shown

FILE = "samplers.json"
"""Name of the file in a workdir that says where the learner listens."""

PROTOCOL = 1
"""Version of the messages between a learner and its samplers."""

_AT_ONCE = 32  # Number of connections that may be proving who they are.
_HELLO_S = 10.0
_LEAST_S = 3.0  # Time in which a sign of life comes for sure, with one each second.


class JoinRefused(Exception):
  """The learner does not take this sampler. One line."""


def fingerprint_of(workdir: Path) -> str:
  """Returns a digest of the resolved config of the run in a workdir.

  Raises:
    ValueError: If there is no run. One line.
  """
  try:
    config = json.loads((workdir / "config.json").read_text())
  except (OSError, ValueError) as error:
    raise ValueError(f"{workdir / 'config.json'}: it cannot be read ({one_line(error)})") from error
  return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


class _Gate:
  """A port on which samplers join a crew; see `open_crew` for its arguments."""

  def __init__(self, crew: Crew, secret: bytes, *, fingerprint: str, timeout_s: float, host: str, note: Callable[[str], None]):
    self._crew, self._secret, self._fingerprint, self._timeout_s, self._note = crew, secret, fingerprint, timeout_s, note
    self._listener = socket.create_server((host, 0), backlog=64)
    self.address: tuple[str, int] = self._listener.getsockname()[:2]
    self._room, self._is_closed, self._num_strangers = threading.BoundedSemaphore(_AT_ONCE), False, 0
    self._thread = threading.Thread(target=self._accept, name="gate of samplers", daemon=True)
    self._thread.start()

  def _accept(self) -> None:
    while not self._is_closed:
      try:
        accepted, peer = self._listener.accept()
      except OSError:  # Closed.
        return
      if self._room.acquire(blocking=False):
        threading.Thread(target=self._greet, args=[accepted, f"{peer[0]}:{peer[1]}"], name="gate of samplers", daemon=True).start()
      else:
        accepted.close()

  def _greet(self, accepted: socket.socket, peer: str) -> None:
    with contextlib.ExitStack() as room:
      room.callback(self._room.release)
      try:
        connection = wire.accept(accepted, self._secret, seconds=_HELLO_S)
      except WireError as error:
        self._num_strangers += 1
        if not self._num_strangers & (self._num_strangers - 1):  # A flood of them leaves few lines.
          self._note(f"a stranger at {peer} is refused, the {self._num_strangers}. so far: {error}")
        return
      try:
        with wire.patience(connection, _HELLO_S):
          hello = wire.receive(connection)
          wrong = self._wrong(hello)
          name = f"sampler {shown(hello.fields.get('name'))} at {peer}"
          if wrong is None:
            limits, slots = EngineLimits(*hello.fields["limits"]), int(hello.fields["slots"])
            vocab_size = int(hello.fields["vocab_size"])
          wire.send(connection, Frame("refused", {"line": wrong}) if wrong else Frame("welcome", {"timeout_s": self._timeout_s}))
      except (EOFError, OSError, WireError, KeyError, TypeError, ValueError) as error:
        connection.close()
        self._note(f"a sampler at {peer} is refused: {one_line(error)}")
        return
      if wrong is not None:
        connection.close()
        self._note(f"{name} is refused: {wrong}")
        return
    options = dict(vocab_size=vocab_size, slots=slots, timeout_s=self._timeout_s, name=name)
    engine = RemoteEngine(connection, limits, note=self._note, on_lost=self._crew.lose, **options)
    try:
      self._crew.join(engine)
    except (RuntimeError, SamplerLost) as error:
      if not engine.is_lost:
        self._note(f"{name} cannot join: {one_line(error, typed=False)}")
      engine.close()
      return
    self._note(f"{name} has joined, with {slots} rows")

  def _wrong(self, hello: Frame) -> str | None:
    """Returns why a sampler is refused; None if it is not."""
    fields, context = hello.fields, self._crew.limits.context
    if hello.kind != "hello" or fields.get("protocol") != PROTOCOL or fields.get("package") != __version__:
      return f"package: found {shown(fields.get('package'))}, expected {__version__!r}, the learner's version"
    if fields.get("fingerprint") != self._fingerprint:
      return f"config: found the fingerprint {shown(fields.get('fingerprint'))}, expected {self._fingerprint!r}: the run has another config"
    if fields["limits"][0] < context:
      return f"context: found {fields['limits'][0]}, expected at least {context}"
    if not fields["slots"] >= 1:
      return f"slots: found {fields['slots']}, expected 1 or more"
    return None

  def close(self) -> None:
    """Lets no more samplers in."""
    self._is_closed = True
    with contextlib.suppress(OSError):
      self._listener.shutdown(socket.SHUT_RDWR)
    self._listener.close()
    if threading.current_thread() is not self._thread:
      self._thread.join()


def knock(
  address: tuple[str, int], secret: bytes, *, fingerprint: str, limits: EngineLimits, slots: int, vocab_size: int, name: str
) -> tuple[Connection, float]:
  """Asks a learner to be taken as a sampler, whose engine is ready.

  Args:
    address: Host and port of the learner.
    secret: Secret of the learner.
    fingerprint: Fingerprint of this sampler's config.
    limits: Limits of its engine.
    slots: Number of its rows.
    vocab_size: Number of ids of its model.
    name: Name for messages.

  Returns:
    The connection to the learner, and the time of silence after which one side is lost for the
    other, in seconds.

  Raises:
    OSError: If nothing listens there.
    JoinRefused: If the learner does not take it. One line.
    WireError: If the other side has another secret, or is no learner.
  """
  connection = wire.connect(address, secret, seconds=_HELLO_S)
  fields = dict(fingerprint=fingerprint, limits=list(limits), slots=slots, vocab_size=vocab_size, name=name)
  with contextlib.ExitStack() as on_error:
    on_error.callback(connection.close)
    try:
      wire.send(connection, Frame("hello", {"protocol": PROTOCOL, "package": __version__, **fields}))
      if not connection.poll(_HELLO_S):
        raise WireError(f"the learner has not answered within {_HELLO_S:g} s")
      answer = wire.receive(connection)
    except (EOFError, OSError) as error:
      raise WireError(f"the learner has hung up ({one_line(error)})") from error
    if answer.kind != "welcome":
      raise JoinRefused(str(answer.fields.get("line")))
    on_error.pop_all()
  return connection, float(answer.fields["timeout_s"])


class Learner(NamedTuple):
  """Where a learner listens, as `samplers.json` says.

  Attributes:
    address: Host and port.
    secret: Secret of this attempt at the run.
  """

  address: tuple[str, int]
  secret: bytes


def read_learner(workdir: Path) -> Learner | None:
  """Reads where the learner of a run listens; None if it does not.

  Raises:
    ValueError: If the file is damaged. One line.
  """
  try:
    saved = json.loads((workdir / FILE).read_text())
    return Learner((str(saved["host"]), int(saved["port"])), bytes.fromhex(saved["secret"]))
  except FileNotFoundError:
    return None
  except (KeyError, OSError, TypeError, ValueError) as error:
    raise ValueError(f"{workdir / FILE}: it cannot be read ({one_line(error)})") from error


def write_learner(workdir: Path, learner: Learner) -> None:
  """Writes where the learner listens, for the eyes of this user alone."""
  half = workdir / f"{FILE}.tmp"
  half.unlink(missing_ok=True)
  text = json.dumps({"host": learner.address[0], "port": learner.address[1], "secret": learner.secret.hex()}) + "\n"
  with open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
    file.write(text)
  half.replace(workdir / FILE)


def open_crew(
  workdir: Path, *, limits: EngineLimits, timeout_s: float = 60.0, host: str = "127.0.0.1", fingerprint: str | None = None,
  vocab_size: int | None = None, dtype: str | None = None, note: Callable[[str], None] = lambda line: None,
) -> Crew:  # fmt: skip
  """Opens a crew of samplers that find it by the workdir; `close`, or a block's end, closes it.

  Args:
    workdir: Folder of the run, in which `samplers.json` says where the learner listens.
    limits: Largest sizes of requests, and number of those that are open.
    timeout_s: Time of silence, or without a new token for open requests, after which a sampler is
      lost.
    host: Address to listen on; loopback lets in processes of this machine alone.
    fingerprint: Fingerprint of the run's config; None is that of `config.json` in the workdir.
    vocab_size: Number of ids; None leaves the check to the samplers.
    dtype: Dtype to which weights are cast before they travel; None keeps theirs.
    note: Function that gets lines for the log.

  Raises:
    OSError: If the address cannot be used, or the file not be written.
    ValueError: If there is no run in the workdir, or the time is too short.
  """
  if not timeout_s >= _LEAST_S:
    raise ValueError(f"timeout_s: found {timeout_s}, expected at least {_LEAST_S:g} seconds")
  own, secret = fingerprint_of(workdir) if fingerprint is None else fingerprint, secrets.token_bytes(32)
  crew = Crew(limits, vocab_size=vocab_size, dtype=dtype, note=note)
  gate = _Gate(crew, secret, fingerprint=own, timeout_s=timeout_s, host=host, note=note)
  crew.on_close(gate.close)
  learner = Learner((socket.gethostname() if gate.address[0] in ("0.0.0.0", "::") else gate.address[0], gate.address[1]), secret)
  try:
    write_learner(workdir, learner)
  except OSError:
    crew.close()
    raise

  def remove() -> None:
    with contextlib.suppress(OSError, ValueError):
      if read_learner(workdir) == learner:  # Not that of a later attempt.
        (workdir / FILE).unlink()

  crew.on_close(remove)
  return crew
