"""The opening of a workdir: the newest checkpoint, the metrics and the screen of a training."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm.config import changes
from jaxrl_llm.devices import hosts
from jaxrl_llm.pretrained import where
from jaxrl_llm.run.observe import faults
from jaxrl_llm.run.observe.phases import Phases
from jaxrl_llm.run.observe.profiling import Profiler
from jaxrl_llm.run.observe.progress import Progress
from jaxrl_llm.run.observe.trackers.followers import Followers
from jaxrl_llm.run.observe.watchdog import Watchdog
from jaxrl_llm.tasks import Task
from jaxrl_llm.tasks.files import report
from jaxrl_llm.tasks.preference_pairs import Pairs
from jaxrl_llm.workdir import checkpoint
from jaxrl_llm.workdir.metrics import MetricWriter
from jaxrl_llm.workdir.record import Record, resumed
from jaxrl_llm.workdir.summary import Clock


class Opened(NamedTuple):
  """Contents of a workdir.

  Attributes:
    checkpoints: Checkpoints that the training saves to.
    record: Record of this attempt.
    arrays: Restored arrays by name; None for a new training.
    places: Positions of the data iterators, as JSON by name; empty for a new training.
    notes: Lines for the screen, about damaged checkpoints and data that is drawn again.
  """

  checkpoints: checkpoint.Checkpoints
  record: Record
  arrays: dict[str, Any] | None
  places: dict[str, Any]
  notes: list[str]


def open_workdir(
  config: ConfigDict, workdir: Path, first: Record, abstract_arrays: Mapping[str, Any], *, iterators: Sequence[str], data: str
) -> Opened:
  """Restores the newest checkpoint of an existing workdir, if there is one.

  Args:
    config: Checked config.
    workdir: Workdir of the training.
    first: Record of a new training.
    abstract_arrays: Arrays of a checkpoint, as shapes, dtypes and shardings.
    iterators: Names of what a checkpoint holds besides arrays and record.
    data: Plural of what is learned from, for an error message.

  Raises:
    ValueError: If the checkpoints are damaged, or the run there began with other weights or data.
  """
  kept = {name: config.checkpoint[name] for name in ("keep", "keep_best", "keep_every_hours", "asynchronous")}
  checkpoints, notes = checkpoint.open_checkpoints(workdir / "checkpoints", **kept), []
  restored = checkpoint.restore_latest(checkpoints, abstract_arrays, tell=notes.append)
  if restored is None:
    return Opened(checkpoints, first, None, {}, notes)
  arrays, saved = restored
  of_teacher = config.teacher if "teacher" in config else {}  # A reward model has none.
  field = "path" if of_teacher.get("paths") is None else "paths"
  for name, other, remedy in (
    ("base", f"config.model.path: found other weights in {config.model.path!r}", "restore those"),
    ("teacher", f"config.teacher.{field}: found other weights in {of_teacher.get(field)!r}", "name those, as WORKDIR@STEP"),
    ("data_fingerprint", f"config.task: found other {data}", "restore the original files"),
  ):
    if saved.get(name) != getattr(first, name):
      raise ValueError(f"{other} than those that the run in {workdir} began with; {remedy}, or choose another --workdir")
  places = {name: saved.pop(name, None) for name in iterators}
  return Opened(checkpoints, resumed(first, saved), arrays, places, notes)


def first_record(config: ConfigDict, command: str, source: Task | Pairs, **own: Any) -> Record:
  """Returns the record of a new training on `source`.

  `own` holds the fields that only this kind of training has.
  """
  base = None if config.model.path is None else where.fingerprint(where.resolve(config.model.path))
  data = source.report and report.to_json(source.report)
  return Record(command, base=base, data=data, data_fingerprint=source.fingerprint, **own)


def restore_iterator(iterator: Any, place: Mapping[str, Any], *, was: int, now: int, what: str) -> list[str]:
  """Moves a data iterator to the position saved in a checkpoint.

  Its batches then had `was` rows instead of `now`.

  Returns:
    The line about rows that are drawn again, if there are any; `what` names them in the plural.
  """
  place, moved = changes.convert_position(place, was=was, now=now, what=what)
  iterator.set_state(place)
  return [] if moved is None else [moved]


def open_outputs(
  config: ConfigDict, workdir: Path, opened: Opened, clock: Clock, *, profiler: Profiler, log: Callable[[str], None], data: Iterable[str]
) -> tuple[MetricWriter, Progress, Phases, Followers]:
  """Opens the metrics, the screen, the phases and the trackers of a training.

  Args:
    config: Checked config.
    workdir: Folder of the metrics.
    opened: Contents of the workdir.
    clock: Clock that started with the attempt.
    profiler: Profiler of the phases.
    log: Function called with every line of the screen.
    data: First lines of the screen, about what is learned from.
  """
  writer = MetricWriter(workdir if hosts.is_main() else None, tensorboard=config.log.tensorboard)
  writer.resume(opened.record.phase_steps)
  progress = Progress(quiet=not hosts.is_main(), log=log)
  for line in (*data, *opened.notes):
    progress.note(line)
  watchdog = Watchdog(config.watchdog.seconds, stop_seconds=config.watchdog.stop_seconds, folder=workdir / "logs")
  # They read what the writer has left of an earlier attempt.
  trackers = Followers(workdir, config.log.trackers if hosts.is_main() else ())
  return writer, progress, Phases(clock, profiler, watchdog, faults.from_environment()), trackers
