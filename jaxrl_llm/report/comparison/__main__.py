"""Command line of the comparison: the page of several runs, or a figure for a paper."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.report.comparison.comparing import load, write_page
from jaxrl_llm.report.comparison.paper_figure import DEFAULT_METRICS, WIDTHS, draw
from jaxrl_llm.report.comparison.runs import AXES, is_run

_EXAMPLE = """
A run's folder, or one that holds runs, such as that of a sweep. Runs that differ in their seed only are one arm. Without --out the page is
comparison.html, in the folder of a sweep where one is given alone; with --figure a page is written only where --out asks for it.
"""


def main(argv: Sequence[str] | None = None) -> int:
  """Writes the page, and with --figure the figure. Returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m jaxrl_llm.report.comparison", description="Compares runs: arms with means and intervals over seeds.", epilog=_EXAMPLE
  )
  parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path, help="of a run, or of a sweep")
  parser.add_argument("--out", metavar="FILE.html", type=Path, help="the page")
  parser.add_argument("--title", default="", help="of the page")
  parser.add_argument("--figure", metavar="FILE.pdf", type=Path, help="draw a figure for a paper (.pdf, .svg or .png)")
  metrics = parser.add_argument("--metrics", metavar="NAME,NAME", help="panels of the figure, and further charts of the page")
  metrics.help += f"; default of the figure: {','.join(DEFAULT_METRICS)}"
  parser.add_argument("--x", choices=tuple(AXES), default="step", help="what the figure's curves are drawn against")
  parser.add_argument("--width", choices=tuple(WIDTHS), default="full", help="of the figure: one column of a paper (3.3 in) or both (7 in)")
  args = parser.parse_args(argv)
  metrics = tuple(filter(None, (name.strip() for name in (args.metrics or "").split(","))))
  try:
    arms, notes = load(args.folders)
    for note in notes:
      print(f"note: {note}", file=sys.stderr)
    if args.figure:
      print(draw(arms, metrics or DEFAULT_METRICS, args.figure, axis=args.x, width=args.width))
    if args.out or not args.figure:
      print(write_page(arms, notes, args.out or _default_page(args.folders), title=args.title, metrics=metrics))
  except (OSError, ImportError, ValueError) as error:
    for line in str(error).splitlines():
      print(f"error: {line}", file=sys.stderr)
    return 2
  return 0


def _default_page(folders: Sequence[Path]) -> Path:
  alone = len(folders) == 1 and not is_run(folders[0])
  return folders[0] / "comparison.html" if alone else Path("comparison.html")


if __name__ == "__main__":
  logging.basicConfig(level=logging.ERROR)  # The notes say what the reader of rows would warn of.
  sys.exit(main())
