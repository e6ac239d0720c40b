"""Connections between a learner and its samplers, which carry frames.

A connection begins with the exchange of `multiprocessing.connection`, in which both sides prove
that they know a secret without sending it. Starts no JAX.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from jaxrl_llm.decoding.engine.frames import LARGEST_FRAME, Frame, WireError, decode, encode
from jaxrl_llm.messages import one_line


def send(connection: Connection, frame: Frame) -> None:
  """Sends a frame. One thread at a time.

  Raises:
    OSError: If the connection is broken.
    WireError: If the frame cannot be sent.
  """
  connection.send_bytes(encode(frame))


def receive(connection: Connection) -> Frame:
  """Waits for a frame. One thread at a time.

  Raises:
    EOFError: If the other side has closed the connection.
    OSError: If the connection is broken, or a frame is too large.
    WireError: If what arrives is no frame.
  """
  return decode(connection.recv_bytes(LARGEST_FRAME))


def hang_up(connection: Connection) -> None:
  """Breaks a connection, also under threads that send or wait: they get an error at once."""
  with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as other:
    other.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def patience(connection: Connection, seconds: float) -> Iterator[None]:
  """Breaks a connection whose block does not end in time."""
  timer = threading.Timer(seconds, hang_up, [connection])
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def accept(accepted: socket.socket, secret: bytes, *, seconds: float = 10.0) -> Connection:
  """Returns the connection to a client that knows the secret.

  Args:
    accepted: Socket from `accept` of one that listens, which now belongs to the connection.
    secret: Secret that both sides know.
    seconds: Time for the exchange.

  Raises:
    WireError: If the client does not know it, says nothing, or speaks of something else.
  """
  return _prove(accepted, secret, (deliver_challenge, answer_challenge), seconds)


def connect(address: tuple[str, int], secret: bytes, *, seconds: float = 10.0) -> Connection:
  """Connects to a learner.

  Args:
    address: Host and port.
    secret: Secret that both sides know.
    seconds: Time for the exchange.

  Raises:
    OSError: If nothing listens there.
    WireError: If the other side does not know the secret, or is no learner.
  """
  return _prove(socket.create_connection(address, timeout=seconds), secret, (answer_challenge, deliver_challenge), seconds)


def _prove(own: socket.socket, secret: bytes, steps: tuple, seconds: float) -> Connection:
  own.setblocking(True)
  with contextlib.suppress(OSError):
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  connection = Connection(own.detach())
  try:
    with patience(connection, seconds):
      for step in steps:
        step(connection, secret)
  except AuthenticationError as error:
    connection.close()
    raise WireError("the other side has another secret") from error
  except (AssertionError, EOFError, OSError, ValueError) as error:
    connection.close()
    raise WireError(f"the other side did not prove that it knows the secret ({one_line(error)})") from error
  return connection
