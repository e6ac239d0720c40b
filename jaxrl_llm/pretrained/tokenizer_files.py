"""The tokenizer of a model in files that transformers, vLLM and related programs open."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.byte_tokenizer_files import write_byte_tokenizer
from jaxrl_llm.pretrained.chat_options import standalone
from jaxrl_llm.pretrained.gguf_vocabulary import read_gguf
from jaxrl_llm.pretrained.tokenizer import PretrainedTokenizer
from jaxrl_llm.pretrained.vocabulary import Vocabulary

CONFIG, GENERATION, TEMPLATE = "config.json", "generation_config.json", "chat_template.jinja"
TOKENIZER_FILES = (
  "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
  "tokenizer.model", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def stored_files(folder: Path) -> list[Path]:
  """Lists the files of the tokenizer, chat templates, processors and settings of generation."""
  return [file for name in (*TOKENIZER_FILES, *PROCESSOR_FILES, GENERATION) for file in sorted(folder.glob(name)) if file.is_file()]


def copy_files(source: Path, folder: Path) -> None:
  """Copies the files of `stored_files` to an existing folder."""
  for file in stored_files(source):
    copied = folder / file.relative_to(source)
    copied.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, copied)


@contextlib.contextmanager
def files_of(tokenizer: PretrainedTokenizer | ByteTokenizer) -> Iterator[Path]:
  """Yields a folder with the files of a run's tokenizer, for an export to copy.

  They are those of the folder that the run began with, or written from its GGUF file or for bytes.
  `config.json` has the token ids, and `generation_config.json` every id that ends a response. The
  chat template has the run's options and date in it.
  """
  with tempfile.TemporaryDirectory() as made:
    folder = Path(made)
    if isinstance(tokenizer, ByteTokenizer):
      write_byte_tokenizer(folder)
    elif tokenizer.path.is_dir():
      copy_files(tokenizer.path, folder)
      shutil.copyfile(tokenizer.path / CONFIG, folder / CONFIG)
    else:
      write_vocabulary(folder, read_gguf(tokenizer.path), stop_ids=tokenizer.stop_ids, pad_id=tokenizer.pad_id)
    if isinstance(tokenizer, PretrainedTokenizer) and tokenizer.chat_template is not None:
      template = tokenizer.chat_template
      if (source := standalone(template)) != template.source:
        # Of all places of a template, transformers takes this one first.
        (folder / TEMPLATE).write_text(source, encoding="utf-8")
    file = folder / GENERATION
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    ends = generation.get("eos_token_id") or []
    ends = ends if isinstance(ends, list) else [ends]
    if missing := [i for i in tokenizer.stop_ids if i not in ends]:
      _write(file, generation | {"eos_token_id": [*ends, *missing]})
    yield folder


def write_vocabulary(folder: Path, vocabulary: Vocabulary, *, stop_ids: Sequence[int], pad_id: int) -> None:
  """Writes `tokenizer.json`, `tokenizer_config.json` and the token ids of config and generation.

  Args:
    folder: Existing folder, to which the files are written.
    vocabulary: Vocabulary of a checkpoint.
    stop_ids: Ids that end a response.
    pad_id: Id of the pad token for a vocabulary that names none.
  """
  backend, named = tokenizers.Tokenizer.from_str(vocabulary.backend.to_str()), vocabulary.named
  if vocabulary.adds_bos:
    bos = named["bos_token"]
    template = {"single": [bos, "$A"], "pair": [bos, "$A", bos, "$B:1"]}
    backend.post_processor = processors.TemplateProcessing(**template, special_tokens=[(bos, vocabulary.bos_id)])
  settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "add_bos_token": vocabulary.adds_bos}
  settings |= {"eos_token": backend.id_to_token(stop_ids[0]), "pad_token": backend.id_to_token(pad_id), **named}
  if vocabulary.chat_template is not None:
    settings["chat_template"] = vocabulary.chat_template
  pad_id = pad_id if vocabulary.pad_id is None else vocabulary.pad_id
  ends = list(stop_ids) if len(stop_ids) > 1 else stop_ids[0]
  ids = {"bos_token_id": vocabulary.bos_id, "eos_token_id": ends, "pad_token_id": pad_id}
  backend.save(str(folder / "tokenizer.json"))
  _write(folder / "tokenizer_config.json", settings)
  for name in (CONFIG, GENERATION):
    _write(folder / name, ids)


def _write(path: Path, content: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
