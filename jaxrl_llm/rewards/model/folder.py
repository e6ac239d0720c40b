"""The tokenizer of a reward model, stored beside its weights or referenced from there."""

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
"""File beside the weights of a reward model trained by this package.

It holds `tokenizer` ("bytes" or "folder"; earlier versions also wrote a path), and the `PROMPTS`
settings of the training.
"""

PROMPTS = {"chat": True, "system": None, "chat_options": {}, "special_tokens": "text"}
"""Settings of `load_tokenizer` by which prompts are written and read, with their defaults."""

_BYTES, _FOLDER = "bytes", "folder"


def notes_of(path: str | os.PathLike | None, **prompts: Any) -> dict[str, Any]:
  """Returns the content of `NOTES` for a checkpoint's tokenizer.

  If `path` is None, it describes the byte tokenizer. `prompts` are settings of `PROMPTS`; None is
  the default.
  """
  if path is None:
    return {"tokenizer": _BYTES}
  resolved = where.resolve(path)
  if resolved.is_dir() and (own := _notes(resolved)):  # A reward model that is trained further.
    return own | {"tokenizer": _BYTES if own["tokenizer"] == _BYTES else _FOLDER}
  set_here = {name: value for name, value in prompts.items() if value is not None}
  return {"tokenizer": _FOLDER, **PROMPTS, **set_here}


def load_reward_tokenizer(
  path: str | os.PathLike,
  *,
  pad_token: str | None = None,
  vocab_rows: int | None = None,
  **prompts: Any,
) -> Tokenizer:
  """Loads the tokenizer of a reward model, or of a language model that is to become one.

  Args:
    path: Path of the checkpoint, as in `pretrained.where.resolve`.
    pad_token: Padding token, as in `load_tokenizer`.
    vocab_rows: Number of rows of the model's embeddings, as in `load_tokenizer`.
    prompts: Settings of `PROMPTS`. None, as if left out, uses the value from training.

  Raises:
    ValueError: If there is no tokenizer, or it does not fit. One line.
  """
  resolved = where.resolve(path)
  notes = _notes(resolved) if resolved.is_dir() else {}
  if notes.get("tokenizer") == _BYTES:
    return ByteTokenizer()
  if (source := notes.get("tokenizer", _FOLDER)) != _FOLDER:
    resolved = where.resolve(source)
  settings = PROMPTS | {name: notes[name] for name in PROMPTS if name in notes}
  own = {name: value for name, value in prompts.items() if value is not None}
  if own.get("chat") is False:  # Nothing reads what the notes say of the chat.
    settings |= {"system": None, "chat_options": {}}
  return load_tokenizer(resolved, vocab_rows=vocab_rows, pad_token=pad_token, **(settings | own))


def same_vocabulary(one: Tokenizer, other: Tokenizer) -> bool:
  """Returns whether the ids of two tokenizers have the same meaning.

  Example:
    >>> same_vocabulary(ByteTokenizer(), ByteTokenizer())
    True
  """
  if isinstance(one, PretrainedTokenizer) and isinstance(other, PretrainedTokenizer):
    vocabulary = lambda x: x.backend.get_vocab(with_added_tokens=True)
    return vocabulary(one) == vocabulary(other)
  return isinstance(one, ByteTokenizer) and one == other


def folder_problems(path: str | os.PathLike, *, chat: bool | None = None, budget: int = 0) -> Iterator[Problem | str]:
  """Yields the problems of a reward model's headers and tokenizer, without loading its weights.

  Args:
    path: Folder of the reward model.
    chat: Whether prompts are written with the chat template; see `load_reward_tokenizer`.
    budget: Length of the longest prompt with the longest response, in tokens.
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
    actual = f"a reward model of at most {config.max_positions} tokens"
    yield Problem("config.reward.model_path", actual, f"one of at least {least}")


def _notes(folder: pathlib.Path) -> Mapping[str, Any]:
  """Reads the notes of a folder. They are empty if this package did not make the folder."""
  file = folder / NOTES
  if not file.exists():
    return {}
  try:
    notes = json.loads(file.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{file}: found a file that is not JSON ({error}); train the reward model again, or remove the file") from error
  if not isinstance(notes, dict) or not isinstance(notes.get("tokenizer"), str):
    raise ValueError(f"{file}: found no tokenizer, expected one of {_BYTES!r}, {_FOLDER!r} or a path")
  return notes
