"""Engines for tests of links between processes: they draw numbers that follow from the seed."""

import threading
import time
from concurrent.futures import Future
from multiprocessing.connection import Pipe

import jax
import numpy as np

from jaxrl_llm.decoding.apart.remote import RemoteEngine, SamplerLost
from jaxrl_llm.decoding.apart.served import serve
from jaxrl_llm.decoding.apart.weights import HeldWeights
from jaxrl_llm.decoding.engine.requests import Decoded, EngineLimits, Handle, Piece, Pulse, QueueFull

LIMITS, VOCAB, WAIT = EngineLimits(64, 100), 1000, 60
PARAMS = {"layers": {"up": np.arange(12, dtype=np.float32).reshape(3, 4)}, "scale": np.float32([1, 2])}


def drawn(request):
  """Returns the tokens and log-probabilities of a request."""
  rng = np.random.default_rng([request.seed, *request.tokens])
  count = request.max_tokens
  return rng.integers(0, VOCAB, count).tolist(), (-rng.random(count, np.float32)).tolist()


class Steady:
  """Engine that draws a token of each request every `pace_s`, and stops when `is_frozen`."""

  def __init__(self, pace_s=0.0, limits=LIMITS):
    self.limits, self.pace_s, self.is_frozen = limits, pace_s, False
    self.updates, self.asked, self.num_aborted, self.num_drawn, self.error = [], [], 0, 0, None

  def submit(self, request, on_piece=None):
    if request.max_tokens > 50:
      raise ValueError("max_tokens: found more than 50")
    self.asked.append((request, self.updates[-1][1] if self.updates else None))
    future, aborted = Future(), threading.Event()
    threading.Thread(target=self._draw, args=[request, on_piece, future, aborted], daemon=True).start()
    return Handle(future, aborted.set)

  def _draw(self, request, on_piece, future, aborted):
    version, reason = self.asked[-1][1] or 0, "length"
    tokens, logprobs = drawn(request)
    for i in range(len(tokens)):
      time.sleep(self.pace_s)
      while self.is_frozen and not aborted.is_set():
        time.sleep(0.01)
      if aborted.is_set():
        self.num_aborted += 1
        tokens, logprobs, reason = tokens[:i], logprobs[:i], "aborted"
        break
      if self.error is not None:
        future.set_exception(self.error)
        return
      self.num_drawn += 1
      if on_piece is not None:
        on_piece(Piece(tokens[i : i + 1], logprobs[i : i + 1]))
    future.set_result(Decoded(tokens, logprobs, reason, 1, len(tokens), version, ((version, len(tokens)),)))

  def update(self, params, version):
    self.updates.append((jax.tree.map(np.asarray, params), version))

  def pulse(self):
    return Pulse(0, self.num_drawn, 0.0, time.monotonic())

  def close(self):
    pass


class Slow(RemoteEngine):
  """A remote engine without a process, which draws only when it is told to."""

  def __init__(self, most=100, slots=4):
    self.limits, self.slots, self.moved = EngineLimits(64, most), slots, None
    self.open, self.versions, self.closed = [], [], False
    self._lost, self._pulse = None, Pulse(0, 0, 0.0, 0.0)

  def submit(self, request, on_piece=None):
    if self.is_lost:
      raise self._lost
    if len(self.open) >= self.limits.requests:
      raise QueueFull("full")
    future = Future()
    self.open.append((request, on_piece, future))

    def abort():
      if not future.done():
        self.open = [item for item in self.open if item[2] is not future]
        future.set_result(Decoded([], [], "aborted", 0, 0, 0))

    return Handle(future, abort)

  def piece(self, tokens, number=0):
    self.open[number][1](Piece(tokens, [-1.0] * len(tokens)))

  def end(self, tokens=(1, 2)):
    request, _, future = self.open.pop(0)
    future.set_result(Decoded(list(tokens), [-1.0] * len(tokens), "stop", 0, 0, 0))
    return request

  def lose(self):
    self._lost, opened, self.open = SamplerLost("lost"), self.open, []
    for _, _, future in opened:
      future.set_exception(self._lost)

  def give(self, snapshot):
    self.versions.append(snapshot.version)
    given = Future()
    given.set_result(None)
    return given

  def close(self):
    self.closed = True
    for _, _, future in self.open:
      future.set_result(Decoded([], [], "aborted", 0, 0, 0))


def loads(engines):
  """Returns the numbers of open requests."""
  return [len(engine.open) for engine in engines]


class Link:
  """An engine behind a connection, with the thread that serves it."""

  def __init__(self, engine=None, *, timeout_s=10.0, params=PARAMS, on_lost=None, name="sampler", slots=4):
    self.engine = engine or Steady()
    own, other = Pipe()
    self.lines, self.leave, self.end = [], threading.Event(), []
    self.held = self.template(params)
    self.served = other
    self.thread = threading.Thread(target=self._serve, daemon=True)
    self.thread.start()
    options = dict(vocab_size=VOCAB, slots=slots, timeout_s=timeout_s, name=name, on_lost=on_lost)
    self.remote = RemoteEngine(own, self.engine.limits, note=self.lines.append, **options)

  @staticmethod
  def template(params):
    return HeldWeights(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))

  def _serve(self):
    try:
      self.end.append(serve(self.engine, self.served, self.held, timeout_s=WAIT, leave=self.leave))
    except Exception as error:
      self.end.append(error)

  def close(self):
    self.engine.is_frozen = False
    self.remote.close()
    self.thread.join(WAIT)
    assert not self.thread.is_alive()


def wait_until(is_true):
  until = time.monotonic() + WAIT
  while not is_true() and time.monotonic() < until:
    time.sleep(0.01)
  assert is_true()


def threads():
  """Returns the threads of links that are left a while after their end."""
  names = ("remote engine", "served engine", "gate of samplers", "weights to the host")
  own = [thread for thread in threading.enumerate() if thread.name.startswith(names)]
  for thread in own:
    thread.join(5)
  return [thread for thread in own if thread.is_alive()]
