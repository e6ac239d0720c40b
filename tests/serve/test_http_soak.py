"""A thousand requests, every tenth of a client that misbehaves."""

import asyncio
import contextlib
import gc
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl_llm.decoding.engine.requests import EngineLimits
from jaxrl_llm.serve.server import Patience
from jaxrl_llm.serve.shell import Rules
from tests.runs import wait_for
from tests.serve.fake_engine import CHAT, COMPLETION, RESET, FakeEngine, ask, connect, events_of, head, serving, whole

NUM_REQUESTS = 1000
LONG = {"prompt": "x" * 20, "max_tokens": 100}
MISBEHAVIOURS = {
  # Content, and what follows: the client leaves, resets, or waits until the service has ended it.
  "half a head": (head(100)[:40], "leave"),
  "half a body": (head(100) + b'{"pro', "leave"),
  "half a body and silence": (head(100) + b'{"pro', "wait"),
  "silence": (b"", "wait"),
  "no reading": (whole(LONG | {"stream": True}) * 20, "reset"),
  "a reset": (whole(LONG), "reset"),
  "a disconnection": (whole(LONG), "leave"),
  "a disconnection from a stream": (whole(LONG | {"stream": True, "n": 3}), "leave"),
  "no HTTP": (b"\xff\x00\r\n\r\n", "wait"),
  "no JSON": (head(5) + b'{"a":', "leave"),
  "no UTF-8": (head(14) + b'{"prompt":"\xff"}', "leave"),
  "a billion tokens": (whole({"prompt": "hi", "max_tokens": 10**9}), "leave"),
}


def misbehave(service, kind, draw):
  content, end = MISBEHAVIOURS[kind]
  with contextlib.suppress(ConnectionError), connect(service) as connection:
    connection.sendall(content)
    if end == "wait":
      while connection.recv(65536):
        continue
    else:
      time.sleep(draw.random() * 0.05)
    if end == "reset":
      connection.setsockopt(*RESET)


def behave(service, number, draw):
  """Sends a request and checks that the answer is its own."""
  text = f"answer {number} " + "y" * draw.randint(0, 40)
  stream, is_chat = draw.random() < 0.5, draw.random() < 0.5
  asked = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
  for _ in range(100):
    path = CHAT if is_chat else COMPLETION
    status, headers, answer = ask(service, path, {**asked, "max_tokens": 100, "stream": stream}, timeout=60)
    if status != 429:
      break
    time.sleep(float(headers["retry-after"]) * draw.random())
  assert status == 200, answer
  choices = [choice for event in events_of(answer) for choice in event["choices"]] if stream else answer["choices"]
  texts = [choice["text"] if not is_chat else (choice["delta"] if stream else choice["message"])["content"] for choice in choices]
  assert "".join(texts) == text
  return True


def leftovers():
  """Returns what a service that is idle still holds."""
  gc.collect()
  tasks = [task for task in gc.get_objects() if isinstance(task, asyncio.Task) and not task.done()]
  # The service's own pool grows to four threads when they are needed.
  threads = [thread for thread in threading.enumerate() if not thread.name.startswith("serve_")]
  return len(tasks), len(os.listdir("/proc/self/fd")), len(threads)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts file descriptors as Linux shows them")
def test_a_thousand_requests_leave_nothing_behind():
  def reply(request):
    text = bytes(token for token in request.tokens if token < 256).decode()
    # The misbehaving get long answers, so that they leave in the middle.
    return "z" * 200 if text.startswith("x") else text.removeprefix("<user>").removesuffix("<assistant>")

  engine = FakeEngine(reply, limits=EngineLimits(context=256, requests=24), delay=0.002, step=6)
  patience = Patience(keep_alive=0.5, idle=1, stalled=1)
  with serving(engine, patience=patience, rules=Rules(body_seconds=1)) as service:
    assert behave(service, 0, random.Random(0))
    wait_for(lambda: service.open_connections() == 0)
    before = leftovers()
    kinds = list(MISBEHAVIOURS)

    def run(number):
      draw = random.Random(number)
      if number % 10:
        return behave(service, number, draw)
      return misbehave(service, kinds[number // 10 % len(kinds)], draw)

    with ThreadPoolExecutor(32) as pool:
      results = list(pool.map(run, range(NUM_REQUESTS)))
    assert results.count(True) == NUM_REQUESTS * 9 // 10
    wait_for(lambda: not engine.open and service.open_requests() == service.open_connections() == 0)
    assert leftovers() == before
    assert engine.aborts > 0 and ask(service, "/health")[0] == 200
  wait_for(lambda: threading.active_count() < before[2])
