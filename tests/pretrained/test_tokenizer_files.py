"""Files of a tokenizer for an export: its ids, chats, special tokens and end ids are the run's."""

import json
import pathlib
import shutil

import pytest
import tokenizers

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.gguf_vocabulary import read_gguf
from jaxrl_llm.pretrained.tokenizer import load_tokenizer
from jaxrl_llm.pretrained.tokenizer_files import files_of
from jaxrl_llm.pretrained.vocabulary import read_folder
from tests.pretrained.test_tokenizer import QWEN3, SMOLLM2, edit, smollm2, write_gguf  # noqa: F401 (a fixture)

TEMPLATE = (
  "{{ bos_token }}{% for m in messages %}<h>{{ m.role }}\n{{ m.content }}<eot>{% endfor %}"
  "{% if add_generation_prompt %}<h>a\n{% endif %}"
)
TEXTS = ["abc cab", "a<eot>b", "", " <bos>a"]


def llama(path, **values):
  """Writes a vocabulary with a begin token, two end tokens and no pad token."""
  names = ["a", "b", "c", "Ġ", "Ċ", "ab", "u", "s", "e", "r"]
  kinds = dict.fromkeys(names, 1) | {"<bos>": 3, "<eos>": 3, "<eot>": 3, "<h>": 3, "<pad_0>": 3}
  tokens = dict(enumerate(kinds.items()))
  roles = {"bos": "<bos>", "eos": "<eos>", "eot": "<eot>"}
  ids = {f"tokenizer.ggml.{role}_token_id": list(kinds).index(token) for role, token in roles.items()}
  return write_gguf(path, tokens, ["a b"], pre="llama-bpe", num_tokens=len(kinds) + 3, **ids, **values)


@pytest.fixture(params=["smollm2", "llama", "llama without a begin token", "llama without a template"])
def run(request, tmp_path):
  """The tokenizer of a run that began with a GGUF file, and texts for it."""
  if request.param == "smollm2":
    return load_tokenizer(request.getfixturevalue("smollm2")), SMOLLM2["texts"]
  values = {} if request.param.endswith("template") else {"tokenizer.chat_template": TEMPLATE}
  values |= {"tokenizer.ggml.add_bos_token": False} if "begin" in request.param else {}
  return load_tokenizer(llama(tmp_path / "m.gguf", **values), chat="tokenizer.chat_template" in values), TEXTS


def test_files_from_a_gguf_give_the_tokenizer_of_the_run(run, tmp_path):
  tokenizer, texts = run
  with files_of(tokenizer) as made:
    folder = pathlib.Path(shutil.copytree(made, tmp_path / "out"))
  again = load_tokenizer(folder, chat=tokenizer.chat_template is not None)
  same = ("vocab_size", "stop_ids", "pad_id", "bos_id", "special_ids")
  assert [getattr(again, name) for name in same] == [getattr(tokenizer, name) for name in same]
  for text in texts:
    assert again.encode(text) == tokenizer.encode(text) and again.encode_prompt(text) == tokenizer.encode_prompt(text), text
  # Other programs add the begin token by themselves.
  begins = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  assert tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a b").ids == begins + tokenizer.encode("a b")
  theirs, ours = read_folder(folder), read_gguf(tokenizer.path)
  assert theirs.chat_template == ours.chat_template and ours.named.items() <= theirs.named.items()
  for name in ("config.json", "generation_config.json"):
    ids = json.loads((folder / name).read_text())
    ends = ids["eos_token_id"] if isinstance(ids["eos_token_id"], list) else [ids["eos_token_id"]]
    assert set(ends) == set(tokenizer.stop_ids) and ids["bos_token_id"] == ours.bos_id and isinstance(ids["pad_token_id"], int)


@pytest.fixture
def folder(tmp_path):
  made = pathlib.Path(shutil.copytree(QWEN3, tmp_path / "model"))
  (made / "config.json").write_text('{"eos_token_id": 151643}')
  return made


@pytest.mark.parametrize(
  ("generation", "expected"),
  [
    (None, {"eos_token_id": [151645, 151643]}),
    ({"eos_token_id": 151643, "top_k": 20}, {"eos_token_id": [151643, 151645], "top_k": 20}),
    ({"eos_token_id": [151643, 151645], "pad_token_id": 7}, {"eos_token_id": [151643, 151645], "pad_token_id": 7}),
  ],
)
def test_the_generation_config_of_a_folder_gets_the_end_of_a_turn(generation, expected, folder):
  (folder / "generation_config.json").unlink(missing_ok=True)
  if generation is not None:
    edit(folder, "generation_config.json", **generation)
  with files_of(load_tokenizer(folder)) as made:
    assert json.loads((made / "generation_config.json").read_text()) == expected
    assert (made / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_everything_that_a_processor_reads_is_copied(folder):
  names = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "additional_chat_templates/rag.jinja")
  (folder / "additional_chat_templates").mkdir()
  for name in names:
    (folder / name).write_text(name)
  (folder / "notes.json").write_text("{}")
  with files_of(load_tokenizer(folder)) as made:
    assert [(made / name).read_text() for name in names] == list(names) and not (made / "notes.json").exists()


def test_a_run_of_bytes_has_the_files_of_the_byte_tokenizer():
  with files_of(ByteTokenizer()) as made:
    assert tokenizers.Tokenizer.from_file(str(made / "tokenizer.json")).encode("7+8").ids == ByteTokenizer().encode("7+8", add_bos=True)
    assert json.loads((made / "generation_config.json").read_text())["eos_token_id"] == ByteTokenizer().eos_id
