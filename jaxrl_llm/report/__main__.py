"""The command line of the report: pages and figures of one run or several, and where two part."""

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.devices.addresses import KEY_VARIABLE, check_address, is_loopback
from jaxrl_llm.messages import refuse
from jaxrl_llm.report import SOURCES, write_figure, write_report
from jaxrl_llm.report.comparison.diff import describe, read_pair
from jaxrl_llm.report.comparison.page import load_arms, write_comparison
from jaxrl_llm.report.comparison.paper_figure import DEFAULT_METRICS, WIDTHS, draw
from jaxrl_llm.report.comparison.runs import X_AXES, is_run
from jaxrl_llm.workdir.bucket.copies import give_back, localize

_PORT = 8300
_RULES = """
One run gets its own page, RUN/report.html, and with --figure its learning curves. Several runs,
or a folder of runs such as that of a sweep, are compared. Runs that differ only in their seed form
one arm. Any other option also asks for a comparison, even of one run. Its page is comparison.html,
in the current folder, or in the folder of a sweep that is given alone. With --figure, the page is
written only if --out names it.

With --diff, nothing is written: the first difference of two runs in the order of the training loop
is printed, with its step and its likely cause.

With --serve, nothing is written: a page in the browser follows the runs, which may be in progress
or not yet exist.
"""


def main(argv: Sequence[str] | None = None) -> int:
  """Writes the page and the figure of a command line. Returns the exit status."""
  parser = argparse.ArgumentParser("python -m jaxrl_llm.report", description="Writes the page of a run, or of a comparison.", epilog=_RULES)
  parser.add_argument("folders", metavar="RUN", nargs="+", type=Path, help="folder of a run, or of a sweep; gs://BUCKET/RUN or s3://BUCKET/RUN")
  parser.add_argument("--figure", metavar="FILE.pdf", type=Path, help="draw a figure (.pdf, .svg or .png)")
  parser.add_argument("--out", metavar="FILE.html", type=Path, help="file of the comparison's page")
  parser.add_argument("--title", help="title of the comparison's page")
  names = f"metrics of the figure's panels, and of further charts of the page; default for the figure: {','.join(DEFAULT_METRICS)}"
  parser.add_argument("--metrics", metavar="NAME,NAME", type=_names, help=names)
  parser.add_argument("--x", choices=tuple(X_AXES), help="x axis of the figure's curves; default: step")
  parser.add_argument(
    "--width", choices=tuple(WIDTHS), help="width of one column of a paper (3.3 in), or of both (7 in, the default)"
  )
  parser.add_argument("--diff", action="store_true", help="print where two runs part, and the likely cause")
  parser.add_argument("--serve", action="store_true", help="follow the runs in the browser until Ctrl-C")
  parser.add_argument("--host", help="address that --serve listens on; default: 127.0.0.1, for this machine alone")
  key = f"key that --serve asks browsers for as a password; default: {KEY_VARIABLE} of the environment; other addresses need one"
  parser.add_argument("--api_key", help=key)
  parser.add_argument("--port", type=int, help=f"port that --serve listens on, 0 for a free one; default: {_PORT}")
  args = parser.parse_args(argv)
  given = args.folders
  alone = len(args.folders) == 1 and (args.out, args.title, args.metrics, args.x, args.width) == (None,) * 5
  try:
    if args.serve:
      _serve(args, compares=not alone)
      return 0
    if (args.host, args.port, args.api_key) != (None,) * 3:
      raise ValueError("--host, --port, --api_key: found no --serve, without which they have no effect; add it or leave them out")
    if args.diff:
      _diff(args)
      return 0
    args.folders = [localize(folder, checkpoints=False) for folder in given]
    if alone and any((args.folders[0] / name).is_file() for name in SOURCES):
      page = write_report(args.folders[0])
      print(give_back(given[0], args.folders[0], [page]) or page)
      if args.figure:
        print(write_figure(args.folders[0], args.figure))
    else:
      _compare(args, given)
  except (OSError, ImportError, ValueError) as error:
    return refuse(error)
  return 0


def _names(text: str) -> tuple[str, ...]:
  return tuple(filter(None, (name.strip() for name in text.split(","))))


def _serve(args: argparse.Namespace, *, compares: bool) -> None:
  from jaxrl_llm.report import live

  unused = [f"--{name}" for name in ("figure", "out", "x", "width") if getattr(args, name) is not None]
  if unused:
    raise ValueError(f"{', '.join(unused)}: found with --serve, which writes no file; run the command once more without --serve for it")
  for folder in args.folders:
    if folder.exists() and not folder.is_dir():
      raise ValueError(f"{folder}: found a file, expected the folder of a run or of a sweep, which may not exist yet")
  followed = live.Followed(tuple(args.folders), args.title or "", args.metrics or (), compares and len(args.folders) == 1)
  host, port = args.host or "127.0.0.1", _PORT if args.port is None else args.port
  key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE) or None
  check_address(host, key)
  try:
    server = live.make_server(followed, host=host, port=port, api_key=key)
  except (OSError, OverflowError) as error:
    expected = "expected an address of this machine and a free port, such as --port=0"
    raise ValueError(f"--host={host} --port={port}: {error}; {expected}") from error
  logging.basicConfig(level=logging.ERROR)
  if not is_loopback(host):
    print(f"note: everyone who reaches {host} with the key can read these runs", file=sys.stderr)
  waiting = [str(folder) for folder in args.folders if not live.local(folder).exists()]
  note = f" ({', '.join(waiting)}: nothing there yet, the page waits)" if waiting else ""
  print(f"following {', '.join(map(str, args.folders))} at {live.address(server)}{note}; Ctrl-C ends it", flush=True)
  with server, contextlib.suppress(KeyboardInterrupt):
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server.serve_forever()


def _diff(args: argparse.Namespace) -> None:
  unused = [f"--{name}" for name in ("figure", "out", "title", "metrics", "x", "width") if getattr(args, name) is not None]
  if unused:
    raise ValueError(f"{', '.join(unused)}: found with --diff, which prints text; run the command once more without --diff for it")
  logging.basicConfig(level=logging.ERROR)  # The notes cover the warnings of the row reader.
  # A damaged checkpoint is told by code that starts JAX, and a run may be using the accelerator.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  a, b, notes = read_pair([localize(folder, checkpoints=False) for folder in args.folders])
  for note in notes:
    print(f"note: {note}", file=sys.stderr)
  print(*describe(a, b), sep="\n")


def _compare(args: argparse.Namespace, given: Sequence[Path]) -> None:
  logging.basicConfig(level=logging.ERROR)  # The notes cover the warnings of the row reader.
  arms, notes = load_arms(args.folders)
  for note in notes:
    print(f"note: {note}", file=sys.stderr)
  if args.figure:
    print(draw(arms, args.metrics or DEFAULT_METRICS, args.figure, axis=args.x or "step", width=args.width or "full"))
  if args.out or not args.figure:
    is_sweep = len(args.folders) == 1 and not is_run(args.folders[0])
    page = args.out or (args.folders[0] if is_sweep else Path()) / "comparison.html"
    page = write_comparison(arms, notes, page, title=args.title or "", metrics=args.metrics or ())
    print((give_back(given[0], args.folders[0], [page]) if is_sweep else None) or page)


if __name__ == "__main__":
  sys.exit(main())
