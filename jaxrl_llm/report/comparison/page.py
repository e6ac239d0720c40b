"""The page that compares the runs of some folders."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jaxrl_llm.report import TEMPLATES, page
from jaxrl_llm.report.comparison.arms import UNCOUNTED, Arm, accuracy_of, differences, group, results
from jaxrl_llm.report.comparison.curves import PANELS, page_panels
from jaxrl_llm.report.comparison.paper_figure import choose_panels
from jaxrl_llm.report.comparison.runs import MARKS, X_AXES, RunRecord, find_runs, read_runs
from jaxrl_llm.workdir import disk


class EmptyComparisonError(ValueError):
  """The error of a comparison of folders that hold no run."""


def write_comparison(arms: Sequence[Arm], notes: Sequence[str], path: Path, **options: Any) -> Path:
  """Writes the page that compares runs, which atomically replaces an older one. Returns `path`.

  Args:
    arms: Arms, as returned by `load_arms`.
    notes: Notes, as returned by `load_arms`.
    path: File of the page.
    **options: The `title` and `metrics` of `page_data`.

  Raises:
    ValueError: If no run has one of the metrics.
    OSError: If the page cannot be written.
  """
  data = page_data(arms, notes, link=lambda run: _link(run, path.parent), **options)
  path.parent.mkdir(parents=True, exist_ok=True)
  disk.replace(path, page.build_page(*TEMPLATES["comparison"], data))
  return path


def load_arms(workdirs: Sequence[Path]) -> tuple[list[Arm], list[str]]:
  """Reads the arms of the runs in some folders, and a note for each missing or skipped part.

  Args:
    workdirs: Folders of runs, which may be unfinished or lack files, or folders that hold runs,
      such as that of a sweep.

  Raises:
    EmptyComparisonError: If no folder holds a run. The error is a `ValueError` with a line for each
      folder.
  """
  paths, problems = find_runs(workdirs)
  if not paths:
    nothing = [f"no folder given, expected folders of runs (with {' or '.join(MARKS)}) or of a sweep"]
    raise EmptyComparisonError("\n".join(problems or nothing))
  runs, more = read_runs(paths)
  return group(runs), problems + more


def page_data(
  arms: Sequence[Arm], notes: Sequence[str] = (), *, title: str = "", metrics: Sequence[str] = (),
  link: Callable[[RunRecord], str | None] = lambda run: None,
) -> dict[str, Any]:
  """Returns the data of the page as strict JSON values.

  Args:
    arms: Arms, as returned by `load_arms`.
    notes: Notes, as returned by `load_arms`.
    title: Heading of the page; by default, the objectives of the arms.
    metrics: Metrics that get charts in addition to those of `curves.PANELS`.
    link: Function that returns the address of a run's page, or None for no link.

  Returns:
    `title`, `arms` (each with its `name`, `runs` and `result`), `fields` (those in which configs
    differ, with a value per arm), `panels`, `axes`, and `notes`.

  Raises:
    ValueError: If no run has one of the metrics.
  """
  runs = [[_run_row(run, link(run)) for run in arm.runs] for arm in arms]
  differing = differences([arm.config for arm in arms])
  data = {
    "title": title or _title(arms),
    "arms": [{"name": arm.name, "result": result, "runs": rows} for arm, result, rows in zip(arms, results(arms), runs, strict=True)],
    "fields": [{"field": field, "values": values} for field, values in differing.items()],
    "panels": page_panels(arms, (*choose_panels(arms, metrics), *(panel for panel in PANELS if panel.metric not in metrics))),
    "axes": X_AXES,
    "notes": [*notes, *_remarks(arms)],
  }
  return page.strict(data)


def _title(arms: Sequence[Arm]) -> str:
  objectives = dict.fromkeys(str(arm.config.get("objective.name", "")) for arm in arms)
  return ", ".join(list(filter(None, objectives))[:4]) or f"{len(arms)} arms"


def _link(run: RunRecord, folder: Path) -> str | None:
  """Returns the address of a run's `report.html` as seen from a folder, if it exists."""
  report = run.path / "report.html"
  # Quoted, so that no folder name acts as another kind of URL.
  return quote(os.path.relpath(report, folder)) if report.is_file() else None


def _run_row(run: RunRecord, link: str | None) -> dict[str, Any]:
  alarms = run.summary.get("alarms")
  return {
    "name": run.name,
    "seed": run.seed,
    "state": run.state,
    "status": run.status,
    "start": accuracy_of(run, "start"),
    "final": accuracy_of(run, "final"),
    "tokens": run.summary.get("tokens"),
    "seconds": run.summary.get("wall_seconds"),
    "alarms": alarms if isinstance(alarms, dict) else {},
    "report": link,
  }


def _remarks(arms: Sequence[Arm]) -> list[str]:
  """Returns the notes that a reader needs to interpret the numbers."""
  remarks = []
  for arm in arms:
    incomplete = [run for run in arm.runs if not run.is_complete]
    if incomplete and len(incomplete) < len(arm.runs):
      names = ", ".join(f"{run.name} ({run.status})" for run in incomplete[:4]) + (", ..." if len(incomplete) > 4 else "")
      remarks.append(f"{arm.name}: runs that have not finished are not in the table of results: {names}")
    elif incomplete:
      remarks.append(f"{arm.name}: no run has finished; the numbers are those so far")
    seeds = [run.seed for run in arm.runs if run.seed is not None]
    if repeated := sorted({str(seed) for seed in seeds if seeds.count(seed) > 1}):
      remarks.append(f"{arm.name}: several runs of seed {', '.join(repeated)}; their mean counts as one seed")
  if any(len({run.seed for run in arm.runs}) < 2 for arm in arms):
    remarks.append("An arm of one seed has no interval: the variance over seeds is unknown")
  ignored = ", ".join(section.rstrip(".") for section in UNCOUNTED)
  changed = [arm.name for arm in arms if len({str(sorted(_ignored(run).items())) for run in arm.runs}) > 1]
  if changed:
    remarks.append(f"{', '.join(changed)}: runs differ in sections that do not separate arms ({ignored})")
  return remarks


def _ignored(run: RunRecord) -> dict[str, Any]:
  return {field: value for field, value in run.config.items() if field.startswith(UNCOUNTED)}
