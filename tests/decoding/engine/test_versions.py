"""Tests of new weights that come while requests are open, and of draws that are repeated."""

import threading

import numpy as np
import pytest

from jaxrl_llm.decoding.engine.requests import ReplayLost, Request
from tests.decoding.engine.engines import PRESETS, WAIT, built, complete, logprobs_of, prompt
from tests.marks import few

NEWEST = 3


def weights(version):
  """Returns weights of a version; consecutive ones differ."""
  return built("dense")[1 + version % 2]


def drawn(engine, requests, *, updates):
  """Draws requests while weights change: to version i + 1 after `updates[i]` tokens of all."""
  count, coming = 0, list(enumerate(updates, 1))

  def note(piece):
    nonlocal count
    count += len(piece.tokens)
    while coming and count >= coming[0][1]:  # In the engine's thread, so that they are never late.
      version, _ = coming.pop(0)
      engine.update(weights(version), version)

  handles = [engine.submit(request, note) for request in requests]
  return [handle.completion.result(WAIT) for handle in handles]


def requests_of(count=12, budget=24):
  """Requests in pairs of one prompt, more than there are rows, whose lengths differ."""
  return [Request(prompt(i // 2, 5 + 6 * (i // 2)), budget - 3 * (i % 5), seed=i, temperature=1.0) for i in range(count)]


def test_a_request_waits_for_the_weights_that_may_draw_it(engine_of):
  engine = engine_of()
  waiting = engine.submit(Request(prompt(0, 9), 6, seed=1, oldest=2))
  assert complete(engine, Request(prompt(1, 9), 6, seed=1))[0].parts == ((0, 6),)
  engine.update(weights(1), 1)
  assert complete(engine, Request(prompt(1, 9), 6, seed=1))[0].parts == ((1, 6),)
  assert not waiting.completion.done()
  engine.update(weights(2), 2)
  assert waiting.completion.result(WAIT).parts == ((2, 6),)


def test_a_request_that_waits_for_weights_can_be_aborted(engine_of):
  handle = engine_of().submit(Request(prompt(0, 9), 6, oldest=2))
  handle.abort()
  assert handle.completion.result(WAIT).reason == "aborted"


def test_lower_orders_get_rows_first(engine_of):
  engine, ended = engine_of(slots=1), []
  for order in (0, 2, 1, 2, 1):
    handle = engine.submit(Request(prompt(order, 9), 12, order=order, oldest=1))
    handle.completion.add_done_callback(lambda _, order=order: ended.append(order))
  engine.update(weights(1), 1)
  complete(engine, Request(prompt(9, 9), 1, order=3))
  assert ended == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "wait"])
def test_completions_say_which_weights_drew_what(engine_of, in_flight):
  engine, requests = engine_of(in_flight=in_flight), requests_of()
  results = drawn(engine, requests, updates=(20, 70, 120))
  for result in results:
    versions = [version for version, _ in result.parts]
    assert versions == sorted(set(versions)) and sum(count for _, count in result.parts) == len(result.tokens)
    assert result.version == versions[0] and min(count for _, count in result.parts) > 0
  is_mixed = [len(result.parts) > 1 for result in results]
  assert any(is_mixed) != (in_flight == "wait")
  own = {version for result in results for version, _ in result.parts}
  assert own == set(range(NEWEST + 1)) if in_flight != "wait" else {0, NEWEST} <= own


@pytest.mark.parametrize("kind", few(PRESETS, 0))
def test_recomputed_keys_and_values_are_those_of_the_new_weights(engine_of, kind):
  """Every token has the log-probability of its own weights, given all tokens before it."""
  engine = engine_of(kind, in_flight="recompute")
  requests = [Request(prompt(i, 9), 24, seed=i) for i in range(3)]
  submitted, begun = threading.Event(), set()

  def noting(i):
    def note(piece):  # In the engine's thread, so that no request ends before it.
      submitted.wait(WAIT)
      was, _ = len(begun), begun.add(i)
      if was < len(begun) == len(requests):
        engine.update(built(kind)[2], 1)

    return note

  handles = [engine.submit(request, noting(i)) for i, request in enumerate(requests)]
  submitted.set()
  for request, handle in zip(requests, handles, strict=True):
    result = handle.completion.result(WAIT)
    assert [version for version, _ in result.parts] == [0, 1]
    known = [logprobs_of(kind, request.tokens, result.tokens, built(kind)[1 + version]) for version in (0, 1)]
    first = result.parts[0][1]
    np.testing.assert_allclose(result.logprobs, [*known[0][:first], *known[1][first:]], atol=2e-5)
    assert np.abs(known[0] - known[1]).max() > 0.1


def repeated(engine, requests, results):
  """Draws again what was drawn; each version comes once the one before has done its part."""
  counts, now = [0] * len(requests), threading.Condition()

  def noting(i):
    def note(piece):
      with now:
        counts[i] += len(piece.tokens)
        now.notify()

    return note

  again = [request._replace(parts=result.parts) for request, result in zip(requests, results, strict=True)]
  handles = [engine.submit(request, noting(i)) for i, request in enumerate(again)]
  for version in range(NEWEST):
    due = [sum(count for of, count in result.parts if of <= version) for result in results]
    with now:
      assert now.wait_for(lambda due=due: counts >= due and all(a >= b for a, b in zip(counts, due, strict=True)), WAIT)
    engine.update(weights(version + 1), version + 1)
  return [handle.completion.result(WAIT) for handle in handles]


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "wait"])
@pytest.mark.parametrize("updates", few(["20 70 120", "1 2 3", "90 91 92"], 0))
def test_a_draw_is_repeated_to_the_last_bit(engine_of, in_flight, updates):
  requests = requests_of()
  results = drawn(engine_of(in_flight=in_flight), requests, updates=map(int, updates.split()))
  again = repeated(engine_of(in_flight=in_flight), requests, results)
  plain = complete(engine_of(in_flight=in_flight), *requests)
  key = lambda result: (result.tokens, result.logprobs, result.parts, result.reason)
  assert list(map(key, again)) == list(map(key, results))
  assert [x.tokens for x in plain] != [x.tokens for x in results]  # Other weights do draw others.


def test_a_draw_of_older_weights_cannot_be_repeated(engine_of):
  engine = engine_of()
  engine.update(weights(1), 1)
  complete(engine, Request(prompt(0, 9), 1))
  handle = engine.submit(Request(prompt(0, 9), 6, parts=((0, 6),)))
  with pytest.raises(ReplayLost, match="found the weights of version 1, expected 0"):
    handle.completion.result(WAIT)
  handle = engine.submit(Request(prompt(0, 9), 6, parts=((1, 3), (2, 3))))
  engine.update(weights(3), 3)
  with pytest.raises(ReplayLost, match="found the weights of version 3, expected [12]"):
    handle.completion.result(WAIT)
  assert complete(engine, Request(prompt(0, 9), 6))[0].reason == "length"


def test_a_turn_that_rereads_nothing_is_the_same_whatever_is_cached(engine_of):
  first = Request(prompt(0, 9), 20, seed=1, owner="a")
  engine = engine_of()
  [said] = complete(engine, first)
  second = Request([*first.tokens, *said.tokens, *prompt(1, 3)], 20, seed=2, owner="a", rereads=False)
  [answer], [apart] = complete(engine, second), complete(engine_of(), second)
  assert (answer.tokens, answer.logprobs) == (apart.tokens, apart.logprobs)
  assert answer.cached_tokens == len(first.tokens) - 1 and apart.cached_tokens == 0
  # All that is now computed as a prompt need not be computed again.
  third = second._replace(tokens=[*second.tokens, *answer.tokens, *prompt(2, 3)], seed=3)
  assert complete(engine, third)[0].cached_tokens == len(second.tokens) - 1
  assert complete(engine, third._replace(rereads=True))[0].cached_tokens > len(second.tokens)
