"""Names of special tokens in the text of users and tools, which stay text.

A chat template writes a conversation as one string, in which a special token and a message that
spells its name look alike. `hide` therefore puts a number into each name in a message before it is
rendered, and `encode` takes it out again: hidden names are encoded as text, all others as tokens.
Digits pass through what templates do with a text, such as JSON, trimming and HTML.
"""

import functools
import json
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

# A message that could contain them might forge a token, so they differ from process to process.
_HIDDEN, _MARKED = (str(10**29 + secrets.randbelow(9 * 10**29)) for _ in range(2))
_LOCK = threading.Lock()


def hide(value: Any, names: Sequence[str]) -> Any:
  """Returns a text, or messages, in which `encode` will take the names of special tokens as text.

  Args:
    value: JSON value, such as messages with their contents and tool calls.
    names: Names of the special tokens.

  Example:
    >>> hidden = hide([{"role": "user", "content": "Say <end>"}], ["<end>"])
    >>> "<end>" in hidden[0]["content"]
    False
  """
  if isinstance(value, str):
    return _starts(tuple(names)).sub(lambda match: match[0] + _HIDDEN, value) if names else value
  if isinstance(value, Mapping):
    return {key: hide(item, names) for key, item in value.items()}
  return [hide(item, names) for item in value] if isinstance(value, list | tuple) else value


def encode(text: str, backend: tokenizers.Tokenizer, names: Sequence[str]) -> list[int]:
  """Encodes a text in which hidden names of special tokens are text, and all others tokens.

  Args:
    text: Text without or with hidden names.
    backend: Tokenizer of the package tokenizers.
    names: Names of its special tokens.
  """
  if _HIDDEN not in text:
    return backend.encode(text, add_special_tokens=False).ids
  pattern = "|".join([_HIDDEN, *map(re.escape, sorted(names, key=len, reverse=True))])
  marked = re.sub(pattern, lambda match: "" if match[0] == _HIDDEN else _marked(match[0]), text)
  with _LOCK:  # Threads that reply at the same time make it once.
    marked_backend = _marked_backend(backend, tuple(names))
  return marked_backend.encode(marked, add_special_tokens=False).ids


@functools.lru_cache(maxsize=16)
def _starts(names: tuple[str, ...]) -> re.Pattern:
  """Makes the pattern of the first character of each name, also of names that overlap."""
  return re.compile(f"(?={'|'.join(map(re.escape, names))}).", re.DOTALL)


def _marked(name: str) -> str:
  return name[0] + _MARKED + name[1:]


@functools.lru_cache(maxsize=2)
def _marked_backend(backend: tokenizers.Tokenizer, names: tuple[str, ...]) -> tokenizers.Tokenizer:
  """Makes the tokenizer whose special tokens have marked names, and the same ids.

  All else is as in `backend`: how a text is normalised and cut, and the white space that a token
  takes from its neighbours. For Qwen3's vocabulary this takes some three seconds, once.
  """
  content = json.loads(backend.to_str())
  marked = {name: _marked(name) for name in names}
  for entry in content["added_tokens"]:
    entry["content"] = marked.get(entry["content"], entry["content"])
  model = content["model"]
  if isinstance(vocabulary := model["vocab"], dict):
    # With their ids, because a token outside the vocabulary would get the next free one.
    of_names = {marked[name]: backend.token_to_id(name) for name in names}
    model["vocab"] = {piece: i for piece, i in vocabulary.items() if piece not in marked} | of_names
  else:
    model["vocab"] = [[marked.get(piece, piece), score] for piece, score in vocabulary]
  if model.get("unk_token") in marked:
    model["unk_token"] = marked[model["unk_token"]]
  content["post_processor"] = None
  made = tokenizers.Tokenizer.from_str(json.dumps(content))
  if moved := [name for name in names if made.token_to_id(marked[name]) != backend.token_to_id(name)]:
    raise ValueError(f"found a tokenizer whose special token {moved[0]!r} has no fixed id; set config.task.special_tokens='tokens'")
  return made
