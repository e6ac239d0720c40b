"""Rows of results of the first hour, and their page."""

import json
import pathlib
from typing import Any, NamedTuple


class Row(NamedTuple):
  """One figure.

  Attributes:
    what: Description of the figure.
    value: Value with its unit, as text.
    expected: Goal or tolerance, as text; empty for figures without one.
    is_good: Whether the figure reaches it; None for figures without one.
  """

  what: str
  value: str
  expected: str = ""
  is_good: bool | None = None


class Result(NamedTuple):
  """Result of one part.

  Attributes:
    name: Name of the part.
    title: Description of the part.
    rows: Figures, in order.
    seconds: Time of the part in seconds.
    error: Why the part did not finish; empty if it did.
  """

  name: str
  title: str
  rows: list[Row]
  seconds: float
  error: str = ""


def at_most(what: str, value: float, limit: float) -> Row:
  """Makes the row of an error that has a tolerance.

  Example:
    >>> at_most("loss", 2e-6, 1e-5)
    Row(what='loss', value='2e-06', expected='at most 1e-05', is_good=True)
  """
  return Row(what, f"{value:.1g}", f"at most {limit:g}", bool(value <= limit))


def share(what: str, value: float, goal: float | None) -> Row:
  """Makes the row of a share of a peak, with a goal only where there is one.

  Example:
    >>> share("bandwidth", 0.5, 0.7)
    Row(what='bandwidth', value='50.0%', expected='at least 70%', is_good=False)
  """
  return Row(what, f"{value:.1%}", f"at least {goal:.0%}" if goal else "", bool(value >= goal) if goal else None)


def save(path: pathlib.Path, rows: list[Row]) -> None:
  """Writes the rows of a part."""
  path.write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n")


def read(path: pathlib.Path) -> list[Row]:
  """Reads the rows of a part; none if it wrote none."""
  return [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []


def page(results: list[Result], *, device: str, command: str, date: str) -> str:
  """Formats all results as one page of Markdown.

  Args:
    results: Results of the parts, in order.
    device: Name of the device.
    command: Command that made them.
    date: Day on which they were made.
  """
  verdict = {True: "yes", False: "**no**", None: ""}
  every = [row for result in results for row in result.rows]
  missed = sum(row.is_good is False for row in every)
  failed = [result.name for result in results if result.error]
  lines = [
    f"# First hour on {device}",
    "",
    f"{date}, {sum(result.seconds for result in results) / 60:.1f} minutes, `{command}`",
    "",
    f"{sum(row.is_good is True for row in every)} figures as expected, {missed} not"
    + (f"; parts without a result: {', '.join(failed)}" if failed else ""),
  ]
  for result in results:
    lines += ["", f"## {result.title} ({result.seconds:.0f} s)", ""]
    if result.rows:
      lines += ["| figure | value | expected | reached |", "| --- | --- | --- | --- |"]
      lines += [f"| {_cell(row.what)} | {_cell(row.value)} | {_cell(row.expected)} | {verdict[row.is_good]} |" for row in result.rows]
    if result.error:
      lines += ["", f"**{result.error}**"]
  return "\n".join(lines) + "\n"


def _cell(text: Any) -> str:
  return str(text).replace("|", "\\|").replace("\n", " ")
