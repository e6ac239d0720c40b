"""Drills have right answers and workings, and no problem is a reordering of another."""

import itertools
import re

import pytest

from jaxrl_llm.rewards import final_number
from jaxrl_llm.tasks.files.storage import split_of
from jaxrl_llm.tasks.sets import drills
from jaxrl_llm.text_types import Completion

KINDS = {"largest": (drills.Largest, max), "sums": (drills.Sums, sum)}


def rows_of(builder, count=200):
  """Returns the first rows of each level, without building a dataset."""
  by_level = itertools.groupby(builder._rows(builder), key=lambda row: row["level"])
  return [row for _, rows in by_level for row in itertools.islice(rows, count)]


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_right_and_responses_end_with_them(name):
  builder, solve = KINDS[name]
  rows = rows_of(builder)
  assert {row["level"] for row in rows} == set(builder.LEVELS)
  for row in rows:
    numbers = [int(x) for x in re.findall(r"\d+", row["question"])]
    assert len(numbers) == row["level"] and all(10 <= x <= 99 for x in numbers) and row["answer"] == str(solve(numbers))
    assert row["response"].startswith(" ") and final_number(Completion(row["response"], (), 9, True), row) == 1


def test_every_step_of_a_working_is_right():
  steps = [step for row in rows_of(drills.Sums) if row["level"] > 2 for step in row["response"].split(",")]
  assert len(steps) == 200 * 2 + 200 * 3
  for step in steps:
    left, right, result = map(int, re.fullmatch(r" (\d+) \+ (\d+) = (\d+)", step).groups())
    assert left + right == result


def test_a_tally_adds_digits_one_by_one():
  rows = list(drills.Tally._rows(drills.Tally))
  assert len(rows) == 2000 * len(drills.Tally.LEVELS) and {row["level"] for row in rows} == set(drills.Tally.LEVELS)
  for row in rows:
    first, *digits = map(int, re.findall(r"\d+", row["question"]))
    assert 10 <= first <= 99 and len(digits) == row["level"] and all(2 <= digit <= 9 for digit in digits)
    assert row["answer"] == str(first + sum(digits))
    assert row["response"] == " " + drills.steps([first, *digits]) and final_number(Completion(row["response"], (), 9, True), row) == 1
  keys = {tuple(sorted(re.findall(r"\d+", row["question"]))) for row in rows}
  assert len(keys) == len(rows)
  assert 0.08 < sum(split_of(row["question"]) == "test" for row in rows) / len(rows) < 0.12


def test_times():
  rows = list(drills.Times._rows(drills.Times))
  assert len(rows) == len({row["question"] for row in rows}) == 720
  assert all(int(row["answer"]) == eval(row["question"].removesuffix("=")) for row in rows)


@pytest.mark.parametrize("name", KINDS)
def test_no_problem_is_a_reordering_of_another(name):
  """Otherwise a held-out problem could be one that was trained on."""
  builder, _ = KINDS[name]
  rows = list(builder._rows(builder))
  keys = {tuple(sorted(re.findall(r"\d+", row["question"]))) for row in rows}
  assert len(keys) == len(rows) == 4000 * len(builder.LEVELS)
  share = sum(split_of(row["question"]) == "test" for row in rows) / len(rows)
  assert 0.08 < share < 0.12
