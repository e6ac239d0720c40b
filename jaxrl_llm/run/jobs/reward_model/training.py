"""The training of a reward model, from a config to a folder that transformers opens.

Read it top to bottom.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from jaxrl_llm.config.fields import flatten
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.evaluation import bootstrap_interval
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.schedules import unfinished_warm_ups
from jaxrl_llm.models import save_reward_model
from jaxrl_llm.pretrained.tokenizer_files import files_of
from jaxrl_llm.rewards.model import notes_of
from jaxrl_llm.rewards.model.folder import NOTES
from jaxrl_llm.run.jobs.reward_model.check import load_pairs, prompt_settings, row_problems, shape_of, tokenizer_of
from jaxrl_llm.run.jobs.reward_model.programs import RewardModelPrograms, make_programs, of_step
from jaxrl_llm.run.jobs.reward_model.rows import Pair, of_pairs, pack_pairs
from jaxrl_llm.run.observe.phases import Phases
from jaxrl_llm.run.observe.profiling import Profiler
from jaxrl_llm.run.observe.progress import Progress
from jaxrl_llm.run.observe.trackers.followers import Followers
from jaxrl_llm.run.setup.outputs import first_record, open_outputs, open_workdir, restore_iterator
from jaxrl_llm.run.steps.bookkeeping import finish, report_failed_saves, require_saved
from jaxrl_llm.run.steps.stop import end_step, stop_if_not_finite
from jaxrl_llm.tasks.files import report
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.pipeline import example_iterator
from jaxrl_llm.tasks.preference_pairs import Pairs, encode_pair
from jaxrl_llm.text_types import Tokenizer
from jaxrl_llm.types import TrainBatch, TrainState
from jaxrl_llm.workdir import checkpoint
from jaxrl_llm.workdir.metrics import MetricWriter
from jaxrl_llm.workdir.record import Record
from jaxrl_llm.workdir.summary import Clock, to_floats

FOLDER = "reward_model"
"""Name of the trained model's folder in the workdir."""

PHASE = "reward_model"


@dataclass
class RewardModelRun:
  """A training in progress: what changes from step to step, and its outputs.

  It is a `bookkeeping.Job`.
  """

  config: ConfigDict
  workdir: Path
  mesh: jax.sharding.Mesh
  programs: RewardModelPrograms
  tokenizer: Tokenizer
  pairs: Pairs
  state: TrainState
  batches: Any
  record: Record
  checkpoints: checkpoint.Checkpoints
  writer: MetricWriter
  progress: Progress
  phases: Phases
  trackers: Followers

  @property
  def num_params(self) -> int:
    """Number of weights of the model."""
    return self.programs.model.num_params

  def arrays(self) -> dict[str, Any]:
    """Returns the arrays of a checkpoint."""
    return {"state": self.state}

  def places(self) -> dict[str, Any]:
    """Returns the position of the iterator over pairs, as JSON."""
    return {"batches": self.batches.get_state()}


def start_run(
  config: ConfigDict, workdir: Path, *, command: str = "", log: Callable[[str], None] = lambda line: None
) -> RewardModelRun:
  """Starts a training, or resumes it from the newest checkpoint of `workdir`.

  Args:
    config: Checked config; see `reward_model.check`.
    workdir: Existing folder for metrics, checkpoints, summary, report and the model.
    command: Command as the user typed it, for the summary.
    log: Function called with every line of the screen.

  Raises:
    ValueError: If pairs cannot be used, a checkpoint is damaged, or the mesh does not fit the
      devices or the model.
  """
  clock, size = Clock(), config.learner.batch_pairs
  mesh = mesh_lib.make_meshes(**config.mesh)[0]
  if problems := list(row_problems(config, mesh_lib.num_row_shards(mesh))):
    raise ValueError("\n".join(problems))
  pairs, tokenizer = load_pairs(config), tokenizer_of(config)
  programs = make_programs(config, mesh, shape_of(config))
  batches = example_iterator(pairs.train, batch_size=size, seed=config.seed)
  first = first_record(config, command, pairs, batch_pairs=size)
  opened = open_workdir(config, workdir, first, {"state": programs.abstract_state}, iterators=["batches"], data="pairs")
  record = opened.record
  if opened.arrays is None:
    state = programs.init(jax.random.key(config.seed))
  else:
    state = opened.arrays["state"]
    opened.notes.extend(
      restore_iterator(batches, opened.places["batches"], was=record.batch_pairs, now=size, what="pairs")
    )
    opened.notes.append(f"resumed {workdir} at step {record.rl_steps}")
    record.batch_pairs = size
  profiler, first_lines = Profiler(None, start=0, num_steps=0), [f"data: {in_words(pairs)}", *unfinished_warm_ups(flatten(config))]
  outputs = open_outputs(config, workdir, opened, clock, profiler=profiler, log=log, data=first_lines)
  return RewardModelRun(config, workdir, mesh, programs, tokenizer, pairs, state, batches, record, opened.checkpoints, *outputs)


def proceed(run: RewardModelRun) -> dict[str, Any]:
  """Runs the training to its end.

  Returns:
    The summary, as in `summary.json`; its `accuracy_start` and `accuracy_final` are on held-out
    pairs.

  Raises:
    NonFiniteError: If `learner.max_skipped` updates in a row were refused.
    PreemptedError: If a process received SIGTERM; the training can resume from a checkpoint.
    SaveFailedError: If the last checkpoint could not be saved; the training can resume from an
      earlier one.
  """
  with contextlib.closing(run.checkpoints), run.phases, run.progress, run.writer:
    learn(run)
    require_saved(run)
    save_model(run)
  return finish(run)


def learn(run: RewardModelRun) -> None:
  """Runs the loop over steps."""
  config, record = run.config, run.record
  run.progress.start(PHASE, config.num_steps, done=record.rl_steps)
  if record.accuracy_start is None:
    record.accuracy_start = record.accuracy_final = evaluate_pairs(run, 0)
  for step in range(record.rl_steps, config.num_steps):
    run.phases.begin_step(step + 1, "update")
    batch, layout = packed(run, pairs_of(run, next(run.batches)))
    run.state, metrics = run.programs.step(run.state, batch)
    metrics = to_floats(metrics)
    tokens, timing = layout.num_used, run.phases.end()
    performance = {"perf/throughput": tokens / timing["timing_s/update"], "perf/packing_waste": packing.packing_waste([layout])}
    record.rl_steps, record.tokens = step + 1, record.tokens + tokens
    run.writer.write(step + 1, PHASE, metrics | timing | performance | report_failed_saves(run))
    run.progress.update(step + 1, metrics | performance)
    stop_if_not_finite(run, [metrics], [batch])
    last = step + 1 == config.num_steps
    if last or (step + 1) % config.eval.every == 0:
      record.accuracy_final = evaluate_pairs(run, step + 1)
    end_step(run, saves=last or (step + 1) % config.checkpoint.every == 0, last=last)


def pairs_of(run: RewardModelRun, rows: Sequence[Row]) -> list[Pair]:
  """Returns the pairs of some rows of the data, encoded."""
  margin = lambda row: float(row["margin"]) if row["margin"] else run.config.objective.margin
  return [Pair(*encode_pair(row, run.tokenizer), margin(row)) for row in rows]


def packed(run: RewardModelRun, pairs: Sequence[Pair]) -> tuple[TrainBatch, packing.Layout]:
  """Packs pairs into a batch on the devices; returns the batch and its layout."""
  learner, shards = run.config.learner, mesh_lib.num_row_shards(run.mesh)
  options = dict(row_tokens=learner.row_tokens, row_buckets=learner.row_buckets)
  batch, layout = pack_pairs(pairs, num_shards=shards, own_shards=mesh_lib.own_row_shards(run.mesh), **options)
  return mesh_lib.place_tokens(run.mesh, of_step(batch)), layout


def margins(run: RewardModelRun, rows: Sequence[Row]) -> Float[np.ndarray, " N"]:
  """Returns r_c − r_r of each pair."""
  size, values = run.config.learner.batch_pairs, []
  for begin in range(0, len(rows), size):
    pairs = pairs_of(run, rows[begin : begin + size])
    batch, layout = packed(run, pairs)
    values.append(of_pairs(hosts.to_host(run.programs.margins(run.state.params, batch)), pairs, layout))
  return np.concatenate(values)


def evaluate_pairs(run: RewardModelRun, step: int) -> float:
  """Measures the accuracy on held-out pairs, where a tie counts half.

  The interval is over prompts, since the pairs of one prompt are not independent.
  """
  run.phases.begin("eval", step)
  # The same pairs each time, from all over the file.
  chosen = np.random.default_rng(0).permutation(len(run.pairs.test))[: run.config.eval.num_pairs]
  rows = [run.pairs.test[int(i)] for i in np.sort(chosen)]
  differences = margins(run, rows)
  of_prompt: dict[str, list[float]] = {}
  for row, right in zip(rows, (1 + np.sign(differences)) / 2, strict=True):
    of_prompt.setdefault(row["conversation"] or row["prompt"], []).append(float(right))
  accuracy = bootstrap_interval(np.array([np.mean(x) for x in of_prompt.values()]))
  metrics = {"eval/accuracy": accuracy.mean, "eval/accuracy_low": accuracy.low, "eval/accuracy_high": accuracy.high}
  metrics |= {
    "eval/margin/mean": float(differences.mean()),
    "eval/loss": float(np.mean(np.logaddexp(0, -differences))),
    "eval/num_pairs": len(rows),
  }
  run.writer.write(step, "eval", metrics | run.phases.end())
  held_out = f"{len(rows)} held-out pairs {accuracy.mean:.1%} ({accuracy.low:.1%} to {accuracy.high:.1%})"
  run.progress.note(f"eval at step {step:,} | accuracy on {held_out} | margin {differences.mean():.2f}")
  return accuracy.mean


def save_model(run: RewardModelRun) -> None:
  """Saves the trained model with its tokenizer in transformers' format."""
  folder, section = run.workdir / FOLDER, run.config.model
  # An earlier attempt stopped before its summary; the folder only appears whole.
  if folder.exists():
    return
  notes = notes_of(None if section.tokenizer else section.path, **prompt_settings(run.config))
  with files_of(run.tokenizer) as tokenizer_from:
    options = dict(pad_token_id=run.tokenizer.pad_id, tokenizer_from=tokenizer_from, notes={NOTES: notes})
    save_reward_model(folder, run.programs.model, run.state.params, **options)
  run.progress.note(f"saved the reward model to {folder}; to use it in RL, pass --config.reward.model_path={folder}")


def in_words(pairs: Pairs) -> str:
  """Describes how many pairs there are, and for files what was left out and why."""
  words = "" if pairs.report is None else f" ({report.in_words(pairs.report).replace('problems', 'pairs')})"
  return f"{len(pairs.train):,} pairs to learn from, {len(pairs.test):,} held out{words}"


def describe_training(config: ConfigDict) -> str:
  """Describes mesh, model and pairs, for `--dry_run`.

  It allocates nothing and raises what `start_run` raises.
  """
  mesh = mesh_lib.make_meshes(**config.mesh)[0]
  programs, pairs = make_programs(config, mesh, shape_of(config)), load_pairs(config)
  return "\n".join([
    f"mesh: {dict(mesh.shape)} over {mesh.size} {mesh.devices.flat[0].device_kind} device(s)",
    f"reward model: {config.model.path or config.model.preset}, {programs.model.num_params:,} parameters",
    f"data: {in_words(pairs)}",
    *unfinished_warm_ups(flatten(config)),
  ])
