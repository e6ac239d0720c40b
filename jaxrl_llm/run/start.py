"""A run in progress: what it is made of, and how it starts or goes on from a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxrl_llm.config import changes
from jaxrl_llm.config.refusals import refuse_several_processes
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices.compiling import CompileCounter
from jaxrl_llm.pretrained import where
from jaxrl_llm.rewards.grader import Grader
from jaxrl_llm.rollouts import partial
from jaxrl_llm.rollouts.weight_sync import SamplerWeights
from jaxrl_llm.run import alarms, faults
from jaxrl_llm.run.experiment import Experiment, build, footprint, kl_coef_in_loss
from jaxrl_llm.run.phases import Phases
from jaxrl_llm.run.profiling import Profiler
from jaxrl_llm.run.progress import Progress
from jaxrl_llm.run.saved_state import CRITIC, INIT, abstract_arrays, keeps_reference, whole_state
from jaxrl_llm.run.watchdog import Watchdog
from jaxrl_llm.tasks.curriculum import CurriculumStream
from jaxrl_llm.tasks.files import report
from jaxrl_llm.tasks.pipeline import example_iterator
from jaxrl_llm.types import Params, TrainState
from jaxrl_llm.workdir import checkpoint, summary
from jaxrl_llm.workdir.metrics import MetricWriter, SampleWriter
from jaxrl_llm.workdir.record import Record, resumed


@dataclass
class Run:
  """A run in progress: what changes from step to step, and where it is written."""

  experiment: Experiment
  config: ConfigDict
  workdir: Path
  key: jax.Array
  state: TrainState
  reference: Params  # The policy after the warm start, frozen; None where nobody reads it.
  critic: TrainState | None
  prompts: Any
  demonstrations: Any
  record: Record
  checkpoints: checkpoint.Checkpoints
  writer: MetricWriter
  samples: SampleWriter
  progress: Progress
  clock: summary.Clock
  compiled: CompileCounter
  profiler: Profiler
  watchdog: Watchdog
  phases: Phases
  carried: partial.Groups | None  # What the next RL step goes on with; None where every step waits for all groups.
  grader: Grader
  on_sampler: SamplerWeights | None = None  # What was moved there last; None before, and where nothing moves.


def start(config: ConfigDict, workdir: Path, *, command: str = "", log: Callable[[str], None] = lambda line: None) -> Run:
  """Builds the experiment and starts it, or restores it from the newest checkpoint of `workdir`.

  Args:
    config: checked, see `config.check`.
    workdir: exists; metrics, samples, checkpoints, summary and report go there.
    command: what the user typed, for the summary.
    log: takes every line that a person watching sees.

  Raises:
    ValueError: a damaged dataset or checkpoint, a mesh that the devices or the model do not fit, or a part that several processes lack.
  """
  refuse_several_processes(config, jax.process_count())
  clock, compiled = summary.Clock(), CompileCounter("rl", "eval")
  experiment = build(config)
  key = jax.random.key(config.seed)
  # One by one where groups are carried: the first step, which goes on with none, takes more new prompts than the others.
  num_prompts = 1 if config.rollout.spare_prompts else config.rollout.num_prompts
  if config.task.curriculum is None:
    prompts = example_iterator(experiment.task.train, batch_size=num_prompts, seed=config.seed)
  else:
    options = dict(by=config.task.curriculum, group_size=config.rollout.group_size)
    prompts = CurriculumStream(experiment.task.train, batch_size=num_prompts, seed=config.seed, **options)
  demonstrations = None  # A task need not have any.
  if config.warm_start.num_steps:
    demonstrations = example_iterator(experiment.task.demonstrations, batch_size=config.warm_start.batch_size, seed=config.seed)
  kept = {name: config.checkpoint[name] for name in ("keep", "keep_best", "keep_every_hours", "asynchronous")}
  checkpoints = checkpoint.open_checkpoints(workdir / "checkpoints", **kept)
  base = None if config.model.path is None else where.fingerprint(where.resolve(config.model.path))
  task, kl_coef = experiment.task, config.reward.kl_coef or kl_coef_in_loss(config)
  record = first = Record(
    command,
    base=base,
    data=task.report and report.to_json(task.report),
    data_fingerprint=task.fingerprint,
    kl_coef=kl_coef,
    kl_coef_began=kl_coef,
    predicted_memory_gb=footprint(config, experiment).peak / 1e9,
    batch_sizes={"prompts": num_prompts, "demonstrations": config.warm_start.batch_size},
    alarms=alarms.new_state(),
  )
  carried = experiment.sampler.carried
  damaged: list[str] = []
  restored = checkpoint.restore_latest(checkpoints, abstract_arrays(experiment), tell=damaged.append)
  if restored is None:
    state = experiment.init(jax.random.fold_in(key, INIT))
    reference = copy(state.params) if keeps_reference(experiment) else None
    critic = experiment.learner.critic and experiment.learner.critic.init(jax.random.fold_in(key, CRITIC), state.params)
  else:
    arrays, saved = restored
    if saved.get("base") != base:
      raise ValueError(
        f"config.model.path: found other weights in {config.model.path!r} than those that the run in {workdir} began with; put those back, "
        "or choose another --workdir"
      )
    if saved.get("data_fingerprint") != task.fingerprint:
      raise ValueError(
        f"config.task: found other problems than those that the run in {workdir} began with; put the files back as they were, or choose "
        "another --workdir"
      )
    state = whole_state(experiment, arrays["state"], jax.random.fold_in(key, INIT))
    reference, critic = arrays.get("reference"), arrays.get("critic")
    place_of = {name: saved.pop(name, None) for name in ("prompts", "demonstrations", "carried")}
    record = resumed(first, saved)
    place, moved = changes.position(place_of["prompts"], was=record.batch_sizes["prompts"], now=num_prompts, what="prompts")
    prompts.set_state(place)
    damaged += filter(None, [moved])
    if carried is not None:
      carried = partial.from_json(place_of["carried"], carried)
    if demonstrations is not None:
      was, now = record.batch_sizes["demonstrations"], config.warm_start.batch_size
      place, moved = changes.position(place_of["demonstrations"], was=was, now=now, what="demonstrations")
      demonstrations.set_state(place)
      damaged += filter(None, [moved] if record.warm_steps < config.warm_start.num_steps else [])
    if record.kl_coef_began != kl_coef:
      record.kl_coef = record.kl_coef_began = kl_coef  # Another one was asked for since.
    record.batch_sizes = first.batch_sizes

  folder = workdir if hosts.is_main() else None
  writer = MetricWriter(folder, tensorboard=config.log.tensorboard)
  samples = SampleWriter(folder)
  writer.resume(record.phase_steps)
  samples.resume(record.phase_steps)
  progress = Progress(quiet=not hosts.is_main(), log=log)
  traces = workdir / "profile" if config.profile.start and hosts.is_main() else None
  if task.report is not None:
    progress.note(f"data: {report.in_words(task.report)}")
  for line in damaged:
    progress.note(line)
  if restored:
    progress.note(f"resumed {workdir} at warm-start step {record.warm_steps}, RL step {record.rl_steps}")
  profiler = Profiler(traces, start=config.profile.start or 0, num_steps=config.profile.num_steps)
  watchdog = Watchdog(config.watchdog.seconds, stop_seconds=config.watchdog.stop_seconds, folder=workdir / "logs")
  return Run(
    experiment=experiment,
    config=config,
    workdir=workdir,
    key=key,
    state=state,
    reference=reference,
    critic=critic,
    prompts=prompts,
    demonstrations=demonstrations,
    record=record,
    checkpoints=checkpoints,
    writer=writer,
    samples=samples,
    progress=progress,
    clock=clock,
    compiled=compiled,
    profiler=profiler,
    watchdog=watchdog,
    phases=Phases(clock, profiler, watchdog, faults.from_environment()),
    carried=carried,
    grader=Grader(
      experiment.rewards,
      num_workers=config.reward.workers,
      timeout_s=config.reward.timeout_s,
      max_chars=config.reward.max_chars,
      memory_gb=config.reward.worker_memory_gb,
    ),
  )


def copy(params: Params) -> Params:
  """The same weights in memory of their own, which no donation can take."""
  return jax.tree.map(jnp.copy, params)
