"""The byte tokenizer in files that transformers, vLLM and the package tokenizers open."""

import json
from pathlib import Path
from typing import Any

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer


def write_byte_tokenizer(folder: Path) -> None:
  """Writes `tokenizer.json`, `tokenizer_config.json` and the token ids of config and generation.

  `AutoTokenizer` gives the ids of `ByteTokenizer.encode`, after the begin token unless
  `add_special_tokens=False`. A text that spells a special token, such as "<|end|>", stays bytes
  there; the package tokenizers alone needs `encode_special_tokens = True` for that.

  Args:
    folder: Existing folder, to which the files are written.
  """
  tokenizer = ByteTokenizer()
  names = special_names(tokenizer)
  ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "split_special_tokens": True,
    "bos_token": names[tokenizer.bos_id], "eos_token": names[tokenizer.eos_id], "pad_token": names[tokenizer.pad_id],
  }  # fmt: skip
  contents = {"tokenizer.json": tokenizer_json(tokenizer), "tokenizer_config.json": settings}
  for name, content in (contents | {"config.json": ids, "generation_config.json": ids}).items():
    (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def is_byte_tokenizer(folder: Path) -> bool:
  """Returns whether the tokenizer of a folder is the byte tokenizer."""
  try:
    return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")) == tokenizer_json(ByteTokenizer())
  except (OSError, ValueError):
    return False


def special_names(tokenizer: ByteTokenizer) -> dict[int, str]:
  """Returns the texts of the ids that are no bytes."""
  known = {tokenizer.pad_id: "<|pad|>", tokenizer.bos_id: "<|begin|>", tokenizer.eos_id: "<|end|>", tokenizer.image_id: "<|image|>"}
  return {i: known.get(i, f"<|reserved_{i}|>") for i in range(256, tokenizer.vocab_size)}


def tokenizer_json(tokenizer: ByteTokenizer) -> dict[str, Any]:
  """Returns the content of `tokenizer.json`: byte-level BPE without merges."""
  names = special_names(tokenizer)
  flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
  byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
  bos = names[tokenizer.bos_id]
  begin, text = {"SpecialToken": {"id": bos, "type_id": 0}}, lambda part, i: {"Sequence": {"id": part, "type_id": i}}
  template = {
    "type": "TemplateProcessing", "single": [begin, text("A", 0)], "pair": [begin, text("A", 0), text("B", 1)],
    "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}},
  }  # fmt: skip
  characters = byte_characters()
  model = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "fuse_unk": False, "byte_fallback": False, "vocab": {characters[i]: i for i in range(256)}, "merges": [],
  }  # fmt: skip
  return {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [{"id": i, "content": x, **flags} for i, x in names.items()],
    "normalizer": None, "pre_tokenizer": byte_level, "post_processor": template, "decoder": byte_level, "model": model,
  }  # fmt: skip


def byte_characters() -> list[str]:
  """Returns the printable character that byte-level BPE writes for each byte, as in GPT-2.

  Example:
    >>> byte_characters()[ord("a")], byte_characters()[ord(" ")]
    ('a', 'Ġ')
  """
  printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
  others = iter(range(256, 512))
  return [chr(i) if i in printable else chr(next(others)) for i in range(256)]
