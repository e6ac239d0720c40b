"""Every value of a column has one text, or a reason why it has none."""

import datetime
import decimal
import math
import random
import struct

import pytest

from jaxrl_llm.tasks.files import values
from jaxrl_llm.tasks.files.values import Unusable

D = decimal.Decimal


@pytest.mark.parametrize(
  ("value", "expected"),
  [
    (D("12.50"), "12.50"), (D("1E+3"), "1000"), (D("-0.10"), "-0.10"), (D("1E-10"), "0.0000000001"),
    (1e-7, "0.0000001"), (1.5e300, "15" + "0" * 299), (-2.5e-5, "-0.000025"), (1e22, "1" + "0" * 22), (7.0, "7"), (0.1, "0.1"),
    (2**64 - 1, "18446744073709551615"), (True, "true"), (b"\xc3\xa4", "ä"),
    (datetime.date(2026, 3, 1), "2026-03-01"), (datetime.datetime(2026, 3, 1, 12, 30), "2026-03-01T12:30:00"),
    (datetime.time(9, 5), "09:05:00"), (datetime.timedelta(seconds=90), "0:01:30"),
    (["2"], "2"), ([[D("0.5")]], "0.5"), ("12.50", "12.50"), (' "went" ', ' "went" '),
  ],
)  # fmt: skip
def test_text(value, expected):
  assert values.text({"a": value}, "a") == expected


def test_a_float_is_the_shortest_decimal_that_is_the_same_float():
  pick = random.Random(0)
  for _ in range(2000):
    (value,) = struct.unpack("<d", pick.randbytes(8))
    if math.isfinite(value):
      written = values.text({"a": value}, "a")
      assert "e" not in written.lower() and float(written) == value


@pytest.mark.parametrize(
  ("value", "reason"),
  [
    (["1", "2"], "a is a list of several"), ([], "a is empty"), ([None], "a is null"), ([[]], "a is empty"), ({}, "a is an object"),
    ({"ground_truth": 1}, "a is an object"), ([{"x": 1}], "a is an object"), (float("inf"), "a is inf"), (D("NaN"), "a is nan"),
    ("NaN", "a is nan"), (" ", "a is empty"), (None, "a is null"),
  ],
)  # fmt: skip
def test_reasons(value, reason):
  with pytest.raises(Unusable) as caught:
    values.text({"a": value}, "a")
  assert caught.value.reason == reason


def test_dots_go_into_objects_lists_and_json_text():
  record = {"m": {"truth": {"value": 7}, "none": None}, "c": ["x", {"y": "z"}], "j": '{"answer": "4"}', "m.x": "own"}
  read = {name: values.find(record, name) for name in ("m.truth.value", "m.none", "m.none.deeper", "c.0", "c.1.y", "j.answer", "m.x")}
  assert list(read.values()) == [7, None, None, "x", "z", "4", "own"]
  for name in ("m.y", "c.2", "c.-1", "c.y", "j.x", "m.truth.value.0", ""):
    with pytest.raises(KeyError):
      values.find(record, name)
  with pytest.raises(Unusable, match="did you mean 'm.truth.value'"):
    values.text(record, "m.truth.valu")


@pytest.mark.parametrize(
  "value", [["red", "blue"], {"text": ["red", "blue"], "label": ["A", "B"]}, {"A": "red", "B": "blue"}, ("red", "blue")]
)
def test_options_have_letters(value):
  assert values.shown({"choices": value}, "choices") == "(A) red\n(B) blue"
  assert values.shown({"x": {"options": value}}, "x.options") == "(A) red\n(B) blue"


def test_other_lists_and_objects_are_shown_as_json():
  table = [{"price": D("12.50"), "day": datetime.date(2026, 3, 1), "rate": 1e-7, "ä": None}]
  assert values.shown({"table": table}, "table") == '[{"price": 12.50, "day": "2026-03-01", "rate": 0.0000001, "ä": null}]'
  assert values.shown({"choices": [["a"], ["b"]]}, "choices") == '[["a"], ["b"]]'
  assert values.shown({"hint": None}, "hint") == ""
