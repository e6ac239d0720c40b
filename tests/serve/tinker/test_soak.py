"""A thousand calls of the Tinker API, every tenth of a client that misbehaves."""

import contextlib
import gc
import os
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxrl_llm.serve import server
from jaxrl_llm.serve.tinker import wire
from jaxrl_llm.serve.tinker.app import make_app
from jaxrl_llm.serve.tinker.sessions import Sessions
from tests.serve.fake_engine import RESET, port_of
from tests.serve.tinker.client import Client, datum, wait_until
from tests.serve.tinker.test_training import SEEN, TEXT

NUM_CALLS, NUM_LEAVING = 1000, 200
HEAD = "POST /api/v1/{} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {}\r\ncontent-length: {}\r\n\r\n"
JSON, MESSAGE = "application/json", "application/x-protobuf"


def misbehave(service, rng, model):
  """Sends something odd and leaves, with or without waiting for an answer."""
  training = wire.encode((1, model), (2, rng.randrange(10**6)), (3, datum(*SEEN)), (4, "cross_entropy"))
  path, kind, body, size = rng.choice([
    ("forward_backward", MESSAGE, training[: rng.randrange(len(training))], len(training)),
    ("forward_backward", MESSAGE, training, 2**40),
    ("forward_backward", MESSAGE, os.urandom(200), 200),
    ("forward_backward", MESSAGE, b"\x0a\x03abc", 5),
    ("optim_step", JSON, b"[" * 500, 500),
    ("optim_step", JSON, b'{"model_id": {"a": 1}}', 22),
    ("retrieve_future", JSON, b'{"request_id": "x:1"}', 21),
    ("create_model", JSON, b"\xff\xfe", 2),
    ("asample", JSON, b'{"sampling_session_id": 1e999}', 30),
    ("nothing", JSON, b"", 0),
  ])  # fmt: skip
  with contextlib.closing(
    socket.create_connection(("127.0.0.1", port_of(service)), timeout=10)
  ) as connection:
    connection.sendall(HEAD.format(path, kind, size).encode() + body)
    if rng.random() < 0.5:
      connection.setsockopt(*RESET)
    elif len(body) == size:
      connection.recv(1000)


@pytest.mark.slow
def test_a_thousand_calls_with_odd_ones_among_them(tinker_bases, tmp_path):
  sessions = Sessions()
  app = make_app(tinker_bases, tmp_path, rules=server.rules_of("127.0.0.1", None), sessions=sessions)
  service = server.listen(app, host="127.0.0.1", port=0)
  local, lock, made = threading.local(), threading.Lock(), []

  def own():
    if not hasattr(local, "client"):
      local.client = Client(service)
      local.model, local.sampler = local.client.create(), local.client.sampler(base_model="nano")
      with lock:
        made.append(local.client)
    return local.client, local.model, local.sampler

  first = Client(service)
  model, sampler = first.create(), first.sampler(base_model="nano")
  expected = (
    first.compute(model, [SEEN], forward_only=True).logprobs[0],
    first.compute_logprobs(sampler, TEXT),
  )
  before = len(os.listdir("/proc/self/fd")), threading.active_count()

  def call(number):
    rng = random.Random(number)
    if number % 10 == 0:
      return misbehave(service, rng, model)
    client, model_id, sampler_id = own()
    if number % 2:
      answer = client.compute(model_id, [SEEN], forward_only=True).logprobs[0], expected[0]
    else:
      answer = client.compute_logprobs(sampler_id, TEXT), expected[1]
    np.testing.assert_array_equal(*answer)

  try:
    with ThreadPoolExecutor(16) as pool:
      list(pool.map(call, range(NUM_CALLS)))
    for number in range(NUM_LEAVING):
      body = wire.encode((1, model), (2, 10**7 + number), (3, datum(*SEEN)), (4, "cross_entropy"), (6, 1))
      with contextlib.closing(socket.create_connection(("127.0.0.1", port_of(service)))) as connection:
        connection.setsockopt(*RESET)
        connection.sendall(HEAD.format("forward_backward", MESSAGE, len(body)).encode() + body)
    wait_until(lambda: service.open_requests() == 0 and service.open_connections() == 0, seconds=60)
    first.numbers[model] = 2 * 10**7
    np.testing.assert_array_equal(first.compute(model, [SEEN], forward_only=True).logprobs[0], expected[0])
    for client in [first, *made]:
      client.ask(f"sessions/{client.session}/finish", {"reason": {"type": "success"}, "detail": None})
    assert sessions.num_adapters() == 0
    gc.collect()
    wait_until(
      lambda: len(os.listdir("/proc/self/fd")) <= before[0] and threading.active_count() <= before[1] + 4
    )
  finally:
    service.close()
