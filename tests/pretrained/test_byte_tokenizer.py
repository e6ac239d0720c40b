"""Bytes round-trip, and no text or id breaks the tokenizer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def test_ids_are_distinct_and_fit_the_vocabulary():
  special = {TOKENIZER.pad_id, TOKENIZER.bos_id, TOKENIZER.eos_id}
  assert len(special) == 3 and min(special) >= 256 and max(special) < TOKENIZER.vocab_size
  assert TOKENIZER.vocab_size % 8 == 0
  assert TOKENIZER.stop_ids == (TOKENIZER.eos_id,)


def test_golden():
  assert TOKENIZER.encode("é") == [0xC3, 0xA9]
  assert TOKENIZER.encode("", add_bos=True) == [TOKENIZER.bos_id]
  assert TOKENIZER.encode("") == []


@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans())
def test_round_trip(text, add_bos):
  ids = TOKENIZER.encode(text, add_bos=add_bos)
  assert TOKENIZER.decode(ids) == text
  assert TOKENIZER.decode([*ids, TOKENIZER.eos_id]) == text


@given(st.lists(st.integers(-300, 300)))
def test_decode_takes_any_ids(ids):
  assert isinstance(TOKENIZER.decode(ids), str)
  assert TOKENIZER.decode(np.array(ids, np.int32)) == TOKENIZER.decode(ids)


def test_invalid_text_is_replaced():
  assert TOKENIZER.decode([0x41, 0xFF, 0x42]) == "A\ufffdB"
  assert TOKENIZER.encode("a\ud800b") == list(b"a?b")


def test_the_tokenizer_is_immutable():
  with pytest.raises(AttributeError):
    TOKENIZER.vocab_size = 300


@pytest.mark.parametrize("stray", [TOKENIZER.pad_id, TOKENIZER.bos_id, 263, 10**6, -1])
def test_a_stray_token_is_visible(stray):
  """If it were left out, two halves would read as one answer."""
  assert TOKENIZER.decode([*TOKENIZER.encode("#1"), stray, *TOKENIZER.encode("0")]) == "#1\ufffd0"


TOKEN_BYTES = TOKENIZER.token_bytes()


@given(st.text())
def test_bytes_of_tokens(text):
  assert len(TOKEN_BYTES) == TOKENIZER.vocab_size and set(TOKEN_BYTES[256:]) == {None}
  assert b"".join(TOKEN_BYTES[i] for i in TOKENIZER.encode(text)) == text.encode(errors="replace")
