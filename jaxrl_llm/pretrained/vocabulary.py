"""Vocabulary and special tokens of a checkpoint in Hugging Face's format.

`gguf_vocabulary` reads them from a GGUF file.
"""

import json
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import tokenizers

from jaxrl_llm.messages import one_line

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Vocabulary(NamedTuple):
  """A vocabulary and the roles of its special tokens, exactly as in the checkpoint.

  Nothing is chosen or repaired here.

  Attributes:
    path: Path of the checkpoint, for error messages.
    backend: Tokenizer of the package tokenizers.
    special_ids: Ids of special tokens.
    bos_id: Id that begins a text; None if the checkpoint names none.
    adds_bos: Whether a plain text begins with `bos_id`.
    eos_ids: Ids that end a text or a turn, the tokenizer's own first; empty if the checkpoint names
      none.
    pad_id: Id of the pad token; None if the checkpoint names none.
    chat_template: Jinja source; None if there is none.
    named: Special tokens by the names that a chat template may read, such as `bos_token`.
  """

  path: pathlib.Path
  backend: tokenizers.Tokenizer
  special_ids: frozenset[int]
  bos_id: int | None
  adds_bos: bool
  eos_ids: tuple[int, ...]
  pad_id: int | None
  chat_template: str | None
  named: dict[str, str]


def read_folder(path: pathlib.Path) -> Vocabulary:
  """Reads `tokenizer.json` and related files from a folder in Hugging Face's format.

  The format is that of `save_pretrained`. The text of special tokens comes from
  `tokenizer_config.json`, else `special_tokens_map.json`; their ids come from
  `generation_config.json`, else `config.json`. The chat template comes from `chat_template.jinja`,
  else `tokenizer_config.json`, else `chat_template.json`, which older processors write.

  Raises:
    ValueError: If a file is missing or damaged, a special token is not in the vocabulary, or none
      of several chat templates is the default. One line.
  """
  backend = _load_backend(path)
  config = _read_json(path / "tokenizer_config.json")
  _add_tokens(backend, config, path)
  named = {key: text for key, value in (_read_json(path / "special_tokens_map.json") | config).items() if (text := _token_text(key, value))}
  _make_special(backend, named.values())
  by_name = {key: _id_of(backend, text, path, key) for key, text in named.items() if key in ("bos_token", "eos_token", "pad_token")}
  ids = _read_json(path / "config.json"), _read_json(path / "generation_config.json")
  ids = {key: value for part in ids for key, value in part.items() if key.endswith("_token_id") and value is not None}
  eos_ids = ids.get("eos_token_id", [])
  eos_ids = dict.fromkeys([by_name.get("eos_token"), *(eos_ids if isinstance(eos_ids, list) else [eos_ids])])
  bos_id = by_name.get("bos_token", ids.get("bos_token_id"))
  # Ids that `tokenizer.json` puts around any text.
  written = backend.encode("", add_special_tokens=True).ids
  return Vocabulary(
    path=path,
    backend=backend,
    special_ids=frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special),
    bos_id=bos_id,
    adds_bos=bos_id is not None and (bos_id in written or config.get("add_bos_token") is True),
    eos_ids=tuple(i for i in eos_ids if i is not None),
    pad_id=by_name.get("pad_token", ids.get("pad_token_id")),
    chat_template=_chat_template(path, config),
    named=named,
  )


def _load_backend(path: pathlib.Path) -> tokenizers.Tokenizer:
  file = path / "tokenizer.json"
  if not file.is_file():
    others = [name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (path / name).is_file()]
    content = f"only {others[0]}" if others else "no tokenizer"
    raise ValueError(
      f"{path}: found {content}, expected tokenizer.json; "
      "let transformers write it: AutoTokenizer.from_pretrained(A).save_pretrained(B)"
    )
  try:
    backend = tokenizers.Tokenizer.from_file(str(file))
  except Exception as error:  # The package raises plain `Exception`.
    raise ValueError(f"{file}: found a damaged tokenizer ({one_line(error, typed=False)}); copy or download it again") from error
  _reset(backend)
  return backend


def _reset(backend: tokenizers.Tokenizer) -> None:
  """Undoes what the code that saved a tokenizer had set for its own batches.

  Truncation and padding are arguments of a call in transformers, never a property of the file.
  Dropout of merges and draws of segmentations are for pre-training: here they would encode the same
  prompt in another way each time.
  """
  backend.no_truncation()
  backend.no_padding()
  for name in ("dropout", "alpha", "nbest_size"):
    if getattr(backend.model, name, None) is not None:
      setattr(backend.model, name, None)


def _read_json(file: pathlib.Path) -> dict[str, Any]:
  if not file.is_file():
    return {}
  try:
    content = json.loads(file.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{file}: found no JSON ({error}); copy or download it again") from error
  if not isinstance(content, dict):
    raise ValueError(f"{file}: found a JSON {type(content).__name__}, expected an object; copy or download it again")
  return content


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], path: pathlib.Path) -> None:
  """Adds the tokens that `tokenizer_config.json` lists; its flags replace those of the file."""
  listed = config.get("added_tokens_decoder") or {}
  for i, entry in sorted((int(i), entry) for i, entry in listed.items()):
    flags = {key: bool(entry[key]) for key in _FLAGS if key in entry}
    known = backend.get_added_tokens_decoder().get(i)
    if known is not None and known.content == entry["content"] and all(getattr(known, key) == x for key, x in flags.items()):
      continue
    backend.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])
    if (token_id := backend.token_to_id(entry["content"])) != i:
      raise ValueError(
        f"{path}: {entry['content']!r} is {i} in tokenizer_config.json but {token_id} by tokenizer.json; "
        "the two do not belong together"
      )


def _make_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
  """Makes special tokens of texts with a role, such as `eos_token`, that are plain pieces."""
  added = backend.get_added_tokens_decoder()
  for text in dict.fromkeys(texts):
    i = backend.token_to_id(text)
    if i is not None and (i not in added or not added[i].special):
      flags = {key: getattr(added[i], key) for key in _FLAGS[:-1]} if i in added else {"normalized": False}
      backend.add_tokens([tokenizers.AddedToken(text, special=True, **flags)])


def _token_text(key: str, value: Any) -> str | None:
  """Returns the text of a special token, which is stored as a string or as an object."""
  if not key.endswith("_token"):
    return None
  text = value.get("content") if isinstance(value, dict) else value
  return text if isinstance(text, str) else None


def _id_of(backend: tokenizers.Tokenizer, text: str, path: pathlib.Path, key: str) -> int:
  if (token_id := backend.token_to_id(text)) is None:
    raise ValueError(f"{path}: {key} is {text!r}, which is not in the vocabulary of tokenizer.json; the files do not belong together")
  return token_id


def _chat_template(path: pathlib.Path, config: dict[str, Any]) -> str | None:
  file = path / "chat_template.jinja"
  if file.is_file():
    return file.read_text(encoding="utf-8")
  template = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
  # A list has the form [{"name": "default", "template": "..."}, {"name": "tool_use", ...}].
  if isinstance(template, list):
    template = {entry["name"]: entry["template"] for entry in template}
  if isinstance(template, dict):
    if "default" not in template and len(template) != 1:
      raise ValueError(
        f"{path}: found the chat templates {', '.join(template)}, expected one named default; "
        f"write the one to use to {file.name}"
      )
    template = template.get("default") or next(iter(template.values()))
  return template
