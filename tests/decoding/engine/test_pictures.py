"""Requests that show pictures: what they draw, what they share, and which are refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.engine.make import make_engine
from jaxrl_llm.decoding.engine.programs import make_programs
from jaxrl_llm.decoding.engine.requests import Request
from jaxrl_llm.decoding.sampler import Requests, make_sampler
from jaxrl_llm.devices.compilation import CompileCounter
from jaxrl_llm.devices.mesh import make_mesh, param_shardings
from jaxrl_llm.models import make_model
from jaxrl_llm.models.decoding import serving_of
from jaxrl_llm.models.image_slots import Room
from jaxrl_llm.types import Images
from tests.decoding.engine.engines import WAIT, complete, make
from tests.marks import few
from tests.models.test_pictures import COUNTS, NAMES, ROOM, loaded, prompts, seen

BUDGET = 12
KINDS = [(NAMES[0], False), (NAMES[1], True)]
IMAGE, SHAPES = 90, [(16, 16, 3), (24, 16, 3)]  # Squares of 2 x 2 and 3 x 2 image tokens.


def of_row(name, count):
  """Returns a prompt like a recorded one, but with squares: positions lag behind columns."""
  rng, tokens, shown = np.random.default_rng(count), [*range(5, 12)], []
  for height, width, _ in SHAPES[:count]:
    shown.append(rng.integers(0, 256, (height, width, 3)).astype(np.uint8))
    tokens += [88, *[IMAGE] * (height * width // 64), 89, *rng.integers(0, 80, 4).tolist()]
  return np.array(tokens, np.int32), shown, None


@pytest.fixture(autouse=True)
def own_prompts(monkeypatch):
  """Replaces the recorded prompts, whose pictures are strips with as many positions as tokens."""
  monkeypatch.setattr("tests.models.test_pictures.of_row", of_row)


@functools.cache
def built(name, train_tower):
  """Returns a model, its weights, other ones, and the programs of an engine that shows pictures."""
  model, params = loaded(name, train_tower=train_tower)
  sizes = dict(slots=4, context=64, chunk=8, spans=8, steps=4, cache_dtype="float32")
  programs = make_programs(model, params, room=Room(model.config, 2, ROOM), **sizes)
  return model, params, jax.tree.map(lambda x: 1.1 * x, params), programs


@pytest.fixture
def engine_of():
  """Returns a function that makes engines, which are closed at the end."""
  engines = []

  def of(name=NAMES[0], train_tower=False, **options):
    model, params, _, programs = built(name, train_tower)
    engines.append(make(model=model, params=params, programs=programs, context=64, room=Room(model.config, 2, ROOM), **options))
    return engines[-1]

  yield of
  for engine in engines:
    engine.close()


def shown(name, train_tower, count, params=None):
  """Returns the pictures of a recorded prompt, None without any."""
  model, own, *_ = built(name, train_tower)
  return seen(model, own if params is None else params, name, count, as_patches=train_tower) if count else None


def asked(name, train_tower, count, **options):
  """Returns a request for a recorded prompt."""
  pictures = shown(name, train_tower, count)
  return Request(of_row(name, count)[0].tolist(), **dict(max_tokens=BUDGET) | options, pictures=pictures)


def logprobs_of(model, params, request, drawn):
  """Returns the log-probability of each drawn token under the model itself."""
  tokens = np.array([[*request.tokens, *drawn]], np.int32)
  positions, images = np.arange(tokens.size)[None], None
  if request.pictures is not None:
    of_row, slots = request.pictures.span(0, tokens.size)
    positions, one = of_row[None], lambda x: None if x is None else jax.tree.map(lambda x: jnp.asarray(x)[None], x)
    images = Images(slots[None], one(request.pictures.features), one(request.pictures.patches))
  logits = jax.jit(model.logits)(params, tokens, positions, np.ones_like(tokens), images)
  return np.asarray(jax.nn.log_softmax(logits))[0][len(request.tokens) - 1 + np.arange(len(drawn)), np.asarray(drawn)]


@pytest.mark.parametrize(("name", "train_tower"), few(KINDS, 0))
def test_completions_are_those_of_the_batch_sampler_and_of_the_learner(engine_of, name, train_tower):
  """Of prompts with no picture, one and two, each drawn twice."""
  model, params, *_ = built(name, train_tower)
  sample = make_sampler(model, group_size=2, max_new_tokens=BUDGET, stop_ids=(3,), pad_id=0)
  seeds = Requests(np.stack([np.arange(6), np.zeros(6)], axis=1).astype(np.uint32))
  tokens, mask, of_prompts = prompts(model, params, name, as_patches=train_tower)
  drawn = jax.jit(sample)(params, tokens, mask, seeds, of_prompts)
  asking = [asked(name, train_tower, COUNTS[i // 2], seed=i, stop_ids=(3,)) for i in range(6)]
  for i, (request, result) in enumerate(zip(asking, complete(engine_of(name, train_tower), *asking), strict=True)):
    length = int(drawn.mask[i].sum())
    assert result.tokens == drawn.tokens[i, :length].tolist()
    np.testing.assert_allclose(result.logprobs, drawn.logprobs[i, :length], atol=1e-5)
    np.testing.assert_allclose(result.logprobs, logprobs_of(model, params, request, result.tokens), atol=1e-5)


def test_only_prompts_with_the_same_pictures_share_what_is_cached(engine_of):
  model, params, *_ = built(NAMES[0], False)
  engine, request = engine_of(), asked(NAMES[0], False, 1)
  other = request._replace(pictures=request.pictures._replace(key=b"other", features=-request.pictures.features))
  first, again = complete(engine, request)[0], complete(engine, request)[0]
  assert first.cached_tokens == 0 and again.cached_tokens == len(request.tokens) - 1 and again.tokens == first.tokens
  (unlike,) = complete(engine, other)
  assert unlike.cached_tokens == 0 and np.abs(unlike.logprobs[0] - first.logprobs[0]) > 1e-3
  for one, result in ((request, first), (other, unlike)):
    np.testing.assert_allclose(result.logprobs, logprobs_of(model, params, one, result.tokens), atol=1e-5)
  # The next turn of a conversation.
  further = request._replace(tokens=[*request.tokens, *first.tokens, 5, 6, 7], owner="a")
  own = complete(engine, request._replace(owner="a"), further)[1]
  assert own.cached_tokens >= len(request.tokens) - 1
  np.testing.assert_allclose(own.logprobs, logprobs_of(model, params, further, own.tokens), atol=1e-5)


def test_what_is_computed_beside_it_changes_no_bit(engine_of):
  requests = [asked(NAMES[0], False, count, seed=count) for count in COUNTS]
  alone = [complete(engine_of(), request)[0] for request in requests]
  together = complete(engine_of(), *requests)
  assert [x.tokens for x in together] == [x.tokens for x in alone]
  assert [x.logprobs for x in together] == [x.logprobs for x in alone]


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_new_weights_compute_features_anew(engine_of, in_flight):
  """By a trained tower; what is recomputed includes what had been drawn."""
  model, params, others, _ = built(NAMES[0], True)
  engine, request, pieces = engine_of(NAMES[0], True, in_flight=in_flight), asked(NAMES[0], True, 2, max_tokens=30), []

  def note(piece):
    pieces.append(piece)
    if len(pieces) == 1:
      engine.update(others, 1)

  result = engine.submit(request, note).completion.result(WAIT)
  (_, before), (version, after) = result.parts
  assert version == 1 and after
  # The log-probabilities of this tower differ by 1.2e-5 with JAX 0.12.
  old, new = (logprobs_of(model, own, request, result.tokens) for own in (params, others))
  np.testing.assert_allclose(result.logprobs[:before], old[:before], atol=3e-5)
  assert (np.abs(result.logprobs - new)[before:].max() < 3e-5) == (in_flight == "recompute")
  (fresh,) = complete(engine, request)
  np.testing.assert_allclose(fresh.logprobs, logprobs_of(model, others, request, fresh.tokens), atol=3e-5)


def test_pictures_are_seen_once_by_all_that_show_them(engine_of):
  *_, programs = built(NAMES[0], True)
  calls = []
  counted = programs._replace(features=lambda *given: (calls.append(1), programs.features(*given))[1])
  model, params, *_ = built(NAMES[0], True)
  engine = make(model=model, params=params, programs=counted, context=64, room=Room(model.config, 2, ROOM))
  request = asked(NAMES[0], True, 2)
  compiled = CompileCounter()
  complete(engine, *(request._replace(seed=i) for i in range(8)), asked(NAMES[0], True, 0))
  engine.close()
  assert len(calls) == 1 and compiled.count == 0


@pytest.mark.slow
@pytest.mark.parametrize("train_tower", few([False, True], 1))
def test_devices_that_share_the_weights_draw_the_same(engine_of, train_tower):
  model, params, *_ = built(NAMES[0], train_tower)
  mesh = make_mesh(fsdp=2, devices=jax.devices()[:2])
  spread = make_model(model.config, mesh=mesh, serving=serving_of(model.config, mesh, layout=None))
  placed = jax.device_put(params, param_shardings(mesh, spread.logical_axes, params))
  sizes = dict(slots=4, context=64, max_requests=99, chunk=8, spans=8, steps=4, room=Room(model.config, 2, ROOM))
  several = make_engine(spread, placed, **sizes)
  requests = [asked(NAMES[0], train_tower, i % 3, seed=i) for i in range(7)]
  for one, other in zip(complete(engine_of(NAMES[0], train_tower), *requests), complete(several, *requests), strict=True):
    assert one.tokens == other.tokens
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
  several.close()


def test_an_engine_of_text_alone_has_no_program_for_pictures():
  model, params, *_ = built(NAMES[0], False)
  engine = make_engine(model, params, slots=2, context=32, max_requests=4, chunk=8, spans=2)
  with pytest.raises(ValueError, match="^pictures: found some, expected None: the engine reads text alone$"):
    engine.submit(asked(NAMES[0], False, 1))
  engine.close()


REFUSALS = {
  "features: found None, expected those of the pictures: the tower is frozen": lambda x: dict(features=None),
  "features: found the shape (1, 15, 4, 32), expected 1 to 2 pictures of shape (16, 4, 32)": lambda x: dict(features=x.features[:, :-1]),
  "features: found the shape (3, 16, 4, 32), expected 1 to 2": lambda x: dict(features=np.repeat(x.features, 3, axis=0)),
  "slots: found 0 slots of pictures for 4 image tokens, expected one at each image token (id 90)": lambda x: dict(slots=0 * x.slots - 1),
  "slots: found 102, expected less than 16": lambda x: dict(slots=np.where(x.slots < 0, -1, x.slots + 99)),
  "slots: found 16 slots and positions of shape (17, 3), expected one for each token": lambda x: dict(slots=x.slots[:-1]),
  "positions: found 0 to 14 before 99, expected 0 to 16: a prompt of 17 tokens": lambda x: dict(end=99),
}


def test_pictures_that_do_not_fit_are_refused(engine_of):
  request, engine = asked(NAMES[0], False, 1), engine_of()
  for message, change in REFUSALS.items():
    pictures = request.pictures._replace(**change(request.pictures))
    with pytest.raises(ValueError, match=f"^pictures.{re.escape(message)}.*$"):
      engine.submit(request._replace(pictures=pictures))
