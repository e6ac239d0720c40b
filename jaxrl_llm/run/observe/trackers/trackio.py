"""A run in Trackio, in files below the workdir unless Trackio's own variables say otherwise."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.run.observe.trackers.entry import COLUMNS, PROJECT, TrackerEntry, cells
from jaxrl_llm.workdir.metrics.row_file import Row


class Trackio:
  """An open run."""

  def __init__(self, entry: TrackerEntry):
    os.environ.setdefault("TRACKIO_DIR", str(entry.folder / "trackio"))
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    import trackio  # Slow, and only here.

    self._trackio: Any = trackio
    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    # Trackio finds a run by its name, and projects may be shared by runs of the same workdir name.
    options = dict(embed=False, auto_log_gpu=False, auto_log_cpu=False)
    self._run = trackio.init(project, name=f"{entry.name}-{entry.id[:6]}", resume="allow", config=entry.config, **options)

  def metrics(self, phase: str, step: int, numbers: Mapping[str, float]) -> None:
    """Logs the numbers at their step; names tell phases apart."""
    del phase
    self._trackio.log(dict(numbers), step=step)

  def samples(self, phase: str, step: int, rows: Sequence[Row]) -> None:
    """Logs a table."""
    table = self._trackio.Table(columns=list(COLUMNS), data=[cells(row) for row in rows])
    self._trackio.log({f"{phase}/samples": table}, step=step)

  def files(self, figure: Path | None, report: Path | None) -> None:
    """Keeps both files as artifacts; a picture in the log would need a step of its own."""
    for path, kind in ((figure, "figure"), (report, "report")):
      if path is not None:
        self._trackio.log_artifact(path, name=f"{self._run.name}-{path.stem}", type=kind, overwrite=True)

  def close(self) -> None:
    """Finishes the attempt."""
    self._trackio.finish()
