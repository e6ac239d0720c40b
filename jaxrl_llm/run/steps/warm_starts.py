"""Warm starts that are computed once: a run takes the weights of an equal earlier one.

The key of a warm start is a hash of everything that its bits depend on: the encoded demonstrations,
the settings that the imitation reads, the model and its first weights, the devices, the versions of
the libraries, and the source of this package. What RL alone reads is left out, so that the trials
of a sweep over RL settings share one warm start.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.config.fields import flatten
from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.run.observe import faults
from jaxrl_llm.run.setup.experiment import Experiment
from jaxrl_llm.run.setup.saved_state import saved_part
from jaxrl_llm.run.setup.start import Run
from jaxrl_llm.run.steps.stop import stop_if_preempted
from jaxrl_llm.tasks.mixture import MixedRows
from jaxrl_llm.tasks.pipeline import encode_demonstrations
from jaxrl_llm.workdir import kept_results
from jaxrl_llm.workdir.kept_results import Results
from jaxrl_llm.workdir.machine import PACKAGES, machine
from jaxrl_llm.workdir.metrics import reproducible
from jaxrl_llm.workdir.source import source_digest

VARIABLE = "JAXRL_LLM_WARM_STARTS"
"""Environment variable with the folder of warm starts; "off" switches them off."""

RL_ONLY = (
  "num_steps", "objective.", "advantage.", "critic.", "kl.", "entropy.", "correction.", "teacher.", "reward.", "environment.", "sandbox.",
  "rollout.", "serving.", "eval.", "checkpoint.", "alarms.", "watchdog.", "profile.", "log.", "moe.replay", "moe.measure_every",
  "model.sampler_dtype", "learner.learning_rate", "learner.warmup_steps", "learner.schedule", "learner.updates_per_rollout",
  "learner.share_prompts", "learner.skip_zero_advantages", "learner.row_buckets", "learner.old_logprobs", "learner.max_skipped",
  "warm_start.cache", "warm_start.cache_dir", "warm_start.cache_gb",
  "task.",  # Its demonstrations are hashed themselves.
)  # fmt: skip
"""Fields that no update of a warm start reads; a final dot marks a section. A new field counts."""


def reuse(run: Run, imitate: Callable[[Run], list[dict[str, Any]]]) -> None:
  """Brings the policy to the end of its warm start.

  A run of one process takes the result of an equal run, or imitates and keeps its own. A run that
  resumes within its warm start, that has several processes, whose folders need not be shared, or
  that has planned faults, imitates.

  Args:
    run: Run at its beginning, or resumed.
    imitate: Function that takes the remaining steps and returns the metrics of each.

  Raises:
    PreemptedError: If the run was asked to stop.
  """
  results = results_of(run)
  if results is None:
    imitate(run)
    return
  key, told = key_of(run.experiment, run.record.base), []
  until = time.monotonic() + run.config.watchdog.seconds / 2  # Another run may hang.

  def waiting() -> None:
    stop_if_preempted(run, None)
    if not told:
      told.append(run.progress.note("warm start: waiting for that of an equal run, which is being computed"))
    if time.monotonic() > until:
      raise TimeoutError("an equal run takes too long")  # This run then computes its own.

  with kept_results.turn(results, key, waiting=waiting):
    if not take(run, results, key):
      began = time.monotonic()
      rows = imitate(run)
      keep(run, results, key, rows, seconds=time.monotonic() - began)


def results_of(run: Run) -> Results | None:
  """Returns the folder of warm starts; None if the run neither takes nor keeps one."""
  section, record = run.config.warm_start, run.record
  folder = folder_of(section.cache_dir, os.environ)
  if not section.cache or folder is None or section.num_steps == 0 or record.warm_steps > 0:
    return None
  if jax.process_count() > 1 or faults.from_environment():
    return None
  return Results(folder, int(section.cache_gb * 1e9))


def folder_of(named: str | None, environment: Mapping[str, str]) -> Path | None:
  """Returns the folder of warm starts; None if the environment switches them off.

  Args:
    named: Folder that the config names; None for the default.
    environment: Variables of the environment.

  Example:
    >>> folder_of(None, {VARIABLE: "off"}), folder_of("mine", {}).name
    (None, 'mine')
    >>> folder_of(None, {"XDG_CACHE_HOME": "/cache"}).as_posix()
    '/cache/jaxrl_llm/warm_starts'
  """
  set_to = environment.get(VARIABLE, "")
  if set_to == "off":
    return None
  if named or set_to:
    return Path(named or set_to).expanduser()
  caches = environment.get("XDG_CACHE_HOME")
  return Path(caches or Path.home() / ".cache") / "jaxrl_llm" / "warm_starts"


def take(run: Run, results: Results, key: str) -> bool:
  """Takes a warm start into a run, with its metrics and its position in the data.

  Returns:
    Whether there was one. A damaged one is deleted, with a line.
  """
  run.phases.begin_step(1, "warm_start")
  where = results.place(key)
  try:
    restored = kept_results.read(results, key, {"params": saved_part(run.experiment, run.experiment.learner.abstract_state).params})
  except kept_results.DamagedError as error:
    run.progress.note(f"warm start: {where} is damaged and is computed again: {error}")
    kept_results.delete(results, key)
    return False
  if restored is None:
    return False
  arrays, kept = restored
  params = arrays["params"]
  if run.experiment.learner.model.config.lora is not None:
    params = combine(params, partition(run.state.params, run.experiment.learner.trainable)[1])
  run.state = run.state._replace(params=params)
  run.demonstrations.set_state(kept["demonstrations"])
  run.record.warm_steps, run.record.tokens = len(kept["rows"]), kept["tokens"]
  for step, row in enumerate(kept["rows"], 1):
    run.writer.write(step, "warm_start", row)
  run.phases.begin("other")
  seconds = f"{kept['seconds']:,.0f} s"
  run.progress.note(f"warm start: taken from {where}, computed by an equal run in {seconds}; warm_start.cache=False computes it again")
  return True


def keep(run: Run, results: Results, key: str, rows: list[dict[str, Any]], *, seconds: float) -> None:
  """Keeps a warm start for equal runs, unless something went wrong in it.

  Args:
    run: Run at the end of its warm start.
    results: Folder of warm starts.
    key: Key of this one.
    rows: Metrics of each step.
    seconds: Time that it took.
  """
  if run.record.skipped_steps or run.record.failed_saves:
    return  # Its files, or its metrics, are this run's own.
  rows = [reproducible(row) for row in rows]
  record = {"rows": rows, "tokens": run.record.tokens, "demonstrations": run.demonstrations.get_state(), "seconds": seconds}
  try:
    kept_results.write(results, key, {"params": saved_part(run.experiment, run.state).params}, record)
    run.progress.note(f"warm start: kept for equal runs in {results.place(key)}")
  except kept_results.NotKeptError as error:
    run.progress.note(f"warm start: not kept for equal runs: {error}")


def key_of(experiment: Experiment, base: str | None) -> str:
  """Returns the key of a warm start, a SHA-256 in hexadecimal.

  Args:
    experiment: Experiment, with every size set.
    base: Fingerprint of the published weights that it starts from; None for random weights.
  """
  config = experiment.config
  parts = {
    "settings": {field: x for field, x in flatten(config).items() if not _is_of_rl(field)},
    "objective": flatten(config.objective) if experiment.objective.imitates else None,
    "model": repr(experiment.learner.model.config),
    "weights": base,
    "demonstrations": demonstrations_digest(experiment),
    "mesh": dict(experiment.mesh.shape),
    "machine": machine(),
    "versions": {name: metadata.version(name) for name in PACKAGES},
    "source": source_digest(),
  }
  return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def _is_of_rl(field: str) -> bool:
  return any(field.startswith(name) if name.endswith(".") else field == name for name in RL_ONLY)


def demonstrations_digest(experiment: Experiment) -> str:
  """Returns a hash of the demonstrations, as rows and as ids, and of how they are mixed."""
  rows, pictures = experiment.task.demonstrations, experiment.drawing.gallery and experiment.drawing.gallery.settings
  digest = hashlib.sha256()
  if isinstance(rows, MixedRows):
    digest.update(repr(([len(part) for part in rows.parts], rows.weights)).encode())
  for row in rows:
    digest.update(json.dumps(row, sort_keys=True, default=_as_text).encode() + b"\n")
  for shown in encode_demonstrations(rows, experiment.task.tokenizer, replies=experiment.replies, pictures=pictures):
    digest.update(repr((list(map(int, shown.prompt)), list(map(int, shown.response)), list(map(bool, shown.written)))).encode())
  return digest.hexdigest()


def _as_text(value: Any) -> Any:
  if isinstance(value, bytes):
    return hashlib.sha256(value).hexdigest()
  return value.tolist() if hasattr(value, "tolist") else repr(value)
