"""Tokenizer of a published checkpoint, with its chat template, stop ids and pad id."""

import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsInt

import tokenizers
from tokenizers import decoders

from jaxrl_llm.messages import Problem, problem_of
from jaxrl_llm.pretrained import image_prompts, special_text, where
from jaxrl_llm.pretrained.byte_tokenizer_files import byte_characters
from jaxrl_llm.pretrained.chat_options import with_options
from jaxrl_llm.pretrained.chat_template import ChatTemplate, left_out, render, turn_end
from jaxrl_llm.pretrained.gguf_vocabulary import read_gguf
from jaxrl_llm.pretrained.vocabulary import Vocabulary, read_folder
from jaxrl_llm.text_types import Tokenizer

# Special tokens that occur in no text and that no answer needs, best first.
_SPARE = (
  r"<\|finetune_right_pad_id\|>",  # Llama 3's own.
  r"[<\[]\|?pad\|?[>\]]",
  r".*pad.*",  # Qwen's <|fim_pad|>, <|vision_pad|>.
  r".*(reserved|unused).*",
  # Document separator in pre-training, for a model whose turns end with another token.
  r"<\|endoftext\|>",
)


@dataclass(frozen=True, eq=False)
class PretrainedTokenizer:
  """Tokenizer of a published checkpoint, built by `load_tokenizer`.

  Attributes:
    path: Path of the checkpoint, for error messages.
    backend: Tokenizer of the package tokenizers.
    vocab_size: Number of ids in use. A checkpoint's embedding may have more rows, which no text
      reaches.
    pad_id: Id that fills unused slots; never one of `stop_ids`.
    eos_id: Id that ends a demonstration.
    stop_ids: Ids that end a response, including `eos_id`.
    special_ids: Ids of all special tokens.
    special: Names of the special tokens that users and tools may spell without meaning the token
      (see `special_text`); empty if their names are always tokens.
    bos_id: Id that begins a prompt without a chat template; None if the checkpoint uses no begin
      token.
    chat_template: Template that renders a question as a conversation; None if there is none.
    system: System message of the conversation; None leaves it to the template.
  """

  path: pathlib.Path
  backend: tokenizers.Tokenizer
  vocab_size: int
  pad_id: int
  eos_id: int
  stop_ids: tuple[int, ...]
  special_ids: frozenset[int]
  special: tuple[str, ...] = ()
  bos_id: int | None = None
  chat_template: ChatTemplate | None = None
  system: str | None = None

  def encode(self, text: str) -> list[int]:
    """Encodes text without adding special tokens.

    A special token's name in the text becomes that token, unless `special_text.hide` has hidden it.
    A lone surrogate, which UTF-8 cannot encode, becomes "?".
    """
    return special_text.encode(text.encode("utf-8", errors="replace").decode(), self.backend, self.special)

  @property
  def image_id(self) -> int | None:
    """Id of each image token of a picture; None if the vocabulary has no such token."""
    return self.backend.token_to_id(image_prompts.TOKEN)

  def encode_prompt(self, text: str, slots: Sequence[int] = ()) -> list[int]:
    """Encodes the user's text as the ids that the policy continues.

    With a chat template, the ids are the conversation up to the beginning of the assistant's turn,
    and the template writes every special token itself. Without one, they are the text, after the
    begin token if the checkpoint uses one.

    Args:
      text: Text of the user; with pictures, see `image_prompts.MARK`.
      slots: Number of image tokens of each picture.

    Raises:
      BadPicture: If the marks in the text, or the image tokens that the chat template writes, do
        not fit the pictures.
      ValueError: If there are pictures and the vocabulary has no image token.
    """
    if not slots:
      return self._written(text)
    if self.image_id is None:
      raise ValueError(f"{self.path}: found no token {image_prompts.TOKEN}, expected a checkpoint that reads pictures")
    return image_prompts.expand(self._written(image_prompts.parts(text, len(slots))), self.image_id, slots)

  def _written(self, content: str | list[dict[str, str]]) -> list[int]:
    """Encodes a user's message, a text or texts and pictures, with one image token for each."""
    if self.chat_template is not None:
      return self.encode(render(self.chat_template, _conversation(self.system, content)))
    parts = [{"text": content}] if isinstance(content, str) else content
    texts = (special_text.hide(part["text"], self.special) if "text" in part else image_prompts.PLAIN for part in parts)
    return [self.bos_id] * (self.bos_id is not None) + self.encode("".join(texts))

  def decode(self, ids: Iterable[SupportsInt]) -> str:
    """Decodes ids to text and never raises, because a policy may write anything.

    A leading begin token, and special and stop tokens at the end, are left out. Elsewhere these
    tokens are written out, because a token between two others must not vanish. Ids outside the
    vocabulary, and bytes that are not UTF-8, become U+FFFD.
    """
    ids = [int(i) for i in ids]
    silent = self.special_ids.union(self.stop_ids)
    while ids and ids[-1] in silent:
      ids.pop()
    if ids[:1] == [self.bos_id]:
      del ids[0]
    pieces, known = [], []
    for i in ids:
      if 0 <= i < self.vocab_size and self.backend.id_to_token(i) is not None:
        known.append(i)
      else:
        pieces += [self.backend.decode(known, skip_special_tokens=False), "\ufffd"]
        known = []
    return "".join([*pieces, self.backend.decode(known, skip_special_tokens=False)])

  def token_bytes(self) -> list[bytes | None]:
    """Returns the bytes of each of the `vocab_size` ids in a text; None for special and unused ids.

    Raises:
      ValueError: If the tokenizer is not a byte-level BPE, because the bytes of a token then depend
        on its neighbours.
    """
    if not isinstance(self.backend.decoder, decoders.ByteLevel):
      decoder = "no decoder" if self.backend.decoder is None else f"the decoder {type(self.backend.decoder).__name__}"
      raise ValueError(
        f"{self.path}: found {decoder}, expected ByteLevel: only byte-level tokens have bytes of their own; "
        "leave rollout.stop_strings unset"
      )
    values = {character: byte for byte, character in enumerate(byte_characters())}
    pieces: list[bytes | None] = [None] * self.vocab_size
    for token, i in self.backend.get_vocab(with_added_tokens=True).items():
      if i not in self.special_ids:
        # As in the decoder, an added token with characters outside the alphabet is plain text.
        pieces[i] = bytes([values[c] for c in token]) if values.keys() >= set(token) else token.encode()
    return pieces


def encode_foreign(text: str, tokenizer: Tokenizer) -> list[int]:
  """Encodes text that the policy reads and does not write, of a user, a tool or another policy.

  The names of special tokens in it are text, unless the tokenizer was loaded for them to be tokens.
  """
  return tokenizer.encode(special_text.hide(text, tokenizer.special) if isinstance(tokenizer, PretrainedTokenizer) else text)


def load_tokenizer(
  path: str | os.PathLike,
  *,
  chat: bool = True,
  system: str | None = None,
  vocab_rows: int | None = None,
  pad_token: str | None = None,
  chat_options: Mapping[str, Any] | None = None,
  special_tokens: str = "text",
) -> PretrainedTokenizer:
  """Loads the tokenizer of a checkpoint.

  A response ends with any of these: the ids of `eos_token_id` in generation_config.json (else
  config.json), the tokenizer's own end token and, if `chat`, the special token with which the
  template ends the assistant's turn.

  The checkpoint's pad token fills unused slots. If it is missing, or would also end a response (as
  in SmolLM2 and Qwen), a special token that neither a text nor an answer needs replaces it: a pad
  or reserved token, else `<|endoftext|>`.

  Args:
    path: Folder in Hugging Face's format, `.gguf` file, or `package:DIST` (see
      `pretrained.where.resolve`).
    chat: Whether to write questions with the checkpoint's chat template.
    system: System message of each conversation; None leaves it to the template.
    vocab_rows: Number of rows of the model's embedding, which must hold every id; None skips the
      check.
    pad_token: Text of the token that fills unused slots; None chooses it as above.
    chat_options: Options of the chat template, such as `{"enable_thinking": False}`; that of
      `strftime_now` is the date that it reads (`chat_template.DATE` by default).
    special_tokens: Meaning of a special token's name in messages, prompts and replies: "text", or
      "tokens" as in transformers, where such a text can end a turn or begin another one.

  Raises:
    ValueError: If a part of the checkpoint is missing or damaged, or the parts do not fit together.
      One line, with the fix.
    MissingPackageError: If the chat template needs the package jinja2 and it is not installed.
  """
  path = where.resolve(path)
  vocabulary = read_folder(path) if path.is_dir() else read_gguf(path)
  tokens = {i: token for token, i in vocabulary.backend.get_vocab(with_added_tokens=True).items()}
  vocab_size = max(tokens, default=-1) + 1
  if vocab_rows is not None and vocab_size > vocab_rows:
    raise ValueError(
      f"{path}: has ids up to {vocab_size - 1}, but the model's embedding only {vocab_rows} rows; the two do not belong together"
    )
  specials = {i: tokens[i] for i in sorted(vocabulary.special_ids)}
  special = tuple(specials.values()) if special_tokens == "text" else ()
  template = _chat_template(vocabulary, system, chat_options or {}, special) if chat else None
  if system is not None and not chat:
    raise ValueError(
      f"config.task.system: found {system[:40]!r} with config.task.chat=False, where nothing reads it; set chat=True or remove it"
    )
  if chat_options and not chat:
    raise ValueError(Problem("config.task.chat_options", repr(dict(chat_options)), "none with task.chat=False, where nothing reads them"))
  stop_ids = _stop_ids(vocabulary, tokens, template and turn_end(template, list(specials.values())))
  return PretrainedTokenizer(
    path=path,
    backend=vocabulary.backend,
    vocab_size=vocab_size,
    pad_id=_pad_id(vocabulary, stop_ids, specials, pad_token),
    eos_id=stop_ids[0],
    stop_ids=stop_ids,
    special_ids=vocabulary.special_ids,
    special=special,
    bos_id=vocabulary.bos_id if vocabulary.adds_bos else None,
    chat_template=template,
    system=system,
  )


def _conversation(system: str | None, text: str | list[dict[str, str]]) -> list[dict[str, Any]]:
  head = [] if system is None else [{"role": "system", "content": system}]
  return [*head, {"role": "user", "content": text}]


def _chat_template(vocabulary: Vocabulary, system: str | None, options: Mapping[str, Any], special: tuple[str, ...]) -> ChatTemplate:
  """Returns the template after one trial, so that errors surface before the first rollout."""
  if not vocabulary.chat_template:
    raise ValueError(
      f"{vocabulary.path}: has no chat template; set config.task.chat=False, or add chat_template.jinja to the checkpoint's folder"
    )
  template = ChatTemplate(vocabulary.chat_template, str(vocabulary.path), vocabulary.named, special)
  # Also without options, to report a template that does not compile.
  missing = left_out(template, _conversation(system, "How many?"))
  try:
    template = with_options(template, options)
  except ValueError as error:
    problem = problem_of(error)
    raise ValueError(problem.with_prefix("config.task.chat_options")) from error
  missing = missing or left_out(template, _conversation(system, "How many?"))
  if missing and missing["role"] == "user":
    raise ValueError(f"{vocabulary.path}: the chat template leaves out what the user says; set config.task.chat=False to use none")
  if missing:
    raise ValueError(f"{vocabulary.path}: the chat template leaves out the system message; leave config.task.system unset")
  return template


def _stop_ids(vocabulary: Vocabulary, tokens: Mapping[int, str], turn_end_token: str | None) -> tuple[int, ...]:
  """Returns the ids that end a response, beginning with the one that ends demonstrations."""
  for i in vocabulary.eos_ids:
    if i not in tokens:
      raise ValueError(f"{vocabulary.path}: eos_token_id {i} is not in the vocabulary; the checkpoint's files do not belong together")
  ends = [] if turn_end_token is None else [vocabulary.backend.token_to_id(turn_end_token)]
  stop_ids = tuple(dict.fromkeys([*ends, *vocabulary.eos_ids]))
  if not stop_ids:
    raise ValueError(f"{vocabulary.path}: names no end token, so no response would ever end; add eos_token to its tokenizer_config.json")
  return stop_ids


def _pad_id(vocabulary: Vocabulary, stop_ids: tuple[int, ...], specials: Mapping[int, str], pad_token: str | None) -> int:
  if pad_token is not None:
    pad_id = vocabulary.backend.token_to_id(pad_token)
    if pad_id is None or pad_id in stop_ids:
      reason = "is not in the vocabulary" if pad_id is None else "ends a response"
      raise ValueError(
        f"config.task.pad_token: found {pad_token!r}, which {reason}; "
        f"expected another special token of {vocabulary.path}"
      )
    return pad_id
  if vocabulary.pad_id is not None and vocabulary.pad_id not in stop_ids:
    return vocabulary.pad_id
  for pattern in _SPARE:
    for i, token in specials.items():
      if i not in stop_ids and i != vocabulary.bos_id and re.fullmatch(pattern, token, re.IGNORECASE):
        return i
  problem = "no pad token"
  if vocabulary.pad_id is not None:
    problem = f"the pad token {vocabulary.backend.id_to_token(vocabulary.pad_id)!r}, which ends a response"
  raise ValueError(
    f"{vocabulary.path}: found {problem}, and no spare special token; "
    "set config.task.pad_token to a token that no text needs"
  )
