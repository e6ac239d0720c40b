"""Plain numbers are compared exactly, without an algebra system."""

import pytest

from jaxrl_llm.rewards.plain_numbers import answer_key, plain_verdict


@pytest.mark.parametrize("gold, answer, expected", [
  ("5", "5", True), ("5", "6", False), ("1000", "1,000", True), ("0.5", "1/2", True),
  ("0.5", r"\frac{1}{2}", True), (".5", "0.50", True),
  ("-5", "5", False), ("-0", "0", True), ("007", "7", True), ("7", "7.0", True), ("1/3", "0.5", False),
  ("9" * 200, "9" * 200, True),
  ("9" * 200, "9" * 199 + "8", False), ("x_1 + 2", "x_1 + 2", True),
  # A space may separate two numbers or the thousands of one.
  ("32, 349", "32,349", None),
  # Left to the algebra system: units, percent, decimal commas, answers without numbers, and division
  # by zero.
  ("5", "5 cm", None), ("5", "x=5", None), ("50", "50%", None), ("1,22", "1.22", None),
  ("0,111", "0.111", None), ("Evelyn", "Evelyn", None), ("1", "1/0", None), ("1/0", "2/0", None),
  ("", "", None), ("5", "", None),
  ("5", "1e5", None), ("5", "0x5", None), ("5", "1_0", None), ("5", "\u0665", None),
  ("0." + "1" * 30, "0." + "1" * 29 + "2", False),
])  # fmt: skip
def test_verdicts(gold, answer, expected):
  assert plain_verdict(gold, answer) is expected


def test_keys_of_votes():
  assert answer_key("0.5") == answer_key("1/2") == answer_key(r"\dfrac{2}{4}") == "1/2"
  assert answer_key("1,000") == answer_key("1000.0") == "1000" != answer_key("1001")
  assert answer_key("x=1") == "x=1" and answer_key("1/0") == "1/0"


@pytest.mark.parametrize("left, right, expected", [
  ("0.333333", "1/3", True), ("1/3", "0.33333333333333333333", True), ("33.333333", "100/3", True),
  ("0.1428571", "1/7", True),
  ("0.666667", "2/3", True), ("11.180340", "1118034/100000", True), ("0.500000", "50000001/100000000", True),
  # Too few places or digits, or one of them wrong.
  ("0.3333", "1/3", False), ("33.3333", "100/3", False), ("0.666666", "2/3", False),
  ("0.3333334", "1/3", False), ("0.9999999", "1", False),
  ("0.000333", "1/3000", False), ("0.033333", "1/30", False), ("0.00000003", "1/30000000", False),
  ("0.5", "50000001/100000000", False),
  ("0.0000000", "1/100000000", False),
  # Two decimals, or two other numbers.
  ("0.333333", "0.3333333", False), ("0.0000001", "0.0000002", False), ("0.30", "0.3", True),
  ("10^{-20}", r"2 \cdot 10^{-20}", False),
  ("10^{-20}", "0", False), ("1" + "0" * 30 + "1", "10^{31}", False), ("10^{9}", "1000000000", True),
  (r"-45 \cdot 10^{-4}", "-0.0045", True),
  ("355/113", "3.14159292", True), ("355/113", "3.14159265", False),
  ("123456789012345678901/3", "41152263004115226300.333333", True),
  ("123456789012345678901/3", "41152263004115226300.333334", False),
])  # fmt: skip
def test_decimals_against_exact_values(left, right, expected):
  assert plain_verdict(left, right) is plain_verdict(right, left) is expected
