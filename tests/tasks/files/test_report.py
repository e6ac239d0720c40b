"""Counts add up, and the policy "error" refuses rows that were dropped earlier."""

import pytest

from jaxrl_llm.tasks.files import report
from jaxrl_llm.tasks.files.report import OTHER_LEVEL, Report, Tally


def test_counts_by_reason_with_the_first_place():
  tally = Tally("drop")
  for line in (3, 5, 9):
    tally.bad("answer is null", f"a.jsonl:{line}", "column 'answer'")
  tally.bad("empty question", "a.jsonl:7")
  counts = report.report(tally, read=10, kept=6)
  assert counts.dropped == {"answer is null": 3, "empty question": 1}
  assert counts.first == {"answer is null": "a.jsonl:3: column 'answer'", "empty question": "a.jsonl:7"}
  assert report.in_words(counts) == "10 problems read, 6 kept; 4 dropped: 3 answer is null, 1 empty question"
  assert report.from_json(report.to_json(counts)) == counts
  both = report.merge([counts, Report(5, 4, {"empty question": 1}, {"empty question": "b.jsonl:1"})])
  assert both == Report(15, 10, {"answer is null": 3, "empty question": 2}, counts.first)


def test_a_choice_is_no_fault():
  tally = Tally("error")
  tally.bad(OTHER_LEVEL, "a.jsonl:1")
  assert tally.dropped == {OTHER_LEVEL: 1}
  report.refuse(report.report(tally, read=1, kept=0), "error")


def test_a_stricter_policy_refuses_rows_dropped_earlier():
  counts = Report(10, 9, {"answer is null": 1}, {"answer is null": "a.jsonl:3: column 'answer'"})
  report.refuse(counts, "drop")
  with pytest.raises(ValueError, match=r"^a.jsonl:3: answer is null \(column 'answer'\); repair the row"):
    report.refuse(counts, "error")
  with pytest.raises(ValueError, match="task.bad_rows: found 'no', expected one of drop, error"):
    Tally("no")
