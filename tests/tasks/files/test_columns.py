"""Each record becomes either a problem or a reason, whatever it contains."""

import datetime
import decimal
import itertools
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.tasks.files import columns, text_files
from jaxrl_llm.tasks.files.columns import Columns, Unusable
from jaxrl_llm.tasks.files.report import Tally
from jaxrl_llm.tasks.sets import code, logic, maths, mathvision

GOOD = {"question": "1+1?", "answer": "2", "level": 1, "id": "a", "response": "2"}


def reason(record, **mapped):
  """Returns the reason why a record is not a problem, or "" if it is one."""
  tally = Tally("drop")
  mapped = Columns(**({"level": "level", "id": "id"} | mapped))
  rows = list(columns.usable_rows([("f.jsonl:7", record)], columns.mapping(mapped), tally, seen=set()))
  assert len(rows) + sum(tally.dropped.values()) == 1
  assert all(place.startswith("f.jsonl:7") for place in tally.first.values())
  return next(iter(tally.dropped), "")


@pytest.mark.parametrize(
  "change, expected",
  [
    ({}, ""),
    ({"question": None}, "question is null"),
    ({"question": " \n"}, "question is empty"),
    ({"question": "\ud800"}, "not UTF-8"),
    ({"question": "\udcff"}, "not UTF-8"),  # A lone surrogate stands for an invalid byte.
    ({"answer": None}, "answer is null"),
    ({"answer": ""}, "answer is empty"),
    ({"answer": float("nan")}, "answer is nan"),
    ({"level": "hard"}, "level is no whole number"),
    ({"level": 1.5}, "level is no whole number"),
    ({"level": "1 or 2"}, "level is no whole number"),
    ({"level": None}, "level is null"),
    ({"level": "9" * 50}, "level is no whole number"),
    ({"level": "Level 3"}, ""),
    ({"level": -2}, ""),
    ({"id": None}, "id is null"),
    ({"answer": 0}, ""),
    ({"answer": False}, ""),
    ({"answer": ["a"]}, ""),
    ({"question": 17}, ""),
  ],
)
def test_faults(change, expected):
  assert reason(GOOD | change) == expected


def test_a_record_without_a_column():
  assert reason({"queston": "1+1?"} | {k: v for k, v in GOOD.items() if k != "question"}) == "no column 'question'"


def test_a_column_that_no_record_has():
  columns.check_columns([("f:1", GOOD | {"extra": 1})], Columns(level="level"), "f")
  endless = ((str(i), {"queston": "1+1?", "answer": "2"}) for i in itertools.count())
  with pytest.raises(ValueError, match=r"^f: found no column 'question', but queston, answer; did you mean 'queston'\?$"):
    columns.check_columns(endless, Columns(), "f")


def test_a_response_may_be_missing():
  assert columns.mapping(Columns(response="work"))(GOOD)["response"] == ""


def test_each_problem_is_kept_once():
  rows = [GOOD, GOOD | {"id": "b"}, GOOD | {"question": "2+2?"}, GOOD | {"question": "3+3?", "id": "c"}]
  tally, seen = Tally("drop"), set()
  kept = list(columns.usable_rows(enumerate_places(rows), columns.mapping(Columns(id="id")), tally, seen=seen))
  assert [row["question"] for row in kept] == ["1+1?", "3+3?"]
  assert tally.dropped == {"duplicate question": 1, "duplicate id": 1}
  assert tally.first["duplicate id"] == "f.jsonl:3: a"
  with pytest.raises(ValueError, match=r"^f.jsonl:1: duplicate id \(a\); repair the row, or set task.bad_rows to 'drop'"):
    list(columns.usable_rows(enumerate_places(rows), columns.mapping(Columns(id="id")), Tally("error"), seen=seen))


def enumerate_places(rows):
  return ((f"f.jsonl:{i}", row) for i, row in enumerate(rows, 1))


def test_a_value_that_is_nested_too_deep_is_a_bad_row():
  deep = []
  for _ in range(5000):
    deep = [deep, deep]
  tally = Tally("drop")
  records = enumerate_places([GOOD | {"table": deep}, GOOD | {"table": [[1]]}])
  rows = list(columns.usable_rows(records, columns.mapping(Columns(others=("table",))), tally, seen=set()))
  assert [row["table"] for row in rows] == ["[[1]]"] and tally.dropped == {"nested too deep": 1}


def test_a_column_within_a_column_is_found_and_hinted_at():
  records = [("f:1", {"q": "?", "reward_model": {"style": "rule", "ground_truth": "7"}})]
  columns.check_columns(records, Columns("q", "reward_model.ground_truth"), "f")
  words = "^f: found no column 'reward_model.truth', but q, reward_model.style, reward_model.ground_truth; did you mean 'reward"
  with pytest.raises(ValueError, match=words):
    columns.check_columns(records, Columns("q", "reward_model.truth"), "f")


ODD = [None, True, 7, 2**80, 0.5, float("nan"), float("-inf"), "", " ", "a", "\ud800", "[{", "[]", '{"role": 1, "content": 2}', b"\xff"]
ODD = st.sampled_from([*ODD, decimal.Decimal("sNaN"), decimal.Decimal("-0"), datetime.date.max, datetime.timedelta.min, object()])
KEYS = st.sampled_from(["role", "content", "type", "text", "label", "tool_calls", "a.b"])
ANYTHING = st.recursive(ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=5)


@settings(max_examples=100)
@given(field=st.sampled_from(["question", "answer", "level", "id", "response", "choices"]), value=ANYTHING)
def test_any_value_in_any_column_of_own_files(field, value):
  reason(GOOD | {"choices": ["a", "b"], field: value}, response="response", others=("choices",))


FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
CONVERTERS = {
  "gsm8k/train.jsonl": maths.gsm8k,
  "math/test.jsonl": maths.math,
  "math/train/algebra/1.json": maths.math,
  "dapo_math/dapo-math-17k.jsonl": maths.dapo_math,
  "dapo_math_processed/train.jsonl": maths.dapo_math,
  "aime24/train.jsonl": maths.competition,
  "aime25/aime2025-I.jsonl": columns.mapping(Columns()),
  "hmmt25/train.jsonl": maths.competition,
  "livecodebench/test.jsonl": code.livecodebench,
  "codeforces/test.jsonl": code.codeforces,
  "zebralogic/grid_mode/test.jsonl": logic.grid,
  "zebralogic/mc_mode/test.jsonl": logic.multiple_choice,
}
MATHVISION = {"id": "1", "question": "?", "options": list("ABCDE"), "decoded_image": None, "answer": "B", "level": 1, "subject": "x"}
RECORDS = {name: next(record for _, record in text_files.read_records(FIXTURES / name)) for name in CONVERTERS}
RECORDS["mathvision"], CONVERTERS["mathvision"] = MATHVISION, mathvision.mathvision
FIELDS = [(name, field) for name, record in RECORDS.items() for field in record]
SCALARS = [None, True, -1, 2**80, 1.5, float("nan"), float("inf"), "", " ", "7", "\ud800", "[]", "[1]", "{", "\\boxed{", "####", b"\xff"]
SCALARS = st.sampled_from(SCALARS)
VALUES = SCALARS | st.lists(SCALARS | st.dictionaries(st.sampled_from(["role", "input", "rows"]), SCALARS, max_size=2), max_size=2)
ABSENT = object()


@settings(max_examples=400)
@given(field=st.sampled_from(FIELDS), value=VALUES | st.just(ABSENT))
def test_any_value_in_any_field(field, value):
  name, field = field
  record = RECORDS[name] | {field: value}
  if value is ABSENT:
    del record[field]
  try:
    row = CONVERTERS[name](record)
    columns.check_row(row)
  except Unusable as error:
    assert error.reason and "\n" not in error.reason
    return
  assert row.keys() >= {"question", "answer", "level", "response", "id"} and row["question"].strip()
  assert all(isinstance(value, int if column == "level" else str) for column, value in row.items())
