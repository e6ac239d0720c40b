"""Table of a sweep: live on a terminal, one line per event elsewhere, and plain text at the end."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.launch.rows import value_text, varying
from experiments.launch.status import FAILED, FINISHED, RUNNING, STOPPED, Status
from experiments.launch.trial import Trial

_STYLES = {FINISHED: "green", FAILED: "red", STOPPED: "yellow", RUNNING: "cyan"}
_LONGEST = 120  # Characters of an error; summary.csv and the log have all of them.
_EVERY = 60.0  # Seconds between lines of progress if there is no terminal.


def cells(trials: Sequence[Trial], statuses: Sequence[Status]) -> tuple[list[str], list[list[str]]]:
  """Returns the header and the rows, as text."""
  fields = varying([trial.row for trial in trials])
  short = _short(fields)
  header = ["id", *short, "state", "step", "accuracy", "wall time", "attempts", ""]
  rows = []
  for trial, at in zip(trials, statuses, strict=True):
    settings = [value_text(trial.row.overrides[field]) if field in trial.row.overrides else "" for field in fields]
    steps = f"{at.step}/{at.num_steps}" if at.num_steps is not None else "" if not at.attempts else str(at.step)
    start, end = ("-" if x is None else f"{x:.1%}" for x in (at.accuracy_start, at.accuracy))
    accuracy = "" if at.accuracy_start is None and at.accuracy is None else f"{start} -> {end}"
    why = at.error if len(at.error) <= _LONGEST else f"{at.error[: _LONGEST - 4]} ..."
    rows.append([trial.row.id, *settings, at.state, steps, accuracy, clock(at.seconds), str(at.attempts or ""), why])
  return header, rows


def _short(fields: Sequence[str]) -> list[str]:
  """Returns the last parts of the fields' names where these are unambiguous."""
  last = [field.rsplit(".", 1)[-1] for field in fields]
  return [name if last.count(name) == 1 else field for name, field in zip(last, fields, strict=True)]


def clock(seconds: float) -> str:
  """Formats a duration as minutes and seconds, or with hours.

  Example:
    >>> clock(75), clock(7325)
    ('1:15', '2:02:05')
  """
  if not seconds:
    return ""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def text(trials: Sequence[Trial], statuses: Sequence[Status]) -> str:
  """Formats the table as aligned text."""
  header, rows = cells(trials, statuses)
  widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
  lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]]
  return "\n".join([lines[0], "  ".join("-" * width for width in widths if width), *lines[1:]])


def counts(statuses: Sequence[Status]) -> str:
  """Counts the trials by state, as in "6 finished, 1 failed, 1 stopped"."""
  states = [at.state for at in statuses]
  order = dict.fromkeys(state for state in (FINISHED, RUNNING, FAILED, STOPPED, *states) if state in states)
  return ", ".join(f"{states.count(state)} {state}" for state in order)


@contextlib.contextmanager
def live(look: Callable[[], tuple[Sequence[Trial], Sequence[Status]]]) -> Iterator[Callable[[str], Any]]:
  """Shows the table while trials run.

  Args:
    look: Function that returns the trials and statuses to show, called about once a second.

  Yields:
    A function to call often, with a description of what has happened since ("" for nothing).
  """
  if sys.stdout.isatty():
    from rich.live import Live

    shown_at = [0.0]
    with Live(drawn(*look()), refresh_per_second=2, transient=True) as screen:

      def refresh(event: str) -> None:
        if event or time.monotonic() - shown_at[0] > 1:
          shown_at[0] = time.monotonic()
          screen.update(drawn(*look()))

      yield refresh
    return
  told_at = [time.monotonic()]

  def tell(event: str) -> None:
    if event:
      print(event, flush=True)
    if time.monotonic() - told_at[0] > _EVERY:
      told_at[0] = time.monotonic()
      trials, statuses = look()
      steps = [f"{trial.row.id} step {at.step}/{at.num_steps or '?'}" for trial, at in zip(trials, statuses) if at.state == RUNNING]
      print(f"{counts(statuses)} | {', '.join(steps)}", flush=True)

  yield tell


def drawn(trials: Sequence[Trial], statuses: Sequence[Status]) -> Any:
  """Draws the table with rich."""
  from rich.table import Table
  from rich.text import Text

  header, rows = cells(trials, statuses)
  table = Table(title=counts(statuses), title_justify="left", box=None, pad_edge=False)
  for name in header:
    table.add_column(name)
  for row, at in zip(rows, statuses, strict=True):
    # Plain text and never markup, because an error may contain brackets.
    table.add_row(*(Text(cell, style=_STYLES.get(at.state, "")) for cell in row))
  return table
