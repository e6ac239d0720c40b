"""Engines for tests, which share their compiled programs."""

import functools

import jax
import numpy as np

from jaxrl_llm.decoding.engine.loop import STOP_IDS, DecodingEngine
from jaxrl_llm.decoding.engine.programs import make_programs
from jaxrl_llm.decoding.engine.requests import EngineLimits
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer

VOCAB, CONTEXT, CHUNK, SPANS, STEPS, WAIT = 264, 224, 8, 8, 4, 120
PRESETS = {"dense": "nano", "mixture": "nano-moe"}


@functools.cache
def built(kind):
  model = make_model(preset(PRESETS[kind], vocab_size=VOCAB))
  return model, model.init(jax.random.key(0)), model.init(jax.random.key(1))


@functools.cache
def programs_of(kind, slots, records_routes, records_kept):
  model, params, _ = built(kind)
  sizes = dict(slots=slots, context=CONTEXT, chunk=CHUNK, spans=SPANS, steps=STEPS, num_stop_ids=STOP_IDS)
  return make_programs(model, params, cache_dtype="float32", records_routes=records_routes, records_kept=records_kept, **sizes)


def complete(engine, *requests):
  """Submits requests at once and waits for all completions."""
  handles = [engine.submit(request) for request in requests]
  return [handle.completion.result(WAIT) for handle in handles]


def prompt(seed, length):
  return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def logprobs_of(kind, tokens, params=None):
  """Returns the log-probability of each token but the first under the model itself."""
  size, padded = len(tokens), np.pad(np.array([tokens]), ((0, 0), (0, CONTEXT - len(tokens))))
  segments = (np.arange(CONTEXT) < size).astype(int)[None]
  logits = logits_of(kind)(built(kind)[1] if params is None else params, padded, np.arange(CONTEXT)[None], segments)
  logprobs = np.asarray(jax.nn.log_softmax(logits))[0]
  return logprobs[np.arange(size - 1), tokens[1:]]


@functools.cache
def logits_of(kind):
  return jax.jit(built(kind)[0].logits)


def make(kind="dense", slots=4, max_requests=1000, records_routes=False, records_kept=False, in_flight="keep", programs=None):
  """Makes an engine with an empty cache and weights of version 0, by default of shared programs."""
  model, params, _ = built(kind)
  programs = programs or programs_of(kind, slots, records_routes, records_kept)
  return DecodingEngine(
    model, programs, programs.weights(params), EngineLimits(CONTEXT, max_requests), slots=slots, chunk=CHUNK, spans=SPANS,
    tokenizer=ByteTokenizer(), version=0, in_flight=in_flight, records_routes=records_routes, records_kept=records_kept,
  )  # fmt: skip
