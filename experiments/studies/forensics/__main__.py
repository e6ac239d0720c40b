"""`python -m experiments.studies.forensics [--measure] [--smoke] [--folder=DIR]`

Judges the recorded continuations again, prints what each remedy saved, and draws the figure. All
rows are in `results.json`; nothing is trained.

  --measure  continue the collapses anew; resumes where it stopped
  --smoke    with --measure: two short runs of a tiny model, to see that everything works
  --folder   folder of the results; default: the study's own
"""

import json
import sys
from pathlib import Path

from experiments import provenance
from experiments.claims import bed as claims
from experiments.claims.study import STARTED, read_trials
from experiments.results import from_json, rounded, to_json
from experiments.studies.alarms import __main__ as alarms
from experiments.studies.alarms import bed
from experiments.studies.alarms import rules as alarm_rules
from experiments.studies.forensics import branches, rules
from jaxrl_llm.devices import compilation_cache

HERE = Path(__file__).parent


def main(argv: list[str]) -> int:
  """Runs a command line and returns its exit status: 0, or 2 for a wrong argument."""
  chosen = alarms.options(argv, __doc__, HERE)
  if isinstance(chosen, int):
    return chosen
  folder, measures, smoke = chosen
  if measures:
    measure(folder, smoke=smoke)
  path = folder / "results.json"
  if not path.exists():
    fix = "expected the recorded continuations; run it once with --measure"
    print(f"error: {path}: found no such file, {fix}", file=sys.stderr)
    return 2
  from experiments.studies.forensics import figures

  recorded = from_json(path.read_text())
  results = judged(recorded["provenance"], recorded["runs"])
  path.write_text(to_json(results))
  print(lines(results))
  figures.draw(results, folder / "figures", ["png"])
  return 0


def measure(folder: Path, *, smoke: bool) -> None:
  """Adds the rows that are not recorded yet, and writes the results once all are."""
  folder.mkdir(parents=True, exist_ok=True)
  compilation_cache.cache_compilations()
  files = (Path(module.__file__) for module in (branches, bed, alarm_rules))
  began, path = provenance.begin(folder / STARTED, rules, *files), folder / "trials.jsonl"
  sizes, pairs, steps, draws = claims.Sizes(), rules.to_repeat(records()), alarm_rules.STEPS, rules.DRAWS
  if smoke:
    sizes, pairs, steps, draws = claims.SMOKE, pairs[:2], 10, draws[:1]
  rows = read_trials(path)

  def add(row: dict) -> None:
    rows.append(row)
    with path.open("a") as file:
      print(json.dumps(row), file=file)
    curve = [round(100 * x) for x in row["accuracy"]]
    print(row["arm"], row["seed"], row["remedy"], row["draw"], curve, flush=True)

  done = lambda *names: [tuple(row[name] for name in names) for row in rows]
  for pair in pairs:
    if (*pair, "original") not in done("arm", "seed", "remedy"):
      add(branches.repeated(sizes, *pair, steps))
  originals = [rules.Collapse(*(row[name] for name in rules.Collapse._fields)) for row in rows[: len(pairs)]]
  chosen = rules.choose(at for at in originals if at.step)[: rules.COUNT]
  if smoke:  # Untrained models do not collapse.
    chosen = [at._replace(alarm="policy_kl", step=4, begins=10) for at in originals]
  for at in chosen:
    plan = [(remedy, draw) for remedy in rules.REMEDIES for draw in draws]
    todo = [way for way in plan if (*at[:2], *way) not in done("arm", "seed", "remedy", "draw")]
    for row in branches.continued(sizes, at, steps, todo) if todo else ():
      add(row)
  (folder / "results.json").write_text(to_json(judged(began, rows)))
  path.unlink()
  (folder / STARTED).unlink()


def records() -> list[dict]:
  """Reads the recorded runs of the alarms' study."""
  return alarms.read(alarms.HERE / alarms.RUNS)["runs"]


def judged(began: dict, rows: list[dict]) -> dict:
  """Returns the contents of `results.json`."""
  original = [row for row in rows if row["remedy"] == "original"]
  continued = [row for row in rows if row["remedy"] != "original"]
  verdicts = rules.judge_parts(continued) | {"repeats": rules.judge_repeats(original, records())}
  return {"provenance": began} | rounded(verdicts) | {"runs": rows}


def lines(results: dict) -> str:
  """Formats the results as the command prints them, a line for each remedy."""
  again, out = results["repeats"], []
  out.append(
    f"{again['of']} runs repeated: {again['equal']} have the recorded accuracies, {again['collapsed']} "
    f"collapse again, {again['warned']} of them after an alarm"
  )
  for part in ("all", "data", "optimisation"):
    for remedy, row in results[part].items():
      text = f"{part}, {remedy}: {row['saved']} of {row['of']} saved, {row['healthy']} healthy"
      text += f", {row['end']:.0%} at the end"
      if "verdict" in row:
        text += f"; gain {row['gain']:+.0%} [{row['low']:+.0%}, {row['high']:+.0%}]"
        text += f", p = {row['p_holm']:.2g} after Holm: {row['verdict']}"
      out.append(text)
  return "\n".join(out)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
