"""A run in progress: its parts, and how it starts or resumes from a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from jaxrl_llm.advantages.estimators import first_baselines
from jaxrl_llm.config import entries, fork, recorded, sizes
from jaxrl_llm.config.fields import flatten, given
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices.compilation import CompileCounter
from jaxrl_llm.learner.schedules import unfinished_warm_ups
from jaxrl_llm.rewards.grader import Grader
from jaxrl_llm.rollouts import carried, schedule
from jaxrl_llm.rollouts.recorded import Recorded, Recorder, ReplaceFn
from jaxrl_llm.rollouts.weight_sync import SamplerWeights
from jaxrl_llm.run.observe import alarms
from jaxrl_llm.run.observe.phases import Phases
from jaxrl_llm.run.observe.profiling import Profiler
from jaxrl_llm.run.observe.progress import Progress
from jaxrl_llm.run.observe.trackers.followers import Followers
from jaxrl_llm.run.setup.drawing import check_processes
from jaxrl_llm.run.setup.experiment import Experiment, build_experiment, kl_coef_in_loss, make_grader
from jaxrl_llm.run.setup.out_of_memory import explained, footprint, shortage
from jaxrl_llm.run.setup.outputs import Opened, first_record, open_outputs, open_workdir, restore_iterator
from jaxrl_llm.run.setup.sampler_processes import use_samplers
from jaxrl_llm.run.setup.saved_state import abstract_arrays, fresh_state, restored_state, saved_part
from jaxrl_llm.run.setup.teacher import fingerprint, load_teacher
from jaxrl_llm.tasks.curriculum import CurriculumStream
from jaxrl_llm.tasks.files import report
from jaxrl_llm.tasks.pipeline import example_iterator, prompt_notes
from jaxrl_llm.types import Params, TrainState
from jaxrl_llm.workdir import branch, checkpoint
from jaxrl_llm.workdir.claim import recorded_config
from jaxrl_llm.workdir.metrics import MetricWriter, SampleWriter
from jaxrl_llm.workdir.record import Record
from jaxrl_llm.workdir.summary import Clock


@dataclass
class Run:
  """A run in progress: what changes from step to step, and its outputs. A `bookkeeping.Job`."""

  experiment: Experiment
  config: ConfigDict
  workdir: Path
  key: jax.Array
  state: TrainState
  reference: Params | None  # Policy after the warm start, frozen; None if no loss reads it.
  critic: TrainState | None
  # By name, as `experiment.teachers`; they never change, and are in no checkpoint of the run.
  teachers: Mapping[str, Params]
  prompts: Any
  demonstrations: Any
  # Groups that the next RL step continues; None if every step waits for all groups.
  carried: carried.Groups | None
  record: Record
  checkpoints: checkpoint.Checkpoints
  writer: MetricWriter
  samples: SampleWriter
  progress: Progress
  phases: Phases
  trackers: Followers
  compiled: CompileCounter
  grader: Grader
  # Weights last moved to the sampler; None before the first move, and if sampler and learner share
  # devices.
  on_sampler: SamplerWeights | None = None
  # Last RL step of a branch that still has the settings of the run it began with, and what starts
  # it with its own settings from the checkpoint of its fork.
  until: int | None = None
  goes_on: Callable[[], "Run"] | None = None
  # What records the batches of some steps, or plays recorded ones.
  player: ReplaceFn | None = None
  # Function called with the `Learned` of each RL step and the step, from 0.
  witness: Callable[[Any, int], None] | None = None

  @property
  def num_params(self) -> int:
    """Number of weights of the policy."""
    return self.experiment.learner.model.num_params

  def arrays(self) -> dict[str, Any]:
    """Returns the arrays of a checkpoint."""
    optional = {"reference": self.reference, "critic": self.critic}
    return {"state": saved_part(self.experiment, self.state)} | {name: x for name, x in optional.items() if x is not None}

  def places(self) -> dict[str, Any]:
    """Returns the positions of the iterators, and the carried groups, as JSON."""
    demonstrations = self.demonstrations and self.demonstrations.get_state()
    groups = None if self.carried is None else carried.to_json(self.carried)
    return Data(self.prompts.get_state(), demonstrations, groups)._asdict()


def start_run(
  config: ConfigDict,
  workdir: Path,
  *,
  command: str = "",
  log: Callable[[str], None] = lambda line: None,
  replay: Path | None = None,
  until: int | None = None,
) -> Run:
  """Builds the experiment and starts it, or restores it from the newest checkpoint of `workdir`.

  A branch that has not reached its fork starts with the settings of the run that it continues.

  Args:
    config: Checked config; see `config.check`. The run's own has every size set.
    workdir: Existing folder for metrics, samples, checkpoints, summary and report.
    command: Command as the user typed it, for the summary.
    log: Function called with every line of the screen.
    replay: Workdir of a run with `rollout.update_in_flight` to repeat; None for a run of its own.
    until: RL step after which to stop with a checkpoint; None for `config.num_steps`.

  Raises:
    ValueError: If a dataset or checkpoint is damaged, the mesh does not fit the devices or the
      model, the run is predicted not to fit into memory, or a part of it does not support several
      processes.
    OutOfMemoryError: If the devices are too small for the first state.
  """
  if until is None and (last := hosts.on_main(lambda: branch.pending(workdir, config.to_dict()))) is not None:
    begun = start_run(recorded.run_config(workdir / fork.FOLDER), workdir, command=command, log=log, until=last)
    return to_fork(begun, partial(start_run, config, workdir, command=command, log=log))
  check_processes(config, jax.process_count())
  clock, compiled, key = Clock(), CompileCounter("rl", "eval"), jax.random.key(config.seed)
  with explained(config, lambda: "start"):
    asked, experiment = config, build_experiment(config)
    chosen, config = [*sizes.describe_sizes(config, experiment.config, experiment.lengths), *experiment.left_out], experiment.config
    data, kl_coef = fresh_data(config, experiment), config.reward.kl_coef or kl_coef_in_loss(config)
    own = dict(kl_coef=kl_coef, kl_coef_began=kl_coef)
    entropy_coef = None if config.entropy.target is None else entries.values_of("objective", config)["entropy_coef"]
    own |= dict(entropy_coef=entropy_coef, entropy_coef_began=entropy_coef, batch_sizes=batch_sizes(config), alarms=alarms.new_state())
    own["role_baselines"] = first_baselines(config.advantage.estimator, **given(config.advantage, "estimator", "whiten"))
    own["beliefs"] = {} if "beliefs" in experiment.estimator.needs else None
    own["teacher"], begins = fingerprint(experiment.teachers), fork.fork_of(workdir)
    own["branched_from"] = begins and begins._asdict()
    vocab_size, open_rows = experiment.learner.model.config.vocab_size, "learner.row_buckets" in sizes.open_sizes(asked)
    predicted = footprint(config, vocab_size)
    chosen += shortage(config, predicted, experiment.mesh, vocab_size=vocab_size, open_rows=open_rows)
    first = first_record(config, command, experiment.task, predicted_memory_gb=predicted.peak / 1e9, **own)
    opened = open_workdir(config, workdir, first, abstract_arrays(experiment), iterators=Data._fields, data="problems")
    record = opened.record
    if until is None and hosts.on_main(lambda: branch.pending(workdir, asked.to_dict())) is not None:
      raise ValueError(f"{workdir}: found no undamaged checkpoint of the fork; the same command repeats the steps up to it")
    if opened.arrays is None:
      state, reference, critic = fresh_state(experiment, key)
    else:
      state, reference, critic = restored_state(experiment, opened.arrays, key)
      data, again = restored_data(config, opened, data)
      record.batch_sizes = first.batch_sizes
      if record.kl_coef_began != kl_coef:  # The config has changed since.
        record.kl_coef = record.kl_coef_began = kl_coef
      if record.entropy_coef_began != entropy_coef:
        record.entropy_coef = record.entropy_coef_began = entropy_coef
      if len(record.role_baselines or ()) != len(first.role_baselines or ()):
        record.role_baselines = first.role_baselines
      if (record.beliefs is None) != (first.beliefs is None):
        record.beliefs = first.beliefs
      opened.notes.extend([*again, f"resumed {workdir} at warm-start step {record.warm_steps}, RL step {record.rl_steps}"])
    taught = experiment.learner.teachers
    teachers = {name: load_teacher(x, taught[name].model, taught[name].abstract_params) for name, x in experiment.teachers.items()}
  samples = SampleWriter(workdir if hosts.is_main() else None)
  samples.resume(record.phase_steps)
  traces = workdir / "profile" if config.profile.start and hosts.is_main() else None
  profiler = Profiler(traces, start=config.profile.start or 0, num_steps=config.profile.num_steps)
  first_lines = [] if experiment.task.report is None else report.lines(experiment.task.report)
  first_lines += [*prompt_notes(experiment.task.train, experiment.task.tokenizer), *chosen]
  first_lines += unfinished_warm_ups(flatten(config))
  writer, progress, phases, trackers = open_outputs(config, workdir, opened, clock, profiler=profiler, log=log, data=first_lines)
  if config.rollout.samplers:
    use_samplers(config, experiment, workdir, note=progress.note)
  if config.rollout.update_in_flight is not None:
    experiment.drawing.queue.schedule = open_schedule(asked, workdir, record, replay)
  return Run(
    experiment=experiment,
    config=config,
    workdir=workdir,
    key=key,
    state=state,
    reference=reference,
    critic=critic,
    teachers=teachers,
    prompts=data.prompts,
    demonstrations=data.demonstrations,
    carried=data.carried,
    record=record,
    checkpoints=opened.checkpoints,
    writer=writer,
    samples=samples,
    progress=progress,
    phases=phases,
    trackers=trackers,
    compiled=compiled,
    grader=make_grader(config, experiment.rewards, judgements=workdir / "judgements"),
    until=until,
    player=None if until is not None else recorded_player(workdir, progress.note),
  )


def to_fork(run: Run, follows: Callable[[], Run]) -> Run:
  """Returns a run that repeats the steps before a fork, and those whose rollouts a branch records.

  Args:
    run: Run of the branch with the settings of the run that it began with.
    follows: Function that starts the branch with its own settings.
  """
  begins = fork.fork_of(run.workdir)
  run.checkpoints.last = fork.num_warm_steps(run.config.to_dict()) + begins.step
  if not begins.recorded:
    return replace(run, goes_on=follows)
  path = run.workdir / fork.FOLDER / fork.ROLLOUTS
  recorder = Recorder(path if hosts.is_main() else None, steps_of(begins))

  def goes_on() -> Run:
    recorder.finish()
    return follows()

  return replace(run, goes_on=goes_on, player=recorder)


def recorded_player(workdir: Path, note: Callable[[str], None]) -> Recorded | None:
  """Returns what plays the recorded rollouts of a branch; None if it has none.

  Raises:
    ValueError: If their file is damaged. One line.
  """
  begins = fork.fork_of(workdir)
  if begins is None or not begins.recorded:
    return None
  return Recorded(workdir / fork.FOLDER / fork.ROLLOUTS, steps_of(begins), note=note)


def steps_of(begins: fork.Fork) -> range:
  """Returns the RL steps, from 0, that learn from recorded rollouts."""
  return range(begins.step, begins.step + begins.recorded)


def open_schedule(config: ConfigDict, workdir: Path, record: Record, replay: Path | None) -> schedule.Schedule:
  """Opens the schedule of a run, and that of the run that it repeats.

  Args:
    config: Config as it was asked for, before sizes were chosen.
    workdir: Folder of the run.
    record: Record of the run.
    replay: Workdir of the run to repeat; None if there is none.

  Raises:
    ValueError: If that run has another config or no schedule. One line.
  """
  settings, repeated = schedule.checksum_of(flatten(config)), None
  # Those of the same config in the fields of an earlier version.
  alike = lambda folder: {settings, schedule.checksum_of(flatten(recorded_config(folder, config.to_dict()) or {}))}
  if replay is not None:
    repeated = schedule.read(replay)
    if not repeated:
      expected = "the workdir of a run with config.rollout.update_in_flight"
      raise ValueError(f"--replay: found no {schedule.FILE} in {replay}, expected {expected}")
    if not {batch.settings for batch in repeated} <= alike(replay):
      raise ValueError(f"--replay: found another config in {replay}, expected the same one: the command is in its summary.json")
  folder = workdir if hosts.is_main() else None  # Process 0 plays, reads and writes.
  return schedule.Schedule(folder, settings, first=record.rl_steps, repeated=repeated, alike=alike(workdir) | alike(workdir / fork.FOLDER))


class Data(NamedTuple):
  """The data of a run; the fields are names in the JSON of a checkpoint.

  Attributes:
    prompts: Iterator over training problems.
    demonstrations: Iterator over demonstrations; None for a run without a warm start, whose task
      need not have any.
    carried: Groups that the next RL step continues; None if every step waits for all groups.
  """

  prompts: Any
  demonstrations: Any
  carried: carried.Groups | None


def batch_sizes(config: ConfigDict) -> dict[str, int]:
  """Returns the number of rows in a batch of each iterator."""
  # One at a time if groups are carried: the first step, which continues none, takes more new
  # prompts than the others.
  num_prompts = 1 if config.rollout.spare_prompts else config.rollout.num_prompts
  return {"prompts": num_prompts, "demonstrations": config.warm_start.batch_size}


def fresh_data(config: ConfigDict, experiment: Experiment) -> Data:
  """Opens the data at its beginning."""
  task, sizes = experiment.task, batch_sizes(config)
  drawing = dict(batch_size=sizes["prompts"], seed=config.seed)
  if config.task.curriculum is None:
    prompts = example_iterator(task.train, **drawing)
  else:
    prompts = CurriculumStream(task.train, by=config.task.curriculum, group_size=config.rollout.group_size, **drawing)
  demonstrations = None
  if config.warm_start.num_steps:
    demonstrations = example_iterator(task.demonstrations, batch_size=sizes["demonstrations"], seed=config.seed)
  return Data(prompts, demonstrations, carried.NO_GROUPS if config.rollout.spare_prompts else None)


def restored_data(config: ConfigDict, opened: Opened, data: Data) -> tuple[Data, list[str]]:
  """Moves the data from its beginning to the position saved in a checkpoint.

  Returns:
    The data, and lines about what is drawn again.
  """
  places, was, now = opened.places, opened.record.batch_sizes, batch_sizes(config)
  moved = lambda name, iterator: restore_iterator(iterator, places[name], was=was[name], now=now[name], what=name)
  again = moved("prompts", data.prompts)
  if data.demonstrations is not None:
    shown_again = moved("demonstrations", data.demonstrations)
    if opened.record.warm_steps < config.warm_start.num_steps:
      again += shown_again
  if data.carried is not None:
    data = data._replace(carried=carried.from_json(places["carried"]))
  return data, again
