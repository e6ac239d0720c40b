"""Refusals of requests that can never be served, each in one line that names the field."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Integer

from jaxrl_llm.decoding.engine.requests import Request
from jaxrl_llm.decoding.filters import check_filter
from jaxrl_llm.decoding.stops import MAX_IDS, check_texts


def check_request(request: Request, *, vocab_size: int, context: int) -> Integer[np.ndarray, " n"]:
  """Checks a request before it is accepted.

  Args:
    request: Request to check.
    vocab_size: Number of ids.
    context: Largest number of tokens of a prompt and its completion together.

  Returns:
    The ids of the prompt.

  Raises:
    ValueError: If a field is out of range. One line, which names the field.

  Example:
    >>> check_request(Request([1, 2], max_tokens=7), vocab_size=64, context=8)
    Traceback (most recent call last):
    ...
    ValueError: max_tokens: found 7 after a prompt of 2 tokens, expected at most 6: the context is 8
  """
  tokens = _ids("tokens", request.tokens, vocab_size)
  if not len(tokens):
    raise ValueError("tokens: found no ids, expected one or more")
  if len(tokens) >= context:
    raise ValueError(f"tokens: found {len(tokens)} ids, expected at most {context - 1}: the context is {context}")
  if request.max_tokens < 1:
    raise ValueError(f"max_tokens: found {request.max_tokens}, expected 1 or more")
  if len(tokens) + request.max_tokens > context:
    raise ValueError(
      f"max_tokens: found {request.max_tokens} after a prompt of {len(tokens)} tokens, expected at most {context - len(tokens)}: "
      f"the context is {context}"
    )
  if not 0 <= request.drawn < len(tokens):
    raise ValueError(f"drawn: found {request.drawn}, expected 0 to {len(tokens) - 1}: a prompt of {len(tokens)} tokens")
  check_filter(request.temperature, request.top_k, request.top_p)
  if not -(1 << 63) <= request.seed < 1 << 64:
    raise ValueError(f"seed: found {request.seed}, expected an integer of 64 bits")
  _ids("stop_ids", request.stop_ids, vocab_size)
  if len(request.stop_ids) > MAX_IDS:
    raise ValueError(f"stop_ids: found {len(request.stop_ids)} ids, expected at most {MAX_IDS}")
  check_texts("stops", request.stops)
  return tokens


def _ids(name: str, given: Iterable, vocab_size: int) -> Integer[np.ndarray, " n"]:
  """Returns ids as an array, or raises if one is not in the vocabulary."""
  given = list(given)
  if set(map(type, given)) <= {int} and (not given or (min(given) >= 0 and max(given) < vocab_size)):
    return np.array(given, np.int32)
  for i in given:
    if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < vocab_size:
      raise ValueError(f"{name}: found the id {i!r}, expected integers from 0 to {vocab_size - 1}")
  return np.array(given, np.int32)
