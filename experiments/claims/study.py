"""Studies of the bed: arms with paired seeds, trained one after another, then judged and drawn.

The same command resumes a study that was stopped. `trials.jsonl` has one line per finished trial,
and is removed once all trials are in `results.json`.

A study may have a second run, with seeds and arms of its own and with rules that were committed
before it. `--second` runs it. It changes no row of the first run: `results.json` gets the entry
"second", with the record of the run, and the table "second_trials".
"""

import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import provenance
from experiments.claims import bed as beds
from experiments.claims import study_command, trial
from experiments.results import from_json, rounded, to_json

EVERY = 16
"""Updates between two stored points of a curve."""

OF_ROUTES = ("log_r", "log_r_replayed", "max_r", "change")
"""Columns of `trial.staleness`."""

STARTED = "started.json"
"""File of the record made at the start of a study; removed once `results.json` contains it."""


SECOND = "second"
"""Prefix of the files and of the entries of `results.json` that belong to the second run."""

Arms = Sequence[tuple[dict[str, Any], beds.Arm]]
"""Arms with the columns that name them, as in ({"objective": "grpo", "updates": 4}, Arm).

A column "draw" selects other responses to the same problems; see `trial.train`.
"""


Sized = Callable[[beds.Sizes, Mapping[str, Any]], beds.Sizes]


class Second(NamedTuple):
  """Second run of a study; its results are written once all of its trials are done.

  Attributes:
    arms: Arms, with the columns that name them.
    seeds: Seeds of the trials.
    tables: Function `(sizes, trials)` that returns further entries of `results.json`.
  """

  arms: Arms
  seeds: Sequence[int]
  tables: Callable[[beds.Sizes, Sequence[Mapping]], dict] = lambda sizes, trials: {}


class Study(NamedTuple):
  """Plan of a study: what it trains, and how it judges and draws the results.

  Attributes:
    package: Import path, for the command line.
    about: Description of the study in one line, for `--help`.
    arms: Blocks of arms. A block runs with all seeds before the next block begins.
    seeds: Seeds of the trials.
    rules: Module whose `judge(results)` returns the verdicts.
    draw: Function `(results, folder, formats)` that draws the figures.
    tables: Function `(sizes, trials)` that returns further entries of `results.json`.
    second: Second run; None if there is none.
    sizes: Sizes of the bed.
    sized: Function `(sizes, names)` from these sizes and the columns that name an arm to the arm's.
  """

  package: str
  about: str
  arms: Sequence[Arms]
  seeds: Sequence[int]
  rules: ModuleType
  draw: Callable[[Mapping, pathlib.Path, Sequence[str]], None]
  tables: Callable[[beds.Sizes, Sequence[Mapping]], dict] = lambda sizes, trials: {}
  second: Second | None = None
  sizes: beds.Sizes = beds.Sizes()
  sized: Sized = lambda sizes, names: sizes


def main(study: Study, argv: Sequence[str] | None, here: pathlib.Path) -> None:
  """Runs the command line of a study; see `study_command.run`."""

  def measure_in(folder: pathlib.Path, smoke: bool) -> None:
    sizes, seeds = (beds.SMOKE, study.seeds[:2]) if smoke else (study.sizes, study.seeds)
    measure(study, sizes, seeds, folder)

  def measure_second_in(folder: pathlib.Path, smoke: bool) -> None:
    sizes, seeds = (beds.SMOKE, study.second.seeds[:2]) if smoke else (study.sizes, study.second.seeds)
    measure_second(study, sizes, seeds, folder)

  study_command.run(
    argv, package=study.package, about=study.about, here=here, measure=measure_in, draw=study.draw,
    second=measure_second_in if study.second else None,
  )  # fmt: skip


def measure(study: Study, sizes: beds.Sizes, seeds: Sequence[int], folder: pathlib.Path) -> None:
  """Runs the trials that are not done yet, and judges and writes the results after every block.

  A seed whose imitation fails has no trials and is missing from the "seeds" of `results.json`.
  """
  path, recorded = folder / "trials.jsonl", provenance.begin(folder / STARTED, study.rules)
  for rows, left in trained(study.arms, sizes, seeds, path, study.sized):
    write(study, sizes, left, rows, folder, recorded)
  path.unlink()
  (folder / STARTED).unlink()


def measure_second(study: Study, sizes: beds.Sizes, seeds: Sequence[int], folder: pathlib.Path) -> None:
  """Runs the trials of the second run that are not done yet; then judges and writes all results.

  Raises:
    SystemExit: If the first run has not been written, or the rules have changed since the start.
  """
  results = folder / "results.json"
  if not results.exists():
    raise SystemExit(f"error: {results}: found no such file, expected the results of the first run; run it once without --second")
  path, started = folder / f"{SECOND}.jsonl", folder / f"{SECOND}_{STARTED}"
  recorded = provenance.begin(started, study.rules)
  for rows, left in trained((study.second.arms,), sizes, seeds, path, study.sized):
    about = {"seeds": left, "jax": jax.__version__} | totals(rows) | {"provenance": dict(recorded)}
    tables = {"trials": rows} | study.second.tables(sizes, rows)
    first = from_json(results.read_text())
    judge(study, first | {SECOND: about} | {f"{SECOND}_{name}": table for name, table in tables.items()}, results)
  path.unlink()
  started.unlink()


def trained(
  blocks: Sequence[Arms], sizes: beds.Sizes, seeds: Sequence[int], path: pathlib.Path, sized: Sized = lambda sizes, names: sizes
) -> Iterator[tuple[list[dict], list[int]]]:
  """Runs the trials that are not in a file yet, and appends each to it, and each seed that failed.

  Yields:
    After every block: the rows of the trials so far, in the order of the plan, and the seeds whose
    imitation did not fail. If that of a control with a model of its own fails, the seed's other
    arms are left out too.

  Raises:
    SystemExit: If the file has a trial that is not in the plan. The file is removed in the end, and
      with it any trial that was left out.
  """
  stored, planned = read_trials(path), []
  done, failed = [row for row in stored if "failed" not in row], [row["seed"] for row in stored if "failed" in row]
  for row in done:
    if not any(row["seed"] in seeds and names.items() <= row.items() for block in blocks for names, _ in block):
      own = {name: row.get(name) for name in (*blocks[0][0][0], "seed")}
      raise SystemExit(f"error: {path}: found a trial {own}, expected the arms and seeds of the study; move the file elsewhere first")
  for block in blocks:
    trials = [(names | {"seed": seed}, arm) for seed in seeds for names, arm in block]
    known = [{name: row[name] for name in trials[0][0]} for row in done]
    left = [(names, arm) for names, arm in trials if names not in known]
    with path.open("a") as file:
      for names, arm in left:
        seed = names["seed"]
        if seed in failed:
          continue
        try:
          # All starts before the first arm, which would be for nothing if that of a control fails.
          starts = [(sized(sizes, others), other.model) for others, other in left if others["seed"] == seed]
          for of_arm, model in dict.fromkeys(starts):
            beds.warm_params(of_arm, seed, model)
          done.append(run(sized(sizes, names), names, arm))
        # Raised before an arm is trained from this start, so that no result influences the choice.
        except beds.StartFailed as reason:
          print(f"{reason}; it is left out", flush=True)
          failed.append(seed)
          print(json.dumps({"seed": seed, "failed": str(reason)}), file=file, flush=True)
          continue
        print(json.dumps(done[-1]), file=file, flush=True)
    planned += [names for names, _ in trials]
    named = [{name: row[name] for name in planned[0]} for row in done]
    counted = [names for names in planned if names["seed"] not in failed]
    order = sorted((counted.index(names), place) for place, names in enumerate(named) if names in counted)
    yield [done[place] for _, place in order], [seed for seed in seeds if seed not in failed]


def read_trials(path: pathlib.Path) -> list[dict]:
  """Reads the trials that are done, and the seeds that failed.

  If the process was killed while it wrote the last line, that line is removed from the file, so
  that its trial runs again.
  """
  text = path.read_text() if path.exists() else ""
  whole = text[: text.rfind("\n") + 1]
  if whole != text:
    path.write_text(whole)
  return [json.loads(line) for line in whole.splitlines()]


def run(sizes: beds.Sizes, names: Mapping[str, Any], arm: beds.Arm) -> dict:
  """Runs one trial and returns it as a row."""
  started, wall = time.process_time(), time.perf_counter()
  arm = arm._replace(per_rollout=min(arm.per_rollout, sizes.updates))
  row = summary(trial.train(sizes, names["seed"], arm, samples=names.get("draw", 0)), per_rollout=arm.per_rollout)
  # The names stay if the summary has a column of that name, since a stopped study resumes by them.
  return rounded(names | row | names | {"processor_seconds": time.process_time() - started, "wall_seconds": time.perf_counter() - wall})


def write(study: Study, sizes: beds.Sizes, seeds: Sequence[int], rows: Sequence[Mapping], folder: pathlib.Path, recorded: Mapping) -> None:
  """Judges the trials and writes `results.json`; the entries of a second run stay."""
  path = folder / "results.json"
  second = {name: entry for name, entry in from_json(path.read_text()).items() if name.startswith(SECOND)} if path.exists() else {}
  results = {"sizes": sizes._asdict(), "seeds": list(seeds), "jax": jax.__version__} | totals(rows)
  results |= {"provenance": dict(recorded), "verdicts": {}} | study.tables(sizes, rows) | {"trials": rows}
  judge(study, results | second, path)


def totals(rows: Sequence[Mapping]) -> dict[str, float]:
  """Sums what the trials took."""
  return {name: sum(row[name] for row in rows) for name in ("processor_seconds", "wall_seconds")}


def judge(study: Study, results: Mapping, path: pathlib.Path) -> None:
  """Judges results and writes them to a file."""
  results = rounded(dict(results))
  path.write_text(to_json(results | {"verdicts": rounded(study.rules.judge(results))}))


def summary(history: Mapping, *, per_rollout: int) -> dict:
  """Reduces a trial to the part that `results.json` stores.

  All trials have the same columns; a mixture of experts also has those of `trial.staleness`.
  """
  thinned = lambda name: history[name][::EVERY] + history[name][-1:] if name in history else None
  mean = lambda name: float(np.mean([x for x in history[name] if x is not None])) if name in history else None
  norms = [x for x in history["grad_norm"] if x is not None]
  sign = trial.first_sign(history["rewards"], history, per_rollout=per_rollout)

  def late(name: str) -> float | None:
    """Averages a metric over the last quarter of the updates of each rollout batch."""
    if name not in history:
      return None
    last = np.array(history[name], float).reshape(-1, per_rollout)[:, -max(1, per_rollout // 4) :]
    return float(np.nanmean(last)) if np.isfinite(last).any() else None

  return {
    "sign": sign.kind if sign else "",
    "sign_at": sign.update if sign else None,
    "samples": history["samples"],
    "right": "".join(str(x) for x in history["right"]),
    "curve": history["curve"],
    "entropy": thinned("entropy"),
    "reward": float(np.mean(history["rewards"])),
    "tokens": [history["lengths"][0], history["lengths"][-1]],
    "clipped": mean("clipped"),
    "gate": mean("gate"),
    "gap": mean("gap"),
    "kl": max((x for x in history["kl"] if x is not None), default=None) if "kl" in history else None,
    "kl_late": late("kl"),
    "clipped_late": late("clipped"),
    "grad_norm": [float(np.median(norms)), max(norms)] if norms else None,
  } | ({"trained": len(history["kl"])} | {name: history[name] for name in OF_ROUTES} if "change" in history else {})
