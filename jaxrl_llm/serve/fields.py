"""Fields of a JSON request: which names there are, and which values they take."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxrl_llm.messages import Problem, shown
from jaxrl_llm.serve.refusals import Refusal, hint, wrong

NEUTRAL: dict[str, tuple[Any, ...]] = {
  "add_generation_prompt": (True,),
  "add_special_tokens": (),
  "allowed_token_ids": (),
  "audio": (),
  "bad_words": ([],),
  "best_of": (1,),
  "chat_template": (),
  "content_parts": ([],),
  "continue_final_message": (False,),
  "documents": ([],),
  "echo": (False,),
  "features": (),
  "flat_logprobs": (False,),
  "frequency_penalty": (0,),
  "function_call": ("none",),
  "functions": ([],),
  "guided_choice": (),
  "guided_grammar": (),
  "guided_json": (),
  "guided_regex": (),
  "include_reasoning": (True,),
  "include_stop_str_in_output": (False,),
  "kv_transfer_params": ({},),
  "length_penalty": (1,),
  "logit_bias": ({},),
  "logits_processors": ([],),
  "min_p": (0,),
  "mm_processor_kwargs": ({},),
  "modalities": (["text"],),
  "presence_penalty": (0,),
  "prompt_logprobs": (),
  "reasoning_effort": ("none",),
  "repetition_penalty": (1,),
  "response_format": ({"type": "text"},),
  "spaces_between_special_tokens": (True,),
  "structured_outputs": (),
  "suffix": ("",),
  "tool_choice": ("none", "auto"),
  "tools": ([],),
  "top_logprobs": (0,),
  "truncate_prompt_tokens": (),
  "use_beam_search": (False,),
  "verbosity": ("medium",),
  "vllm_xargs": ({},),
}
"""Fields of others' services that this one does not have, with the values that change nothing.

Null says nothing in any field.
"""

IGNORED = frozenset(
  "detokenize metadata priority prompt_cache_key prompt_cache_retention safety_identifier service_tier session_id store user".split()
)
"""Fields that cannot change what is drawn, and are not read."""


def check_names(
  values: Mapping[str, Any],
  names: Collection[str],
  *,
  inside: str = "",
  neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL,
  ignored: Collection[str] = IGNORED,
) -> None:
  """Refuses fields that the service does not know, and values that it does not have.

  Args:
    values: Fields of a request.
    names: Names that the caller reads.
    inside: Dotted path in front of the names, with its last dot.
    neutral: Fields that are not supported, with the values that change nothing.
    ignored: Fields that are not read.

  Raises:
    Refusal: If a field could change the result and is not read.

  Example:
    >>> check_names({"temprature": 1}, ["temperature"])
    Traceback (most recent call last):
    ...
    jaxrl_llm.serve.refusals.Refusal: temprature: found an unknown field;
      did you mean 'temperature'?
  """
  for name, value in values.items():
    if value is None or name in names or name in ignored:
      continue
    if name not in neutral:
      field = inside + (name if len(name) <= 64 and name.isprintable() else shown(name, limit=64))
      raise Refusal(400, str(Problem(field, f"an unknown field{hint(name, [*names, *neutral])}")), field=field, code="unknown_field")
    if not any(_is_same(value, known) for known in neutral[name]):
      expected = " or ".join([*map(repr, neutral[name]), "no such field"])
      raise wrong(inside + name, value, f"{expected}, because the service does not support it", code="unsupported_field")


def _is_same(value: Any, known: Any) -> bool:
  """Returns whether two JSON values are equal: true is no number, and 1.0 is 1."""
  return isinstance(value, bool) == isinstance(known, bool) and value == known


def number(values: Mapping[str, Any], name: str, default: float, *, low: float, high: float, inside: str = "") -> float:
  """Reads a number from `low` to `high`; null and a missing field are the default."""
  # A whole number may be too large for a float.
  is_good = lambda value: type(value) in (int, float) and low <= value <= high and math.isfinite(value)
  return float(_read(values, name, default, is_good, f"a number from {low:g} to {high:g}", inside))


def whole(values: Mapping[str, Any], name: str, default: int | None, *, low: int, high: int, inside: str = "") -> int | None:
  """Reads a whole number from `low` to `high`; null and a missing field are the default."""
  is_good = lambda value: type(value) is int and low <= value <= high
  return _read(values, name, default, is_good, f"a whole number from {low:,} to {high:,}", inside)


def flag(values: Mapping[str, Any], name: str, default: bool, *, inside: str = "") -> bool:
  """Reads true or false; null and a missing field are the default."""
  return _read(values, name, default, lambda value: type(value) is bool, "true or false", inside)


def text(values: Mapping[str, Any], name: str, default: str, *, most: int, inside: str = "") -> str:
  """Reads a text of at most `most` characters; null and a missing field are the default."""
  is_good = lambda value: type(value) is str and len(value) <= most
  return _read(values, name, default, is_good, f"a text of at most {most:,} characters", inside)


def texts(values: Mapping[str, Any], name: str, *, most: int, longest: int, inside: str = "") -> tuple[str, ...]:
  """Reads a text, or a list of at most `most` texts of 1 to `longest` characters; "" is none."""
  is_text = lambda item: type(item) is str and 0 < len(item) <= longest
  is_good = lambda value: value == "" or is_text(value) or (type(value) is list and len(value) <= most and all(map(is_text, value)))
  value = _read(values, name, [], is_good, f"a text, or a list of at most {most} texts, of 1 to {longest} characters", inside)
  return tuple(dict.fromkeys(filter(None, [value] if isinstance(value, str) else value)))


def _read(values: Mapping[str, Any], name: str, default: Any, is_good: Callable[[Any], bool], expected: str, inside: str) -> Any:
  value = values.get(name)
  if value is None:
    return default
  if not is_good(value):
    raise wrong(inside + name, value, expected)
  return value


def ids(value: Any, field: str, *, vocab_size: int, most: int, empty: bool = False) -> list[int]:
  """Reads a list of token ids.

  Args:
    value: JSON value.
    field: Dotted path of the field, for messages.
    vocab_size: Number of ids.
    most: Largest number of tokens.
    empty: Whether the list may be empty.
  """
  if not isinstance(value, list) or not (value or empty):
    raise wrong(field, value, "a list of token ids")
  if len(value) > most:
    raise Refusal(400, str(Problem(field, f"{len(value):,} tokens", f"at most {most:,}")), field=field)
  for i, item in enumerate(value):
    if type(item) is not int or not 0 <= item < vocab_size:
      raise wrong(f"{field}[{i}]", item, f"a token id from 0 to {vocab_size - 1:,}")
  return value
