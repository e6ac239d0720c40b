"""The files of the byte tokenizer give other programs the same ids, for every text and byte."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.byte_tokenizer_files import byte_characters, is_byte_tokenizer, tokenizer_json, write_byte_tokenizer

OURS = ByteTokenizer()
THEIRS = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(OURS)))
THEIRS.encode_special_tokens = True
TEXTS = ["7+8=", "é 中文 😀\n\t\x00 'll   x", "", " a", "<|end|> and <|pad|>", "\u00a0\u00ad\u0120"]


def test_every_byte_has_a_character_of_its_own():
  assert len(set(byte_characters())) == 256 and THEIRS.get_vocab_size() == OURS.vocab_size


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_ids_are_equal(text):
  assert THEIRS.encode(text, add_special_tokens=False).ids == OURS.encode(text)
  assert THEIRS.encode(text).ids == OURS.encode(text, add_bos=True)


@given(st.lists(st.integers(0, 255)))
def test_decoded_texts_are_equal(ids):
  assert THEIRS.decode([OURS.bos_id, *ids, OURS.eos_id]) == OURS.decode([OURS.bos_id, *ids, OURS.eos_id])


def test_transformers_opens_the_files(tmp_path):
  transformers = pytest.importorskip("transformers")
  write_byte_tokenizer(tmp_path)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  for text in TEXTS:
    assert theirs(text).input_ids == OURS.encode(text, add_bos=True), text
    assert theirs(text, add_special_tokens=False).input_ids == OURS.encode(text), text
    assert theirs.decode(OURS.encode(text)) == text
  assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (OURS.bos_id, OURS.eos_id, OURS.pad_id)


def test_the_files_are_recognised(tmp_path):
  assert not is_byte_tokenizer(tmp_path)
  write_byte_tokenizer(tmp_path)
  assert is_byte_tokenizer(tmp_path)
  (tmp_path / "tokenizer.json").write_text("{}")
  assert not is_byte_tokenizer(tmp_path)
