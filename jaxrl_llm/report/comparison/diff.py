"""Where two runs part: their first difference in the order of the loop, and its likely cause.

What the config and the machine have to do with it is told apart from the first number that differs.
Only recorded numbers are compared, so two runs can be "equal in all that is recorded", and no more.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.report.comparison import loop_parts
from jaxrl_llm.report.comparison.causes import NAMES, Cause, can_act, find_causes, listed
from jaxrl_llm.report.comparison.loop_parts import Difference
from jaxrl_llm.report.comparison.runs import RunRecord, find_runs, read_runs
from jaxrl_llm.workdir.metrics import read_rows

MAX_GB = 50
"""Size of a checkpoint, in GB, above which weights are not compared."""


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
    number = f"{len(paths)} run{'' if len(paths) == 1 else 's'}"
    which = f" ({listed([str(path) for path in paths])})" if paths else ""
    told = f"--diff: found {number}{which}, expected two: runs/a runs/b --diff"
    raise ValueError("\n".join([*(problem.removesuffix("; skipped") for problem in problems), told]))
  runs, notes = read_runs(paths)
  empty = [run for run in runs if not run.rows]
  if empty:
    expected = "expected at least one step; has the run begun?"
    raise ValueError("\n".join(f"{run.path}: found no rows in metrics.jsonl, {expected}" for run in empty))
  are_models = [any(row["phase"] == "reward_model" for row in run.rows) for run in runs]
  kinds = ["a reward model" if is_model else "a policy" for is_model in are_models]
  if kinds[0] != kinds[1]:
    raise ValueError(
      f"--diff: found {kinds[0]} in {runs[0].path} and {kinds[1]} in {runs[1].path}, expected two runs of one kind"
    )
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
  end = None if first is None else loop_parts.place((first.phase, first.step))
  before = [key for key in keys if end is None or loop_parts.place(key) < end]
  counts = [sum(len(x.samples.get(key, ())) for key in before) for x in (a, b)]
  size = f"{len(before):,} rows of metrics and {min(counts):,} samples"
  if first is not None:
    lines = [_verdict(first, causes, a.run, b.run)]
  else:
    although = f", although these differ: {listed([cause.name for cause in causes])}" if causes else ""
    lines = [f"equal in all that is recorded: {size}{although}"]
  lines += [f"  {cause.kind}: {str(cause).removeprefix('config.')}" for cause in causes]
  lines += [
    f"  branch: {run.name} {fork}"
    for run, other in ((a.run, b.run), (b.run, a.run))
    if (fork := _fork(run, other))
  ]
  if first is not None:
    lines.append(f"  equal before that step: {size}")
    if others := [name for name in first.metrics if f"{name}:" not in first.detail]:
      lines.append(f"  differ in that step too: {listed(others)}")
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
      notes.append(
        f"{shorter.run.name} ends before {_where(*key)} ({shorter.run.status}); {longer.run.name} goes on"
      )
      break
    if missing := [x.run.name for x, of_run in zip((a, b), rows, strict=True) if key not in of_run]:
      if key[0] == "eval":
        continue  # They are measured at other steps.
      first = Difference(
        *key,
        "rows of metrics",
        f"none in {missing[0]}",
        "its line of metrics.jsonl was removed, or is damaged",
        is_certain=True,
      )
      break
    pair = tuple(of_run[key] for of_run in rows)
    first = loop_parts.difference_of_step(
      key, pair, tuple(x.samples.get(key, []) for x in (a, b)), shared=shared
    )
    if first is not None:
      break
  changed, more = _first_weights(a.run, b.run, first)
  return changed or first, notes + more


def _first_weights(
  a: RunRecord, b: RunRecord, first: Difference | None
) -> tuple[Difference | None, list[str]]:
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
      detail = f"checkpoint {number}: {listed([name.removeprefix('state.') for name in names], 2)}"
      cause = "the checkpoint is of another run, was changed, or shows what no metric does"
      damage = _damage(folders)
      changed = Difference(*key, "saved weights", detail, damage or cause, is_certain=damage is not None)
      break
    compared.append(str(number))
  return changed, [
    f"equal weights: checkpoint{'s' if len(compared) > 1 else ''} {', '.join(compared)}"
  ] * bool(compared) + notes


def _numbers(run: Path) -> list[int]:
  return [
    int(path.parent.name)
    for path in (run / "checkpoints").glob("*/manifest.json")
    if path.parent.name.isdecimal()
  ]


def _damage(folders: Sequence[Path]) -> str | None:
  from jaxrl_llm.workdir import checkpoint  # It needs JAX.

  problems = [
    f"{folder} is damaged: {problem}" for folder in folders if (problem := checkpoint.problem(folder))
  ]
  return "; ".join(problems) or None


def _fork(run: RunRecord, other: RunRecord) -> str:
  """Returns where a branch begins; "" for a run of its own."""
  fork = run.summary.get("branched_from")
  if not isinstance(fork, dict):
    return ""
  origin = Path(str(fork.get("workdir")))
  name = other.name if origin == other.path.resolve() else origin
  return f"branches {name} after RL step {fork.get('step')}"


def _verdict(first: Difference, causes: Sequence[Cause], a: RunRecord, b: RunRecord) -> str:
  """Returns the first difference and its likely cause in one line."""
  where = f"{first.part} differ from {_where(first.phase, first.step)} ({first.detail})"
  equal = f", where {_and(first.equal)} are equal" if first.equal else ""
  if first.position is not None and first.equal == tuple(NAMES[: first.position]) and len(first.equal) > 4:
    equal = ", where all before them in the step is equal"
  return f"{where}{equal}: {_cause(first, causes, a, b)}"


def _cause(first: Difference, causes: Sequence[Cause], a: RunRecord, b: RunRecord) -> str:
  if first.is_certain:
    return first.cause
  refills = any(run.config.get("rollout.max_refills") for run in (a, b))
  if able := [cause for cause in causes if can_act(cause, first, refills=refills)]:
    others = [cause.name for cause in able[1:]]
    if first.part == "rewards" and all(cause.kind == "machine" for cause in able):
      return f"{first.cause}; or {listed([cause.name for cause in able], 3)}"
    forks = [(run.summary.get("branched_from") or {}).get("step") for run in (a, b)]
    forked = first.phase == "rl" and first.step - 1 in forks
    rest = f", or {listed(others, 3)}" if others else ""
    return f"likely {able[0]}{rest}{', in the first step after the fork' if forked else ''}"
  draws = first.part in ("prompts", "tokens", "orders of the groups")
  # Number of the checkpoint with the weights that the step began with.
  number = 0 if first.phase == "warm_start" else a.config.get("warm_start.num_steps", 0)
  number += first.step - (first.phase != "eval" and first.part != "saved weights")
  resumed = [run.name for run in (a, b) if number in run.summary.get("resumed_at", ())]
  depends = draws or first.phase == "warm_start" or first.part in ("saved weights", "held-out answers")
  if resumed and depends:
    return f"{resumed[0]} was resumed there, from a checkpoint of other weights or of another run"
  if draws and a.config.get("rollout.update_in_flight"):
    return "which weights draw depends on the clock in an asynchronous run; --replay repeats one"
  if draws and refills:
    return f"{first.cause}, or rewards, which decide what is drawn again (rollout.max_refills)"
  later = f" (not {listed([cause.name for cause in causes], 2)}, which acts later in the loop)"
  return first.cause + (later if causes else "")


def _alone(a: RunRecord, b: RunRecord, rows: Sequence[Mapping]) -> Iterator[str]:
  """Yields notes about metrics that only one run has."""
  for run, own, other in ((a, *rows), (b, *reversed(rows))):
    if alone := sorted(loop_parts.names(own) - loop_parts.names(other)):
      yield f"only in {run.name}, so not compared: {listed(alone)}"


def _where(phase: str, step: int) -> str:
  kinds = {"warm_start": f"step {step} of the warm start", "eval": f"the evaluation at RL step {step}"}
  return kinds.get(phase, f"{'step' if phase == 'reward_model' else 'RL step'} {step}")


def _and(items: Sequence[str]) -> str:
  return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
