"""Text of a completion while its tokens arrive."""

import random

import pytest

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.tokenizer import load_tokenizer
from jaxrl_llm.serve.text import TextStream, make_spelling
from tests.runs import ROOT

BYTES = make_spelling(ByteTokenizer())


def parts(tokens, sizes, spelling=BYTES, **options):
  """Feeds tokens in groups of the given sizes."""
  stream, texts = TextStream(spelling, **options), []
  for size in sizes:
    texts.append(stream.feed(tokens[:size]))
    tokens = tokens[size:]
  return [*texts, stream.feed(tokens) + stream.finish()]


@pytest.mark.parametrize("stops", [(), ("\n\n",), ("END",), ("EN", "D!"), ("ENDE", "NDX"), ("é",), ("\ufffd",)])
def test_the_parts_do_not_depend_on_where_they_are_cut(stops):
  draw = random.Random(0)
  for text in ("plain", "caf\u00e9 \U0001f600 \u4f60\u597d", "EEND", "ENENDX", "EN\n\n\nEND", "END!", "", "E"):
    tokens = list(text.encode())
    ends = [text.find(stop) for stop in stops if stop in text]
    expected = text[: min(ends)] if ends else text
    for _ in range(20):
      sizes = [draw.randint(0, 3) for _ in range(draw.randint(0, len(tokens)))]
      assert "".join(parts(tokens, sizes, stops=stops)) == expected


def test_bytes_that_are_no_utf8_become_replacement_characters():
  for tokens in (b"\xff\xfea", b"a\xc3", b"\xe4\xbda", b"\xf0\x9f\x98"):
    assert "".join(parts(list(tokens), [1] * len(tokens))) == tokens.decode("utf-8", "replace")


def test_special_tokens_are_left_out_as_in_the_engine_or_named():
  tokens = [*b"a\xc3", 257, *b"\xa9b", 258]
  assert "".join(parts(tokens, [1] * 6)) == "aéb"
  assert "".join(parts(tokens, [1] * 6, skip_special=False)) == "a\ufffd<257>\ufffdb<258>"
  assert "".join(parts(tokens, [1] * 6, skip_special=False, stop_ids=[258])) == "a\ufffd<257>\ufffdb"
  assert "".join(parts([*b"xEN", 257, *b"D"], [2], stops=("END",))) == "x"


def test_nothing_follows_a_stop_string():
  assert parts(list(b"abENDcd"), [3, 1, 1, 1], stops=("END",)) == ["ab", "", "", "", ""]


def test_ids_outside_the_vocabulary_raise_nothing():
  assert "".join(parts([104, 100_000, 105], [1, 1])) == "hi"
  assert BYTES.bytes_of(100_000) == b"<100000>"


def test_a_real_vocabulary():
  tokenizer = load_tokenizer(ROOT / "tests/pretrained/tokenizers/qwen3")
  spelling = make_spelling(tokenizer)
  text = "Grüße, 你好 \U0001f469\u200d\U0001f680!\n<|im_end|>\n"
  tokens = tokenizer.encode(text)
  assert "".join(parts(tokens, [1] * len(tokens), spelling, skip_special=False)) == text
  assert "".join(parts(tokens, [1] * len(tokens), spelling)) == text.replace("<|im_end|>", "")
  assert spelling.bytes_of(tokenizer.eos_id) == b"<|im_end|>"


def test_without_bytes_of_tokens_the_text_comes_at_the_end():
  spelling = BYTES._replace(pieces=None, decode=ByteTokenizer().decode)
  assert parts(list(b"abENDcd"), [3, 2], spelling, stops=("END",)) == ["", "", "ab"]
  assert parts(list(b"abEN"), [3], spelling, stops=("END",)) == ["", "abEN"]
