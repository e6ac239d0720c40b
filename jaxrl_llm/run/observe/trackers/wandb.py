"""A run in Weights & Biases, in files below the workdir unless its own variables say otherwise."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.run.observe.trackers.entry import COLUMNS, PROJECT, TrackerEntry, cells
from jaxrl_llm.workdir.metrics import PHASES
from jaxrl_llm.workdir.metrics.row_file import Row

ONLINE = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL")
"""Variables by which a user asks for another mode than offline."""


class Wandb:
  """An open run. Each attempt writes one folder; `wandb sync` joins them by their id."""

  def __init__(self, entry: TrackerEntry):
    if not any(os.environ.get(name) for name in ONLINE):
      os.environ["WANDB_MODE"] = "offline"
    os.environ.setdefault("WANDB_DIR", str(entry.folder))
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb  # Slow, and only here.

    self._wandb: Any = wandb
    # No console, code, commit or system metrics: this process is not the one that trains.
    settings = wandb.Settings(console="off", disable_code=True, disable_git=True, disable_job_creation=True, x_disable_stats=True)
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    self._run = wandb.init(project=project, id=entry.id, name=entry.name, resume="allow", settings=settings)
    self._run.config.update(entry.config, allow_val_change=True)
    # With step_sync, W&B would add the steps of all phases to every row.
    for phase in PHASES:
      self._run.define_metric(f"{phase}/step", hidden=True)
      if phase != "rl":
        self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step", step_sync=False)
    self._run.define_metric("*", step_metric="rl/step", step_sync=False)

  def metrics(self, phase: str, step: int, numbers: Mapping[str, float]) -> None:
    """Logs the numbers beside the step of their phase, which is their x axis."""
    self._run.log({**numbers, f"{phase}/step": step})

  def samples(self, phase: str, step: int, rows: Sequence[Row]) -> None:
    """Logs a table."""
    data = [[x if x is None or isinstance(x, float) else str(x) for x in cells(row)] for row in rows]
    self._run.log({f"{phase}/samples": self._wandb.Table(columns=list(COLUMNS), data=data, allow_mixed_types=True), f"{phase}/step": step})

  def files(self, figure: Path | None, report: Path | None) -> None:
    """Logs the picture and the page, both as media."""
    media = {}
    if figure is not None:
      media["learning_curves"] = self._wandb.Image(str(figure))
    if report is not None:
      media["report"] = self._wandb.Html(report.read_text("utf-8"), inject=False)
    if media:
      self._run.log(media)

  def close(self) -> None:
    """Finishes the attempt."""
    self._run.finish()
