"""Sweep on this machine, from its first trial to its report: processes, screen and folder."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.launch import local, rows, status, table
from experiments.launch.status import FAILED, FINISHED, STOPPED, WAITING, Status
from experiments.launch.trial import Trial
from jaxrl_llm.report import comparison


def run(request: Any, trials: Sequence[Trial]) -> int:
  """Runs the trials that are not finished, and reports on all of them at the end.

  Args:
    request: Request of the user.
    trials: Trials of the sweep.

  Returns:
    The exit status.
  """
  statuses = read_statuses(request.sweep.folder, trials)
  status.write_csv(trials, statuses, request.sweep.folder / "summary.csv")
  todo = [one for one, at in zip(trials, statuses, strict=True) if at.state != FINISHED]
  if len(todo) < len(trials):
    print(f"{len(trials) - len(todo)} of {len(trials)} trials finished earlier and are skipped")
  complete = work(request, lambda: trials, iter(todo))
  return finish(request, trials, complete=complete)


def read_statuses(folder: Path, trials: Sequence[Trial], *, running: Sequence[str] = ()) -> list[Status]:
  """Reads the statuses of trials.

  Args:
    folder: Folder of the sweep.
    trials: Trials of the sweep.
    running: Ids of the rows whose trials run in processes of this launcher.
  """
  events = status.attempts(folder)
  return [
    status.look(one, events.get(one.row.id, ()), is_running=one.row.id in running) for one in trials
  ]


def work(
  request: Any,
  known: Callable[[], Sequence[Trial]],
  source: Iterator[Trial],
  *,
  told: Callable[[Trial, Status], Any] | None = None,
) -> bool:
  """Runs trials, shows their table and keeps `summary.csv` up to date.

  Args:
    request: Request of the user.
    known: Function that returns all trials so far.
    source: Trials to run.
    told: Function called with each trial that has ended, and its status.

  Returns:
    Whether every trial was tried.
  """
  folder = request.sweep.folder
  running: set[str] = set()
  finished: dict[str, Status] = {}  # These do not change, and are not read again every second.

  def look() -> tuple[Sequence[Trial], list[Status]]:
    trials = list(known())
    open_ones = [one for one in trials if one.row.id not in finished]
    now = {
      one.row.id: at
      for one, at in zip(open_ones, read_statuses(folder, open_ones, running=tuple(running)), strict=True)
    }
    finished.update({row_id: at for row_id, at in now.items() if at.state == FINISHED})
    return trials, [finished.get(one.row.id) or now[one.row.id] for one in trials]

  with table.live(look) as show:

    def changed(one: Trial, why: str | None) -> None:
      if why is None:
        running.add(one.row.id)
        show(f"{one.row.id}: started ({rows.shown(one.row.overrides)})")
      else:
        running.discard(one.row.id)
      trials, statuses = look()
      status.write_csv(trials, statuses, folder / "summary.csv")
      if why is None:
        return
      at = statuses[[each.row.id for each in trials].index(one.row.id)]
      if told:
        told(one, at)
      accuracy = "" if at.accuracy is None else f", accuracy {at.accuracy:.1%}"
      show(f"{one.row.id}: {at.state} after {table.clock(at.seconds)}{accuracy}{': ' + why if why else ''}")

    return local.run(
      source, folder, max_parallel=request.max_parallel, options=request.options, changed=changed, tick=lambda: show("")
    )


def finish(
  request: Any, trials: Sequence[Trial], *, complete: bool, retried: tuple[str, ...] = (FAILED, STOPPED, WAITING)
) -> int:
  """Writes `summary.csv` and the report, and prints the table.

  Args:
    request: Request of the user.
    trials: All trials of the sweep.
    complete: Whether every trial was tried.
    retried: States of the trials that a relaunch continues.

  Returns:
    The exit status.
  """
  folder = request.sweep.folder
  statuses = read_statuses(folder, trials)
  status.write_csv(trials, statuses, folder / "summary.csv")
  print(table.text(trials, statuses))
  print(f"{table.counts(statuses)}; {folder / 'summary.csv'}")
  begun = [Path(one.workdir) for one in trials if (Path(one.workdir) / "metrics.jsonl").exists()]
  if begun:
    try:
      print(comparison.write_comparison(*comparison.load_arms(begun), folder / "report.html", title=request.sweep.name))
    except (comparison.EmptyComparisonError, OSError) as error:
      print(f"note: no report: {error}", file=sys.stderr)
  left = {at.state for at in statuses} - {FINISHED}
  if left & set(retried):
    print(f"the same command again continues what is {', '.join(state for state in retried if state in left)}")
  if left - {WAITING}:
    print(f"the output of the trials is in {folder / 'logs'}")
  if not complete:
    return local.INTERRUPTED
  return 1 if left else 0
