"""Tests of engines that share the requests: on several devices, the tokens of one."""

import functools
import string
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxrl_llm.decoding.engine.fleet import Fleet, Whereabouts, make_engines
from jaxrl_llm.decoding.engine.make import make_engine
from jaxrl_llm.decoding.engine.requests import EngineLimits, QueueFull, Request
from jaxrl_llm.devices.mesh import make_mesh, param_shardings
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.models.decoding import serving_of
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from tests.decoding.apart.links import Slow, loads
from tests.decoding.engine.engines import VOCAB, complete
from tests.marks import few

SIZES = dict(context=96, max_requests=24, chunk=8, spans=4, steps=4, tokenizer=ByteTokenizer())
MESHES = {
  "rows": dict(data=2, fsdp=2),
  "experts": dict(data=1, fsdp=2, expert=4),
  "heads": dict(data=1, tensor=2),
  "context": dict(data=2, context=2),
}


@functools.cache
def weights(kind, seed):
  model = make_model(preset(kind, vocab_size=VOCAB))
  return model, jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(seed)))


def on_mesh(kind, seed, axes):
  mesh = make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
  config = weights(kind, seed)[0].config
  model = make_model(config, mesh=mesh, serving=serving_of(config, mesh, layout=None))
  params = weights(kind, seed)[1]
  return model, jax.device_put(params, param_shardings(mesh, model.logical_axes, params))


def requests(start):
  """Returns groups of requests with a common prompt."""
  rng = np.random.default_rng(start)
  prompts = [rng.integers(0, VOCAB, 20 + 3 * i).tolist() for i in range(4)]
  return [Request(x, 8, seed=100 * start + 10 * i + j) for i, x in enumerate(prompts) for j in range(3)]


def continued(asked, results):
  return [Request([*x.tokens, *y.tokens, 5, 6], 8, seed=x.seed + 1) for x, y in zip(asked, results, strict=True)]


def assert_draws_as_one(several, kind, later):
  """Asserts that engines draw what one draws, turns after turns, at last with `later` weights."""
  one = make_engine(*weights(kind, 0), slots=12, **SIZES)
  first = requests(0)
  results = complete(one, *first)
  stopped = [x._replace(stop_ids=(9, 99), stops=("no such text", *string.ascii_letters)) for x in requests(1)]
  for number, batch in enumerate([first, continued(first, results), stopped]):
    if number == 2:
      one.update(weights(kind, 1)[1], 1)
      several.update(later, 1)
    for expected, got in zip(complete(one, *batch), complete(several, *batch), strict=True):
      assert (got.tokens, got.reason) == (expected.tokens, expected.reason) and got.version == number // 2
      np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
      # Each engine has room for all that comes back to it.
      assert got.cached_tokens > 20 or number != 1
  one.close()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "axes"), few([("nano-moe", "experts"), ("nano", "rows"), ("nano", "heads"), ("nano", "context")], 0))
def test_several_devices_draw_the_tokens_of_one(kind, axes):
  several = make_engines(*on_mesh(kind, 0, MESHES[axes]), slots=48, **SIZES)
  assert_draws_as_one(several, kind, on_mesh(kind, 1, MESHES[axes])[1])
  several.close()


def test_cores_of_a_cpu_share_programs_and_weights_and_draw_the_tokens_of_one():
  several = make_engines(*weights("nano", 0), slots=128, num_cores=3, **SIZES)
  assert_draws_as_one(several, "nano", weights("nano", 1)[1])
  twins = several._engines
  assert len(twins) == 2 and twins[0]._programs is twins[1]._programs and twins[0]._weights is twins[1]._weights
  assert all(twin.pulse().calls > 8 for twin in twins) and several.limits.requests == SIZES["max_requests"]
  several.close()


def fleet(count=3, most=4, slots=8):
  engines = [Slow(most) for _ in range(count)]
  return engines, Fleet(engines, lambda params, version: None, slots=slots)


def prompt(number):
  return [number] * 32


def test_strangers_go_where_least_is_to_do():
  engines, several = fleet()
  for i in range(6):
    several.submit(Request(prompt(i), 1))
  assert loads(engines) == [2, 2, 2]
  engines[1].end()
  several.submit(Request(prompt(9), 1))
  assert loads(engines) == [2, 2, 2]


def test_turns_return_to_what_they_have_left_and_groups_stay_together_until_it_costs_more():
  engines, several = fleet()
  for i in range(3):
    several.submit(Request(prompt(i), 1))
  own = engines[2].end(range(40))
  several.submit(Request(prompt(7), 1))  # Now engine 2 has as much to do as the others.
  several.submit(Request([*own.tokens, *range(40), 3], 1))
  assert loads(engines) == [1, 1, 2]
  for _ in range(3):
    several.submit(Request(prompt(50), 1))
  # The first to engine 0, the second beside it; then engine 0 has more to do than 1 by two.
  assert loads(engines) == [3, 2, 2]


def test_what_is_known_is_bounded():
  known = Whereabouts(capacity=3)
  for i in range(200):
    known.note([i], "", i)
  assert known.find([199, 5], "") == 199 and known.find([1, 5], "") is None
  known.note(range(48), "", 7)
  known.note(range(100, 148), "", 8)
  assert known.find(range(48), "") is None and known.find(range(100, 148), "a") is None
  assert len(known._blocks) == 3


def test_a_salt_and_other_weights_know_nothing_of_each_other():
  engines, several = fleet(count=2)
  several.submit(Request(prompt(1), 1, salt="a"))
  engines[0].end()
  several.submit(Request(prompt(2), 1))
  several.submit(Request(prompt(1), 1, salt="b"))
  assert loads(engines) == [1, 1]
  several.update({}, 1)
  engines[0].end()
  several.submit(Request(prompt(1), 1, salt="b"))
  assert loads(engines) == [1, 1]


def test_a_full_queue_is_refused_only_if_all_are_full():
  engines, several = fleet(count=2, most=2)
  for _ in range(4):
    several.submit(Request(prompt(1), 1))
  assert loads(engines) == [2, 2] and several.limits == EngineLimits(64, 4)
  with pytest.raises(QueueFull, match="found 4 open requests, expected fewer than 4"):
    several.submit(Request(prompt(1), 1))
  engines[1].end()
  several.submit(Request(prompt(1), 1))


def test_requests_of_many_threads_are_counted():
  engines, several = fleet(count=2, most=1000)
  with ThreadPoolExecutor(8) as threads:
    list(threads.map(lambda i: [several.submit(Request(prompt(i), 1)) for _ in range(20)], range(8)))
  assert sum(loads(engines)) == sum(several._open) == 160 and several._open == loads(engines)
  while engines[0].open:
    engines[0].end()
  assert several._open == [0, len(engines[1].open)]
  several.close()
  assert all(engine.closed for engine in engines)
