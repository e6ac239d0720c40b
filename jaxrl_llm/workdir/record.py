"""The record of a run: its counters, and what a later attempt compares itself with. It travels in every checkpoint, as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any


def utc_now() -> str:
  """The time of day in UTC, to the second, in ISO 8601."""
  return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Record:
  """What a run knows about itself; every field is JSON. Saved in one step with the arrays, so that neither can run ahead.

  RL and the training of a reward model share it. A field that only one of them has is None in the other, and then absent from the JSON.

  Attributes:
    command: The command of the first attempt, as the user typed it.
    started: Time of the first attempt's start.
    attempts: Number of attempts, this one included.
    warm_steps: Steps of the warm start that are done.
    rl_steps: Steps of RL, or of a reward model's training, that are done.
    tokens: Tokens learned from, prompts included.
    skipped_steps: Updates refused because a loss or a gradient was not finite.
    skipped_in_a_row: Refused updates since the last one that was made.
    failed_saves: Checkpoints that could not be written.
    nonfinite_dumps: Names of the files that hold batches of refused updates.
    accuracy_start: Held-out accuracy before the first step; None before it is measured.
    accuracy_final: The latest held-out accuracy; None before one is measured.
    seconds: Wall time by phase, over all attempts.
    phase_steps: The last step that each phase has written to the metrics.
    peak_memory_gb: The most memory held so far, in GB.
    base: Fingerprint of the published weights that the run began with; None for random ones.
    data: Counts of the problems that were read, kept, and dropped by reason; None for generated ones.
    data_fingerprint: Fingerprint of the problems; None for generated ones.
    kl_coef: The KL coefficient of the next RL step, which an adaptive one moves (RL).
    kl_coef_began: The coefficient that the config asked for (RL).
    predicted_memory_gb: Estimated peak of each device, without what the process itself takes (RL).
    batch_sizes: Prompts and demonstrations of a step, the units in which their iterators count (RL).
    alarms: State of the alarms, see `alarms.State` (RL).
    batch_pairs: Pairs of a step, the unit in which their iterator counts (reward model).
    unknown: Other keys of a restored record, written by another version; they travel on.
  """

  command: str
  started: str = field(default_factory=utc_now)
  attempts: int = 1
  warm_steps: int = 0
  rl_steps: int = 0
  tokens: int = 0
  skipped_steps: int = 0
  skipped_in_a_row: int = 0
  failed_saves: int = 0
  nonfinite_dumps: list[str] = field(default_factory=list)
  accuracy_start: float | None = None
  accuracy_final: float | None = None
  seconds: dict[str, float] = field(default_factory=dict)
  phase_steps: dict[str, int] = field(default_factory=dict)
  peak_memory_gb: float = 0.0
  base: str | None = None
  data: dict[str, Any] | None = None
  data_fingerprint: str | None = None
  kl_coef: float | None = None
  kl_coef_began: float | None = None
  predicted_memory_gb: float | None = None
  batch_sizes: dict[str, int] | None = None
  alarms: dict[str, Any] | None = None
  batch_pairs: int | None = None
  unknown: dict[str, Any] = field(default_factory=dict)


_OF_ONE_JOB = ("kl_coef", "kl_coef_began", "predicted_memory_gb", "batch_sizes", "alarms", "batch_pairs")


def to_json(record: Record) -> dict[str, Any]:
  """Gives the record as a checkpoint holds it.

  Example:
    >>> record = Record("python -m jaxrl_llm.main", rl_steps=3, unknown={"moon": "full"})
    >>> to_json(record)["rl_steps"], to_json(record)["moon"], "kl_coef" in to_json(record)
    (3, 'full', False)
  """
  values = {each.name: getattr(record, each.name) for each in fields(record) if each.name != "unknown"}
  return {name: value for name, value in values.items() if value is not None or name not in _OF_ONE_JOB} | record.unknown


def resumed(fresh: Record, saved: Mapping[str, Any]) -> Record:
  """Gives the record of the next attempt at a run.

  Args:
    fresh: The record that the attempt would begin a new run with, for what the saved one lacks.
    saved: The JSON of a checkpoint.

  Example:
    >>> record = resumed(Record("again", kl_coef=0.1), {"command": "first", "attempts": 1, "rl_steps": 7, "moon": "full"})
    >>> record.command, record.attempts, record.rl_steps, record.kl_coef, record.unknown
    ('first', 2, 7, 0.1, {'moon': 'full'})
  """
  names = {each.name for each in fields(Record)} - {"unknown"}
  known = {name: value for name, value in saved.items() if name in names}
  unknown = {name: value for name, value in saved.items() if name not in names}
  return replace(fresh, **known | {"attempts": saved["attempts"] + 1}, unknown=unknown)
