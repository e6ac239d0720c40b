"""Counts of problems read, kept and dropped, with reasons, for the summary of a run."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

POLICIES = ("drop", "error")

OTHER_LEVEL = "level not in task.levels"
OTHER_DATE = "outside task.after and task.before"
CHOSEN = (OTHER_LEVEL, OTHER_DATE)
"""Reasons that are the user's choice and not a fault, so that no policy rejects them."""

CAREFUL = "careful: "
"""Beginning of a line on what looks wrong, although it prevents no run."""


class Report(NamedTuple):
  """Counts of the rows of a dataset.

  Attributes:
    read: Number of rows read.
    kept: Number of rows in the train and test splits together.
    dropped: Number of rows left out, by reason.
    first: First occurrence of each reason: the place, such as "data.jsonl:12", and its content.
    columns: The columns that were read, in words; "" if they are those of a published set.
    doubts: What looks wrong although every row can be used.
  """

  read: int = 0
  kept: int = 0
  dropped: Mapping[str, int] = {}
  first: Mapping[str, str] = {}
  columns: str = ""
  doubts: tuple[str, ...] = ()


class Tally:
  """A counter of bad rows while a dataset is read, which can also reject the first one.

  Args:
    policy: Treatment of a bad row: "drop" counts it and continues; "error" raises.

  Example:
    >>> tally = Tally("drop")
    >>> tally.bad("answer is null", "data.jsonl:3", "column 'answer'")
    >>> report(tally, read=10, kept=9)
    Report(read=10, kept=9, dropped={'answer is null': 1},
           first={'answer is null': "data.jsonl:3: column 'answer'"}, columns='', doubts=())
    >>> Tally("error").bad("answer is null", "data.jsonl:3", "column 'answer'")
    Traceback (most recent call last):
    ...
    ValueError: data.jsonl:3: answer is null (column 'answer'); repair the row, or set
      task.bad_rows to 'drop' to leave such rows out
  """

  def __init__(self, policy: str = "drop"):
    check_policy(policy)
    self.policy = policy
    self.dropped: dict[str, int] = {}
    self.first: dict[str, str] = {}

  def bad(self, reason: str, place: str, detail: str = "") -> None:
    """Counts a row that cannot be used.

    Args:
      reason: Fixed text for each kind of fault, since rows are counted by it.
      place: File and line of the row.
      detail: Offending content of this row.

    Raises:
      ValueError: If the policy is "error" and the reason is not one of `CHOSEN`.
    """
    if self.policy == "error" and reason not in CHOSEN:
      raise refusal(reason, place, detail)
    self.dropped[reason] = self.dropped.get(reason, 0) + 1
    self.first.setdefault(reason, f"{place}: {detail}" if detail else place)


def report(tally: Tally, *, read: int, kept: int) -> Report:
  """Returns a tally's counts, with the totals."""
  return Report(read, kept, dict(tally.dropped), dict(tally.first))


def merge(reports: Iterable[Report]) -> Report:
  """Returns the sum of several reports; each reason keeps its first place."""
  total = Report()
  for one in reports:
    dropped = {reason: total.dropped.get(reason, 0) + one.dropped.get(reason, 0) for reason in {**total.dropped, **one.dropped}}
    words = total.columns or one.columns, (*total.doubts, *one.doubts)
    total = Report(total.read + one.read, total.kept + one.kept, dropped, {**one.first, **total.first}, *words)
  return total


def to_json(counts: Report) -> dict[str, Any]:
  """Converts a report to plain values, for `summary.json`."""
  return counts._asdict() | {"doubts": list(counts.doubts)}


def from_json(values: Mapping[str, Any]) -> Report:
  """Restores a report from the values of `to_json`."""
  words = values.get("columns", ""), tuple(values.get("doubts", ()))
  return Report(int(values["read"]), int(values["kept"]), dict(values["dropped"]), dict(values["first"]), *words)


def in_words(counts: Report) -> str:
  """Returns a report as one line of text, the most frequent reason first.

  Example:
    >>> in_words(Report(read=10, kept=7, dropped={"empty question": 1, "answer is null": 2}))
    '10 problems read, 7 kept; 3 dropped: 2 answer is null, 1 empty question'
  """
  line = f"{counts.read} problems read, {counts.kept} kept"
  if not counts.dropped:
    return line
  reasons = sorted(counts.dropped.items(), key=lambda item: -item[1])
  return f"{line}; {sum(counts.dropped.values())} dropped: " + ", ".join(
    f"{count} {reason}" for reason, count in reasons
  )


def lines(counts: Report) -> list[str]:
  """Returns a report as lines: counts, first bad rows, columns and what looks wrong."""
  bad = sum(count for reason, count in counts.dropped.items() if reason not in CHOSEN)
  doubts = [*([f"{bad} of {counts.read} rows are left out"] if bad else []), *counts.doubts]
  first = [f"  {reason}: {place}" for reason, place in counts.first.items() if reason not in CHOSEN]
  return [f"data: {in_words(counts)}", *first, *filter(None, [counts.columns]), *(CAREFUL + doubt for doubt in doubts)]


def check_policy(policy: str) -> None:
  """Raises a ValueError if the policy is neither "drop" nor "error"."""
  if policy not in POLICIES:
    raise ValueError(f"task.bad_rows: found {policy!r}, expected one of {', '.join(POLICIES)}")


def refuse(counts: Report, policy: str) -> None:
  """Raises a ValueError if the policy is "error" and a dataset read earlier dropped bad rows."""
  faults = [reason for reason in counts.dropped if reason not in CHOSEN]
  if policy == "error" and faults:
    raise refusal(faults[0], *counts.first[faults[0]].partition(": ")[::2])


def refusal(reason: str, place: str, detail: str) -> ValueError:
  """Returns the error for a bad row."""
  context = f" ({detail})" if detail else ""
  return ValueError(
    f"{place}: {reason}{context}; repair the row, or set task.bad_rows to 'drop' to leave such rows out"
  )
