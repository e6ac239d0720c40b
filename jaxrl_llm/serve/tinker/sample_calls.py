"""Calls of `asample`: from JSON to requests of the engine, and from completions to messages."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxrl_llm.decoding.engine.requests import Decoded, Request, Score
from jaxrl_llm.decoding.filters import LEAST_TEMPERATURE
from jaxrl_llm.messages import Problem
from jaxrl_llm.serve import fields
from jaxrl_llm.serve.calls import (
  LONGEST_STOP,
  MAX_CHOICES,
  MAX_LIKELIEST,
  MAX_SEED,
  MAX_STOP_IDS,
  MAX_STOPS,
  seed_of,
)
from jaxrl_llm.serve.refusals import Refusal, wrong
from jaxrl_llm.serve.tinker import wire
from jaxrl_llm.serve.tinker.training import Base

_NAMES = (
  "num_samples",
  "prompt",
  "sampling_params",
  "sampling_session_id",
  "seq_id",
  "prompt_logprobs",
  "prompt_logprobs_last_n",
)
_NAMES += ("topk_prompt_logprobs", "topk_sample_logprobs")
_NEUTRAL = {
  "base_model": (),
  "model_path": (),
  "target_prompt_logprobs": (),
  "prompt_alt_tokens_k": (0,),
  "record_stability_info": (False,),
}
_PARAMS = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
_EMPTY_ID, _EMPTY_LOGPROB = 0, -99999.0
_REASONS = {"stop": 0, "length": 1}


class SampleCall(NamedTuple):
  """What a call of `asample` asks for.

  Attributes:
    requests: One for each sample; the first scores the prompt.
    prompt: Ids of the prompt.
    scored_from: First token of the prompt whose log-probability is wanted; None for none.
    topk_prompt: Number of likeliest ids at each token of the prompt.
    topk_sample: Number of likeliest ids at each token of a sample.
  """

  requests: list[Request]
  prompt: list[int]
  scored_from: int | None
  topk_prompt: int
  topk_sample: int


def prompt_of(value: Any, base: Base) -> list[int]:
  """Reads a prompt of chunks of tokens.

  Raises:
    Refusal: If it has other chunks, or too many tokens or none.
  """
  chunks = value.get("chunks") if isinstance(value, dict) else None
  if not isinstance(chunks, list) or not all(isinstance(chunk, dict) for chunk in chunks):
    raise wrong("prompt", value, "an object with a list of chunks")
  tokens: list[int] = []
  for i, chunk in enumerate(chunks):
    if (kind := chunk.get("type", "encoded_text")) != "encoded_text":
      raise wrong(f"prompt.chunks[{i}].type", kind, "'encoded_text': this server reads tokens alone")
    own = fields.ids(
      chunk.get("tokens"),
      f"prompt.chunks[{i}].tokens",
      vocab_size=base.model.config.vocab_size,
      most=base.context,
      empty=True,
    )
    tokens += own
  if not 1 <= len(tokens) < base.context:
    raise Refusal(
      400, str(Problem("prompt", f"{len(tokens):,} tokens", f"1 to {base.context - 1:,}")), field="prompt"
    )
  return tokens


def read(values: Mapping[str, Any], base: Base, *, owner: str, number: int) -> SampleCall:
  """Reads a call.

  Args:
    values: JSON of the call.
    base: Model.
    owner: Id of the call.
    number: Number of its sampler in its session: without a seed, the same calls of two sessions
      draw the same.

  Raises:
    Refusal: If a field is wrong or not supported.
  """
  fields.check_names(values, _NAMES, neutral=_NEUTRAL, ignored=("type",))
  prompt, params = prompt_of(values.get("prompt"), base), values.get("sampling_params")
  if not isinstance(params, dict):
    raise wrong("sampling_params", params, "an object")
  inside = "sampling_params."
  fields.check_names(params, _PARAMS, inside=inside, neutral={}, ignored=())
  most = min(MAX_CHOICES, base.sampler.limits.requests)
  count = fields.whole(values, "num_samples", 1, low=1, high=most)
  temperature = fields.number(params, "temperature", 1.0, low=0, high=100, inside=inside)
  top_p = fields.number(params, "top_p", 1.0, low=0, high=1, inside=inside)
  if not top_p:
    raise wrong("sampling_params.top_p", top_p, "a number above 0, up to 1")
  top_k = max(fields.whole(params, "top_k", -1, low=-1, high=2**31 - 1, inside=inside), 0)
  room = base.context - len(prompt)
  budget = fields.whole(params, "max_tokens", room, low=1, high=2**63, inside=inside)
  seed = fields.whole(params, "seed", None, low=0, high=MAX_SEED, inside=inside)
  if seed is None:
    unseeded = f"{number}/{values.get('seq_id')}"
    seed = int.from_bytes(hashlib.sha256(unseeded.encode()).digest()[:8], "big")
  stop_ids, stops = _stops(params, base)
  topk_prompt, topk_sample = (
    fields.whole(values, name, 0, low=0, high=MAX_LIKELIEST)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs")
  )
  scores_prompt = fields.flag(values, "prompt_logprobs", False)
  last = fields.whole(values, "prompt_logprobs_last_n", None, low=1, high=max(len(prompt) - 1, 1))
  if last is not None and not scores_prompt:
    raise wrong("prompt_logprobs_last_n", last, "no such field without prompt_logprobs")
  scored_from = None if not (scores_prompt or topk_prompt) else 1 if last is None else len(prompt) - last
  # At temperature 0 the log-probability of a draw says nothing; a score is that of the model.
  likeliest = topk_sample if topk_sample or temperature < LEAST_TEMPERATURE else None
  request = Request(
    tokens=prompt,
    max_tokens=min(budget, room),
    temperature=temperature,
    top_k=top_k if top_k < base.model.config.vocab_size else 0,
    top_p=top_p,
    stop_ids=stop_ids,
    stops=stops,
    owner=owner,
    likeliest=likeliest,
  )
  # Only the likeliest ids of a prompt come from the engine.
  of_prompt = topk_prompt or None
  requests = [
    request._replace(seed=seed_of(seed, i), prompt_likeliest=None if i else of_prompt) for i in range(count)
  ]
  return SampleCall(requests, prompt, scored_from, topk_prompt, topk_sample)


def _stops(params: Mapping[str, Any], base: Base) -> tuple[tuple[int, ...], tuple[str, ...]]:
  """Returns the ids and the texts that end a sample; without any of them, the tokenizer's ids."""
  stop = params.get("stop")
  if stop is None:
    return tuple(base.tokenizer.stop_ids), ()
  if isinstance(stop, list) and all(type(item) is int for item in stop):
    ids = fields.ids(
      stop, "sampling_params.stop", vocab_size=base.model.config.vocab_size, most=MAX_STOP_IDS, empty=True
    )
    return tuple(dict.fromkeys(ids)), ()
  return (), fields.texts(params, "stop", most=MAX_STOPS, longest=LONGEST_STOP, inside="sampling_params.")


def encode(
  call: SampleCall, completions: Sequence[Decoded], of_prompt: Float[np.ndarray, " n"] | None
) -> bytes:
  """Encodes the samples of a call as the message that the SDK reads.

  Args:
    call: What was asked.
    completions: Samples of the call.
    of_prompt: Log-probability of each id of the prompt but the first; None if not asked.
  """
  out = [(1, _sequence(call, completion)) for completion in completions]
  if call.scored_from is not None:
    out.append((2, _floats([*[np.nan] * call.scored_from, *of_prompt[call.scored_from - 1 :].tolist()])))
    if call.topk_prompt:
      scores = [None, *completions[0].prompt_scores]
      scores[: call.scored_from] = [None] * min(call.scored_from, len(scores))
      out.append((3, _likeliest(scores, call.topk_prompt)))
  return wire.encode(*out, (4, completions[0].cached_tokens))


def _sequence(call: SampleCall, completion: Decoded) -> bytes:
  scores = completion.scores
  logprobs = completion.logprobs if scores is None else [score.logprob for score in scores]
  out = [
    (1, _REASONS[completion.reason]),
    (2, np.asarray(completion.tokens, "<i4").tobytes()),
    (3, _floats(logprobs)),
  ]
  return wire.encode(*out, *([(4, _likeliest(scores, call.topk_sample))] if call.topk_sample else []))


def _likeliest(scores: Sequence[Score | None], count: int) -> bytes:
  ids = np.full((len(scores), count), _EMPTY_ID, "<i4")
  logprobs = np.full((len(scores), count), _EMPTY_LOGPROB, "<f4")
  for row, score in enumerate(scores):
    for column, (own, logprob) in enumerate(() if score is None else score.likeliest[:count]):
      ids[row, column], logprobs[row, column] = own, logprob
  return wire.encode((1, ids.tobytes()), (2, logprobs.tobytes()), (3, count), (4, len(scores)))


def _floats(numbers: Sequence[float]) -> bytes:
  return np.asarray(numbers, "<f4").tobytes()
