"""Command line of the report: the page of one run, or the page that compares several, and figures of either."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.report import SOURCES, write_figure, write_report
from jaxrl_llm.report.comparison.comparing import load, write_page
from jaxrl_llm.report.comparison.paper_figure import DEFAULT_METRICS, WIDTHS, draw
from jaxrl_llm.report.comparison.runs import AXES, is_run

_RULES = """
One run gets its own page, RUN/report.html, and with --figure its learning curves. Several runs, or a folder that holds runs,
such as that of a sweep, are compared: runs that differ in their seed only are one arm. The other options ask for a comparison
too, even of one run. Its page is comparison.html, in the folder of a sweep given alone; with --figure it is written only if
--out names it.
"""


def main(argv: Sequence[str] | None = None) -> int:
  """Writes the page, and with --figure the figure. Returns the exit status."""
  parser = argparse.ArgumentParser("python -m jaxrl_llm.report", description="Writes the page of a run, or of a comparison.", epilog=_RULES)
  parser.add_argument("folders", metavar="RUN", nargs="+", type=Path, help="folder of a run, or of a sweep")
  parser.add_argument("--figure", metavar="FILE.pdf", type=Path, help="draw a figure (.pdf, .svg or .png)")
  parser.add_argument("--out", metavar="FILE.html", type=Path, help="the comparison's page")
  parser.add_argument("--title", help="title of the comparison's page")
  metrics = parser.add_argument("--metrics", metavar="NAME,NAME", help="panels of the figure, and further charts of the page")
  metrics.help += f"; default of the figure: {','.join(DEFAULT_METRICS)}"
  parser.add_argument("--x", choices=tuple(AXES), help="what the figure's curves are drawn against; default: step")
  parser.add_argument("--width", choices=tuple(WIDTHS), help="one column of a paper (3.3 in), or both (7 in), the default")
  args = parser.parse_args(argv)
  alone = len(args.folders) == 1 and (args.out, args.title, args.metrics, args.x, args.width) == (None,) * 5
  try:
    if alone and any((args.folders[0] / name).is_file() for name in SOURCES):
      print(write_report(args.folders[0]))
      if args.figure:
        print(write_figure(args.folders[0], args.figure))
    else:
      _compare(args)
  except (OSError, ImportError, ValueError) as error:
    for line in str(error).splitlines():
      print(f"error: {line}", file=sys.stderr)
    return 2
  return 0


def _compare(args: argparse.Namespace) -> None:
  logging.basicConfig(level=logging.ERROR)  # The notes say what the reader of rows would warn of.
  metrics = tuple(filter(None, (name.strip() for name in (args.metrics or "").split(","))))
  arms, notes = load(args.folders)
  for note in notes:
    print(f"note: {note}", file=sys.stderr)
  if args.figure:
    print(draw(arms, metrics or DEFAULT_METRICS, args.figure, axis=args.x or "step", width=args.width or "full"))
  if args.out or not args.figure:
    is_sweep = len(args.folders) == 1 and not is_run(args.folders[0])
    page = args.out or (args.folders[0] if is_sweep else Path()) / "comparison.html"
    print(write_page(arms, notes, page, title=args.title or "", metrics=metrics))


if __name__ == "__main__":
  sys.exit(main())
