"""The training of a reward model, from a config to a folder that transformers opens. Read it top to bottom."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from jaxrl_llm.config import changes
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.evaluation import bootstrap_interval
from jaxrl_llm.learner import packing
from jaxrl_llm.models import save_reward_model
from jaxrl_llm.pretrained import where as where_lib
from jaxrl_llm.rewards.model import notes_of
from jaxrl_llm.rewards.model.folder import NOTES
from jaxrl_llm.run import faults
from jaxrl_llm.run.bookkeeping import finish_saving, is_due, tell_of_failed_saves, unsaved, write_report
from jaxrl_llm.run.phases import Phases
from jaxrl_llm.run.profiling import Profiler
from jaxrl_llm.run.progress import Progress
from jaxrl_llm.run.reward_model.check import load_pairs, row_problems, shape_of, tokenizer_of
from jaxrl_llm.run.reward_model.programs import Programs, make_programs, of_step
from jaxrl_llm.run.reward_model.rows import Pair, of_pairs, pack_pairs
from jaxrl_llm.run.stopping import NonFiniteError, PreemptedError, is_refused, keep_refused, why_not_finite
from jaxrl_llm.run.watchdog import Watchdog
from jaxrl_llm.tasks.files import report
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.pipeline import example_iterator
from jaxrl_llm.tasks.preference_pairs import Pairs, encode_pair
from jaxrl_llm.text_types import Tokenizer
from jaxrl_llm.types import TrainBatch, TrainState
from jaxrl_llm.workdir import checkpoint
from jaxrl_llm.workdir import summary as summary_lib
from jaxrl_llm.workdir.metrics import MetricWriter
from jaxrl_llm.workdir.record import Record, resumed, to_json

FOLDER = "reward_model"
"""In the workdir, the folder of the trained model."""

PHASE = "reward_model"


@dataclass
class Run:
  """A training in progress: what changes from step to step, and where it is written."""

  config: ConfigDict
  workdir: Path
  mesh: jax.sharding.Mesh
  programs: Programs
  tokenizer: Tokenizer
  pairs: Pairs
  state: TrainState
  batches: Any
  record: Record
  checkpoints: checkpoint.Checkpoints
  writer: MetricWriter
  progress: Progress
  clock: summary_lib.Clock
  watchdog: Watchdog
  phases: Phases


def start(config: ConfigDict, workdir: Path, *, command: str = "", log: Callable[[str], None] = lambda line: None) -> Run:
  """Starts a training, or goes on with it from the newest checkpoint of `workdir`.

  Args:
    config: checked, see `reward_model.check`.
    workdir: exists; metrics, checkpoints, summary, report and the model go there.
    command: what the user typed, for the summary.
    log: takes every line that a person watching sees.

  Raises:
    ValueError: pairs that cannot be used, a damaged checkpoint, or a mesh that the devices or the model do not fit.
  """
  clock = summary_lib.Clock()
  mesh = mesh_lib.make_meshes(**config.mesh)[0]
  if found := list(row_problems(config, mesh_lib.num_row_shards(mesh))):
    raise ValueError("\n".join(found))
  pairs, tokenizer = load_pairs(config), tokenizer_of(config)
  programs = make_programs(config, mesh, shape_of(config))
  batches = example_iterator(pairs.train, batch_size=config.learner.batch_pairs, seed=config.seed)
  base = None if config.model.path is None else where_lib.fingerprint(where_lib.resolve(config.model.path))
  whose, size = {"base": base, "data_fingerprint": pairs.fingerprint}, config.learner.batch_pairs
  record = Record(command, **whose, data=pairs.report and report.to_json(pairs.report), batch_pairs=size)
  kept = {name: config.checkpoint[name] for name in ("keep", "keep_best", "keep_every_hours", "asynchronous")}
  checkpoints = checkpoint.open_checkpoints(workdir / "checkpoints", **kept)
  damaged: list[str] = []
  restored = checkpoint.restore_latest(checkpoints, {"state": programs.abstract_state}, tell=damaged.append)
  if restored is None:
    state = programs.init(jax.random.key(config.seed))
  else:
    arrays, saved = restored
    if changed := [name for name, value in whose.items() if saved.get(name) != value]:
      what = "config.model.path: found other weights" if changed[0] == "base" else "config.task: found other pairs"
      raise ValueError(f"{what} than those that the run in {workdir} began with; put those back, or choose another --workdir")
    state = arrays["state"]
    stood = saved.pop("batches")
    record = resumed(record, saved)
    place, moved = changes.position(stood, was=record.batch_pairs, now=size, what="pairs")
    record.batch_pairs = size
    batches.set_state(place)
    damaged += filter(None, [moved])
  writer = MetricWriter(workdir if hosts.is_main() else None, tensorboard=config.log.tensorboard)
  writer.resume(record.phase_steps)
  progress = Progress(quiet=not hosts.is_main(), log=log)
  progress.note(f"data: {in_words(pairs)}")
  for line in damaged:
    progress.note(line)
  if restored:
    progress.note(f"resumed {workdir} at step {record.rl_steps}")
  watchdog = Watchdog(config.watchdog.seconds, stop_seconds=config.watchdog.stop_seconds, folder=workdir / "logs")
  phases = Phases(clock, Profiler(None, start=0, num_steps=0), watchdog, faults.from_environment())
  parts = (mesh, programs, tokenizer, pairs, state, batches, record, checkpoints, writer, progress, clock, watchdog, phases)
  return Run(config, workdir, *parts)


def proceed(this: Run) -> dict[str, Any]:
  """Runs to the end.

  Returns:
    The summary, as in `summary.json`: `accuracy_start` and `accuracy_final` are those on held-out pairs.

  Raises:
    NonFiniteError: `learner.max_skipped` updates in a row were refused.
    PreemptedError: a process was sent SIGTERM; the training can go on from a checkpoint.
    SaveFailedError: the last checkpoint could not be saved; the training can go on from one before.
  """
  with contextlib.closing(this.checkpoints), this.watchdog, this.progress, this.writer:
    learn(this)
    if (error := unsaved(this)) is not None:
      summarize(this, "stopped: not saved")
      raise error
    save_model(this)
  summary = summarize(this, "finished")
  write_report(this)
  return summary


def learn(this: Run) -> None:
  """The loop."""
  config, record = this.config, this.record
  this.progress.start(PHASE, config.num_steps, done=record.rl_steps)
  if record.accuracy_start is None:
    record.accuracy_start = record.accuracy_final = evaluate(this, 0)
  for step in range(record.rl_steps, config.num_steps):
    this.phases.begin_step(step + 1, "update")
    batch, _ = packed(this, next(this.batches))
    this.state, metrics = this.programs.step(this.state, mesh_lib.place_tokens(this.mesh, of_step(batch)))
    metrics = summary_lib.to_floats(metrics)
    tokens, timing = int(np.count_nonzero(batch.segments)), this.phases.end()
    performance = {"perf/throughput": tokens / timing["timing_s/update"], "perf/packing_waste": packing.packing_waste([batch])}
    record.rl_steps, record.tokens = step + 1, record.tokens + tokens
    this.writer.write(step + 1, PHASE, metrics | timing | performance | tell_of_failed_saves(this))
    this.progress.update(step + 1, metrics | performance)
    stop_if_not_finite(this, metrics, of_step(batch))
    last = step + 1 == config.num_steps
    if last or (step + 1) % config.eval.every == 0:
      record.accuracy_final = evaluate(this, step + 1)
    stop = not last and hosts.preempted()
    if stop or last or (step + 1) % config.checkpoint.every == 0:
      save(this)
    elif is_due(this):
      save(this, temporary=True)
    if stop:
      finish_saving(this)
      summarize(this, "stopped: SIGTERM")
      where = f"checkpoint {this.checkpoints.latest_step()} in {this.workdir}"
      raise PreemptedError(f"stopped by SIGTERM; the same command goes on from {where}")


def packed(this: Run, rows: Sequence[Row]):
  """Pairs as a batch in host memory, and its layout."""
  learner = this.config.learner
  margin = lambda row: float(row["margin"]) if row["margin"] else this.config.objective.margin
  pairs = [Pair(*encode_pair(row, this.tokenizer), margin(row)) for row in rows]
  shards = mesh_lib.num_row_shards(this.mesh)
  return pack_pairs(pairs, row_tokens=learner.row_tokens, row_buckets=learner.row_buckets, num_shards=shards)


def margins(this: Run, rows: Sequence[Row]) -> Float[np.ndarray, " N"]:
  """r_c − r_r of each pair."""
  size, found = this.config.learner.batch_pairs, []
  for begin in range(0, len(rows), size):
    batch, layout = packed(this, rows[begin : begin + size])
    margins = this.programs.margins(this.state.params, mesh_lib.place_tokens(this.mesh, of_step(batch)))
    found.append(of_pairs(hosts.to_host(margins), batch, layout))
  return np.concatenate(found)


def evaluate(this: Run, step: int) -> float:
  """Accuracy on held-out pairs, a tie counting half, with an interval over prompts: the pairs of one are not independent."""
  this.phases.begin("eval", step)
  # The same ones each time, from all over the file.
  chosen = np.random.default_rng(0).permutation(len(this.pairs.test))[: this.config.eval.num_pairs]
  rows = [this.pairs.test[int(i)] for i in np.sort(chosen)]
  found = margins(this, rows)
  of_prompt: dict[str, list[float]] = {}
  for row, right in zip(rows, (1 + np.sign(found)) / 2, strict=True):
    of_prompt.setdefault(row["conversation"] or row["prompt"], []).append(float(right))
  accuracy = bootstrap_interval(np.array([np.mean(x) for x in of_prompt.values()]))
  metrics = {"eval/accuracy": accuracy.mean, "eval/accuracy_low": accuracy.low, "eval/accuracy_high": accuracy.high}
  metrics |= {"eval/margin/mean": float(found.mean()), "eval/loss": float(np.mean(np.logaddexp(0, -found))), "eval/num_pairs": len(rows)}
  this.writer.write(step, "eval", metrics | this.phases.end())
  interval = f"{accuracy.low:.1%} to {accuracy.high:.1%}"
  this.progress.note(
    f"eval at step {step:,} | accuracy on {len(rows)} held-out pairs {accuracy.mean:.1%} ({interval}) | margin {found.mean():.2f}"
  )
  return accuracy.mean


def save(this: Run, *, temporary: bool = False) -> None:
  """One atomic checkpoint of all that the next step depends on.

  Args:
    this: the training.
    temporary: goes once there is a newer one.
  """
  number = this.record.rl_steps
  this.phases.begin("checkpoint", number)
  this.record.phase_steps = this.writer.phase_steps
  summarize(this, "running")
  position = {"batches": this.batches.get_state()}
  measured = this.writer.phase_steps.get("eval") == this.record.rl_steps  # At this step, not some time ago.
  strike = lambda place: this.phases.strike(place, number)
  options = dict(accuracy=this.record.accuracy_final if measured else None, temporary=temporary, at=strike)
  checkpoint.save(this.checkpoints, number, {"state": this.state}, to_json(this.record) | position, **options)
  tell_of_failed_saves(this)
  this.clock.lap("checkpoint")


def save_model(this: Run) -> None:
  """The trained model in transformers' format, with its tokenizer or where that one is."""
  folder, section, task = this.workdir / FOLDER, this.config.model, this.config.task
  if folder.exists():  # The training was stopped between here and its summary; the folder appears whole.
    return
  source = None if section.path is None else where_lib.resolve(section.path)
  notes = notes_of(None if section.tokenizer else section.path, chat=task.chat, system=task.system)
  tokenizer_from = source if notes["tokenizer"] == "folder" else None
  options = dict(pad_token_id=this.tokenizer.pad_id, tokenizer_from=tokenizer_from, notes={NOTES: notes})
  save_reward_model(folder, this.programs.model, this.state.params, **options)
  this.progress.note(f"saved the reward model to {folder}; RL takes it with --config.reward.model_path={folder}")


def summarize(this: Run, status: str) -> dict[str, Any]:
  """Brings the record up to date and writes `summary.json`."""
  this.clock.lap("other")
  this.clock.settle(this.record.seconds)
  this.record.peak_memory_gb = max(this.record.peak_memory_gb, summary_lib.peak_memory_gb())
  folder = this.workdir if hosts.is_main() else None
  options = dict(objective=this.config.objective.name, num_params=this.programs.model.num_params, status=status)
  return summary_lib.write_summary(folder, this.record, **options)


def stop_if_not_finite(this: Run, metrics: dict[str, float], batch: TrainBatch) -> None:
  """Counts refused updates, and keeps their batches; gives up after too many in a row."""
  record, skipped = this.record, is_refused(metrics)
  keep_refused(this, [metrics], [batch])
  record.skipped_steps += skipped
  record.skipped_in_a_row = record.skipped_in_a_row + 1 if skipped else 0
  if record.skipped_in_a_row >= this.config.learner.max_skipped:
    finish_saving(this)
    summarize(this, "stopped: not finite")
    raise NonFiniteError(why_not_finite(this))


def in_words(pairs: Pairs) -> str:
  """How many pairs there are, and of files what was left out and why."""
  words = "" if pairs.report is None else f" ({report.in_words(pairs.report).replace('problems', 'pairs')})"
  return f"{len(pairs.train):,} pairs to learn from, {len(pairs.test):,} held out{words}"


def describe(config: ConfigDict) -> str:
  """Mesh, model and pairs, for `--dry_run`; allocates nothing.

  Args:
    config: checked.

  Raises:
    ValueError: as `start`.
  """
  mesh = mesh_lib.make_meshes(**config.mesh)[0]
  programs, pairs = make_programs(config, mesh, shape_of(config)), load_pairs(config)
  return "\n".join([
    f"mesh: {dict(mesh.shape)} over {mesh.size} {mesh.devices.flat[0].device_kind} device(s)",
    f"reward model: {config.model.path or config.model.preset}, {programs.model.num_params:,} parameters",
    f"data: {in_words(pairs)}",
  ])
