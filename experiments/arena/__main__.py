"""Scores an objective against the best of ours, on seeds that cannot be known beforehand.

  python -m experiments.arena --practise=my_objective.py     # as often as you like; stores nothing
  python -m experiments.arena --enter=my_objective.py        # once: adds a row to BOARD.md

A file has the form that `experiments.studies.forecast.entry` describes, and MODULE:FUNCTION with
settings works as well. An entry, GRPO and the best objective of the leaderboard's condition are
trained from the same warm starts, each with as many updates and responses. The seeds of a score
follow from the hash of the entry's code and rate, so that they change with every change of it, and
the same code has one score.
"""

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments import judging, provenance
from experiments.claims import study, trial
from experiments.claims.bed import Sizes, StartFailed
from experiments.results import rounded
from experiments.studies.forecast import entry, protocol
from jaxrl_llm.devices import compilation_cache
from jaxrl_llm.messages import Problem

HERE = pathlib.Path(__file__).parent
CELL = protocol.Cell(8, 64)
"""Responses of eight tokens and 64 updates of each rollout batch, where objectives differ most."""

RIVALS = {"grpo": (5.37e-4, 2.25), "dppo_tv": (6.45e-4, 0.401)}
"""Learning rate and factor of the width, as tuned for the leaderboard: GRPO and its first row."""

PRACTICE = tuple(range(500, 506))
NUM_SEEDS, NUM_SPARE = 24, 12
"""Seeds of a score, and more for those whose imitation fails."""

HEADER = """# The arena

Made by `python -m experiments.arena --enter=FILE`: area under the held-out accuracy curve minus
that of a rival, in points, with Student's 95 % interval over seeds that all three share.
[Rules](README.md).

| entry | minus GRPO | minus DPPO-TV | area | seeds | code |
| --- | --- | --- | --- | --- | --- |
"""


class Score(NamedTuple):
  """Areas under the curves of held-out accuracy.

  Attributes:
    areas: Area of each seed, by name; the entry is `""`.
    failed: Seeds whose imitation failed.
  """

  areas: dict[str, dict[int, float]]
  failed: tuple[int, ...]


def seeds_of(code: str) -> list[int]:
  """Returns the seeds of a score, in the order in which they are tried, for a hash in hexadecimal.

  Example:
    >>> seeds_of("1f")[:3], len(seeds_of("1f"))
    ([594366, 675983, 76999], 36)
  """
  rng = np.random.default_rng(int(code, 16))
  return rng.choice(np.arange(10_000, 1_000_000), NUM_SEEDS + NUM_SPARE, replace=False).tolist()


def measure(
  entered: entry.Entry, rate: float, seeds: Sequence[int], count: int, *, sizes: Sizes | None = None
) -> Score:
  """Trains an entry and its rivals from the same warm starts, until `count` seeds are done.

  Args:
    entered: Entry, whose objective is in the registry.
    rate: Learning rate of the entry.
    seeds: Seeds in the order in which they are tried.
    count: Number of seeds to train.
    sizes: Sizes of the bed; None means those of the leaderboard.
  """
  arms = {
    "": protocol.arm(entered.name, CELL, rate, 1.0, advantages=entered.advantages)._replace(
      correction=entered.correction
    )
  }
  arms |= {name: protocol.arm(name, CELL, *constants) for name, constants in RIVALS.items()}
  areas, failed = {name: {} for name in arms}, []
  for seed in seeds:
    if len(areas[""]) == count:
      break
    try:
      for name, arm in arms.items():
        kept = study.summary(
          trial.train(sizes or protocol.sizes(CELL.length), seed, arm), per_rollout=arm.per_rollout
        )
        areas[name][seed] = float(np.mean(kept["curve"][1:]))
    # Raised before any arm is trained.
    except StartFailed:
      failed.append(seed)
      continue
    print(
      f"seed {seed}: "
      + ", ".join(f"{name or entered.name} {100 * own[seed]:.1f} %" for name, own in areas.items()),
      flush=True,
    )
  return Score(areas, tuple(failed))


def row_of(entered: entry.Entry, rate: float, score: Score) -> dict:
  """Returns the row of a score: the differences from the rivals, and what made them."""
  gaps = {name: judging.interval(judging.paired(score.areas[""], score.areas[name])) for name in RIVALS}
  mean, about = (
    float(np.mean(list(score.areas[""].values()))),
    {"outside": entered.outside, "code": entered.code, "rate": rate},
  )
  return rounded(
    {"entry": entered.name}
    | about
    | {"area": mean, "gaps": gaps, "areas": score.areas, "failed": list(score.failed)}
  )


def line_of(row: Mapping) -> str:
  """Returns the line of a row in the table."""
  points = lambda gap: "{mean:+.1f} [{low:+.1f}, {high:+.1f}]".format(
    **{name: 100 * x for name, x in gap.items()}
  )
  gaps = " | ".join(points(row["gaps"][name]) for name in RIVALS)
  return f"| {row['entry']} | {gaps} | {100 * row['area']:.1f} % | {len(row['areas'][''])} | `{row['code']}`, rate {row['rate']:g} |"


def check(entered: entry.Entry, rate: float, rows: Sequence[Mapping]) -> None:
  """Refuses an entry whose seeds could be known, or which has its score.

  Raises:
    ValueError: If it has no code of its own, or its code and rate have been scored. One line.
  """
  if entered.code == entry.NO_CODE:
    expected = (
      "a file or a module of your own: the seeds follow from its code, and those of ours are known to all"
    )
    raise ValueError(Problem("--enter", repr(entered.name), expected))
  for row in rows:
    if (row["code"], row["rate"]) == (entered.code, rate):
      what = f"{entered.name!r}, whose code has its row with the rate {rate:g}: {line_of(row)}"
      raise ValueError(Problem("--enter", what, "other code or another rate; a score is not drawn twice"))
    if row["entry"] == entered.name:
      raise ValueError(
        Problem("--name", repr(entered.name), "another name, because this one has a row of other code")
      )


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.arena", description=__doc__.splitlines()[0], allow_abbrev=False
  )
  action = parser.add_mutually_exclusive_group(required=True)
  action.add_argument("--practise", metavar="OBJECTIVE", help="train on seeds that are known; stores nothing")
  action.add_argument(
    "--enter", metavar="OBJECTIVE", help="train on seeds that follow from the code, and add a row"
  )
  parser.add_argument(
    "--rate",
    type=float,
    default=RIVALS["grpo"][0],
    help="learning rate of Adam; default: %(default)g, GRPO's",
  )
  parser.add_argument(
    "--seeds", type=int, nargs="+", help=f"seeds of a practice; default: {' '.join(map(str, PRACTICE))}"
  )
  parser.add_argument(
    "--estimator", metavar="NAME:SETTING=VALUE", help="estimator of the package, or MODULE:FUNCTION"
  )
  parser.add_argument(
    "--correction", metavar="NAME:SETTING=VALUE", help="correction of the package, or MODULE:FUNCTION"
  )
  parser.add_argument("--name", help="name of the row; default: that of the file or the function")
  parser.add_argument("--folder", type=pathlib.Path, default=HERE, help="folder of scores.jsonl and BOARD.md")
  args = parser.parse_args(argv)
  path = args.folder / "scores.jsonl"
  rows = study.read_trials(path)
  try:
    if args.rate <= 0:
      raise ValueError(Problem("--rate", f"{args.rate:g}", "a number above 0"))
    entered = entry.enter(
      args.enter or args.practise, name=args.name, estimator=args.estimator, correction=args.correction
    )
    if args.enter:
      if args.seeds:
        raise ValueError(
          Problem(
            "--seeds",
            " ".join(map(str, args.seeds)),
            "none with --enter: you have seen them, and could have fitted them",
          )
        )
      check(entered, args.rate, rows)
  except ValueError as error:
    raise SystemExit(f"error: {error}") from None
  compilation_cache.cache_compilations()
  if args.practise:
    seeds = args.seeds or PRACTICE
    print(line_of(row_of(entered, args.rate, measure(entered, args.rate, seeds, len(seeds)))))
    return
  seeds = seeds_of(provenance.hash_of(f"{entered.code} {args.rate!r}".encode()))
  row = row_of(entered, args.rate, measure(entered, args.rate, seeds, NUM_SEEDS))
  with path.open("a") as file:
    print(json.dumps(row), file=file)
  (args.folder / "BOARD.md").write_text(HEADER + "".join(f"{line_of(each)}\n" for each in [*rows, row]))
  print(line_of(row))


if __name__ == "__main__":
  main()
