"""Tests of the decoding engine: what it draws, what it computes, and how requests end."""

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.engine import programs as programs_lib
from jaxrl_llm.decoding.engine.make import make_engine, vocabulary_of
from jaxrl_llm.decoding.engine.programs import no_rows
from jaxrl_llm.decoding.engine.requests import QueueFull, Request
from jaxrl_llm.decoding.filters import REMOVED, make_filter
from jaxrl_llm.decoding.stops import MAX_BYTES, MAX_IDS, NO_ID
from jaxrl_llm.devices.compilation import CompileCounter
from jaxrl_llm.models import make_model, preset
from tests.decoding.engine.engines import (
  CHUNK,
  PRESETS,
  STEPS,
  VOCAB,
  WAIT,
  assert_as_the_model,
  built,
  complete,
  logprobs_of,
  outputs_of,
  programs_of,
  prompt,
)


@pytest.mark.parametrize("kind", PRESETS)
def test_logprobs_are_those_of_the_learner(engine_of, kind):
  """Prompts of any length next to each other, some of which continue others."""
  engine = engine_of(kind)
  first = [Request(prompt(i, 1 + 9 * i), 10, seed=i) for i in range(6)]
  results = complete(engine, *first)
  further = [Request([*x.tokens, *result.tokens, *prompt(9, 3)], 10, seed=9) for x, result in zip(first, results, strict=True)]
  for request, result in zip([*first, *further], results + complete(engine, *further), strict=True):
    assert_as_the_model(request, result, kind)
    assert len(result.tokens) == 10 and result.reason == "length"


def test_routes_are_those_of_the_learner(engine_of):
  """Prompts that are shared, continued and cut by a stop, in fewer rows than requests."""
  engine = engine_of("mixture", slots=3, records_routes=True)
  shared = prompt(50, 3 * CHUNK + 2)
  first = [Request([*shared, *prompt(i, 1 + 5 * i)], 10, seed=i) for i in range(4)] + [Request(prompt(8, 20), 9, seed=8)]
  results = complete(engine, *first)
  stopped = Request(first[-1].tokens, 9, seed=8, stop_ids=(results[-1].tokens[4],))
  further = [Request([*x.tokens, *result.tokens, *prompt(9, 3)], 10, seed=9) for x, result in zip(first, results, strict=True)]
  for request, result in zip([*first, stopped, *further], results + complete(engine, stopped, *further), strict=True):
    tokens = [*request.tokens, *result.tokens]
    routing = np.asarray(outputs_of("mixture", tokens, "forward").routing)
    np.testing.assert_array_equal(np.sort(result.routes), np.sort(routing[0, : len(tokens) - 1]))
  assert any(result.cached_tokens for result in results)


def test_kept_ids_are_those_that_the_filters_leave(engine_of):
  settings = [dict(top_k=5), dict(top_p=0.3, temperature=0.8), dict(top_k=40, top_p=0.9), dict(temperature=0.0), {}]
  requests = [Request(prompt(i, 4 + i), 9, seed=i, **own) for i, own in enumerate(settings)]
  *results, unfiltered = complete(engine_of(records_kept=True), *requests)
  assert unfiltered.kept is None
  for request, own, result in zip(requests[:-1], settings, results, strict=False):
    logits = outputs_of("dense", [*request.tokens, *result.tokens], "logits")[0, len(request.tokens) - 1 :][: len(result.tokens)]
    expected = make_filter(**own)(logits) > REMOVED
    assert result.kept == [np.flatnonzero(row).tolist() for row in np.asarray(expected)]
    assert all(token in kept for token, kept in zip(result.tokens, result.kept, strict=True))


def test_a_dense_model_has_no_routes(engine_of):
  assert complete(engine_of(), Request([1, 2], 2))[0].routes is None
  model, params, _ = built("dense")
  with pytest.raises(ValueError, match="records_routes: found True, expected False: the model has no experts"):
    make_engine(model, params, slots=1, context=8, max_requests=1, records_routes=True)


def jobs():
  """Returns requests of many kinds, some with common prefixes."""
  shared = prompt(100, 30)
  settings = [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.3, "top_k": 40, "top_p": 0.9}, {"temperature": 0.0}]
  prompts = [prompt(i, 2 + 7 * i % 40) if i % 2 else [*shared, *prompt(i, 1 + i)] for i in range(18)]
  return [Request(x, 6 + i % 9, seed=i * 2**37 - 5, **settings[i % 6]) for i, x in enumerate(prompts)]


def test_draws_depend_on_the_seed_alone(engine_of):
  """Not on the order of arrival, the number of rows, what is cached, or who submits."""
  at_once = complete(engine_of(), *jobs())
  one_by_one = [complete(engine_of(slots=2), request)[0] for request in jobs()]
  order, engine, mixed = list(enumerate(jobs() * 2)), engine_of(slots=2), {}
  random.Random(0).shuffle(order)

  def client(part):
    for i, request in part:
      mixed[i] = complete(engine, request)[0]

  with ThreadPoolExecutor(5) as threads:
    list(threads.map(client, (order[k::5] for k in range(5))))
  mixed = [mixed[i] for i in range(36)]
  assert sum(x.cached_tokens for x in mixed) > 100
  for others in (one_by_one, mixed[:18], mixed[18:]):
    assert [x.tokens for x in others] == [x.tokens for x in at_once]
    assert all(np.abs(np.subtract(a.logprobs, b.logprobs)).max() < 1e-5 for a, b in zip(others, at_once, strict=True))
  assert len({tuple(x.tokens) for x in at_once}) == 18


@pytest.fixture
def narrow(monkeypatch, engine_of):
  """An engine of ten rows that draws for three, and whether each stretch was drawn ahead."""
  with monkeypatch.context() as patched:  # Not for programs that other tests share.
    patched.setattr(programs_lib, "_WIDTHS", (3,))
    programs, ahead = programs_of.__wrapped__("dense", 10, False, False), []

  def stretch(*args):
    flying = engine._flying
    ahead.append(flying is not None)
    rows = {x.place.row for x in flying.rows} if flying else set()
    assert rows.isdisjoint(args[3].tolist())
    return programs.stretches[3](*args)

  engine = engine_of(slots=10, programs=programs)
  engine._programs = programs._replace(stretches={3: stretch})
  return engine, ahead


def test_stretches_that_are_drawn_ahead_change_no_draw(engine_of, narrow):
  engine, ahead = narrow
  for own, other in zip(complete(engine, *jobs()), complete(engine_of(), *jobs()), strict=True):
    assert own.tokens == other.tokens and np.abs(np.subtract(own.logprobs, other.logprobs)).max() < 1e-5
  assert sum(ahead) > len(ahead) / 2 and not ahead[0]


@pytest.mark.parametrize("end", ["abort", "close"])
def test_requests_may_end_and_weights_may_come_while_a_stretch_is_drawn(narrow, end):
  engine, ahead = narrow
  _, params, later = built("dense")
  handles, seen = [], itertools.count()

  def on_piece(piece):
    count = next(seen)
    if count == 8:
      engine.update(jax.tree.map(jnp.copy, later), 1)
    if count == 20:
      for handle in handles[::2]:
        handle.abort()
    if count == 30 and end == "close":
      threading.Thread(target=engine.close).start()

  handles += [engine.submit(Request(prompt(i, 9 + i), 40, seed=i), on_piece) for i in range(12)]
  results = [handle.completion.result(WAIT) for handle in handles]
  assert {x.reason for x in results[::2]} == {"aborted"} and any(ahead)
  assert {x.reason for x in results[1::2]} == {"length" if end == "abort" else "aborted"}
  for i, result in enumerate(results):
    assert sum(count for _, count in result.parts) == len(result.tokens)
    first = next((count for version, count in result.parts if version == 0), 0)
    known = [logprobs_of("dense", prompt(i, 9 + i), result.tokens, x) for x in (params, later)]
    np.testing.assert_allclose(result.logprobs[:first], known[0][:first], atol=1e-5)
    if not first:
      np.testing.assert_allclose(result.logprobs, known[1], atol=1e-5)
  assert engine._num_open == 0


def test_few_prompts_are_computed_by_the_smaller_program(engine_of):
  programs, calls = programs_of("dense", 4, False, False), []
  assert list(programs.prefills) == [8, 2]
  counted = {size: lambda *args, size=size: calls.append(size) or programs.prefills[size](*args) for size in programs.prefills}
  engine = engine_of(programs=programs._replace(prefills=counted))
  engine._span_counts = [2, 8]  # Whether or not they compute the same bits.
  calls.clear()
  for prompts, sizes in (([prompt(1, 10)], [2]), ([prompt(i, 30) for i in range(2, 5)], [8, 2, 2])):
    asked = [Request(tokens, 6, seed=1) for tokens in prompts]
    for request, result in zip(asked, complete(engine, *asked), strict=True):
      assert_as_the_model(request, result)
    assert calls == sizes
    calls.clear()


def test_programs_that_compute_other_bits_are_not_used(engine_of):
  programs = programs_of("dense", 4, False, False)
  others = dict(programs.prefills)
  least = min(others)
  assert least < max(others)
  others[least] = lambda weights, cache, *spans: programs.prefills[least](jax.tree.map(lambda x: x * 1.0001, weights), cache, *spans)
  assert engine_of(programs=programs._replace(prefills=others))._span_counts == [max(others)]


def test_other_seeds_draw_other_tokens(engine_of):
  seeds = [0, 1, 2**32, -1, 2**63]
  results = complete(engine_of(), *(Request([5, 6], 8, seed=seed) for seed in [*seeds, 2**64 - 1]))
  assert len({tuple(x.tokens) for x in results}) == 5 and results[3].tokens == results[5].tokens


def test_a_conversation_costs_its_own_length(engine_of):
  """Eight turns of 25 tokens, in three conversations that share the rows."""
  engine, conversations, computed = engine_of(), [[], [], []], [0, 0, 0]
  for turn in range(8):
    for i, tokens in enumerate(conversations):
      tokens += prompt(10 * i + turn, 13)
    results = complete(engine, *(Request(list(tokens), 12, seed=turn) for tokens in conversations))
    for i, result in enumerate(results):
      assert result.cached_tokens + result.computed_tokens == len(conversations[i]) + 11
      conversations[i] += result.tokens
      computed[i] += result.computed_tokens
  assert [len(x) for x in conversations] == [200] * 3
  assert all(total <= 1.15 * 200 for total in computed) and computed == [199] * 3


@pytest.mark.parametrize("slots", [2, 4])
def test_a_group_computes_its_prompt_once(engine_of, slots):
  engine = engine_of(slots=slots)
  for length in (3, 8, 33):
    group = [Request(prompt(length, length), 9, seed=i) for i in range(8)]
    results = complete(engine, *group)
    assert sum(x.computed_tokens for x in results) == length - 1 + 8 * 9
    assert sum(x.cached_tokens for x in results) == 7 * (length - 1)
    for result in results:
      assert_as_the_model(group[0], result)


def test_what_others_have_drawn_changes_no_bit(engine_of):
  """Conversations of two owners, of which one repeats in its prompt what the other one drew."""
  first, bits = prompt(0, 21), []
  ahead = complete(engine_of(slots=8), Request(first, 12, seed=0))[0].tokens
  for order in ("ab", "ba"):
    engine, drawn = engine_of(slots=8), {}
    conversations = {"a": list(first), "b": first + ahead + [7]}
    for turn in range(3):
      for owner in order:
        (result,) = complete(engine, Request(conversations[owner], 12, seed=turn, owner=owner))
        conversations[owner] += [*result.tokens, 3]
        drawn[owner, turn] = result
    assert all(drawn[owner, 2].cached_tokens >= 40 for owner in "ab")
    bits.append({key: (result.tokens, result.logprobs) for key, result in drawn.items()})
  assert bits[0] == bits[1]


def test_a_group_decodes_together_from_the_first_stretch(engine_of):
  engine = engine_of()
  with engine._changed:  # Until all have arrived.
    handles = [engine.submit(Request(prompt(0, 9), STEPS, seed=i)) for i in range(4)]
  assert [len(handle.completion.result(WAIT).tokens) for handle in handles] == [STEPS] * 4 and engine._stretches == 1


def test_salts_are_kept_apart(engine_of):
  engine, tokens = engine_of(), prompt(0, 30)
  complete(engine, Request(tokens, 4, salt="a"))
  assert [complete(engine, Request(tokens, 4, salt=salt))[0].cached_tokens for salt in "aba"] == [29, 0, 29]


def test_new_weights_take_effect_between_two_stretches(engine_of):
  _, _, params = built("dense")
  engine, tokens, pieces, updated = engine_of(), prompt(0, 30), [], threading.Event()

  def on_piece(piece):
    pieces.append(piece)
    if len(pieces) == 3:
      engine.update(jax.tree.map(jnp.copy, params), 1)
      updated.set()

  result = engine.submit(Request(tokens, 40), on_piece).completion.result(WAIT)
  assert updated.is_set() and result.version == 0 and len(result.tokens) == 40
  logprobs = logprobs_of("dense", tokens, result.tokens)
  np.testing.assert_allclose(result.logprobs[: 3 * STEPS], logprobs[: 3 * STEPS], atol=1e-5)
  assert np.abs(result.logprobs - logprobs)[3 * STEPS :].max() > 1e-3
  later, again = (complete(engine, Request(tokens, 5))[0] for _ in range(2))
  assert (later.cached_tokens, again.cached_tokens) == (0, 29) and later.version == again.version == 1
  assert_as_the_model(Request(tokens, 5), later, params=params)
  assert later.tokens == again.tokens


def test_the_params_may_be_donated_after_an_update(engine_of):
  engine, (_, _, params) = engine_of(), built("dense")
  params = jax.tree.map(jnp.copy, params)
  engine.update(params, 1)
  jax.tree.map(lambda x: x.delete(), params)
  assert complete(engine, Request([1], 3))[0].version == 1


def test_weights_that_are_not_finite_leave_nothing_behind(engine_of):
  engine, (_, params, _) = engine_of(slots=2), built("dense")
  (before,) = complete(engine, Request(prompt(0, 30), 9))
  engine.update(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params), 1)
  for handle in [engine.submit(Request(prompt(i, 100), 100)) for i in range(4)]:
    with pytest.raises(FloatingPointError, match="^the log-probabilities are not finite: the weights of version 1 are broken$"):
      handle.completion.result(WAIT)
  engine.update(params, 2)
  (after,) = complete(engine, Request(prompt(0, 30), 9))
  assert after.cached_tokens == 0 and after.tokens == before.tokens and after.logprobs == before.logprobs


def test_clients_that_come_and_go_leave_nothing_behind(engine_of):
  """Of 300 requests every third is aborted at some time or has a caller that raises."""
  engine, rng, whole = engine_of(slots=2), random.Random(0), []
  shared, lock = [prompt(i, 60) for i in range(3)], threading.Lock()

  def misbehaves(piece):
    raise OSError("disconnected")

  def client(seed):
    rng = random.Random(seed)
    for i in range(50):
      tokens = shared[rng.randrange(3)][: rng.randint(1, 60)] + prompt(rng.randrange(1000), rng.randrange(20))
      request = Request(tokens, rng.randint(1, 12), seed=rng.randrange(5), stops=("a",) * rng.randrange(2))
      handle = engine.submit(request, misbehaves if i % 6 == 1 else None)
      if i % 6 == 4:
        handle.abort()
      elif i % 6 != 1:
        result = handle.completion.result(WAIT)
        with lock:
          whole.append((request, result))

  with ThreadPoolExecutor(6) as threads:
    list(threads.map(client, range(6)))
  engine.submit(Request([1], 1)).completion.result(WAIT)
  pool = engine._pool
  assert len(whole) == 6 * 33 and engine._num_open == 0 and not engine._running
  assert not pool._busy.any() and not pool._readers.any()
  for request, result in rng.sample(whole, 20):
    assert_as_the_model(request, result)


def test_stop_ids_and_stop_strings_end_a_completion(engine_of):
  engine, request = engine_of(), Request(prompt(3, 5), 60, seed=3)
  (whole,) = complete(engine, request)
  tokens = whole.tokens
  twos = [i for i in range(9, 59) if max(tokens[i : i + 2]) < 128 and tokens.index(tokens[i]) == i]
  at, across = twos[0], next(i for i in twos[1:] if (i + 1) % STEPS == 0)
  text = lambda i: bytes(tokens[i : i + 2]).decode()
  many = [x for x in range(VOCAB) if x not in tokens][: MAX_IDS - 1]
  ends = {
    at + 1: dict(stop_ids=(tokens[at],)),
    at + 2: dict(stops=("no such text", text(at))),
    # From one stretch to the next, among as many bytes as there may be.
    across + 2: dict(stops=("x" * (MAX_BYTES - 2), text(across))),
    at + 1.0: dict(stop_ids=(*many, tokens[at])),
  }
  for end, settings in ends.items():
    (result,) = complete(engine, request._replace(**settings, salt=str(settings)))
    assert result.tokens == tokens[: int(end)] and result.reason == "stop" and len(result.logprobs) == end
    assert result.computed_tokens == 4 + end  # Nothing is drawn after a stop.
  # What a stop has cut off is not in the cache.
  (result,) = complete(engine, Request([*request.tokens, *tokens[: at + 3]], 3, salt=str(ends[at + 2])))
  assert result.cached_tokens == 5 + at + 1


def test_a_request_goes_on_where_another_one_was_cut(engine_of):
  engine, request = engine_of(), Request(prompt(3, 5), 60, seed=3)
  (whole,) = complete(engine, request)
  at = next(i for i in range(9, 59) if max(whole.tokens[i : i + 2]) < 128 and whole.tokens.index(whole.tokens[i]) == i)
  stop = bytes(whole.tokens[at : at + 2]).decode()
  parts = [dict(), dict(stops=(stop,))]  # The text is cut in its midst.
  rest = [
    request._replace(tokens=[*request.tokens, *whole.tokens[: at + 1]], max_tokens=60 - at - 1, drawn=at + 1, salt=str(i), **settings)
    for i, settings in enumerate(parts)
  ]
  to_the_end, to_the_stop = complete(engine_of(), *rest)
  assert to_the_end.tokens == whole.tokens[at + 1 :] and to_the_end.reason == "length"
  np.testing.assert_allclose(to_the_end.logprobs, whole.logprobs[at + 1 :], atol=1e-5)
  assert to_the_stop.tokens == whole.tokens[at + 1 : at + 2] and to_the_stop.reason == "stop"


def test_a_stop_string_goes_on_in_another_row(engine_of):
  """New weights, which equal the old ones, come in its midst, and keys are computed anew."""
  engine, params = engine_of(in_flight="recompute"), built("dense")[1]
  seeds = ((seed, complete(engine, Request(prompt(3, 5), 8, seed=seed))[0].tokens) for seed in range(99))
  seed, tokens = next((seed, x) for seed, x in seeds if max(x[STEPS - 1 : STEPS + 1]) < 128 and x.index(x[STEPS - 1]) == STEPS - 1)
  request = Request(prompt(3, 5), 8, seed=seed, stops=(bytes(tokens[STEPS - 1 : STEPS + 1]).decode(),), salt="a")
  pieces = []

  def on_piece(piece):
    pieces.append(piece.tokens)
    if len(pieces) == 1:
      engine.take(engine.lay_out(params), 1)

  result = engine.submit(request, on_piece).completion.result(WAIT)
  assert result.tokens == tokens[: STEPS + 1] and result.reason == "stop" and result.parts == ((0, STEPS), (1, 1))


def test_pieces_are_the_completion(engine_of):
  pieces = []
  result = engine_of().submit(Request([1, 2], 11), pieces.append).completion.result(WAIT)
  assert [len(piece.tokens) for piece in pieces] == [4, 4, 3]
  assert sum((piece.tokens for piece in pieces), []) == result.tokens and sum((x.logprobs for x in pieces), []) == result.logprobs


def test_an_aborted_request_leaves_its_row_to_others(engine_of):
  engine, handles, submitted = engine_of(slots=2), [], threading.Event()

  def on_piece(piece):  # In the engine's thread, so that what is aborted is still open.
    submitted.wait(WAIT)
    for handle in (waits[0], handles[0], handles[0]):
      handle.abort()

  for i in range(2):
    handles.append(engine.submit(Request(prompt(i, 9), 200), on_piece))
  waits = [engine.submit(Request(prompt(i, 9), 5, seed=i)) for i in range(2, 5)]
  submitted.set()
  results = [handle.completion.result(WAIT) for handle in (*handles, *waits)]
  assert [x.reason for x in results] == ["aborted", "length", "aborted", "length", "length"]
  assert 0 < len(results[0].tokens) < 200 and results[2].tokens == [] and results[2].computed_tokens == 0
  assert_as_the_model(Request(prompt(0, 9), 200), results[0])
  assert complete(engine, Request(prompt(3, 9), 5, seed=3))[0].tokens == results[3].tokens
  waits[1].abort()


def test_an_aborted_prompt_gives_what_it_has_to_those_that_wait_for_it(engine_of):
  engine, tokens, hold, held = engine_of(), prompt(0, 200), threading.Event(), threading.Event()

  def on_piece(piece):
    held.set()
    hold.wait(WAIT)

  blocker = engine.submit(Request([3], 1), on_piece)
  assert held.wait(WAIT)
  group = [engine.submit(Request(tokens, 4, seed=i)) for i in range(4)]
  for handle in group[:2]:
    handle.abort()
  hold.set()
  results = [handle.completion.result(WAIT) for handle in (blocker, *group)]
  assert [x.reason for x in results[1:]] == ["aborted", "aborted", "length", "length"]
  assert sum(x.computed_tokens for x in results[3:]) == 199 + 8
  assert_as_the_model(Request(tokens, 4), results[4])


def test_a_full_queue_refuses_and_recovers(engine_of):
  engine, hold = engine_of(max_requests=2), threading.Event()
  handles = [engine.submit(Request([1], 2), lambda piece: hold.wait(WAIT)) for _ in range(2)]
  with pytest.raises(QueueFull, match="^found 2 open requests, expected fewer than 2; try again later$"):
    engine.submit(Request([1], 2))
  hold.set()
  for handle in handles:
    handle.completion.result(WAIT)
  assert complete(engine, Request([1], 2))[0].reason == "length"


def test_an_error_of_the_loop_reaches_everybody(engine_of):
  engine, calls = engine_of(slots=2), itertools.count()
  programs, started = engine._programs, threading.Event()

  def stretch(*args):
    started.wait(WAIT)
    if next(calls) == 2:
      raise MemoryError("out of memory")
    return programs.stretches[2](*args)

  engine._programs = programs._replace(stretches={2: stretch})
  handles = [engine.submit(Request(prompt(i, 9), 50)) for i in range(5)]
  started.set()
  for handle in handles:
    with pytest.raises(MemoryError, match="out of memory"):
      handle.completion.result(WAIT)
  for call in (lambda: engine.submit(Request([1], 1)), lambda: engine.update(built("dense")[1], 1)):
    with pytest.raises(MemoryError, match="out of memory"):
      call()


def test_a_caller_that_raises_harms_no_other(engine_of):
  engine = engine_of()

  def on_piece(piece):
    raise OSError("disconnected")

  broken, other = engine.submit(Request([1], 20), on_piece), engine.submit(Request([2], 20))
  with pytest.raises(OSError, match="disconnected"):
    broken.completion.result(WAIT)
  assert len(other.completion.result(WAIT).tokens) == 20


def test_closing_aborts_what_is_open(engine_of):
  engine, started = engine_of(slots=2), threading.Event()

  def on_piece(piece):  # All would take 10 s, so that much is open when the engine is closed.
    started.set()
    time.sleep(0.05)

  handles = [engine.submit(Request([1, 2], 200), on_piece) for _ in range(4)]
  assert started.wait(WAIT)
  engine.close()
  engine.close()
  assert [handle.completion.result(0).reason for handle in handles] == ["aborted"] * 4
  with pytest.raises(RuntimeError, match="^the engine is closed$"):
    engine.submit(Request([1], 1))


def test_nothing_compiles_while_requests_come_and_go(engine_of):
  engine, counter = engine_of(), CompileCounter("start")
  results = complete(engine, *jobs(), Request([4], 30, stop_ids=(1, 2, 3)), Request(prompt(1, 200), 20, stops=("a", "b")))
  before = counter.count
  engine.update(built("dense")[2], 1)
  results += complete(engine, *jobs(), *(Request(prompt(7, 40), 5, seed=i) for i in range(8)))
  assert before == counter.count == 0 and len(results) == 46


REFUSALS = {
  "tokens: found no ids": dict(tokens=[]),
  "tokens: found the id 264, expected integers from 0 to 263": dict(tokens=[1, 264]),
  "tokens: found the id -1": dict(tokens=[-1]),
  "tokens: found the id 1.5": dict(tokens=[1.5]),
  "tokens: found the id True": dict(tokens=[True]),
  "tokens: found 224 ids, expected at most 223": dict(tokens=[1] * 224),
  "max_tokens: found 0, expected 1 or more": dict(max_tokens=0),
  "max_tokens: found 1000000000 after a prompt of 2 tokens, expected at most 222": dict(max_tokens=10**9),
  "temperature: found -0.1": dict(temperature=-0.1),
  "temperature: found nan": dict(temperature=float("nan")),
  "temperature: found inf": dict(temperature=float("inf")),
  "top_p: found 0,": dict(top_p=0),
  "top_p: found 1.5": dict(top_p=1.5),
  "top_p: found nan": dict(top_p=float("nan")),
  "top_k: found -1": dict(top_k=-1),
  "seed: found 18446744073709551616": dict(seed=2**64),
  "seed: found -9223372036854775809": dict(seed=-(2**63) - 1),
  "drawn: found 2, expected 0 to 1": dict(drawn=2),
  "stop_ids: found the id 999": dict(stop_ids=(999,)),
  "stop_ids: found 129 ids, expected at most 128": dict(stop_ids=(1,) * 129),
  "stops: found 1,025 bytes of UTF-8, expected at most 1,024 in all texts together": dict(stops=("ab" * 512, "a")),
  "stops: found ''": dict(stops=("",)),
  "stops: found '.ud800'": dict(stops=("\ud800",)),
}


def test_requests_that_can_never_be_served_are_refused(engine_of):
  engine = engine_of(max_requests=1)
  for message, settings in REFUSALS.items():
    with pytest.raises(ValueError, match=f"^{message}") as caught:
      engine.submit(Request([1, 2], 3)._replace(**settings))
    assert "\n" not in str(caught.value)
  assert complete(engine, Request([1] * 220, 4, top_k=2**40, temperature=1e-30))[0].reason == "length"


def test_stop_strings_need_a_tokenizer(engine_of):
  engine = engine_of()
  engine._programs = engine._programs._replace(vocabulary=None)
  with pytest.raises(ValueError, match=r"^stops: found \('a',\), expected none: the engine has no tokenizer$"):
    engine.submit(Request([1], 1, stops=("a",)))


def test_a_tokenizer_without_bytes_of_its_own_says_why_there_are_no_stop_strings(engine_of):
  def token_bytes():
    raise ValueError("folder: found no decoder, expected ByteLevel; leave rollout.stop_strings unset")

  engine = engine_of()
  vocabulary, engine._no_bytes = vocabulary_of(SimpleNamespace(token_bytes=token_bytes))
  engine._programs = engine._programs._replace(vocabulary=vocabulary)
  with pytest.raises(ValueError, match="^stops: folder: found no decoder, expected ByteLevel; leave it unset$"):
    engine.submit(Request([1], 1, stops=("a",)))


def test_a_stretch_ends_once_ended_rows_have_waited_for_a_step_of_all():
  _, params, _ = built("dense")
  programs = programs_of("dense", 4, False, False)
  rows = no_rows(4, vocabulary=programs.vocabulary)
  budgets = np.array([STEPS, 1, 1, 1], np.int32)
  draw = lambda rows: programs.stretches[4](programs.weights(params), programs.make_cache(), rows, np.arange(4, dtype=np.int32))[1]
  drawn = draw(rows._replace(budgets=budgets))
  # Three rows wait in the second step and in the third: 6 row steps, of 4 that may be lost.
  assert np.sum(np.asarray(drawn.tokens) != NO_ID, axis=0).tolist() == [3, 1, 1, 1]
  alone = rows._replace(budgets=budgets * np.array([1, 0, 0, 0], np.int32))
  drawn = draw(alone)
  # Rows that had nothing to draw do not count.
  assert np.sum(np.asarray(drawn.tokens) != NO_ID, axis=0).tolist() == [STEPS, 0, 0, 0]


def test_settings_out_of_range_are_refused():
  model, params, _ = built("dense")
  sizes = dict(slots=2, context=64, max_requests=4)
  wrong = {"slots": 0, "max_requests": 0, "chunk": 0, "spans": 0, "steps": 0, "context": 1, "cache_dtype": "float8"}
  for name, value in wrong.items():
    with pytest.raises(ValueError, match=f"^{name}: found "):
      make_engine(model, params, **sizes | {name: value})


def test_an_engine_of_one_row_in_bfloat16_serves():
  before = threading.enumerate()  # Engines of other tests may be open.
  config = preset("nano", vocab_size=64)._replace(dtype="bfloat16", num_layers=1)
  model = make_model(config)
  engine = make_engine(model, model.init(jax.random.key(0)), slots=1, context=20, max_requests=8, cache_dtype="int8", chunk=64, spans=1)
  results = complete(engine, *(Request([1, 2, 3, 4, i], 15, seed=i) for i in range(3)))
  engine.close()
  assert [len(x.tokens) for x in results] == [15] * 3
  assert not any(thread.name == "decoding engine" for thread in threading.enumerate() if thread not in before)
