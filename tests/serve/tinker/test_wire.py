"""The wire format of the Tinker SDK: what it refuses, and arrays of few entries."""

import random

import numpy as np
import pytest

from jaxrl_llm.serve.refusals import Refusal
from jaxrl_llm.serve.tinker import data, wire
from tests.serve.tinker.client import datum

BODY = wire.encode(
  (1, "m"), (2, 7), (3, datum([1, 2], {"target_tokens": [2, 3], "weights": [0.5, 1.0]})), (4, "ppo"), (6, 1),
  (7, wire.encode((1, "objective"), (2, wire.encode((2, "gspo"))))), (5, wire.encode((1, "clip_low"))),
)  # fmt: skip


def test_a_call_is_read():
  call = data.read_call(BODY)
  assert call[:2] == ("m", 7) and (call.loss_fn, call.forward_only) == ("ppo", True)
  assert call.config == {"objective": "gspo", "clip_low": 0.0}
  ((chunks, inputs),) = call.data
  assert (
    chunks[0].tolist() == [1, 2]
    and inputs["weights"].tolist() == [0.5, 1.0]
    and inputs["target_tokens"].dtype == np.int64
  )


def test_the_order_of_a_map_does_not_matter():
  first, second = (
    data.read_call(wire.encode((1, "m"), (3, datum([1], inputs))))
    for inputs in ({"a": [1.0], "b": [2.0]}, {"b": [2.0], "a": [1.0]})
  )
  other = data.read_call(wire.encode((1, "m"), (3, datum([1], {"a": [1.0], "b": [2.5]}))))
  assert first.digest == second.digest != other.digest


def csr(values, rows, columns, shape):
  parts = wire.encode(
    (1, np.array(values, "<i8").tobytes()),
    (2, np.array(rows, "<i8").tobytes()),
    (3, np.array(columns, "<i8").tobytes()),
  )
  return wire.encode((2, parts), (3, wire.INT64), (4, wire.packed(shape)))


def test_arrays_of_few_entries_become_whole():
  array = wire.tensor(memoryview(csr([7, 8, 9], [0, 1, 1, 3], [2, 0, 3], [3, 4])))
  assert array.tolist() == [[0, 0, 7, 0], [0, 0, 0, 0], [8, 0, 0, 9]]


@pytest.mark.parametrize(
  "array",
  [
    csr([7], [0, 2**60], [0], [1, 4]),
    csr([7], [0, 1], [0], [2**40, 4]),
    csr([7], [0, 1], [0], [1, 2**40]),
    csr([7], [0, 1], [-1], [1, 4]),
    csr([7], [0, 1], [4], [1, 4]),
    wire.encode((1, b"123"), (3, wire.FLOAT32)),
    wire.encode((1, bytes(8)), (3, wire.FLOAT32), (4, wire.packed([2**40]))),
    wire.encode((1, bytes(8)), (3, 9)),
    wire.encode((1, 2**40), (3, wire.FLOAT32)),
  ],
)
def test_arrays_that_are_wrong_are_refused(array):
  body = wire.encode((3, wire.encode((2, wire.encode((1, "weights"), (2, array))))))
  with pytest.raises(Refusal, match="no message"):
    data.read_call(body)


def test_broken_bytes_are_refused_and_nothing_else():
  rng, refused = random.Random(0), 0
  for _ in range(3000):
    body = bytearray(BODY)
    for _ in range(rng.randint(1, 3)):
      body[rng.randrange(len(body))] = rng.randrange(256)
    try:
      data.read_call(bytes(body[: rng.randint(1, len(body))]))
    except Refusal:
      refused += 1
  assert refused > 500
