"""Refusals of requests that can never be served, each in one line that names the field."""

from collections.abc import Iterable

import jax
import numpy as np
from jaxtyping import Integer

from jaxrl_llm.decoding.engine.requests import EngineLimits, Request
from jaxrl_llm.decoding.filters import check_filter
from jaxrl_llm.decoding.stops import MAX_IDS, check_texts
from jaxrl_llm.models.image_slots import Room


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


def check_scores(request: Request, limits: EngineLimits) -> None:
  """Checks that an engine with these limits can give what a request asks for beyond tokens.

  Raises:
    ValueError: If it cannot. One line, which names the field.

  Example:
    >>> check_scores(Request([1], 1, likeliest=5), EngineLimits(8, 8, likeliest=4))
    Traceback (most recent call last):
    ...
    ValueError: likeliest: found 5, expected None, or 0 to 4 tokens
  """
  for name in ("likeliest", "prompt_likeliest"):
    asked = getattr(request, name)
    if asked is not None and not (limits.likeliest and 0 <= asked <= limits.likeliest):
      expected = f"None, or 0 to {limits.likeliest} tokens" if limits.likeliest else "None: the engine gives no scores"
      raise ValueError(f"{name}: found {asked}, expected {expected}")
  if request.prompt_likeliest is not None and request.pictures is not None:
    raise ValueError("prompt_likeliest: found it with pictures, expected None: prompts that show pictures have no scores")
  if not 0 <= request.min_tokens <= (request.max_tokens if limits.likeliest else 0):
    expected = f"0 to {request.max_tokens}, the budget" if limits.likeliest else "0: the engine gives no scores"
    raise ValueError(f"min_tokens: found {request.min_tokens}, expected {expected}")
  if request.min_tokens and request.stops:
    raise ValueError(f"min_tokens: found {request.min_tokens} with stop strings, expected 0, or stop ids alone")


def check_grammar(request: Request, *, is_alone: bool) -> None:
  """Checks that an engine can obey the grammar of a request, if it has one.

  Args:
    request: Request to check.
    is_alone: Whether no other process draws along.

  Raises:
    ValueError: If it cannot. One line, which names the field.

  Example:
    >>> check_grammar(Request([1], 1, grammar=object()), is_alone=False)
    Traceback (most recent call last):
    ...
    ValueError: grammar: found one, expected None: several processes draw, and a grammar is in one
  """
  if request.grammar is None:
    return
  if not is_alone:
    raise ValueError("grammar: found one, expected None: several processes draw, and a grammar is in one")
  if request.min_tokens:
    raise ValueError(f"min_tokens: found {request.min_tokens} with a grammar, expected 0: the grammar says where the completion may end")


def check_pictures(request: Request, room: Room | None) -> None:
  """Checks that an engine with this room, None for text alone, can show the pictures of a request.

  Raises:
    ValueError: If it cannot. One line, which names the field.
  """
  pictures = request.pictures
  if pictures is None:
    return
  if room is None:
    raise ValueError("pictures: found some, expected None: the engine reads text alone")
  size, image_token = len(pictures.slots), room.config.vision.image_token
  if not 0 < size <= len(request.tokens) or pictures.positions.shape != (size, 3):
    sizes = f"{size} slots and positions of shape {pictures.positions.shape}"
    raise ValueError(f"pictures.slots: found {sizes}, expected one for each token of the prompt, at most {len(request.tokens)}")
  shows = np.asarray(request.tokens[:size]) == image_token
  if not np.array_equal(shows, pictures.slots >= 0):
    counts = f"{int(np.sum(pictures.slots >= 0))} slots of pictures for {int(np.sum(shows))} image tokens"
    raise ValueError(f"pictures.slots: found {counts}, expected one at each image token (id {image_token})")
  # A token is never further on in its pictures than in its row.
  if not (0 < pictures.end <= size and pictures.positions.min() >= 0 and pictures.positions.max() < size):
    bounds = f"{pictures.positions.min()} to {pictures.positions.max()} before {pictures.end}"
    raise ValueError(f"pictures.positions: found {bounds}, expected 0 to {size - 1}: a prompt of {size} tokens")
  name, tower = ("patches", "trained") if room.config.train_tower else ("features", "frozen")
  given, expected = getattr(pictures, name), getattr(room.shapes(1, 1), name)
  if given is None:
    raise ValueError(f"pictures.{name}: found None, expected those of the pictures: the tower is {tower}")
  for field, own, shape in zip(getattr(given, "_fields", ("",)), jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
    if own.shape[1:] != shape.shape[2:] or not 0 < len(own) <= room.pictures:
      most = f"1 to {room.pictures} pictures of shape {shape.shape[2:]}"
      raise ValueError(f"pictures.{name}{field and '.'}{field}: found the shape {own.shape}, expected {most}")
  if pictures.slots.max() >= pictures.count * room.tokens:
    raise ValueError(f"pictures.slots: found {pictures.slots.max()}, expected less than {pictures.count * room.tokens}, the image tokens")


def _ids(name: str, given: Iterable, vocab_size: int) -> Integer[np.ndarray, " n"]:
  """Returns ids as an array, or raises if one is not in the vocabulary."""
  given = list(given)
  if set(map(type, given)) <= {int} and (not given or (min(given) >= 0 and max(given) < vocab_size)):
    return np.array(given, np.int32)
  for i in given:
    if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < vocab_size:
      raise ValueError(f"{name}: found the id {i!r}, expected integers from 0 to {vocab_size - 1}")
  return np.array(given, np.int32)
