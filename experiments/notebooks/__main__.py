"""Executes the notebooks and rewrites their `.ipynb` with the outputs.

  python -m experiments.notebooks                 # all of them, on the checked-in logs
  python -m experiments.notebooks 03 --live       # trains for minutes, writes to runs/notebooks
  python -m experiments.notebooks --html pages    # also writes pages/NAME.html, self-contained
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence

from experiments.notebooks import execution, pages
from experiments.notebooks.sources import LIVE_NAMES, ROOT, chosen


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line and returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.notebooks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("names", nargs="*", metavar="NAME", help="notebook or its first characters; default: all")
  parser.add_argument("--live", action="store_true", help="train instead of reading logs; writes to runs/notebooks")
  parser.add_argument("--html", type=pathlib.Path, metavar="FOLDER", help="folder for an HTML page of each notebook")
  args = parser.parse_args(argv)
  try:
    names = chosen(args.names)
    if args.live and not set(names) & set(LIVE_NAMES):
      raise ValueError(f"--live: {', '.join(names)} would not change; it is for {', '.join(LIVE_NAMES)}")
    execution.require_tools()
  except (ValueError, ImportError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  folder = ROOT / "runs" / "notebooks" if args.live else execution.HERE
  for name in names:
    started = time.perf_counter()
    try:
      notebook = execution.execute(name, live=args.live)
    except execution.cell_errors() as error:
      print(f"error: {name}: {execution.first_error(error)}", file=sys.stderr)
      return 1
    written = [execution.write(name, notebook, folder)]
    if args.html:
      written.append(pages.write(name, notebook, args.html))
    print(f"{name}: {time.perf_counter() - started:.0f} s, {', '.join(map(_shown, written))}", flush=True)
  return 0


def _shown(path: pathlib.Path) -> str:
  """Formats a path relative to the repository, with the size of its file."""
  is_inside = path.resolve().is_relative_to(ROOT)
  return f"{path.resolve().relative_to(ROOT) if is_inside else path} ({path.stat().st_size / 1e3:.0f} kB)"


if __name__ == "__main__":
  sys.exit(main())
