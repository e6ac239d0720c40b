"""Clients that misbehave: each costs its own request, and leaves nothing behind."""

import contextlib
import gc
import http.client
import json
import re
import socket
import threading
import time

import pytest

from jaxrl_llm.decoding.engine.requests import EngineLimits
from jaxrl_llm.serve.server import Patience
from jaxrl_llm.serve.shell import Rules
from tests.runs import wait_for
from tests.serve.fake_engine import COMPLETION, RESET, FakeEngine, ask, connect, events_of, head, port_of, serving, whole

QUICK = Patience(keep_alive=0.4, idle=0.6, stalled=0.6)


def read_all(connection):
  """Reads until the service ends the connection."""
  parts = []
  with contextlib.suppress(ConnectionError):
    while part := connection.recv(65536):
      parts.append(part)
  return b"".join(parts)


def is_empty(service, engine):
  return service.open_requests() == 0 and service.open_connections() == 0 and not engine.open


@pytest.fixture
def hanging():
  """An engine that takes requests and never draws."""
  engine = FakeEngine("hello")
  engine.running.clear()
  return engine


def test_half_a_body_and_then_silence_is_timed_out(hanging):
  with serving(hanging, rules=Rules(body_seconds=0.3)) as service, connect(service) as connection:
    connection.sendall(head(100) + b'{"prompt": ')
    answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"timeout"' in answer and b"connection: close" in answer
    wait_for(lambda: is_empty(service, hanging))


def test_a_body_that_drips_is_timed_out_as_a_whole(hanging):
  with serving(hanging, rules=Rules(body_seconds=0.5)) as service, connect(service) as connection:
    connection.sendall(head(1000))
    begun = time.monotonic()
    with contextlib.suppress(ConnectionError):
      while time.monotonic() - begun < 10 and service.open_requests() or time.monotonic() - begun < 0.2:
        connection.sendall(b" ")
        time.sleep(0.05)
    assert time.monotonic() - begun < 5
    wait_for(lambda: is_empty(service, hanging))


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", head(3)[:-2]])
def test_half_a_head_and_then_silence_is_cut(hanging, sent):
  with serving(hanging, patience=QUICK) as service, connect(service) as connection:
    connection.sendall(sent)
    assert read_all(connection) == b""
    wait_for(lambda: is_empty(service, hanging))


def test_a_second_head_that_drips_is_cut():
  engine = FakeEngine("hello")
  with serving(engine, patience=QUICK) as service, connect(service) as connection:
    connection.sendall(whole({"prompt": "hi"}))
    assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    begun = time.monotonic()
    with contextlib.suppress(ConnectionError):
      for letter in head(3) * 10:
        connection.sendall(bytes([letter]))
        time.sleep(0.05)
    assert time.monotonic() - begun < 5
    wait_for(lambda: is_empty(service, engine))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_a_client_that_leaves_has_its_request_aborted(stream, draws, resets):
  engine = FakeEngine("x" * 200, delay=0.01)
  if not draws:
    engine.running.clear()
  with serving(engine) as service:
    with connect(service) as connection:
      connection.sendall(whole({"prompt": "hi", "n": 2, "max_tokens": 200, "stream": stream}))
      wait_for(lambda: len(engine.open) == 2)
      if draws and stream:
        assert connection.recv(100)
      if resets:
        connection.setsockopt(*RESET)
    wait_for(lambda: is_empty(service, engine))
    assert engine.aborts == 2


def test_a_client_that_leaves_in_its_body_costs_nothing(hanging):
  with serving(hanging) as service:
    with connect(service) as connection:
      connection.sendall(head(100) + b"{")
      wait_for(lambda: service.open_requests() == 1)
    wait_for(lambda: is_empty(service, hanging))
    assert not hanging.requests


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_two_lengths_of_a_body_end_the_connection(method):
  """RFC 9112, 6.1: a proxy may believe the other length."""
  engine = FakeEngine("hello")
  path = COMPLETION if method == "POST" else "/v1/models"
  both = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
  both += "content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n10\r\n" + '{"prompt": "hi"}' + "\r\n0\r\n\r\n"
  with serving(engine) as service, connect(service) as connection:
    connection.sendall(both.encode() + whole({"prompt": "hi"}))
    answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1 and b"connection: close" in answer
    assert not engine.requests


def test_a_client_that_does_not_read_is_cut(hanging):
  """Its answers are larger than what the sockets of both sides hold."""
  with serving(hanging, patience=QUICK) as service:
    page = len(ask(service, "/")[2])
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port_of(service)))
    with connection:
      connection.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 1000)
      assert connection.recv(1)
      wait_for(lambda: is_empty(service, hanging))
      assert 0 < len(read_all(connection)) < 1000 * page / 2


def test_a_client_that_reads_slowly_loses_nothing():
  engine = FakeEngine("x" * 2000, limits=EngineLimits(context=3000, requests=8))
  with serving(engine, patience=QUICK._replace(stalled=5)) as service:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(service), timeout=20)
    value = {"prompt": "hi", "max_tokens": 2500, "stream": True, "return_token_ids": True}
    connection.request("POST", COMPLETION, json.dumps(value), {"content-type": "application/json"})
    response = connection.getresponse()
    parts = []
    while part := response.read(8192):
      parts.append(part)
      time.sleep(0.02)
    connection.close()
    events = events_of(b"".join(parts).decode())
    assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 2001


@pytest.mark.parametrize(
  "sent",
  [
    b"\x00\x01\x02\xff\r\n\r\n", b"GET / HTTX/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"A" * 100_000,
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: evil.example\r\n\r\n",
    b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
  ],
)  # fmt: skip
def test_what_is_no_http_is_refused_or_cut(hanging, sent, capfd):
  with serving(hanging, patience=QUICK) as service:
    with connect(service) as connection, contextlib.suppress(ConnectionError):
      connection.sendall(sent)
      answer = read_all(connection)
      assert answer[:12] in (b"", b"HTTP/1.1 400")
    wait_for(lambda: is_empty(service, hanging))
    assert ask(service, "/health")[0] == 200
  assert capfd.readouterr().err == ""


def test_a_chunked_body_is_limited_too(hanging):
  with serving(hanging) as service, connect(service) as connection:
    start = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    with contextlib.suppress(ConnectionError):
      connection.sendall(start + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 40)
      connection.sendall(b"0\r\n\r\n")
    assert read_all(connection).startswith(b"HTTP/1.1 413 ")
    wait_for(lambda: is_empty(service, hanging))


def test_a_refusal_does_not_wait_for_the_body_for_long(hanging):
  with serving(hanging, api_key="k") as service, connect(service) as connection:
    connection.sendall(head(10**9))
    begun = time.monotonic()
    assert read_all(connection).startswith(b"HTTP/1.1 401 ") and time.monotonic() - begun < 10
    wait_for(lambda: is_empty(service, hanging))


def test_of_too_many_bodies_the_oldest_gives_way():
  """Clients that never end theirs cannot take all places."""
  engine = FakeEngine("hello")
  with serving(engine, rules=Rules(reading=3)) as service, contextlib.ExitStack() as stack:
    slow = []
    for count in range(1, 4):
      slow.append(stack.enter_context(connect(service)))
      slow[-1].sendall(head(100) + b"{")
      wait_for(lambda count=count: service.open_requests() == count)
    for _ in range(2):
      assert ask(service, COMPLETION, {"prompt": "hi"})[0] == 200
    assert read_all(slow[0]).startswith(b"HTTP/1.1 408 ")
    # The first one alone has given way: there is a place since. Its answer arrives before it ends.
    wait_for(lambda: service.open_requests() == 2)
  wait_for(lambda: is_empty(service, engine))


def test_of_too_many_connections_the_longest_idle_one_ends():
  engine = FakeEngine("hello")
  with serving(engine, patience=Patience(connections=3)) as service, contextlib.ExitStack() as stack:
    idle = []
    for count in range(1, 4):
      idle.append(stack.enter_context(connect(service)))
      wait_for(lambda count=count: service.open_connections() == count)
    assert ask(service, COMPLETION, {"prompt": "hi"})[0] == 200
    assert read_all(idle[0]) == b""
    wait_for(lambda: service.open_connections() == 2)


def test_connections_that_are_answered_stay(hanging):
  with serving(hanging, patience=Patience(connections=3)) as service, contextlib.ExitStack() as stack:
    for _ in range(3):
      stack.enter_context(connect(service)).sendall(whole({"prompt": "hi"}))
    wait_for(lambda: len(hanging.open) == 3)
    with connect(service) as connection:
      assert read_all(connection) == b""
    wait_for(lambda: service.open_connections() == 3)
    assert len(hanging.open) == 3


def test_pipelined_requests_are_answered_in_order():
  engine = FakeEngine(lambda request: bytes(request.tokens[1:]).decode())
  with serving(engine) as service, connect(service) as connection:
    last = whole({"prompt": "three"}).replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
    connection.sendall(whole({"prompt": "one"}) + whole({"prompt": "two"}) + last)
    assert re.findall(rb'"text":"(\w+)"', read_all(connection)) == [b"one", b"two", b"three"]


def test_the_end_of_the_service_ends_everything(hanging, capfd):
  """It does not wait for an engine that hangs, nor for clients that hang."""
  gc.collect()
  before = set(threading.enumerate()) - {hanging.thread}
  get = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
  with contextlib.ExitStack() as stack:
    with serving(hanging, patience=Patience(ending=0.3)) as service:
      connections = [stack.enter_context(connect(service)) for _ in range(6)]
      sent = [b"", head(10), whole({"prompt": "hi"}), whole({"prompt": "hi", "stream": True}), get * 1000, get]
      for connection, content in zip(connections, sent, strict=True):
        connection.sendall(content)
      wait_for(lambda: service.open_requests() == 4 and len(hanging.open) == 2 and service.open_connections() == 6)
      begun = time.monotonic()
      service.close()
      assert time.monotonic() - begun < 5 and not service.is_alive()
      assert service.open_requests() == service.open_connections() == 0 and hanging.aborts == 2
    answers = [read_all(connection) for connection in connections]
    assert [answer[:12] for answer in answers] == [b"", b"", *[b"HTTP/1.1 503"] * 2, *[b"HTTP/1.1 200"] * 2]
    wait_for(lambda: set(threading.enumerate()) <= before)
  with pytest.raises(ConnectionError):
    connect(service)
  assert capfd.readouterr().err == ""


def test_an_engine_that_ends_is_unavailable(hanging):
  with serving(hanging) as service, connect(service) as connection:
    connection.sendall(whole({"prompt": "hi"}))
    wait_for(lambda: hanging.open)
    hanging.close()
    assert connection.recv(65536).startswith(b"HTTP/1.1 503 ")


def test_a_port_that_is_taken_is_an_error(hanging):
  with serving(hanging) as service, pytest.raises(OSError, match="in use"), serving(FakeEngine(), port=port_of(service)):
    raise AssertionError
