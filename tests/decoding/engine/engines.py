"""Engines for tests, which share their compiled programs."""

import functools

import jax
import numpy as np

from jaxrl_llm.decoding.engine.loop import DecodingEngine
from jaxrl_llm.decoding.engine.programs import make_programs
from jaxrl_llm.decoding.engine.requests import EngineLimits
from jaxrl_llm.decoding.stops import make_vocabulary
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer

VOCAB, CONTEXT, CHUNK, SPANS, STEPS, WAIT = 264, 224, 8, 8, 4, 120
PRESETS = {"dense": "nano", "mixture": "nano-moe", "window": "nano-window"}


@functools.cache
def built(kind):
  model = make_model(preset(PRESETS[kind], vocab_size=VOCAB))
  return model, model.init(jax.random.key(0)), model.init(jax.random.key(1))


@functools.cache
def programs_of(kind, slots, records_routes, records_kept):
  model, params, _ = built(kind)
  sizes = dict(slots=slots, context=CONTEXT, chunk=CHUNK, spans=SPANS, steps=STEPS)
  sizes |= dict(vocabulary=make_vocabulary(ByteTokenizer().token_bytes()))
  return make_programs(model, params, cache_dtype="float32", records_routes=records_routes, records_kept=records_kept, **sizes)


def complete(engine, *requests):
  """Submits requests at once and waits for all completions."""
  handles = [engine.submit(request) for request in requests]
  return [handle.completion.result(WAIT) for handle in handles]


def prompt(seed, length):
  return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@functools.cache
def jitted(kind, method):
  return jax.jit(getattr(built(kind)[0], method))


def outputs_of(kind, tokens, method, params=None):
  """Returns what a method of the model computes for tokens, padded to the context."""
  here = np.arange(CONTEXT)[None]
  padded = np.pad(np.array([tokens]), ((0, 0), (0, CONTEXT - len(tokens))))
  return jitted(kind, method)(built(kind)[1] if params is None else params, padded, here, (here < len(tokens)).astype(int))


def logprobs_of(kind, tokens, drawn, params=None):
  """Returns the log-probability of each drawn token under the model itself."""
  logprobs = np.asarray(jax.nn.log_softmax(outputs_of(kind, [*tokens, *drawn], "logits", params)))[0]
  return logprobs[len(tokens) - 1 + np.arange(len(drawn)), np.asarray(drawn, int)]


def assert_as_the_model(request, result, kind="dense", params=None):
  """Asserts that log-probabilities are those of the model itself."""
  np.testing.assert_allclose(result.logprobs, logprobs_of(kind, request.tokens, result.tokens, params), atol=1e-5)


def make(
  kind="dense", slots=4, max_requests=1000, records_routes=False, records_kept=False, in_flight="keep", programs=None, *, model=None,
  params=None, context=CONTEXT, room=None,
):  # fmt: skip
  """Makes an engine with an empty cache and weights of version 0, by default of shared programs."""
  model, params = (model, params) if model else built(kind)[:2]
  programs = programs or programs_of(kind, slots, records_routes, records_kept)
  return DecodingEngine(
    model, programs, programs.weights(params), EngineLimits(context, max_requests), slots=slots, chunk=CHUNK, spans=SPANS,
    version=0, in_flight=in_flight, records_routes=records_routes, records_kept=records_kept, room=room,
  )  # fmt: skip
