"""Turns of weights at one engine."""

import threading

from jaxrl_llm.decoding.engine.requests import Decoded, Request
from jaxrl_llm.serve.tinker.sampler import Sampler, Weights
from tests.serve.fake_engine import FakeEngine
from tests.serve.tinker.client import wait_until


class Turning(FakeEngine):
  """Engine that notes the weights that each request meets."""

  def __init__(self):
    super().__init__("hello")
    self.held, self.met = "base", []

  def update(self, params, version):
    assert not self.open
    self.held = params

  def submit(self, request, on_piece=None):
    self.met.append((self.held, request.seed))
    return super().submit(request, on_piece)


def begin(count):
  engine, weights = Turning(), [Weights(lambda i=i: f"adapter {i}", len) for i in range(count)]
  base = Weights(lambda: "base", len)
  return engine, Sampler(engine, base, most=8), [base, *weights]


def test_none_overtakes_in_a_turn_and_all_of_the_next_begin_together():
  engine, sampler, (base, first, second) = begin(2)
  engine.running.clear()
  done, ended = [], threading.Semaphore(0)

  def ask(weights, seed):
    request = Request([1], max_tokens=5, seed=seed)
    return sampler.submit(weights, [request], lambda outcome: (done.append(outcome), ended.release()))

  ask(base, 0)
  wait_until(lambda: engine.met)
  for seed, weights in enumerate((first, base, second, first), 1):
    ask(weights, seed)
  assert engine.met == [("base", 0)]
  engine.running.set()
  for _ in range(5):
    assert ended.acquire(timeout=10)
  met = [("base", 0), ("adapter 0", 1), ("adapter 0", 4), ("base", 2), ("adapter 1", 3)]
  assert engine.met == met and all(isinstance(outcome[0], Decoded) for outcome in done)
  sampler.close()


def test_a_call_that_is_ended_or_fails_is_alone():
  engine, sampler, (base, first) = begin(1)
  engine.running.clear()
  outcomes = {}
  end = sampler.submit(base, [Request([1], max_tokens=5)] * 2, lambda outcome: outcomes.update(ended=outcome))
  wait_until(lambda: len(engine.met) == 2)
  end()
  engine.running.set()
  wait_until(lambda: "ended" in outcomes)
  assert {completion.reason for completion in outcomes["ended"]} == {"aborted"}
  broken = Weights(lambda: 1 / 0, len)
  sampler.submit(broken, [Request([1], max_tokens=5)], lambda outcome: outcomes.update(broken=outcome))
  wait_until(lambda: "broken" in outcomes)
  assert isinstance(outcomes["broken"], ZeroDivisionError)
  sampler.submit(first, [Request([1], max_tokens=5)], lambda outcome: outcomes.update(good=outcome))
  wait_until(lambda: "good" in outcomes)
  assert outcomes["good"][0].tokens == list(b"hello")
  sampler.close()
