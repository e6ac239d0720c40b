"""Tests of an engine behind a connection: what it draws, its weights, and how it is lost."""

import contextlib
import time

import jax
import numpy as np
import pytest

from jaxrl_llm.decoding.apart import weights as weights_lib
from jaxrl_llm.decoding.apart import wire
from jaxrl_llm.decoding.apart.remote import SamplerLost
from jaxrl_llm.decoding.apart.weights import Snapshot, WeightsRefused
from jaxrl_llm.decoding.engine import frames
from jaxrl_llm.decoding.engine.frames import Frame
from jaxrl_llm.decoding.engine.requests import EngineLimits, QueueFull, ReplayLost, Request
from jaxrl_llm.models.image_slots import Pictures
from tests.decoding.apart.links import PARAMS, WAIT, Link, Steady, drawn, threads, wait_until


@pytest.fixture
def link_of(monkeypatch):
  """Returns a function that makes links, all of which must end without a thread."""
  monkeypatch.setattr("jaxrl_llm.decoding.apart.served.BEAT_S", 0.05)
  links = []

  def make(*args, **options):
    links.append(Link(*args, **options))
    return links[-1]

  yield make
  for link in links:
    link.close()
  assert threads() == []


def test_completions_and_pieces_are_those_of_the_engine(link_of):
  link, pieces = link_of(), []
  handles = [link.remote.submit(Request([i, 5], 9, seed=i), pieces.append if i == 3 else None) for i in range(20)]
  for i, handle in enumerate(handles):
    got = handle.completion.result(WAIT)
    assert (got.tokens, got.logprobs) == drawn(Request([i, 5], 9, seed=i)) and got.reason == "length"
  assert [token for piece in pieces for token in piece.tokens] == handles[3].completion.result().tokens
  assert len(pieces) == 9


def test_pictures_travel_once_while_requests_show_them(link_of, monkeypatch):
  monkeypatch.setattr(frames, "_PICTURES_KEPT", 2)
  sent, encode = [], frames.pictures_frame
  monkeypatch.setattr(frames, "pictures_frame", lambda pictures: (sent.append(pictures.key), encode(pictures))[1])
  slots = np.zeros(1, np.int32)
  shown = [Pictures(b"%d" % i, np.zeros((1, 3), np.int32), slots, 1, features=np.full((1, 4, 1, 2), i, np.float32)) for i in range(3)]
  link, order = link_of(), [0, 0, 1, 0, 2, 0, 1, 0]
  for handle in [link.remote.submit(Request([5], 2, seed=at, pictures=shown[i])) for at, i in enumerate(order)]:
    handle.completion.result(WAIT)
  assert sent == [b"0", b"1", b"2", b"1"]
  got = {request.seed: request.pictures for request, _ in link.engine.asked}
  assert [float(got[at].features.max()) for at in range(len(order))] == order


def test_errors_keep_their_kind_and_others_go_on(link_of):
  link = link_of(Steady(limits=EngineLimits(64, 2)))
  with pytest.raises(ValueError, match=r"^tokens: found the id 1000"):
    link.remote.submit(Request([1000], 1))
  with pytest.raises(ValueError, match=r"^max_tokens: found more than 50"):
    link.remote.submit(Request([1], 60)).completion.result(WAIT)
  link.engine.is_frozen = True
  open = [link.remote.submit(Request([1], 3)) for _ in range(2)]
  with pytest.raises(QueueFull, match="found 2 open requests"):
    link.remote.submit(Request([1], 3))
  open[0].abort()
  assert open[0].completion.result(WAIT).reason == "aborted"
  link.engine.is_frozen = False
  assert open[1].completion.result(WAIT).reason == "length"

  def fail(piece):
    raise KeyError("of the caller")

  with pytest.raises(KeyError):
    link.remote.submit(Request([1], 3), fail).completion.result(WAIT)
  link.engine.error = FloatingPointError("not finite")
  with pytest.raises(FloatingPointError, match="^not finite$"):
    link.remote.submit(Request([1], 3)).completion.result(WAIT)
  link.engine.error = ReplayLost("other weights")
  with pytest.raises(ReplayLost, match="^other weights$"):
    link.remote.submit(Request([1], 3)).completion.result(WAIT)
  assert not link.remote.is_lost
  link.engine.error = RuntimeError("broken")
  with pytest.raises(SamplerLost, match="its engine has failed"):
    link.remote.submit(Request([1], 3)).completion.result(WAIT)


def test_messages_arrive_in_the_order_of_the_calls(link_of):
  link = link_of()
  handles = []
  for version in range(5):
    link.remote.update(jax.tree.map(lambda x, version=version: x + version, PARAMS), version)
    handles += [link.remote.submit(Request([version, i], 2)) for i in range(3)]
  for handle in handles:
    handle.completion.result(WAIT)
  assert all(version >= request.tokens[0] for request, version in link.engine.asked)
  assert sorted(request.tokens[0] for request, _ in link.engine.asked) == [x for x in range(5) for _ in range(3)]
  for version, (params, own) in enumerate(link.engine.updates):
    assert own == version
    np.testing.assert_array_equal(params["layers"]["up"], PARAMS["layers"]["up"] + version)


def test_weights_are_read_before_the_call_returns_and_only_changes_travel(link_of):
  link = link_of()
  params = jax.tree.map(jax.numpy.array, PARAMS)
  spend = jax.jit(lambda params: jax.tree.map(lambda x: x - 1, params), donate_argnums=0).lower(params).compile()
  moved = link.remote.give(snapshot := Snapshot(params, 0))
  spend(params)
  assert moved.result(WAIT).num_bytes == 12 * 4 + 2 * 4
  np.testing.assert_array_equal(link.engine.updates[0][0]["layers"]["up"], PARAMS["layers"]["up"])
  later = PARAMS | {"scale": np.float32([1, 3])}
  moved = link.remote.give(newest := Snapshot(later, 1, earlier=snapshot))
  assert moved.result(WAIT).num_bytes == 8
  jax.tree.map(np.testing.assert_array_equal, link.engine.updates[1], (later, 1))
  assert newest.leaf("layers/up") is snapshot.leaf("layers/up")


@pytest.mark.parametrize("times", [1, 2])
def test_wrong_weights_are_sent_once_more_and_not_twice(times, link_of, monkeypatch):
  link, spoiled = link_of(), []

  def spoil(x, size=3, pieces=weights_lib.pieces):
    for start, data in pieces(x, size=size):
      if x.ndim == 2 and start == 6 and len(spoiled) < times:
        spoiled.append(start)
        data = data + np.uint8(1)
      yield start, data

  monkeypatch.setattr("jaxrl_llm.decoding.apart.remote.pieces", spoil)
  moved = link.remote.give(Snapshot(PARAMS, 0))
  if times == 1:
    moved.result(WAIT)
    jax.tree.map(np.testing.assert_array_equal, link.engine.updates, [(PARAMS, 0)])
    assert len(link.lines) == 1 and "layers/up: the learner sent" in link.lines[0]
  else:
    with pytest.raises(SamplerLost, match="layers/up: the learner sent .* for the second time"):
      moved.result(WAIT)
    link.thread.join(WAIT)
    assert not link.engine.updates and isinstance(link.end[0], WeightsRefused)


def test_weights_of_another_model_are_refused(link_of):
  link = link_of()
  with pytest.raises(SamplerLost, match=r"'scale': the learner has float32\[3\], the sampler float32\[2\]"):
    link.remote.give(Snapshot(PARAMS | {"scale": np.ones(3, np.float32)}, 0)).result(WAIT)


def test_a_lost_sampler_fails_its_requests_and_all_later_ones(link_of):
  lost = []
  link = link_of(on_lost=lost.append)
  link.engine.is_frozen = True
  handle = link.remote.submit(Request([1], 3))
  wait_until(lambda: link.engine.asked)
  wire.hang_up(link.served)
  with pytest.raises(SamplerLost, match="^sampler: the connection is broken"):
    handle.completion.result(WAIT)
  with pytest.raises(SamplerLost):
    link.remote.submit(Request([1], 3))
  assert lost == [link.remote] and len(link.lines) == 1
  link.thread.join(WAIT)
  assert link.engine.num_aborted == 1 and link.end == ["lost"]


def test_an_engine_that_hangs_is_lost_and_one_that_waits_for_weights_is_not(link_of):
  link = link_of(timeout_s=1.5)
  link.remote.submit(Request([1], 3)).completion.result(WAIT)
  link.engine.is_frozen = True
  waiting = link.remote.submit(Request([1], 3, oldest=3))
  time.sleep(2.0)
  assert not link.remote.is_lost
  hanging = link.remote.submit(Request([2], 3))
  with pytest.raises(SamplerLost, match=r"no new token for 1\.5 s, with 1 open requests"):
    hanging.completion.result(WAIT)
  assert waiting.completion.exception(WAIT) is not None


def test_a_silent_sampler_is_lost(link_of, monkeypatch):
  link = link_of(timeout_s=0.5)
  sent = wire.send
  silent = lambda connection, frame: connection is link.served or sent(connection, frame)
  monkeypatch.setattr("jaxrl_llm.decoding.apart.served.wire.send", silent)
  wait_until(lambda: link.remote.is_lost)
  assert "not heard of for 0.5 s" in link.remote.why_lost


def test_a_sampler_leaves_when_it_is_told_to(link_of):
  link = link_of(Steady(pace_s=0.2))
  handle = link.remote.submit(Request([1], 50))
  wait_until(lambda: link.engine.asked)
  link.leave.set()
  with pytest.raises(SamplerLost, match="it leaves"):
    handle.completion.result(WAIT)
  link.thread.join(WAIT)
  assert link.end == ["left"] and link.engine.num_aborted == 1


def test_closing_aborts_and_keeps_what_was_drawn(link_of):
  link = link_of(Steady(pace_s=0.02))
  drew = []
  handle = link.remote.submit(Request([1], 50), drew.append)
  wait_until(lambda: drew)
  link.remote.close()
  got = handle.completion.result(WAIT)
  assert got.reason == "aborted" and got.tokens == drawn(Request([1], 50))[0][: len(got.tokens)] and got.tokens
  link.thread.join(WAIT)
  assert link.end == ["closed"] and not link.lines
  with pytest.raises(RuntimeError, match="the engine is closed"):
    link.remote.submit(Request([1], 3))


@pytest.mark.parametrize("frame", [Frame("nonsense"), Frame("done", {"id": "x"}), Frame("beat", {}), Frame("lacks")])
def test_nonsense_from_a_sampler_loses_it(frame, link_of):
  link = link_of()
  link.remote.submit(Request([1], 50, oldest=3)).completion.result(WAIT)
  wire.send(link.served, frame)
  with contextlib.suppress(SamplerLost):
    link.remote.give(Snapshot(PARAMS, 1)).exception(WAIT)
  assert link.remote.is_lost and "\n" not in link.remote.why_lost
