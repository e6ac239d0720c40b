"""Pairs of responses, from files of every format and generated, and records that are not pairs."""

import json
import re

import pytest

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.tasks.files.columns import Unusable
from jaxrl_llm.tasks.files.storage import split_of
from jaxrl_llm.tasks.preference_pairs import PairColumns, encode_pair, from_files, generated, row_of
from jaxrl_llm.tasks.sets import arithmetic
from tests.tasks.written import parquet_bytes, write_lines

USER, OTHER = {"role": "user", "content": "1+1?"}, {"role": "user", "content": "1+2?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def says(text):
  return {"role": "assistant", "content": text}


PLAIN = {"prompt": "1+1?", "conversation": "", "chosen": "2", "rejected": "3", "margin": ""}


@pytest.mark.parametrize(
  ("record", "columns"),
  [
    ({"prompt": "1+1?", "chosen": "2", "rejected": "3"}, PairColumns()),
    ({"prompt": [USER], "chosen": [says("2")], "rejected": [says("3")]}, PairColumns()),
    # The form of UltraFeedback.
    ({"prompt": "1+1?", "chosen": [USER, says("2")], "rejected": [USER, says("3")]}, PairColumns()),
    ({"prompt": "1+1?", "chosen": "2", "rejected": [says("3")]}, PairColumns()),
    ({"chosen": [USER, says("2")], "rejected": [USER, says("3")]}, PairColumns(prompt=None)),
    ({"q": "1+1?", "good": "2", "bad": "3"}, PairColumns("q", "good", "bad")),
  ],
)
def test_one_pair_in_many_forms(record, columns):
  assert row_of(record, columns) == PLAIN


def test_a_conversation_of_several_messages_is_kept_whole():
  before = [SYSTEM, USER, says("2"), OTHER]
  row = row_of({"chosen": [*before, says("3")], "rejected": [*before, says("4")]}, PairColumns(prompt=None))
  assert json.loads(row["conversation"]) == before and row["prompt"] == "1+2?" and (row["chosen"], row["rejected"]) == ("3", "4")
  assert row == row_of({"prompt": before, "chosen": [says("3")], "rejected": [says("4")]}, PairColumns())
  with pytest.raises(Unusable, match="several messages, but the tokenizer has no chat template"):
    encode_pair(row, ByteTokenizer())


def test_margins():
  assert row_of({**PLAIN, "margin": 0.5}, PairColumns(margin="margin"))["margin"] == "0.5"
  with pytest.raises(Unusable, match="margin is no number"):
    row_of({**PLAIN, "margin": "much"}, PairColumns(margin="margin"))


BAD = [
  ({"chosen": "a", "rejected": "b"}, "no column 'prompt'"),
  ({"prompt": None, "chosen": "a", "rejected": "b"}, "prompt is null"),
  ({"prompt": "p1", "chosen": "", "rejected": "b"}, "chosen is empty"),
  ({"prompt": "p2", "chosen": "a", "rejected": None}, "rejected is null"),
  ({"prompt": "p3", "chosen": "same", "rejected": "same"}, "chosen and rejected are the same"),
  ({"prompt": "p4", "chosen": [USER, says("a")], "rejected": [OTHER, says("b")]}, "chosen and rejected have different prompts"),
  ({"prompt": "p5", "chosen": [USER], "rejected": [says("b")]}, "chosen does not end with the assistant"),
  ({"prompt": "p6", "chosen": [{"role": "assistant"}], "rejected": [says("b")]}, "chosen is no list of messages"),
  ({"prompt": [SYSTEM], "chosen": [says("a")], "rejected": [says("b")]}, "prompt does not end with the user"),
  ({"prompt": "p7", "chosen": "a" * 60, "rejected": "b"}, "longer than 40 tokens"),
  ({"prompt": "g1", "chosen": "a", "rejected": "b"}, "duplicate pair"),
]


def load(path, tmp_path, **options):
  return from_files(ByteTokenizer(), path=path, data_dir=tmp_path / "data", **({"max_tokens": 40} | options))


def test_bad_rows_are_dropped_and_counted(tmp_path):
  good = [{"prompt": f"g{i}", "chosen": "a", "rejected": f"b{i % 3}"} for i in range(40)]
  good.append({"prompt": "g1", "chosen": "a", "rejected": "b"})
  pairs = load(write_lines(tmp_path / "pairs.jsonl", [*good, *(record for record, _ in BAD)]), tmp_path, test_fraction=0.3)
  assert len(pairs.train) + len(pairs.test) == pairs.report.kept == 41 and pairs.report.read == 41 + len(BAD)
  assert pairs.report.dropped == dict.fromkeys([reason for _, reason in BAD], 1)
  assert not {row["prompt"] for row in pairs.train} & {row["prompt"] for row in pairs.test} and len(pairs.test) > 3
  again = load(tmp_path / "pairs.jsonl", tmp_path, test_fraction=0.3)
  assert again.fingerprint == pairs.fingerprint != load(tmp_path / "pairs.jsonl", tmp_path, test_fraction=0.1).fingerprint


@pytest.mark.parametrize(("record", "reason"), BAD[:-1])
def test_bad_rows_are_refused_under_the_policy_error(record, reason, tmp_path):
  path = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "g", "chosen": "a", "rejected": "b"}, record])
  with pytest.raises(ValueError, match=re.escape(reason)) as caught:
    load(path, tmp_path, bad_rows="error")
  assert "pairs.jsonl:2" in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_used(tmp_path):
  path = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "p", "choosen": "a", "rejected": "b"}])
  with pytest.raises(ValueError, match=r"found no column 'chosen', but prompt, choosen, rejected; did you mean 'choosen'\?"):
    load(path, tmp_path)
  with pytest.raises(ValueError, match="task.path: found None, expected a file of pairs"):
    load(None, tmp_path)
  with pytest.raises(ValueError, match="task.test_fraction: found 0.5 with test pairs of their own"):
    load(path, tmp_path, test_path=path, test_fraction=0.5)
  with pytest.raises(ValueError, match="task.path, test: found no pair that can be used .1 pairs read, 1 kept"):
    load(write_lines(tmp_path / "one.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}]), tmp_path)


def test_parquet(tmp_path):
  rows = [{"prompt": "1+1?", "chosen": [USER, says("2")], "rejected": [USER, says(str(3 + i))], "score": 1.0} for i in range(3)]
  (tmp_path / "pairs.parquet").write_bytes(parquet_bytes(rows))
  pairs = load(tmp_path / "pairs.parquet", tmp_path, test_path=write_lines(tmp_path / "test.jsonl", [PLAIN]))
  # The first pair of the file is held out, because test pairs are read first.
  assert [row["rejected"] for row in pairs.train] == ["4", "5"] and pairs.test[0]["rejected"] == "3"


def test_generated_pairs_are_right_and_wrong_and_some_are_held_out():
  pairs = generated(levels=(1,))
  assert (len(pairs.train), len(pairs.test)) == (708, 23)
  for split, rows in (("train", pairs.train), ("test", pairs.test)):
    for row in rows:
      question = row["prompt"].strip()
      answer = f"#{arithmetic.evaluate(question)}"
      assert split_of(question) == split
      assert row["chosen"].endswith(answer) and not row["rejected"].endswith(f"\n{answer}")
  with pytest.raises(ValueError, match="task.levels: found .4,., expected one or more of .1, 2, 3."):
    generated(levels=(4,))
