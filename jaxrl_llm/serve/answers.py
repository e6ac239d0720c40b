"""Answers as JSON values: whole completions, and the chunks of a stream."""

import base64
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.decoding.engine.requests import Decoded, Piece, Request, Score
from jaxrl_llm.serve.calls import Call, Served
from jaxrl_llm.serve.text import Spelling
from jaxrl_llm.serve.tools import message

_REASONS = {"stop": "stop", "length": "length", "aborted": "abort"}
_LEAST_LOGPROB = -9999.0
"""Log-probability that says of itself that none is known, as in vLLM: JSON has no infinity."""


def generated(call: Call, served: Served, completions: Sequence[Decoded], strings: Sequence[str | None]) -> dict[str, Any]:
  """Returns the answer of `/inference/v1/generate`.

  Args:
    call: Client's call.
    served: Checkpoint.
    completions: Completions, in the order of the call's requests.
    strings: Stop string that ended each of them; None if none did.
  """
  choices = [
    {
      "index": i,
      "token_ids": completion.tokens,
      "finish_reason": _REASONS[completion.reason],
      "stop_reason": _stop_reason(served, call.requests[i], completion, string),
      "logprobs": _chat_logprobs(_piece_of(completion), None) if call.logprobs else None,
      "sampling_mask": completion.kept,
      "routed_experts": _routed_experts(completion, call.routes_from),
      "weight_versions": versions(completion),
    }
    for i, (completion, string) in enumerate(zip(completions, strings, strict=True))
  ]
  ids = {"prompt_token_ids": call.prompts[0]} if call.returns_ids else {}
  name, scores = call.request_id or uuid.uuid4().hex, completions[0].prompt_scores
  prompt = None if scores is None else [None, *(map(_ranked, call.prompts[0][1:], scores))]
  return {"request_id": name, **ids, "choices": choices, "prompt_logprobs": prompt, "usage": usage(call, served, completions)}


def _piece_of(completion: Decoded) -> Piece:
  return Piece(completion.tokens, completion.logprobs, scores=completion.scores)


def _ranked(token: int, score: Score) -> dict[str, Any]:
  """Returns the score of a prompt's token in vLLM's format: the likeliest ids and its own."""
  ranked = {i: (logprob, rank) for rank, (i, logprob) in enumerate(score.likeliest, 1)}
  ranked.setdefault(token, (score.logprob, score.rank))
  return {str(i): {"logprob": _json_number(logprob), "rank": rank, "decoded_token": None} for i, (logprob, rank) in ranked.items()}


def versions(completion: Decoded) -> list[list[int]]:
  """Returns the versions of the weights that drew a completion, each with its number of tokens.

  Example:
    >>> versions(Decoded([5, 6, 7], [0.0] * 3, "length", 0, 4, 1, parts=((1, 2), (2, 1))))
    [[1, 2], [2, 1]]
  """
  parts = completion.parts or [(completion.version, len(completion.tokens))]
  return [list(part) for part in parts]


def version_header(numbers: Iterable[int]) -> tuple[tuple[str, str], ...]:
  """Returns the header with versions of weights, in ascending order."""
  return (("x-weight-versions", ",".join(map(str, sorted(set(numbers))))),)


def _stop_reason(served: Served, request: Request, completion: Decoded, string: str | None) -> int | str | None:
  """Returns the token or the string that ended a completion; None for an end token of the model."""
  if completion.reason != "stop":
    return None
  last = completion.tokens[-1]
  if last not in request.stop_ids:
    return string
  return None if last in served.tokenizer.stop_ids else last


def _routed_experts(completion: Decoded, start: int) -> dict[str, Any] | None:
  """Returns the experts of all tokens but the last, from the token `start` on, as vLLM does."""
  if completion.routes is None:
    return None
  start = min(start, len(completion.routes))
  routes = np.ascontiguousarray(completion.routes[start:], "<i2")
  # Clients cut the text out by its place, without parsing it.
  return {"data": base64.b64encode(routes).decode("ascii"), "dtype": routes.dtype.name, "shape": list(routes.shape), "start": start}


def whole(
  call: Call, served: Served, spelling: Spelling, completions: Sequence[Decoded], texts: Sequence[tuple[str, str | None]]
) -> dict[str, Any]:
  """Returns a whole answer in the format of the call.

  Args:
    call: Client's call.
    served: Checkpoint.
    spelling: Vocabulary.
    completions: Completions, in the order of the call's requests.
    texts: Texts of the completions, each with the stop string that ended it or None.
  """
  choices = []
  for i, (completion, (text, string)) in enumerate(zip(completions, texts, strict=True)):
    said, reason = _said(call, served, text, completion.reason)
    piece, prompt = _piece_of(completion), _prompt_of(call, i)
    if call.echo:
      scores = completions[i - i % (len(completions) // len(call.prompts))].prompt_scores
      piece = _echoed(prompt, scores, piece)
    content = {"message": {"role": "assistant", **said}} if call.form.is_chat else {"text": text}
    choice = {"index": i, **content, "finish_reason": reason, **_ending(call, served, i, completion, string)}
    choices.append(choice | _numbers(call, spelling, piece, prompt=prompt) | ({"token_ids": completion.tokens} if call.returns_ids else {}))
  answer = {**envelope(call, call.form.whole, served), "choices": choices, "usage": usage(call, served, completions)}
  return answer | ({"prompt_token_ids": call.prompts[0]} if call.form.is_chat and call.returns_ids else {})


def _echoed(prompt: list[int], scores: Sequence[Score] | None, piece: Piece) -> Piece:
  """Returns the tokens of a prompt and its completion, with None for what is not known."""
  unknown = len(prompt) if scores is None else 1
  logprobs = [*[None] * unknown, *(score.logprob for score in scores or ()), *piece.logprobs]
  scores = [*[None] * unknown, *(scores or ()), *(piece.scores or [None] * len(piece.tokens))]
  return Piece([*prompt, *piece.tokens], logprobs, scores=scores)


def _ending(call: Call, served: Served, index: int, completion: Decoded, string: str | None) -> dict[str, Any]:
  """Returns the fields of a choice that has ended."""
  stop_reason = _stop_reason(served, call.requests[index], completion, string)
  return {"stop_reason": stop_reason, "weight_versions": versions(completion)}


def _said(call: Call, served: Served, text: str, reason: str) -> tuple[dict[str, Any], str]:
  """Returns the fields of a message and its reason; a completion that was cut calls no tools."""
  said = message(text, call.tools if reason == "stop" else (), served.tokenizer, most=1 if call.one_tool else None)
  return said, "tool_calls" if "tool_calls" in said else _REASONS[reason]


def envelope(call: Call, kind: str, served: Served) -> dict[str, Any]:
  """Returns the fields that all chunks of an answer share."""
  name = f"{call.form.prefix}-{call.request_id or uuid.uuid4().hex}"
  return {"id": name, "object": kind, "created": int(time.time()), "model": served.name}


def first_chunks(call: Call, shared: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns the chunks before any token: the roles of a conversation's choices."""
  if not call.form.is_chat:
    return []
  ids = {"prompt_token_ids": call.prompts[0]} if call.returns_ids else {}
  start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
  return [{**shared, **ids, "choices": [{"index": i, **start}]} for i in range(len(call.requests))]


def chunk(
  call: Call,
  served: Served,
  spelling: Spelling,
  shared: dict[str, Any],
  *,
  index: int,
  text: str,
  piece: Piece,
  offset: int,
  completion: Decoded | None,
  string: str | None,
  is_first: bool,
) -> dict[str, Any]:
  """Returns the chunk with the next tokens of one choice.

  Args:
    call: Client's call.
    served: Checkpoint.
    spelling: Vocabulary.
    shared: Fields of `envelope`.
    index: Number of the choice.
    text: Text that the tokens complete; with tools, that of the whole completion when it has ended.
    piece: Tokens.
    offset: Number of characters before them.
    completion: The whole completion; None if it goes on.
    string: Stop string that ended it; None if none did.
    is_first: Whether no token of the choice was sent before.
  """
  said, ended = ({"content": text}, None) if completion is None else _said(call, served, text, completion.reason)
  for i, item in enumerate(said.get("tool_calls", ())):
    item["index"] = i
  content = {"delta": said} if call.form.is_chat else {"text": text}
  choice = {"index": index, **content, "finish_reason": ended}
  if completion is not None:
    choice |= _ending(call, served, index, completion, string)
  prompt = _prompt_of(call, index) if is_first else None
  return {**shared, "choices": [choice | _numbers(call, spelling, piece, prompt=prompt, offset=offset)]}


def usage(call: Call, served: Served, completions: Sequence[Decoded]) -> dict[str, Any]:
  """Returns the numbers of tokens of a call; each prompt counts once."""
  choices = len(completions) // len(call.prompts)
  cached = sum(completion.cached_tokens for completion in completions[::choices])
  counts = usage_so_far(call, sum(len(completion.tokens) for completion in completions))
  return counts | {"prompt_tokens_details": {"cached_tokens": cached} if served.tells_cached else None}


def usage_so_far(call: Call, drawn: int) -> dict[str, Any]:
  """Returns the numbers of tokens of a call that has drawn some, of all choices together."""
  prompt = sum(map(len, call.prompts))
  return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def _prompt_of(call: Call, index: int) -> list[int]:
  return call.prompts[index * len(call.prompts) // len(call.requests)]


def _numbers(call: Call, spelling: Spelling, piece: Piece, *, prompt: list[int] | None, offset: int = 0) -> dict[str, Any]:
  """Returns the fields of a choice with log-probabilities and ids, as far as they are asked for."""
  logprobs = None
  if call.logprobs:
    names = None if call.names_ids else spelling
    logprobs = _chat_logprobs(piece, names) if call.form.is_chat else _completion_logprobs(piece, names, offset)
  ids = {"token_ids": piece.tokens} if call.returns_ids else {}
  if ids and prompt is not None and not call.form.is_chat:
    ids["prompt_token_ids"] = prompt
  return {"logprobs": logprobs, **ids}


def _chat_logprobs(piece: Piece, spelling: Spelling | None) -> dict[str, Any]:
  content = []
  for token, logprob, score in _scored(piece):
    entry = _named(token, logprob if score is None else score.logprob, spelling)
    likeliest = [] if score is None else [_named(i, of_id, spelling) for i, of_id in score.likeliest]
    # Without names, as on the wire of trainers, only where it is asked for.
    content.append(entry | ({"top_logprobs": likeliest} if likeliest or spelling is not None else {}))
  return {"content": content}


def _named(token: int, logprob: float, spelling: Spelling | None) -> dict[str, Any]:
  entry = {"token": _name(token, spelling), "logprob": _json_number(logprob)}
  return entry if spelling is None else entry | {"bytes": list(spelling.bytes_of(token))}


def _name(token: int, spelling: Spelling | None) -> str:
  return f"token_id:{token}" if spelling is None else spelling.bytes_of(token).decode("utf-8", "replace")


def _scored(piece: Piece) -> Iterable[tuple[int, float | None, Score | None]]:
  return zip(piece.tokens, piece.logprobs, piece.scores or [None] * len(piece.tokens), strict=True)


def _completion_logprobs(piece: Piece, spelling: Spelling | None, offset: int) -> dict[str, Any]:
  tokens, logprobs, tops, offsets = [], [], [], []
  for token, logprob, score in _scored(piece):
    tokens.append(_name(token, spelling))
    logprobs.append(None if logprob is None else _json_number(logprob if score is None else score.logprob))
    # Ids of the same bytes share a name, which then has the number of the likeliest.
    top = {}
    for i, of_id in [] if score is None else [*score.likeliest, (token, score.logprob)]:
      top.setdefault(_name(i, spelling), _json_number(of_id))
    tops.append(top if score is not None and score.likeliest else None)
    offsets.append(offset)
    offset += len(tokens[-1])
  return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops if any(tops) or not tops else None, "text_offset": offsets}


def _json_number(logprob: float) -> float:
  return float(logprob) if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB
