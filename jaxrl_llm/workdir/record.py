"""The record of a run: its counters, and the facts that a later attempt compares itself with.

Every checkpoint holds it as JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any


def utc_now() -> str:
  """Returns the current time in UTC, to the second, in ISO 8601."""
  return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Record:
  """The counters and facts of a run, all of them JSON values.

  The record is saved in one step with the arrays, so that neither can get ahead of the other. RL
  and the training of a reward model share it. A field that only one of them has is None in the
  other, and then absent from the JSON.

  Attributes:
    command: Command of the first attempt, as the user typed it.
    started: Time of the first attempt's start.
    attempts: Number of attempts, including this one.
    resumed_at: Number of the checkpoint that each later attempt began with; a branch counts its own
      attempts.
    warm_steps: Finished steps of the warm start.
    rl_steps: Finished steps of RL, or of a reward model's training.
    tokens: Tokens learned from, prompts included.
    skipped_steps: Non-finite updates, which were refused.
    skipped_in_a_row: Refused updates since the last accepted one.
    failed_saves: Number of checkpoints that could not be written.
    nonfinite_dumps: Names of the files that hold batches of refused updates.
    accuracy_start: Held-out accuracy before the first step; None until it is measured.
    accuracy_final: Latest held-out accuracy; None until one is measured.
    seconds: Wall time by phase, over all attempts.
    phase_steps: Last step that each phase has written to the metrics.
    peak_memory_gb: Peak memory so far, in GB.
    base: Fingerprint of the published weights that the run started from; None for random weights.
    data: Numbers of problems that were read, kept, and dropped for each reason; None for generated
      problems.
    data_fingerprint: Fingerprint of the problems; None for generated problems.
    teacher: Fingerprint of the teacher's weights; None without a teacher (RL).
    kl_coef: KL coefficient of the next RL step, which the adaptive controller changes (RL).
    kl_coef_began: KL coefficient of the config (RL).
    entropy_coef, entropy_coef_began: The same for the entropy bonus, if its coefficient is adaptive
      (RL).
    role_baselines: Running mean of the rewards of each role of self-play, if the estimator has
      roles (RL).
    beliefs: What is remembered of each prompt, by the key of its problem: the belief in its pass
      rate and its last response; None if the estimator has no beliefs (RL).
    predicted_memory_gb: Estimated peak memory of a device, excluding that of the process itself
      (RL).
    batch_sizes: Numbers of prompts and demonstrations per step, the units of their iterators (RL).
    alarms: State of the alarms, an `alarms.State` (RL).
    branched_from: Fork of the branch, a `fork.Fork` by field; None for a run of its own (RL).
    batch_pairs: Number of pairs per step, the unit of their iterator (reward model).
    unknown: Other keys of a restored record, which another version wrote. They are saved again.
  """

  command: str
  started: str = field(default_factory=utc_now)
  attempts: int = 1
  resumed_at: list[int] = field(default_factory=list)
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
  teacher: str | None = None
  kl_coef: float | None = None
  kl_coef_began: float | None = None
  entropy_coef: float | None = None
  entropy_coef_began: float | None = None
  role_baselines: list[float] | None = None
  beliefs: dict[str, dict[str, Any]] | None = None
  predicted_memory_gb: float | None = None
  batch_sizes: dict[str, int] | None = None
  alarms: dict[str, Any] | None = None
  branched_from: dict[str, Any] | None = None
  batch_pairs: int | None = None
  unknown: dict[str, Any] = field(default_factory=dict)


_OF_ONE_JOB = (
  "teacher", "kl_coef", "kl_coef_began", "entropy_coef", "entropy_coef_began", "role_baselines", "beliefs",
  "predicted_memory_gb", "batch_sizes", "alarms", "branched_from", "batch_pairs",
)  # fmt: skip


def record_to_json(record: Record) -> dict[str, Any]:
  """Converts a record to the JSON object that a checkpoint holds.

  Example:
    >>> record = Record("python -m jaxrl_llm.main", rl_steps=3, unknown={"moon": "full"})
    >>> saved = record_to_json(record)
    >>> saved["rl_steps"], saved["moon"], "kl_coef" in saved
    (3, 'full', False)
  """
  values = {each.name: getattr(record, each.name) for each in fields(record) if each.name != "unknown"}
  return {name: value for name, value in values.items() if value is not None or name not in _OF_ONE_JOB} | record.unknown


def resumed(fresh: Record, saved: Mapping[str, Any]) -> Record:
  """Returns the record of the next attempt at a run.

  Args:
    fresh: Record with which the attempt would start a new run. It supplies the fields that the
      saved one lacks.
    saved: JSON object of a checkpoint. If it is that of the run which this one branches, the
      attempt is the first one at the branch.

  Example:
    >>> record = resumed(Record("again", kl_coef=0.1), {"command": "first", "attempts": 1, "rl_steps": 7, "moon": "full"})
    >>> record.command, record.attempts, record.resumed_at, record.kl_coef, record.unknown
    ('first', 2, [7], 0.1, {'moon': 'full'})
    >>> begun = Record("branch", branched_from={"workdir": "/runs/a", "step": 7})
    >>> record = resumed(begun, {"command": "first", "attempts": 4, "rl_steps": 7})
    >>> record.command, record.attempts, record.rl_steps
    ('branch', 1, 7)
  """
  names = {each.name for each in fields(Record)} - {"unknown"}
  known = {name: value for name, value in saved.items() if name in names}
  unknown = {name: value for name, value in saved.items() if name not in names}
  known["attempts"] = saved["attempts"] + 1
  known["resumed_at"] = [*saved.get("resumed_at", ()), saved.get("warm_steps", 0) + saved.get("rl_steps", 0)]
  if fresh.branched_from != saved.get("branched_from"):
    known |= {name: getattr(fresh, name) for name in ("command", "started", "attempts", "resumed_at", "branched_from")}
  return replace(fresh, **known, unknown=unknown)
