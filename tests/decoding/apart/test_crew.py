"""Tests of engines that come and go: where requests go, and what becomes of those that are lost."""

import json
import socket
import stat
import threading

import numpy as np
import pytest

from jaxrl_llm.decoding.apart import gate, wire
from jaxrl_llm.decoding.apart.crew import Crew
from jaxrl_llm.decoding.apart.served import serve
from jaxrl_llm.decoding.engine import frames
from jaxrl_llm.decoding.engine.frames import WireError
from jaxrl_llm.decoding.engine.requests import EngineLimits, Piece, QueueFull, ReplayLost, Request
from tests.decoding.apart.links import LIMITS, PARAMS, VOCAB, WAIT, Link, Slow, Steady, drawn, loads, threads, wait_until


def crew_of(count=2, slots=4, requests=100):
  crew, engines = Crew(EngineLimits(64, requests), vocab_size=VOCAB), [Slow(slots=slots) for _ in range(count)]
  crew.update(PARAMS, 0)
  for engine in engines:
    crew.join(engine)
  return crew, engines


def test_requests_wait_for_engines_and_newcomers_get_weights_first():
  crew, _ = crew_of(count=0)
  handles = [crew.submit(Request([i], 2, order=-i)) for i in range(6)]
  engine, other = Slow(slots=2), Slow(slots=2)
  crew.join(engine)
  # Two requests per row, those of the lowest order first.
  assert engine.versions == [0] and [item[0].tokens for item in engine.open] == [[5], [4], [3], [2]]
  crew.update(PARAMS, 1)
  crew.join(other)
  assert engine.versions == [0, 1] and other.versions == [1] and loads([engine, other]) == [4, 2]
  engine.end()
  while engine.open or other.open:
    (engine if engine.open else other).end()
  assert [handle.completion.result(WAIT).tokens for handle in handles] == [[1, 2]] * 6
  assert crew.metrics()["samplers/alive"] == 2


def test_turns_stay_where_their_conversation_is_and_strangers_go_where_least_is_to_do():
  crew, engines = crew_of()
  for i in range(4):
    crew.submit(Request([i], 2, owner=f"talk {i}", salt="a"))
  assert loads(engines) == [2, 2]
  own = engines[1].open[0][0]
  for _ in range(9):  # More than two per row.
    crew.submit(Request([7], 2, owner=own.owner, salt="a"))
  assert loads(engines) == [2, 11]
  crew.submit(Request([7], 2, owner=own.owner, salt="b"))
  assert loads(engines) == [3, 11]
  engines[1].lose()
  crew.submit(Request([7], 2, owner=own.owner, salt="a"))
  assert loads(engines) == [15, 0]  # The conversation has moved as a whole.
  while engines[0].open:
    engines[0].end()
  assert crew.redone == 11 and crew.lost == 1 and not crew._waiting


def lost_after_three_tokens():
  """Returns a crew, a request's handle and pieces so far, and the engine that draws it again."""
  crew, engines = crew_of()
  got = []
  handle = crew.submit(Request([1], 9), got.append)
  first, second = engines if engines[0].open else engines[::-1]
  first.piece([1, 2, 3])
  old = first.open[0][1]
  first.lose()
  old(Piece([9], [-1.0]))  # Too late.
  return crew, handle, got, second


def test_what_is_lost_is_drawn_again_and_no_token_comes_twice():
  crew, handle, got, second = lost_after_three_tokens()
  second.piece([1, 2])
  second.piece([3, 4])
  second.end([1, 2, 3, 4])
  assert [piece.tokens for piece in got] == [[1, 2, 3], [4]] and handle.completion.result(WAIT).tokens == [1, 2, 3, 4]
  assert crew.redone == crew.lost == 1


def test_pieces_stop_where_newer_weights_draw_other_tokens():
  _, handle, got, second = lost_after_three_tokens()
  second.piece([1, 7])
  second.piece([8, 9])
  second.end([1, 7, 8, 9])
  assert [piece.tokens for piece in got] == [[1, 2, 3]] and handle.completion.result(WAIT).tokens == [1, 7, 8, 9]


def test_a_replay_is_drawn_again_with_its_first_weights_or_not_at_all():
  crew, engines = crew_of(count=1)
  waits = crew.submit(Request([1], 4, parts=((1, 2), (2, 2))))
  early = crew.submit(Request([2], 4, oldest=1))
  assert not engines[0].open
  crew.update(PARAMS, 1)
  assert len(engines[0].open) == 2
  engines[0].lose()
  crew.join(second := Slow())
  assert len(second.open) == 2 and crew.redone == 2
  crew.update(PARAMS, 2)
  second.lose()
  with pytest.raises(ReplayLost, match="^parts: found version 1, expected 2"):
    waits.completion.result(WAIT)
  crew.join(third := Slow())
  third.end()
  assert early.completion.result(WAIT).tokens == [1, 2]


def test_aborted_requests_are_not_drawn_again():
  crew, engines = crew_of(count=1, slots=1)
  handles = [crew.submit(Request([i], 2)) for i in range(4)]
  handles[3].abort()  # It waits.
  assert handles[3].completion.result(WAIT).reason == "aborted"
  handles[0].abort()
  assert handles[0].completion.result(WAIT).reason == "aborted"
  assert len(engines[0].open) == 2 and handles[2].completion.running()


def test_refusals_and_the_end():
  crew, engines = crew_of(count=1, requests=3)
  with pytest.raises(ValueError, match="^tokens: found the id 1000"):
    crew.submit(Request([1000], 2))
  handles = [crew.submit(Request([1], 2)) for _ in range(3)]
  with pytest.raises(QueueFull, match="found 3 open requests, expected fewer than 3"):
    crew.submit(Request([1], 2))
  engines[0].open[0][2].set_exception(FloatingPointError("not finite"))
  del engines[0].open[0]
  with pytest.raises(FloatingPointError):
    handles[0].completion.result(WAIT)
  late = crew.submit(Request([1], 2, oldest=5))
  crew.close()
  assert engines[0].closed and late.completion.result(WAIT).reason == handles[1].completion.result(WAIT).reason == "aborted"
  with pytest.raises(RuntimeError, match="closed"):
    crew.submit(Request([1], 2))
  with pytest.raises(RuntimeError, match="closed"):
    crew.join(Slow())


def test_repeated_requests_do_not_wait_behind_one_that_keeps_its_row():
  """Two rows each; a request that waits for newer weights keeps its row until they come."""
  crew, engines = crew_of(count=2, slots=2)
  for i in range(6):
    crew.submit(Request([i], 4, owner="a", parts=((0, 2), (1, 2))))
  assert loads(engines) == [2, 2]
  engines[1].end()
  assert loads(engines) == [2, 2] and crew.metrics()["samplers/waiting"] == 1
  crew.close()


def test_requests_outlive_engines_that_are_lost_at_random():
  crew, lost = Crew(LIMITS, vocab_size=VOCAB), []
  crew.update(PARAMS, 0)
  link = lambda: Link(Steady(pace_s=0.004), on_lost=crew.lose, slots=2)
  links = [link() for _ in range(3)]
  for own in links:
    crew.join(own.remote)
  asked = [Request([i], 20, seed=i, owner=f"{i % 7}") for i in range(40)]
  pieces = [[] for _ in asked]
  handles = [crew.submit(x, own.append) for x, own in zip(asked, pieces, strict=True)]
  for _ in range(3):  # By what was drawn and not by time, so that none has ended all it had.
    before = sum(map(len, pieces))
    wait_until(lambda before=before: sum(map(len, pieces)) > before)
    wire.hang_up(links[0].served)
    lost.append(links.pop(0))
    links.append(link())
    crew.join(links[-1].remote)
  for x, handle, own in zip(asked, handles, pieces, strict=True):
    got = handle.completion.result(WAIT)
    assert (got.tokens, got.logprobs) == drawn(x)
    assert [token for piece in own for token in piece.tokens] == got.tokens
  assert crew.lost == 3 and crew.redone > 0
  crew.close()
  for own in (*links, *lost):
    own.thread.join(WAIT)
  assert threads() == []


# The door.


def knock(workdir, secret=None, fingerprint="f", limits=LIMITS, **others):
  learner = gate.read_learner(workdir)
  sizes = dict(limits=limits, slots=4, vocab_size=VOCAB, name="test") | others
  return gate.knock(learner.address, secret or learner.secret, fingerprint=fingerprint, **sizes)


def test_only_samplers_of_this_run_get_in_and_garbage_disturbs_nobody(tmp_path):
  lines = []
  with gate.open_crew(tmp_path, fingerprint="f", limits=LIMITS, timeout_s=5.0, note=lines.append) as crew:
    assert stat.S_IMODE((tmp_path / gate.FILE).stat().st_mode) == 0o600
    assert json.loads((tmp_path / gate.FILE).read_text())["host"] == "127.0.0.1"
    crew.update(PARAMS, 0)
    engine, (connection, _), end = Steady(pace_s=0.01), knock(tmp_path), []
    thread = threading.Thread(target=lambda: end.append(serve(engine, connection, Link.template(PARAMS), timeout_s=WAIT)))
    thread.start()
    assert crew.wait_for(1, WAIT) == 1
    handles = [crew.submit(Request([i], 30, seed=i)) for i in range(8)]
    address, strangers = gate.read_learner(tmp_path).address, []
    for i in range(60):
      strangers.append(socket.create_connection(address))
      strangers[-1].sendall([b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000][i % 3])
    for i, handle in enumerate(handles):
      assert handle.completion.result(WAIT).tokens == drawn(Request([i], 30, seed=i))[0]
    with pytest.raises(gate.JoinRefused, match="^config: found the fingerprint 'other'"):
      knock(tmp_path, fingerprint="other")  # While a third of the strangers say nothing.
    for stranger in strangers:
      stranger.close()
    wait_until(lambda: any("the 16. so far" in line for line in lines))
    with pytest.raises(WireError, match="another secret"):
      knock(tmp_path, secret=b"wrong")
    with pytest.raises(gate.JoinRefused, match="^context: found 32, expected at least 64"):
      knock(tmp_path, limits=EngineLimits(32, 5))
    wait_until(lambda: any("is refused: context: found 32" in line for line in lines))
    assert crew.wait_for(2, 0) == 1
  thread.join(WAIT)
  assert end == ["closed"] and not (tmp_path / gate.FILE).exists()
  np.testing.assert_array_equal(engine.updates[0][0]["scale"], PARAMS["scale"])
  assert threads() == []


def test_another_version_of_the_package_is_refused(tmp_path, monkeypatch):
  with gate.open_crew(tmp_path, fingerprint="f", limits=LIMITS):
    learner = gate.read_learner(tmp_path)
    connection = wire.connect(learner.address, learner.secret)
    wire.send(connection, frames.Frame("hello", {"protocol": gate.PROTOCOL, "package": "0.0.9", "name": "old"}))
    answer = wire.receive(connection)
    assert answer.kind == "refused" and answer.fields["line"].startswith("package: found '0.0.9', expected")
    connection.close()


def test_a_damaged_or_later_file_is_left_alone(tmp_path):
  (tmp_path / "config.json").write_text('{"a": 1}')
  crew = gate.open_crew(tmp_path, limits=LIMITS)
  later = gate.Learner(("127.0.0.1", 1), b"later")
  gate.write_learner(tmp_path, later)
  crew.close()
  assert gate.read_learner(tmp_path) == later
  with pytest.raises(ValueError, match="^timeout_s: found 2"):
    gate.open_crew(tmp_path, limits=LIMITS, timeout_s=2)
  (tmp_path / gate.FILE).write_text("{")
  with pytest.raises(ValueError, match="it cannot be read"):
    gate.read_learner(tmp_path)
