"""A run in MLflow, in a database below the workdir unless `MLFLOW_TRACKING_URI` names a server."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxrl_llm.run.observe.trackers.entry import COLUMNS, PROJECT, TrackerEntry, cells
from jaxrl_llm.workdir.metrics.row_file import Row

OWN_ID = "jaxrl_llm.entry"
"""Tag by which a resumed run finds its entry."""

MAX_PARAM = 500  # Characters; a limit of older servers.
AT_ONCE = 100  # Parameters that a server takes at once.


class Mlflow:
  """An open run."""

  def __init__(self, entry: TrackerEntry):
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{entry.folder.resolve() / 'mlflow.db'}"
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.entities import Metric, Param  # Slow, and only here.
    from mlflow.tracking import MlflowClient

    self._client, self._metric = MlflowClient(uri), Metric
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    experiment = self._client.get_experiment_by_name(name)
    if experiment is None:
      # A server says itself where artifacts lie.
      local = None if os.environ.get("MLFLOW_TRACKING_URI") else (entry.folder / "mlflow-artifacts").resolve().as_uri()
      experiment_id = self._client.create_experiment(name, artifact_location=local)
    else:
      experiment_id = experiment.experiment_id
    runs = self._client.search_runs([experiment_id], f"tags.`{OWN_ID}` = '{entry.id}'")
    run = runs[0] if runs else self._client.create_run(experiment_id, run_name=entry.name, tags={OWN_ID: entry.id})
    self._id = run.info.run_id
    self._client.update_run(self._id, status="RUNNING")
    known = run.data.params  # They cannot be changed: those of the first attempt stay.
    params = [Param(path, str(x)[:MAX_PARAM]) for path, x in entry.config.items() if path not in known]
    for i in range(0, len(params), AT_ONCE):
      self._client.log_batch(self._id, params=params[i : i + AT_ONCE])

  def metrics(self, phase: str, step: int, numbers: Mapping[str, float]) -> None:
    """Logs the numbers in one batch; MLflow has a step for each metric."""
    del phase
    now = time.time_ns() // 1_000_000
    self._client.log_batch(self._id, metrics=[self._metric(key(name), x, now, step) for name, x in numbers.items()])

  def samples(self, phase: str, step: int, rows: Sequence[Row]) -> None:
    """Logs a table in the form that MLflow's page shows as one."""
    table = {"columns": list(COLUMNS), "data": [cells(row) for row in rows]}
    self._client.log_text(self._id, json.dumps(table), f"samples/{phase}-{step:06}.json")

  def files(self, figure: Path | None, report: Path | None) -> None:
    """Keeps both files as artifacts."""
    for path in filter(None, (figure, report)):
      self._client.log_artifact(self._id, str(path))

  def close(self) -> None:
    """Marks the run as finished."""
    self._client.set_terminated(self._id)


def key(name: str) -> str:
  """Replaces characters that MLflow does not allow in the name of a metric.

  Example:
    >>> key("eval/pass@4")
    'eval/pass_4'
  """
  return re.sub(r"[^\w\-. :/]", "_", name)
