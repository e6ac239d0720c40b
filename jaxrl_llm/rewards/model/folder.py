"""What lies beside a reward model's weights: its tokenizer, or where that one is."""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.messages import Problem, problem_of
from jaxrl_llm.models import read_reward_config
from jaxrl_llm.pretrained import where
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.tokenizer import PretrainedTokenizer, load_tokenizer
from jaxrl_llm.text_types import Tokenizer

NOTES = "reward_model.json"
"""Beside the weights of a reward model that was trained here: `tokenizer` ("bytes", "folder", or a path), `chat` and `system`."""

_BYTES, _FOLDER = "bytes", "folder"


def notes_of(path: str | os.PathLike | None, *, chat: bool | None, system: str | None) -> dict[str, Any]:
  """What `NOTES` says of the tokenizer of this checkpoint, or of the tokenizer of bytes where `path` is None."""
  if path is None:
    return {"tokenizer": _BYTES}
  found = where.resolve(path)
  if found.is_dir() and (own := _notes(found)):  # A reward model that has been trained further.
    return own
  return {"tokenizer": _FOLDER if found.is_dir() else str(path), "chat": chat is not False, "system": system}


def load_reward_tokenizer(
  path: str | os.PathLike,
  *,
  chat: bool | None = None,
  system: str | None = None,
  pad_token: str | None = None,
  vocab_rows: int | None = None,
) -> Tokenizer:
  """The tokenizer of a reward model, or of a language model that is to become one.

  Args:
    path: see `pretrained.where.resolve`.
    chat: whether prompts are written with the chat template; None is as it was trained, or True.
    system: message of each conversation; None is as it was trained.
    pad_token: see `load_tokenizer`.
    vocab_rows: see `load_tokenizer`.

  Raises:
    ValueError: no tokenizer, or one that does not fit. One line.
  """
  found = where.resolve(path)
  notes = _notes(found) if found.is_dir() else {}
  if notes.get("tokenizer") == _BYTES:
    return ByteTokenizer()
  if (source := notes.get("tokenizer", _FOLDER)) != _FOLDER:
    found = where.resolve(source)
  chat = notes.get("chat", True) if chat is None else chat
  system = notes.get("system") if system is None and chat else system
  return load_tokenizer(found, chat=chat, system=system, vocab_rows=vocab_rows, pad_token=pad_token)


def same_vocabulary(one: Tokenizer, other: Tokenizer) -> bool:
  """Whether the ids of one tokenizer mean the same to the other.

  Example:
    >>> same_vocabulary(ByteTokenizer(), ByteTokenizer())
    True
  """
  if isinstance(one, PretrainedTokenizer) and isinstance(other, PretrainedTokenizer):
    vocabulary = lambda x: x.backend.get_vocab(with_added_tokens=True)
    return vocabulary(one) == vocabulary(other)
  return isinstance(one, ByteTokenizer) and one == other


def problems(path: str | os.PathLike, *, chat: bool | None = None, budget: int = 0) -> Iterator[Problem | str]:
  """Yields what is wrong with a reward model, of which it reads headers and the tokenizer, no weights.

  Args:
    path: folder of the reward model.
    chat: see `load_reward_tokenizer`.
    budget: tokens of the longest prompt with the longest response.
  """
  try:
    config = read_reward_config(path)
    load_reward_tokenizer(path, chat=chat, vocab_rows=config.vocab_size)
  except (ImportError, ValueError) as error:
    problem, field = problem_of(error), "config.reward.model_path"
    yield problem._replace(field=field) if isinstance(problem, Problem) else f"{field}: {problem}"
    return
  if config.max_positions is not None and budget > config.max_positions:
    least = f"{budget} = max(config.rollout.prompt_buckets) + config.rollout.max_new_tokens"
    found = f"a reward model of at most {config.max_positions} tokens"
    yield Problem("config.reward.model_path", found, f"one of at least {least}")


def _notes(folder: pathlib.Path) -> Mapping[str, Any]:
  """Empty for a folder that somebody else has made."""
  file = folder / NOTES
  if not file.exists():
    return {}
  try:
    found = json.loads(file.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{file}: found a file that is not JSON ({error}); train the reward model again, or remove the file") from error
  if not isinstance(found, dict) or not isinstance(found.get("tokenizer"), str):
    raise ValueError(f"{file}: found no tokenizer, expected one of {_BYTES!r}, {_FOLDER!r} or a path")
  return found
