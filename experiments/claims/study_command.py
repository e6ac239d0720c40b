"""The command line that the studies of claims share: measure, judge, print the verdicts, draw."""

import argparse
import pathlib
from collections.abc import Callable, Mapping, Sequence

from experiments import judging
from experiments.results import from_json
from jaxrl_llm.devices import compilation_cache


def run(
  argv: Sequence[str] | None,
  *,
  package: str,
  about: str,
  here: pathlib.Path,
  measure: Callable[[pathlib.Path, bool], None],
  draw: Callable[[Mapping, pathlib.Path, Sequence[str]], None],
  fresh: bool = False,
) -> None:
  """Parses the command line, measures, prints and draws.

  Args:
    argv: Arguments; None is the process's.
    package: Import path of the study.
    about: A line of help.
    here: The study's folder.
    measure: `(folder, smoke)`; leaves `results.json` in the folder.
    draw: `(results, folder, formats)`.
    fresh: Whether there is `--fresh`: the study goes on with the `results.json` that it finds.

  Raises:
    SystemExit: what cannot be done, a line.
  """
  parser = argparse.ArgumentParser(prog=f"python -m {package}", description=about)
  parser.add_argument("--folder", type=pathlib.Path, default=here, help="where results.json and figures/ go")
  parser.add_argument("--format", nargs="+", choices=("png", "pdf", "svg"), default=["png"])
  if fresh:
    parser.add_argument("--fresh", action="store_true", help="begin anew: what results.json holds is lost")
  parser.add_argument("--plot_only", action="store_true", help="draw what results.json holds, measure nothing")
  parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing worth having")
  args = parser.parse_args(argv)
  path = args.folder / "results.json"
  if args.smoke and args.folder == here:
    raise SystemExit("error: --smoke would write over the measured results: give --folder=DIR with it")
  if not args.plot_only:
    args.folder.mkdir(parents=True, exist_ok=True)
    if fresh and args.fresh:
      path.unlink(missing_ok=True)
    compilation_cache.cache_compilations()
    measure(args.folder, args.smoke)
  if not path.exists():
    raise SystemExit(f"error: {path}: found no such file, expected the results of a run: leave --plot_only out once")
  results = from_json(path.read_text())
  print(judging.lines(results["verdicts"]))
  draw(results, args.folder / "figures", args.format)
