"""Command line of the report: the page of a run, and with --figure its learning curves."""

import argparse
import sys
from collections.abc import Sequence

from jaxrl_llm.report import write_figure, write_report


def main(argv: Sequence[str] | None = None) -> int:
  """Writes the page, and with --figure the figure. Returns the exit status."""
  parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.report", description="Writes WORKDIR/report.html.")
  parser.add_argument("workdir", metavar="WORKDIR", help="a run's folder")
  parser.add_argument("--figure", metavar="PATH", help="also draw the learning curves (.png, .pdf or .svg)")
  args = parser.parse_args(argv)
  try:
    print(write_report(args.workdir))
    if args.figure:
      print(write_figure(args.workdir, args.figure))
  except (OSError, ImportError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
