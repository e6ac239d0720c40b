"""Command line that the studies of claims share: measure, judge, print the verdicts, draw."""

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
  second: Callable[[pathlib.Path, bool], None] | None = None,
) -> None:
  """Parses the command line, measures, prints the verdicts and draws the figures.

  Args:
    argv: Arguments; None means those of the process.
    package: Import path of the study.
    about: Description of the study in one line, for `--help`.
    here: Folder of the study.
    measure: Function `(folder, smoke)` that writes `results.json` into the folder.
    draw: Function `(results, folder, formats)` that draws the figures.
    fresh: Whether to offer `--fresh`, for a study that resumes from an existing `results.json`.
    second: Function like `measure` for the second run, which `--second` offers; None if the study
      has none.

  Raises:
    SystemExit: If an argument is refused, with the reason in one line.
  """
  parser = argparse.ArgumentParser(prog=f"python -m {package}", description=about)
  parser.add_argument("--folder", type=pathlib.Path, default=here, help="folder of results.json and figures/")
  parser.add_argument("--format", nargs="+", choices=("png", "pdf", "svg"), default=["png"])
  if fresh:
    parser.add_argument("--fresh", action="store_true", help="discard the existing results.json and start over")
  if second:
    parser.add_argument("--second", action="store_true", help="measure the second run, which adds to the results of the first")
  parser.add_argument("--plot_only", action="store_true", help="draw results.json again without measuring")
  parser.add_argument("--smoke", action="store_true", help="use tiny sizes to show that the study runs; the measurements are meaningless")
  args = parser.parse_args(argv)
  path = args.folder / "results.json"
  if args.smoke and args.folder == here:
    raise SystemExit(
      "error: --smoke: found the folder of the measured results, expected another --folder=DIR, so that they are not overwritten"
    )
  if not args.plot_only:
    args.folder.mkdir(parents=True, exist_ok=True)
    if fresh and args.fresh:
      path.unlink(missing_ok=True)
    compilation_cache.cache_compilations()
    (second if second and args.second else measure)(args.folder, args.smoke)
  if not path.exists():
    raise SystemExit(f"error: {path}: found no such file, expected the results of a run; run it once without --plot_only")
  results = from_json(path.read_text())
  print(judging.lines(results["verdicts"]))
  draw(results, args.folder / "figures", args.format)
