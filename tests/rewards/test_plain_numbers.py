"""Verdicts without an algebra system, and their agreement with those of one."""

import random
from fractions import Fraction

import pytest

from jaxrl_llm.rewards.notation import unified
from jaxrl_llm.rewards.plain_numbers import answer_key, plain_verdict


@pytest.mark.parametrize("gold, answer, expected", [
  ("5", "5", True), ("5", "6", False), ("1000", "1,000", True), ("0.5", "1/2", True), ("0.5", r"\frac{1}{2}", True), (".5", "0.50", True),
  ("-5", "5", False), ("-0", "0", True), ("007", "7", True), ("7", "7.0", True), ("1/3", "0.5", False), ("9" * 200, "9" * 200, True),
  ("9" * 200, "9" * 199 + "8", False), ("x_1 + 2", "x_1 + 2", True),
  # A space may separate two numbers or the thousands of one.
  ("32, 349", "32,349", None),
  # Left to the algebra system: rounding, units, percent, decimal commas, answers without numbers,
  # and division by zero.
  ("1/3", "0.333333", None), ("1", "0.9999999", None), ("5", "5 cm", None), ("5", "x=5", None), ("50", "50%", None), ("1,22", "1.22", None),
  ("0,111", "0.111", None), ("Evelyn", "Evelyn", None), ("1", "1/0", None), ("1/0", "2/0", None), ("", "", None), ("5", "", None),
  ("5", "1e5", None), ("5", "0x5", None), ("5", "1_0", None), ("5", "\u0665", None), ("0." + "1" * 30, "0." + "1" * 29 + "2", None),
])  # fmt: skip
def test_verdicts(gold, answer, expected):
  assert plain_verdict(gold, answer) is expected


@pytest.mark.parametrize("text, expected", [
  ("\u22125", "-5"), ("\u20135", "-5"), ("\uff11\uff12", "12"), ("\U0001d7d3", "5"), ("1\u2009000\u00a0000", "1000000"), ("5\u200b", "5"),
  ("x\u00b2", "x^{2}"), ("\u00bd", r"\frac{1}{2}"), ("3\u03c0", "3\\pi"), ("\u221a2", r"\sqrt{2}"), ("\u221a(x+1)", r"\sqrt{x+1}"),
  ("a \n\t b", "a b"), ("1 000", "1000"), ("1 000.5", "1 000.5"), ("1 00", "1 00"), ("2x 100 200", "2x 100200"), ("\u0435", "\u0435"),
])  # fmt: skip
def test_one_spelling(text, expected):
  assert unified(text) == expected


def test_keys_of_votes():
  assert answer_key("0.5") == answer_key("1/2") == answer_key(r"\dfrac{2}{4}") == "1/2"
  assert answer_key("1,000") == answer_key("1000.0") == "1000" != answer_key("1001")
  assert answer_key("x=1") == "x=1" and answer_key("1/0") == "1/0"


def numbers(rng):
  """Returns a number, and another spelling of it or of a number that may be close to it."""
  value = Fraction(rng.choice([rng.randint(0, 20), rng.randint(0, 10**6), rng.randint(0, 10**12)]), rng.choice([1, 1, 2, 4, 5, 3, 7]))
  value *= rng.choice([1, 1, -1])

  def spelt(x):
    ways = [str(x), f"{float(x):.{rng.randint(1, 7)}f}", f"\\frac{{{x.numerator}}}{{{x.denominator}}}", f"{round(float(x)):,}"]
    return rng.choice(ways)

  return spelt(value), spelt(value + rng.choice([0, 0, 0, 1, -1, Fraction(1, 1000), Fraction(1, 10**6), Fraction(1, 10**8)]))


def test_the_verdicts_are_math_verifys():
  math_verify = pytest.importorskip("math_verify")
  targets = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]
  parse = lambda text: math_verify.parse(f"\\boxed{{{text}}}", targets)
  rng, settled = random.Random(0), []
  while len(settled) < 120:
    gold, answer = numbers(rng)
    verdict = plain_verdict(unified(gold), unified(answer))
    if verdict is not None:
      assert math_verify.verify(parse(gold), parse(answer)) == verdict, (gold, answer)
      settled.append(verdict)
  assert 20 < sum(settled) < 100
