"""Outputs and returned values against the expected ones: tables, and generated answers."""

import math
import random
import string
from fractions import Fraction

import pytest

from jaxrl_llm.rewards.sandbox.comparison import same_output, same_value


@pytest.mark.parametrize(
  ("number", "expected", "same"),
  [
    (1, 1.0, True), (1.0, 1, True), (-0.0, 0, True),
    # A float is expected.
    (0.1 + 0.2, 0.3, True), (0.3001, 0.3, False), (0.333333, 0.333333333333, True), (0.33333, 0.333333333333, False),
    (-0.333333, 0.333333333333, False), (1e-7, 0.0, True), (1e-5, 0.0, False), (123456789.5, 123456790.25, True),
    (123456789.5, 123457000.25, False), (1000001, 1000001.5, True), (1000001, 1000002.0, False), (1000001.0, 1000002.0, False),
    (math.nextafter(1e20, 2e20), 1e20, True),
    (math.nan, math.nan, True), (math.nan, 0.4, False), (math.inf, -math.inf, False), (math.inf, 1.5e308, False),
    # An integer is expected.
    (2.9999999996, 3, True), (2.9999, 3, False), (1000000.5, 1000001, False), (1000001, 1000002, False),
    (10**20 + 1, 10**20, False), (1e17, 10**17 + 1, False), (1e19, 10**19 + 1, False), (1e20, 10**20 + 1, False), (1e20, 10**20, True),
  ],
)  # fmt: skip
def test_numbers_agree_as_words_and_as_values_alike(number, expected, same):
  assert same_output(str(number), str(expected)) is same_value(number, expected) is same


@pytest.mark.parametrize(
  ("output", "expected", "same"),
  [
    ("3\n", "3", True),
    ("3", "3\n\n", True),
    ("\n3\n", "3", True),
    (" 1   2 \n 3", "1 2\n3", True),
    ("1\r\n2\r\n", "1\n2", True),
    ("1 2 3", "1 2\n3", False),
    ("12", "1 2", False),
    ("", "0", False),
    ("", "", True),
    ("3\nALL TESTS PASSED", "3", False),
    ("1\n\n2", "1\n2", False),
    # Exact decimals.
    ("2.50", "2.5", True),
    ("1e-07", "0.0000001", True),
    ("1E5", "100000", True),
    (".5 5.", "0.5 5", True),
    ("+3 -0 -0.0", "3 0 0", True),
    ("007", "7", True),
    ("7", "007", False),
    ("0010", "10 ", True),
    ("10", "0010", False),
    # An integer is expected.
    ("9007199254740993.5", "9007199254740993", False),
    ("1" * 5000, "1" * 4999 + "2", False),
    ("1" * 5000 + ".0", "1" * 5000, True),
    # Several words, also in brackets.
    ("YES 0.333333\n2.0 x", "YES 0.33333333\n2 x", True),
    ("[0.333333, 2.50, 'a']", "[0.3333333333, 2.5, 'a']", True),
    ("(1.0,{2})", "(1,{2})", True),
    ("[1,2]", "[1, 2]", False),
    ("[1, 2", "[1, 2]", False),
    # Other words.
    ("nan", "NaN", True),
    ("inf", "Infinity", True),
    ("true", "True", False),
    ("True", "1", False),
    ("v1.10", "v1.1", False),
    ("1_0", "10", False),
    ("\u0661", "1", False),
    ("0x10", "16", False),
    ("1e99999999999999999999", "2", False),
    ("1e99999999999999999999", "1e99999999999999999999", True),
    ("1e999999999", "1.0", False),
    ("1e-999999999", "0.5", False),
  ],
)
def test_outputs(output, expected, same):
  assert same_output(output, expected) is same


def test_a_problem_may_have_a_tolerance_of_its_own():
  assert same_output("0.33333 7", "0.33334 7", tolerance=1e-4)
  assert not same_output("0.3 7", "0.4 7", tolerance=1e-4)
  assert not same_output("0.3333333", "0.33333333", tolerance=0) and same_output("0.30", "0.3", tolerance=0)
  assert same_value([1.01], [1.0], tolerance=0.1) and not same_value(1.0 + 1e-9, 1.0, tolerance=0)
  assert not same_output("7", "8", tolerance=1.0) and not same_value(7, 8, tolerance=2)


@pytest.mark.parametrize(
  ("value", "expected", "same"),
  [
    ([1, (2, 3)], (1, [2, 3]), True),
    ([1, 2], [1, 2, 3], False),
    (True, 1, False),
    (1, True, False),
    (1.0, True, False),
    ([0.333333], [0.3333333333], True),
    ([[(0.333333, 1)]], [[[0.3333333333, 1]]], True),
    ({"a": (0.333333,)}, {"a": [0.3333333333]}, True),
    ([0.333333, 1], [0.3333333333, 2], False),
    (math.inf, math.inf, True),
    (10**400, 1.0, False),
    (-(10**400), math.inf, False),
    (10**400, 10**400, True),
    ("1", 1, False),
    ("1.0", "1", False),
    (1.5, "1.5", False),
    ({"a": (1,)}, {"a": [1]}, True),
    ({"a": 1, "b": 2}, {"a": 1}, False),
    ({1: 2}, {"1": 2}, False),
    (None, None, True),
    (None, [], False),
    (None, 0, False),
    ({1, 2}, [1, 2], False),
    ("ab", ["a", "b"], False),
  ],
)
def test_values(value, expected, same):
  assert same_value(value, expected) is same


# A writer of answers, which works on fractions and shares nothing with the comparison.


def written(number: Fraction, digits: int, rng) -> str:
  """Returns a decimal with so many digits behind the point, in one of several spellings."""
  scaled = round(number * 10**digits)
  text = str(abs(scaled)).rjust(digits + 1, "0")
  text = f"{text[: len(text) - digits]}.{text[len(text) - digits :]}"
  sign = "-" if scaled < 0 else rng.choice(["", "", "+"])
  return sign + rng.choice(
    [text, text + "0" * rng.randrange(3), f"{text}e0", f"{scaled if scaled >= 0 else -scaled}e-{digits}"]
  )


def answer(rng):
  """Returns an expected answer, a right one and a wrong one; each is text and value."""
  kind = rng.choice(["integer", "long", "float", "large", "word"])
  if kind == "word":
    word = "".join(rng.choices(string.ascii_letters, k=rng.randrange(4, 9)))
    other = word.swapcase() if rng.random() < 0.5 else word + rng.choice("sx1")
    return (word, word), (word, word), (other, other)
  if kind in ("integer", "long"):
    number = rng.randrange(-(10**7), 10**7) if kind == "integer" else rng.randrange(10**17, 10**24)
    wrong = number + rng.choice([-10, -2, -1, 1, 2, 10])
    right = rng.choice([(str(number), number), (f"{number}.0", number), (f"{number}e0", number)])
    return (str(number), number), right, rng.choice([(str(wrong), wrong), (f"{wrong}.0", wrong)])
  number = Fraction(rng.randrange(-(10**12), 10**12), rng.randrange(1, 10**6)) / (
    1 if kind == "large" else 10**6
  )
  if number.denominator == 1:
    number += Fraction(1, 3)
  scale = max(1, abs(number))
  errors = [Fraction(rng.randrange(*limits), 10**9) for limits in ((0, 900), (1200, 10**9))]
  right, wrong = (number + rng.choice([-1, 1]) * scale * error for error in errors)
  return tuple((written(each, 14, rng), float(each)) for each in (number, right, wrong))


def generated_mistakes(count):
  rng, refused, accepted = random.Random(1), [], []
  for _ in range(count):
    rows = [[answer(rng) for _ in range(rng.randrange(1, 5))] for _ in range(rng.randrange(1, 4))]
    worst = rng.choice(rng.choice(rows))
    text = lambda choose, gap=" ", rows=rows: "\n".join(
      gap.join(choose(cell)[0] for cell in row) for row in rows
    )
    value = lambda choose, kind, rows=rows: kind(kind(choose(cell)[1] for cell in row) for row in rows)
    right, wrong = (lambda cell: cell[1]), (lambda cell, worst=worst: cell[2 if cell is worst else 1])
    expected, expected_value = text(lambda cell: cell[0]), value(lambda cell: cell[0], list)
    ours = [
      text(right, rng.choice([" ", "  "])) + rng.choice(["", "\n", " \n\n"]),
      value(right, rng.choice([list, tuple])),
    ]
    theirs = [text(wrong), value(wrong, list)]
    refused += [ours[0]] * (not same_output(ours[0], expected)) + [ours[1]] * (
      not same_value(ours[1], expected_value)
    )
    accepted += [theirs[0]] * same_output(theirs[0], expected) + [theirs[1]] * same_value(
      theirs[1], expected_value
    )
  return refused, accepted


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_generated_answers(count):
  refused, accepted = generated_mistakes(count)
  assert not refused, (len(refused), refused[0])
  assert not accepted, (len(accepted), accepted[0])
