"""Where two runs part: their first difference in the order of the loop, and its likely cause.

What the config and the machine have to do with it is told apart from the first number that differs.
Only recorded numbers are compared, so two runs can be "equal in all that is recorded", and no more.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.messages import shown
from jaxrl_llm.report.comparison import loop_parts
from jaxrl_llm.report.comparison.arms import UNCOUNTED, differences
from jaxrl_llm.report.comparison.loop_parts import PARTS, Difference
from jaxrl_llm.report.comparison.runs import RunRecord, find_runs, read_runs
from jaxrl_llm.workdir.metrics import read_rows

MAX_GB = 50
"""Size of a checkpoint, in GB, above which weights are not compared."""

_MAX_LISTED = 6  # Differing fields or metrics on a line.
# Fields that act only from a part of the first RL step on. All others may act from the start.
_ACTS_FROM = {
  "reward.": "rewards", "advantage.": "advantages", "critic.": "advantages", "correction.": "updates", "objective.": "updates",
  "learner.learning_rate": "learning rates", "learner.schedule": "learning rates", "learner.warmup_steps": "learning rates",
  "num_steps": "learning rates",
}  # fmt: skip
# Variables of the environment that change no bit.
_IDLE = re.compile("LOG|DUMP|MEM_FRACTION|PREALLOCATE")
_NAMES = [part.name for part in PARTS]


class Cause(NamedTuple):
  """A difference of config, data or machine.

  Attributes:
    kind: "config", "data" or "machine".
    name: What differs.
    a: Value in the first run.
    b: Value in the second run.
    acts_from: Index in `PARTS` of the part from which it acts; -1 from the start of the run.
  """

  kind: str
  name: str
  a: str
  b: str
  acts_from: int = -1

  def __str__(self) -> str:
    return f"{self.name}: {self.a} and {self.b}"


class Recorded(NamedTuple):
  """What is compared of a run.

  Attributes:
    run: Config, summary and metrics.
    samples: Rows of `samples.jsonl` by phase and step.
  """

  run: RunRecord
  samples: dict[tuple[str, int], list[dict[str, Any]]]


def read_pair(folders: Sequence[Path]) -> tuple[Recorded, Recorded, list[str]]:
  """Reads two runs, and notes about their files.

  Raises:
    ValueError: If there are not two runs with rows of the same kind. One line for each problem.
  """
  paths, problems = find_runs(folders)
  if len(paths) != 2:
    listed = f" ({', '.join(map(str, paths[:_MAX_LISTED]))})" if paths else ""
    told = f"--diff: found {len(paths)} run{'' if len(paths) == 1 else 's'}{listed}, expected two: runs/a runs/b --diff"
    raise ValueError("\n".join([*(problem.removesuffix("; skipped") for problem in problems), told]))
  runs, notes = read_runs(paths)
  empty = [run for run in runs if not run.rows]
  if empty:
    expected = "expected at least one step; has the run begun?"
    raise ValueError("\n".join(f"{run.path}: found no rows in metrics.jsonl, {expected}" for run in empty))
  kinds = ["a reward model" if any(row["phase"] == "reward_model" for row in run.rows) else "a policy" for run in runs]
  if kinds[0] != kinds[1]:
    raise ValueError(f"--diff: found {kinds[0]} in {runs[0].path} and {kinds[1]} in {runs[1].path}, expected two runs of one kind")
  return *(Recorded(run, _samples(run.path)) for run in runs), notes


def _samples(path: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
  by_step: dict[tuple[str, int], list[dict[str, Any]]] = {}
  for row in read_rows(path / "samples.jsonl"):
    by_step.setdefault((row["phase"], row["step"]), []).append(row)
  return by_step


def describe(a: Recorded, b: Recorded) -> list[str]:
  """Returns lines about where two runs part: the verdict, and what it rests on."""
  causes, unknown = find_causes(a.run, b.run)
  rows = [loop_parts.by_step(x.run.rows) for x in (a, b)]
  first, notes = find_difference(a, b)
  keys = sorted(rows[0].keys() & rows[1].keys(), key=loop_parts.place)
  before = [key for key in keys if first is None or loop_parts.place(key) < loop_parts.place((first.phase, first.step))]
  counts = [sum(len(x.samples.get(key, ())) for key in before) for x in (a, b)]
  size = f"{len(before):,} rows of metrics and {min(counts):,} samples"
  lines = [f"equal in all that is recorded: {size}"] if first is None else [_verdict(first, causes, a.run, b.run)]
  if first is None and causes:
    lines[0] += f", although these differ: {_listed([cause.name for cause in causes])}"
  lines += [f"  {cause.kind}: {str(cause).removeprefix('config.')}" for cause in causes]
  lines += [f"  branch: {run.name} {fork}" for run, other in ((a.run, b.run), (b.run, a.run)) if (fork := _fork(run, other))]
  if first is not None:
    lines.append(f"  equal before that step: {size}")
    if others := [name for name in first.metrics if f"{name}:" not in first.detail]:
      lines.append(f"  differ in that step too: {_listed(others)}")
  return lines + [f"  {note}" for note in [*notes, *unknown]]


def find_difference(a: Recorded, b: Recorded) -> tuple[Difference | None, list[str]]:
  """Returns the first difference of what two runs computed, or None, and notes."""
  rows = [loop_parts.by_step(x.run.rows) for x in (a, b)]
  shared, notes = loop_parts.names(rows[0]) & loop_parts.names(rows[1]), list(_alone(a.run, b.run, rows))
  ends = [max(map(loop_parts.place, of_run)) for of_run in rows]
  first = None
  for key in sorted(rows[0].keys() | rows[1].keys(), key=loop_parts.place):
    if loop_parts.place(key) > min(ends):
      shorter, longer = (a, b) if ends[0] < ends[1] else (b, a)
      notes.append(f"{shorter.run.name} ends before {_where(*key)} ({shorter.run.status}); {longer.run.name} goes on")
      break
    if missing := [x.run.name for x, of_run in zip((a, b), rows, strict=True) if key not in of_run]:
      if key[0] == "eval":
        continue  # They are measured at other steps.
      first = Difference(*key, "rows of metrics", f"none in {missing[0]}", "its line of metrics.jsonl was removed, or is damaged")
      break
    pair = tuple(of_run[key] for of_run in rows)
    first = loop_parts.difference_of_step(key, pair, tuple(x.samples.get(key, []) for x in (a, b)), shared=shared)
    if first is not None:
      break
  changed, more = _first_weights(a.run, b.run, first)
  return changed or first, notes + more


def _first_weights(a: RunRecord, b: RunRecord, first: Difference | None) -> tuple[Difference | None, list[str]]:
  """Returns the first difference of checkpoints before a difference of rows, and notes."""
  from jaxrl_llm.report.comparison import weights

  warm = a.config.get("warm_start.num_steps", 0)
  if warm != b.config.get("warm_start.num_steps", 0):
    return None, []
  changed, notes, compared = None, [], []
  for number in sorted(set(_numbers(a.path)) & set(_numbers(b.path))):
    key = ("warm_start", number) if number < warm else ("rl", number - warm)
    if first is not None and loop_parts.place(key) >= loop_parts.place((first.phase, first.step)):
      break
    folders = [run.path / "checkpoints" / str(number) for run in (a, b)]
    gigabytes = sum(path.stat().st_size for path in folders[0].rglob("*") if path.is_file()) / 1e9
    if gigabytes > MAX_GB:
      notes.append(f"weights are not compared: checkpoint {number} has {gigabytes:,.0f} GB")
      break
    try:
      names = weights.differing(*folders)
    except ValueError as error:
      notes.append(f"weights of checkpoint {number} are not compared: {error}")
      continue
    if names:
      detail = f"checkpoint {number}: {_listed([name.removeprefix('state.') for name in names], 2)}"
      cause = "the checkpoint is of another run, was changed, or shows what no metric does"
      changed = Difference(*key, "saved weights", detail, _damage(folders) or cause)
      break
    compared.append(str(number))
  return changed, [f"equal weights: checkpoint{'s' if len(compared) > 1 else ''} {', '.join(compared)}"] * bool(compared) + notes


def _numbers(run: Path) -> list[int]:
  return [int(path.parent.name) for path in (run / "checkpoints").glob("*/manifest.json") if path.parent.name.isdecimal()]


def _damage(folders: Sequence[Path]) -> str | None:
  from jaxrl_llm.workdir import checkpoint  # It needs JAX.

  problems = [f"{folder} is damaged: {problem}" for folder in folders if (problem := checkpoint.problem(folder))]
  return "; ".join(problems) or None


def find_causes(a: RunRecord, b: RunRecord) -> tuple[list[Cause], list[str]]:
  """Returns what differs in config, data, machine and origin, and notes on what is not recorded."""
  notes = [f"not recorded in {run.name}: config.json" for run in (a, b) if not run.config]
  causes, idle = [], []
  if a.config and b.config:
    changed = differences([a.config, b.config])
    # A field that only one config has follows from another one, such as the objective's name.
    for field in sorted(changed, key=lambda field: "–" in changed[field]):
      if field.startswith((*UNCOUNTED, "warm_start.cache")):
        idle.append(field)
      else:
        causes.append(Cause("config", f"config.{field}", *map(_value, changed[field]), _acts_from(field)))
  if idle:
    notes.append(f"differ without effect on a number: {_listed(idle)}")
  for kind, name, x, y in _facts(a.summary, b.summary):
    if x is not None and y is not None and x != y:
      causes.append(Cause(kind, name, x, y))
  absent = [name for name in ("processor", "environment", "source_sha256", "resumed_at") if name not in a.summary or name not in b.summary]
  if absent:
    notes.append(f"not recorded in both: {', '.join(absent)}")
  return causes, notes


def _facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None, str | None]]:
  """Yields kind, name and both values of each fact of two summaries; None is not recorded."""
  text = lambda value: None if value is None else _value(value)
  for name in ("base", "teacher", "data_fingerprint", "data"):
    if name in a and name in b:
      yield "data", name, *("none" if x[name] is None else text(x[name]) for x in (a, b))
  for section in ("versions", "environment"):
    of_a, of_b = (x.get(section) if isinstance(x.get(section), dict) else None for x in (a, b))
    if of_a is None or of_b is None:
      continue
    for name in sorted(name for name in of_a.keys() | of_b.keys() if not _IDLE.search(name)):
      yield "machine", name, *("none" if name not in of else str(of[name]) for of in (of_a, of_b))
  for name in ("device", "processes", "processor"):
    yield "machine", name, *(None if x.get(name) is None else str(x[name]) for x in (a, b))
  sources = [x.get("source_sha256") for x in (a, b)]
  yield "machine", "source of jaxrl_llm", *(x and f"{x[:8]}…" for x in sources)


def _fork(run: RunRecord, other: RunRecord) -> str:
  """Returns where a branch begins; "" for a run of its own."""
  fork = run.summary.get("branched_from")
  if not isinstance(fork, dict):
    return ""
  origin = Path(str(fork.get("workdir")))
  return f"branches {other.name if origin == other.path.resolve() else origin} after RL step {fork.get('step')}"


def _acts_from(field: str) -> int:
  part = next((part for name, part in _ACTS_FROM.items() if field == name or name.endswith(".") and field.startswith(name)), None)
  return -1 if part is None else _NAMES.index(part)


def _value(value: Any) -> str:
  return "none" if value is None else "absent" if value == "–" else shown(value, limit=60)


def _verdict(first: Difference, causes: Sequence[Cause], a: RunRecord, b: RunRecord) -> str:
  """Returns the first difference and its likely cause in one line."""
  where = f"{first.part} differ from {_where(first.phase, first.step)} ({first.detail})"
  equal = f", where {_and(first.equal)} are equal" if first.equal else ""
  if first.position is not None and first.equal == tuple(_NAMES[: first.position]) and len(first.equal) > 4:
    equal = ", where all before them in the step is equal"
  return f"{where}{equal}: {_cause(first, causes, a, b)}"


def _cause(first: Difference, causes: Sequence[Cause], a: RunRecord, b: RunRecord) -> str:
  if able := [cause for cause in causes if _can_act(cause, first)]:
    rest = f", or {_listed([cause.name for cause in able[1:]], 3)}" if len(able) > 1 else ""
    forked = any((run.summary.get("branched_from") or {}).get("step") == first.step - 1 for run in (a, b)) and first.phase == "rl"
    return f"likely {able[0]}{rest}{', in the first step after the fork' if forked else ''}"
  warm, resumed = a.config.get("warm_start.num_steps", 0), []
  for run in (a, b):
    number = warm + first.step - (first.part != "saved weights") if first.phase != "warm_start" else first.step
    if number in run.summary.get("resumed_at", ()):
      resumed.append(f"{run.name} was resumed there, from a checkpoint of other weights or of another run")
  if resumed and first.part in ("tokens", "saved weights", "prompts", "held-out answers"):
    return resumed[0]
  if a.config.get("rollout.update_in_flight") and first.part in ("tokens", "prompts", "orders of the groups"):
    return "which weights draw depends on the clock in an asynchronous run; --replay repeats one"
  return first.cause + (f" (not {_listed([cause.name for cause in causes], 2)}, which acts later in the loop)" if causes else "")


def _can_act(cause: Cause, first: Difference) -> bool:
  if cause.acts_from < 0 or first.phase == "rl" and first.step > 1 or first.part == "saved weights":
    return True
  if first.phase in ("warm_start", "reward_model"):
    return False
  return first.step > 0 if first.position is None else cause.acts_from <= first.position


def _alone(a: RunRecord, b: RunRecord, rows: Sequence[Mapping]) -> Iterator[str]:
  """Yields notes about metrics that only one run has."""
  for run, own, other in ((a, *rows), (b, *reversed(rows))):
    if alone := sorted(loop_parts.names(own) - loop_parts.names(other)):
      yield f"only in {run.name}, so not compared: {_listed(alone)}"


def _where(phase: str, step: int) -> str:
  kinds = {"warm_start": f"step {step} of the warm start", "eval": f"the evaluation at RL step {step}"}
  return kinds.get(phase, f"{'step' if phase == 'reward_model' else 'RL step'} {step}")


def _listed(items: Sequence[str], most: int = _MAX_LISTED) -> str:
  return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _and(items: Sequence[str]) -> str:
  return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
