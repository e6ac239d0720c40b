"""Pass rates are counted correctly, weights follow them, and a stream resumes from its state."""

import collections
import itertools
import json

import numpy as np
import pytest

from jaxrl_llm.tasks import curriculum
from jaxrl_llm.tasks.curriculum import CurriculumStream, PassRates

ROWS = [{"question": f"{i}?", "id": f"p{i}", "level": i % 3} for i in range(60)]


def test_old_outcomes_fade():
  rates = curriculum.observe(PassRates(), ["a"] * 4, [1, 1, 1, 0], memory=0.5)
  again = curriculum.observe(rates, ["a", "b", "a"], [0, 1, float("nan")], memory=0.5)
  assert rates == PassRates({"a": 3.0}, {"a": 4.0})  # Unchanged.
  # The sample that could not be judged does not count as tried.
  assert again == PassRates({"a": 1.5, "b": 1.0}, {"a": 3.0, "b": 1.0})
  assert curriculum.pass_rate(again, "a") == (1.5 + 0.5) / 4 and curriculum.pass_rate(again, "new") == 0.5


@pytest.mark.parametrize("outcome", [-0.1, 1.5])
def test_invalid_outcomes_are_refused(outcome):
  with pytest.raises(ValueError, match="expected a number from 0 to 1"):
    curriculum.observe(PassRates(), ["a"], [outcome])
  with pytest.raises(ValueError, match="found 2 keys and 1 outcomes"):
    curriculum.observe(PassRates(), ["a", "b"], [1])


@pytest.mark.parametrize("group_size", [1, 2, 8])
def test_the_signal_is_the_probability_of_a_mixed_group(group_size, rng):
  for rate in (0.0, 0.1, 0.5, 1.0):
    counts = (rng.random((40_000, group_size)) < rate).sum(axis=1)
    assert abs(np.mean((counts > 0) & (counts < group_size)) - curriculum.signal(rate, group_size=group_size)) < 0.01


def test_problems_with_one_question_have_rates_of_their_own():
  shared = [{"question": "Which?", "prompt": f"Which? {i}"} for i in range(4)]
  rows = [*shared, *({"question": f"{i}?", "prompt": f"{i}?"} for i in range(4))]
  stream = CurriculumStream(rows, batch_size=2, seed=0)
  stream.observe([rows[0], rows[4]], [1.0, 1.0])
  assert len(stream.weights()) == 8 and sum(stream.weights() < 1.0) >= 2
  # The keys of other problems are those of their questions, as in runs that began earlier.
  assert {curriculum.key_of(row, "problem") for row in rows[4:]} <= {str(name) for name in stream._names}
  assert curriculum.key_of(rows[4], "problem") in stream.rates.tried and curriculum.key_of(rows[0], "problem") not in stream.rates.tried


def test_problems_that_are_always_or_never_right_are_drawn_less():
  stream = CurriculumStream(ROWS, batch_size=12, seed=0, by="level", group_size=2, floor=0.05)
  before = collections.Counter(row["level"] for batch in itertools.islice(stream, 50) for row in batch)
  assert max(before.values()) - min(before.values()) < 120
  for _ in range(5):
    stream.observe(ROWS, [(1, 0, i // 3 % 2)[row["level"]] for i, row in enumerate(ROWS)])
  after = collections.Counter(row["level"] for batch in itertools.islice(stream, 50) for row in batch)
  assert after[2] > 2.5 * max(after[0], after[1]) and min(after.values()) > 20
  for _ in range(30):
    stream.observe(ROWS, [0] * len(ROWS))
  assert np.allclose(stream.weights() * 20, 0.05)  # Never zero.


def test_a_batch_has_no_problem_twice_and_all_problems_occur():
  stream = CurriculumStream(ROWS, batch_size=20, seed=3)
  batches = list(itertools.islice(stream, 20))
  assert all(len({row["id"] for row in batch}) == 20 for batch in batches)
  assert {row["id"] for batch in batches for row in batch} == {row["id"] for row in ROWS}
  assert CurriculumStream(ROWS, batch_size=60, seed=3).__next__() != ROWS


def test_a_level_counts_by_its_rate_and_not_by_its_size():
  rows = [{"question": str(i), "level": int(i >= 90)} for i in range(100)]
  stream = CurriculumStream(rows, batch_size=2, seed=1, by="level")
  counts = collections.Counter(row["level"] for batch in itertools.islice(stream, 300) for row in batch)
  assert 0.4 < counts[1] / 600 < 0.6


def test_a_stream_resumes_from_its_state():
  def run(stream, start, steps):
    seen = []
    for step in range(start, start + steps):
      batch = next(stream)
      stream.observe(batch, [(int(row["id"][1:]) + step) % 2 for row in batch])
      seen.append([row["id"] for row in batch])
    return seen

  make = lambda: CurriculumStream(ROWS, batch_size=8, seed=5, group_size=4)
  whole, stream = run(make(), 0, 12), make()
  run(stream, 0, 7)
  resumed = make()
  resumed.set_state(json.loads(json.dumps(stream.get_state())))
  assert run(resumed, 7, 5) == whole[7:] and resumed.get_state()["step"] == 12


def test_invalid_arguments_are_refused():
  with pytest.raises(ValueError, match="found batches of 61 from 60 rows"):
    CurriculumStream(ROWS, batch_size=61, seed=0)
  with pytest.raises(ValueError, match="task.curriculum: found 'lvl', expected 'problem' or a column of the rows: id, level, question"):
    CurriculumStream(ROWS, batch_size=6, seed=0, by="lvl")
  assert curriculum.key_of({"question": "x", "id": ""}, "problem") == curriculum.key_of({"question": "x", "id": ""}, "problem") != "x"
