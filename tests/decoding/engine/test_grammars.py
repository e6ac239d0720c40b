"""Draws within a grammar: masks on the device, seeds, and the rows beside them."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl_llm.decoding.engine import frames
from jaxrl_llm.decoding.engine import programs as programs_lib
from jaxrl_llm.decoding.engine.fleet import Fleet, make_engines
from jaxrl_llm.decoding.engine.loop import DecodingEngine
from jaxrl_llm.decoding.engine.make import make_engine
from jaxrl_llm.decoding.engine.programs import num_words
from jaxrl_llm.decoding.engine.requests import GrammarError, Request
from jaxrl_llm.devices.mesh import make_mesh, param_shardings
from jaxrl_llm.models import make_model
from jaxrl_llm.models.decoding import serving_of
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from tests.decoding.engine.engines import VOCAB, WAIT, built, complete, logprobs_of, make, outputs_of, prompt

EOS = ByteTokenizer().eos_id


class Script:
  """Grammar of completions whose token t is one of the t-th set, or behind the last one the end.

  A set may be an exception, which `mask` raises.
  """

  def __init__(self, *sets):
    self.sets = sets

  def begin(self):
    return _Place(self.sets)


class _Place:
  def __init__(self, sets):
    self.sets, self.tokens = sets, []

  def mask(self):
    allowed = self.sets[len(self.tokens)] if len(self.tokens) < len(self.sets) else {EOS}
    if isinstance(allowed, Exception):
      raise allowed
    bits = np.zeros(32 * num_words(VOCAB), bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view("<u4")

  def advance(self, token):
    assert token in self.sets[len(self.tokens)]
    self.tokens.append(token)


SETS = ({3, 31, 32, 63}, {7}, set(range(100, 200)), {0, VOCAB - 1}, {64, 95, 96}, {5, 6})
SCRIPT = Script(*SETS)


def constrained(seed, **options):
  return Request(prompt(seed, 9), **{"max_tokens": 12, "seed": seed, "stop_ids": (EOS,), "grammar": SCRIPT, **options})


def free(seed, **options):
  return Request(prompt(seed, 7 + seed % 5), **{"max_tokens": 20, "seed": seed, "stop_ids": (EOS,), **options})


@pytest.fixture
def engine():
  engine = make()
  yield engine
  engine.close()


@pytest.mark.parametrize("options", [{}, {"temperature": 30.0}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.2, "temperature": 2.0}])
def test_a_completion_is_one_of_the_grammar(engine, options):
  for result in complete(engine, *(constrained(seed, **options) for seed in range(8))):
    assert len(result.tokens) == len(SETS) + 1 and result.reason == "stop"
    assert all(token in allowed for token, allowed in zip(result.tokens, (*SETS, {EOS}), strict=True))
    assert result.logprobs[1] == result.logprobs[-1] == 0  # A single token is certain.


def test_log_probabilities_are_those_among_the_allowed_tokens(engine):
  request = constrained(5)
  (result,) = complete(engine, request)
  logits = np.asarray(outputs_of("dense", [*request.tokens, *result.tokens], "logits"))[0, len(request.tokens) - 1 :]
  for token, logprob, allowed, row in zip(result.tokens, result.logprobs, (*SETS, {EOS}), logits, strict=False):
    expected = row[token] - np.logaddexp.reduce(row[sorted(allowed)])
    assert abs(logprob - expected) < 1e-5


def test_a_draw_at_temperature_0_is_the_likeliest_allowed_token(engine):
  request = constrained(2, temperature=0.0)
  (result,) = complete(engine, request)
  logits = np.asarray(outputs_of("dense", [*request.tokens, *result.tokens], "logits"))[0, len(request.tokens) - 1 :]
  assert result.tokens == [max(allowed, key=lambda i, row=row: row[i]) for allowed, row in zip((*SETS, {EOS}), logits, strict=False)]


def test_draws_depend_on_the_seed_and_not_on_what_else_runs(engine):
  requests = [constrained(seed) for seed in (1, 2, 3)]
  alone = [complete(engine, request)[0] for request in requests]
  others = [engine.submit(free(seed, max_tokens=40)) for seed in range(20, 26)]
  beside = complete(engine, *reversed(requests))[::-1]
  assert [(x.tokens, x.logprobs) for x in beside] == [(x.tokens, x.logprobs) for x in alone]
  assert len({tuple(x.tokens) for x in alone}) > 1
  for other in others:
    other.completion.result(WAIT)


def test_rows_without_a_grammar_do_not_change_by_a_bit(engine):
  requests = [free(seed, temperature=1 + seed / 4, top_k=seed % 3 * 5, top_p=1 - seed % 2 / 10) for seed in range(6)]
  requests += [free(9, temperature=0.0)]
  alone = complete(engine, *requests)
  for order in (1, -1):
    mixed = [x for pair in zip(requests, (constrained(seed, max_tokens=50) for seed in range(30, 37)), strict=True) for x in pair]
    beside = dict(zip(map(id, mixed[::order]), complete(engine, *mixed[::order]), strict=True))
    for request, expected in zip(requests, alone, strict=True):
      result = beside[id(request)]
      assert (result.tokens, result.logprobs) == (expected.tokens, expected.logprobs)


def test_nothing_compiles_without_a_grammar(monkeypatch):
  model, params, _ = built("dense")
  engine = make_engine(model, params, slots=2, context=64, max_requests=8)
  try:
    asked = []
    of_size = engine._programs.constrained
    engine._programs = engine._programs._replace(constrained=lambda size: asked.append(size) or of_size(size))
    complete(engine, free(1), free(2))
    assert not asked
    complete(engine, constrained(1))
    assert asked
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("compiled again"))
    complete(engine, constrained(2), free(3))
  finally:
    engine.close()


def test_a_mesh_draws_the_same():
  model, params, _ = built("dense")
  mesh = make_mesh(fsdp=2, devices=jax.devices()[:2])
  spread = make_model(model.config, mesh=mesh, serving=serving_of(model.config, mesh, layout=None))
  placed = jax.device_put(params, param_shardings(mesh, spread.logical_axes, params))
  requests = [constrained(1), free(2), constrained(3, temperature=9.0), free(4), constrained(5)]
  results = []
  for own, weights in ((model, params), (spread, placed)):
    engine = make_engine(own, weights, slots=4, context=64, max_requests=8)
    try:
      results.append(complete(engine, *requests))
    finally:
      engine.close()
  for one, several in zip(*results, strict=True):
    assert one.tokens == several.tokens
    np.testing.assert_allclose(one.logprobs, several.logprobs, atol=1e-5)


def test_a_continued_completion_goes_on_in_its_grammar(engine):
  request = constrained(4, temperature=3.0)
  (whole,) = complete(engine, request)
  for count in (1, 4):
    rest = request._replace(tokens=[*request.tokens, *whole.tokens[:count]], drawn=count, max_tokens=12 - count)
    (result,) = complete(engine, rest)
    assert result.tokens == whole.tokens[count:]


def test_a_budget_cuts_it(engine):
  (result,) = complete(engine, constrained(1, max_tokens=3))
  assert len(result.tokens) == 3 and result.reason == "length"


def test_pieces_arrive_one_by_one(engine):
  pieces = []
  result = engine.submit(constrained(1), pieces.append).completion.result(WAIT)
  assert [piece.tokens for piece in pieces] == [[token] for token in result.tokens]


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_kept_ids_are_the_allowed_ones(kind):
  engine = make(kind, records_kept=True)
  try:
    result, ranked = complete(engine, constrained(1), constrained(1, top_k=2))
    assert result.kept == [sorted(allowed) for allowed in (*SETS, {EOS})]
    assert [len(kept) for kept in ranked.kept] == [min(len(allowed), 2) for allowed in (*SETS, {EOS})]
  finally:
    engine.close()


def test_scores_keep_their_meaning():
  """They are of the distribution drawn from, and at temperature 0 of the model as it is."""
  model, params, _ = built("dense")
  engine = make_engine(model, params, slots=2, context=64, max_requests=8, likeliest=4)
  try:
    drawn, greedy = (complete(engine, constrained(3, likeliest=4, temperature=t))[0] for t in (1.0, 0.0))
    assert [score.logprob for score in drawn.scores] == pytest.approx(drawn.logprobs, abs=1e-5)
    for score, allowed in zip(drawn.scores, (*SETS, {EOS}), strict=True):
      assert {i for i, _ in score.likeliest} <= set(allowed)
    expected = logprobs_of("dense", constrained(3).tokens, greedy.tokens)
    assert [score.logprob for score in greedy.scores] == pytest.approx(expected, abs=1e-5)
    assert greedy.logprobs == [0.0] * len(greedy.tokens)
    with pytest.raises(ValueError, match="^min_tokens: found 2 with a grammar, expected 0"):
      engine.submit(constrained(3, min_tokens=2))
  finally:
    engine.close()


def test_a_grammar_of_more_ids_than_the_model_has_is_refused(engine):
  request = constrained(1, grammar=SimpleNamespace(begin=lambda: SimpleNamespace(mask=lambda: np.ones(num_words(VOCAB) + 1, np.uint32))))
  with pytest.raises(GrammarError, match="^grammar: found a mask of 10 words, expected at most 9"):
    engine.submit(request)


@pytest.mark.parametrize("fault", [set(), RuntimeError("broken"), GrammarError("too complex")])
def test_a_grammar_that_fails_ends_its_own_request(engine, fault):
  others = [engine.submit(request) for request in (free(1), constrained(2))]
  failed = engine.submit(constrained(3, grammar=Script({1, 2}, {3}, fault)))
  with pytest.raises(type(fault) if isinstance(fault, Exception) else GrammarError, match="broken|too complex|allows no token after 2"):
    failed.completion.result(WAIT)
  assert [other.completion.result(WAIT).reason in ("stop", "length") for other in others] == [True, True]
  with pytest.raises(type(fault) if isinstance(fault, Exception) else GrammarError):
    engine.submit(constrained(3, grammar=Script(fault)))
  assert complete(engine, constrained(2))[0].reason == "stop"


def test_a_grammar_stays_in_its_process():
  with pytest.raises(ValueError, match="^grammar: found one, expected None: it cannot be sent"):
    frames.request_frame(0, constrained(1), pieces=False)


class _Leads:
  leads, calls = True, {}

  def tell(self, news):
    pass

  def hear(self):
    return None


def test_engines_of_several_processes_refuse_a_grammar():
  model, params, _ = built("dense")
  engine = make_engine(model, params, slots=2, context=64, max_requests=8, peers=_Leads())
  try:
    assert isinstance(engine, DecodingEngine)
    with pytest.raises(ValueError, match="^grammar: found one, expected None: several processes"):
      engine.submit(constrained(1))
  finally:
    engine.close()


def test_a_fleet_compiles_once_and_without_its_lock(monkeypatch):
  """Twins share programs of two widths, and all requests draw as in one engine."""
  model, params, _ = built("dense")
  options = dict(slots=96, context=48, max_requests=64)
  requests = [request for seed in range(3) for request in (constrained(seed), free(seed))]
  monkeypatch.setattr(programs_lib, "_WIDTHS", (48, 16))
  fleet = make_engines(model, params, num_cores=2, **options)
  compiled, compile_of = [], jax.stages.Lowered.compile

  def counted(lowered, *args):
    compiled.append(fleet._lock.locked())
    return compile_of(lowered, *args)

  try:
    assert isinstance(fleet, Fleet)
    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    handles = [fleet.submit(request) for request in requests]
    several = [handle.completion.result(WAIT) for handle in handles]
  finally:
    fleet.close()
  monkeypatch.setattr(jax.stages.Lowered, "compile", compile_of)
  assert compiled == [False] * len(compiled) and 1 <= len(compiled) <= 2
  engine = make_engine(model, params, **{**options, "slots": 4})
  try:
    assert [x.tokens for x in several] == [x.tokens for x in complete(engine, *requests)]
  finally:
    engine.close()
