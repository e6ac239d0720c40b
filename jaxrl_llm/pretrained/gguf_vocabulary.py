"""Vocabulary of a GGUF file, as the byte-level BPE from which it was converted."""

import pathlib
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxrl_llm.messages import one_line
from jaxrl_llm.pretrained.gguf_header import read_header
from jaxrl_llm.pretrained.vocabulary import Vocabulary

# Values of `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level])


def _gpt2() -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.ByteLevel(add_prefix_space=False)


# Pre-tokenizers, which split a text before BPE. A GGUF file only names its own.
PRE_TOKENIZERS = {
  "gpt-2": _gpt2,
  "llama-bpe": lambda: _split(_LLAMA3),
  "qwen2": lambda: _split(_QWEN2),
  "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
}


def read_gguf(path: pathlib.Path) -> Vocabulary:
  """Builds the tokenizer of a `.gguf` file with a byte-level BPE vocabulary.

  The file's pre-tokenizer must be one of `PRE_TOKENIZERS`.

  Raises:
    ValueError: If the file is not GGUF, or its vocabulary is of another kind or damaged. One line.

  References:
    Pre-tokenizers: `tokenizer.json` of the checkpoints after which they are named, and llama.cpp's
    src/llama-vocab.cpp.
  """
  metadata = read_header(path).metadata
  get = lambda key, default=None: metadata.get(f"tokenizer.ggml.{key}", default)
  kind, cut = get("model"), get("pre")
  fix = "give the folder with the checkpoint's tokenizer.json"
  if kind != "gpt2":
    raise ValueError(f"{path}: tokenizer.ggml.model is {kind!r}, expected 'gpt2' (byte-level BPE); {fix}")
  if cut not in PRE_TOKENIZERS:
    raise ValueError(f"{path}: tokenizer.ggml.pre is {cut!r}, expected one of {', '.join(PRE_TOKENIZERS)}; {fix}")
  tokens, types = get("tokens", []), get("token_type", [])
  if not tokens or len(types) != len(tokens):
    raise ValueError(f"{path}: found {len(tokens)} tokens and {len(types)} types of tokens; the file is damaged")
  backend = _bpe(path, tokens, types, get("merges", []), cut=cut)
  ids = {key: _checked_id(path, key, get(key), tokens) for key in _ROLES}
  return Vocabulary(
    path=path,
    backend=backend,
    special_ids=frozenset(i for i, kind in enumerate(types) if kind == _CONTROL),
    bos_id=ids["bos_token_id"],
    # The default of `add_bos_token` is llama.cpp's.
    adds_bos=ids["bos_token_id"] is not None and bool(get("add_bos_token", cut == "llama-bpe")),
    eos_ids=tuple(dict.fromkeys(ids[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if ids[key] is not None)),
    pad_id=ids["padding_token_id"],
    chat_template=metadata.get("tokenizer.chat_template"),
    named={_ROLES[key]: tokens[i] for key, i in ids.items() if i is not None and _ROLES[key]},
  )


# Roles of tokens in GGUF, with their names in chat templates.
_ROLES = {
  "bos_token_id": "bos_token",
  "eos_token_id": "eos_token",
  "padding_token_id": "pad_token",
  "unknown_token_id": "unk_token",
  "eot_token_id": None,
  "eom_token_id": None,
}


def _checked_id(path: pathlib.Path, key: str, token_id: Any, tokens: list[str]) -> int | None:
  if token_id is not None and not 0 <= token_id < len(tokens):
    raise ValueError(
      f"{path}: tokenizer.ggml.{key} is {token_id}, expected less than the {len(tokens)} tokens; the file is damaged"
    )
  return token_id


def _bpe(path: pathlib.Path, tokens: list[str], types: list[int], merges: list[str], *, cut: str) -> tokenizers.Tokenizer:
  # Unused ids pad the embedding to a round number of rows. They have names but stand for no text.
  vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
  try:
    # Llama 3 looks up a whole word before merging, because its merges cannot reach some words.
    bpe = models.BPE(vocabulary, [tuple(merge.split(" ", 1)) for merge in merges], ignore_merges=cut == "llama-bpe")
  except Exception as error:  # The package raises plain `Exception`.
    raise ValueError(f"{path}: found merges that do not fit the tokens ({one_line(error, typed=False)}); the file is damaged") from error
  backend = tokenizers.Tokenizer(bpe)
  if cut == "qwen2":
    backend.normalizer = normalizers.NFC()
  backend.pre_tokenizer = PRE_TOKENIZERS[cut]()
  backend.decoder = decoders.ByteLevel()
  added = [(token, kind) for token, kind in zip(tokens, types) if kind in (_CONTROL, _USER_DEFINED)]
  backend.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in added])
  return backend
