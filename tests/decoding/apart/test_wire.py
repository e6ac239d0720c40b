"""Tests of the frames between a learner and its samplers."""

import math
import random
import socket
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.apart import wire
from jaxrl_llm.decoding.engine import frames
from jaxrl_llm.decoding.engine.frames import Frame, WireError
from jaxrl_llm.decoding.engine.in_hand import News
from jaxrl_llm.decoding.engine.lockstep import decode_news, encode_news
from jaxrl_llm.decoding.engine.requests import Decoded, Piece, Request
from jaxrl_llm.models.image_slots import Pictures
from jaxrl_llm.types import Patches

REQUEST = Request(
  [5, 0, 999], 7, temperature=0.1, top_k=3, top_p=1 / 3, stop_ids=(1, 2), stops=("ä\n", "</a>"), seed=2**64 - 1, salt="s", owner="o",
  drawn=2, order=-4, oldest=3, parts=((3, 2), (4, 5)), rereads=False,
)  # fmt: skip


def test_requests_and_answers_return_bit_for_bit():
  rng = np.random.default_rng(0)
  logprobs = [*rng.standard_normal(50).astype(np.float32).tolist(), -math.inf, -0.0, float(np.float32(1e-45))]
  tokens = rng.integers(0, 2**31 - 1, len(logprobs)).tolist()
  assert frames.request_of(frames.decode(frames.encode(frames.request_frame(3, REQUEST, pieces=True)))) == REQUEST
  piece = Piece(tokens, logprobs)
  got = frames.piece_of(frames.decode(frames.encode(frames.piece_frame(3, piece))))
  assert got == piece and [math.copysign(1, x) for x in got.logprobs] == [math.copysign(1, x) for x in logprobs]
  routes = rng.integers(-1, 60, (4, 2, 3)).astype(np.int16)
  for kept in (None, [], [[1, 2], [], [7]]):
    completion = Decoded(tokens, logprobs, "stop", 2, 3, 4, ((4, 50), (5, 3)), routes, kept)
    got = frames.completion_of(frames.decode(frames.encode(frames.completion_frame(3, completion))))
    assert got._replace(routes=None) == completion._replace(routes=None)
    np.testing.assert_array_equal(got.routes, routes)
    assert got.routes.dtype == np.int16 and got.routes.flags.writeable


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "patches"])
def test_pictures_return_bit_for_bit(kind):
  rng = np.random.default_rng(0)
  shapes = Patches(*[rng.normal(size=(2, 8, n)) for n in (6, 2, 4, 4)], np.ones((2, 8), bool))
  patches = shapes._replace(**{name: getattr(shapes, name).astype(np.int32) for name in ("coordinates", "corners")})
  patches = patches._replace(pixels=shapes.pixels.astype(np.float32), shares=shapes.shares.astype(np.float32))
  own = dict(patches=patches) if kind == "patches" else dict(features=rng.normal(size=(2, 4, 1, 3)).astype(jnp.dtype(kind)))
  sent = Pictures(b"\0key", np.zeros((5, 3), np.int32), np.int32([-1, 0, 1, -1, 4]), 4, **own)
  got = frames.pictures_of(frames.decode(frames.encode(frames.pictures_frame(sent))))
  assert (got.key, got.end) == (sent.key, sent.end)
  for one, other in zip(jax.tree.leaves(got[1:3] + got[4:]), jax.tree.leaves(sent[1:3] + sent[4:]), strict=True):
    assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
  frame = frames.decode(frames.encode(frames.request_frame(3, REQUEST._replace(pictures=sent), pieces=False)))
  assert frames.request_of(frame, {sent.key: got}).pictures is got
  news = decode_news(encode_news(News([REQUEST._replace(pictures=sent), REQUEST, REQUEST._replace(pictures=sent)])))
  assert [x.pictures and x.pictures.key for x in news.requests] == [sent.key, None, sent.key]
  with pytest.raises(WireError, match="that cannot be read"):
    frames.request_of(frame)


def test_garbled_frames_are_one_clear_error():
  data = frames.encode(frames.request_frame(3, REQUEST, pieces=False))
  rng = random.Random(0)
  for _ in range(500):
    garbled = bytearray(data)
    for _ in range(rng.randint(1, 4)):
      garbled[rng.randrange(len(garbled))] = rng.randrange(256)
    garbled = bytes(garbled[: rng.choice([len(garbled), rng.randrange(len(garbled))])])
    try:
      frames.request_of(frames.decode(garbled))
    except WireError as error:
      assert "\n" not in str(error)
  whole = frames.encode(Frame("x", {}, {"a": np.int32([1])}))
  for wrong in (b"", b"\0", b"\xff" * 50, b"\2\0\0\0[]", whole[:-1], whole + b"x"):
    with pytest.raises(WireError, match="found a frame"):
      frames.decode(wrong)
  with pytest.raises(WireError, match=r"x\.a: found the dtype float64"):
    frames.encode(Frame("x", {}, {"a": np.zeros(1)}))


def pair(secret, other, seconds=5.0):
  listener, results = socket.create_server(("127.0.0.1", 0)), []

  def accept():
    try:
      results.append(wire.accept(listener.accept()[0], secret, seconds=seconds))
    except WireError as error:
      results.append(error)

  thread = threading.Thread(target=accept)
  thread.start()
  try:
    results.append(other(listener.getsockname()))
  except WireError as error:
    results.append(error)
  thread.join()
  listener.close()
  return results


def test_both_sides_must_know_the_secret():
  for secret, is_right in ((b"right", True), (b"wrong", False)):
    ends = pair(b"right", lambda address, secret=secret: wire.connect(address, secret))
    assert [isinstance(end, WireError) for end in ends] == [not is_right] * 2, ends
    if is_right:
      wire.send(ends[0], Frame("beat"))
      assert wire.receive(ends[1]).kind == "beat"
      for end in ends:
        end.close()


def test_a_client_that_says_nothing_or_nonsense_is_not_waited_for():
  start = time.monotonic()
  for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000):
    stranger = socket.socket()

    def talk(address, stranger=stranger, said=said):
      stranger.connect(address)
      stranger.sendall(said)

    assert any(isinstance(end, WireError) for end in pair(b"right", talk, seconds=0.3))
    stranger.close()
  assert time.monotonic() - start < 5
