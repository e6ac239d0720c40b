"""Who did it: `python -m jaxrl_llm.cli.blame WORKDIR@STEP`

Takes an update of an RL step apart, by default the first one. Its loss and its gradient are split
over groups, responses or tokens, exactly.
"""

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.messages import INTERRUPTED, MissingPackageError, UsageError, refuse

_RULES = """
share: part of the gradient g that comes of a group, <g_i, g> / |g|^2; shares add up to 1.
agreement: cosine of the group's gradient with the sum of all others'; a group whose rewards are
wrong points against them, and --order=against names it first. loss: parts add up to the loss.
"""


def main(argv: Sequence[str]) -> int:
  """Runs a command line, beginning with the program's name, and returns its exit status."""
  description = "Takes an update of an RL step apart."
  parser = argparse.ArgumentParser("python -m jaxrl_llm.cli.blame", description=description, epilog=_RULES)
  parser.add_argument("source", metavar="WORKDIR@STEP|FILE.zip", help="a run and an RL step, from 1; or a bundle of one")
  parser.add_argument("--update", type=int, default=1, metavar="N", help="update of the step, from 1; default: 1")
  parser.add_argument("--by", choices=("group", "response", "token"), default="group", help="parts of the table; default: group")
  order = "what comes first: the largest share of the gradient (default), loss or norm, or what points most against the others"
  parser.add_argument("--order", choices=("share", "against", "norm", "loss"), default="share", help=order)
  parser.add_argument("--group", type=int, metavar="N", help="with --by=response: the responses of this group only")
  parser.add_argument("--response", type=int, metavar="N", help="with --by=token: the response, by its number in the step")
  parser.add_argument("--leave_out", type=int, default=0, metavar="K", help="also take the update without each of the first K of the table")
  parser.add_argument("--most", type=int, default=20, metavar="N", help="rows of the table; default: 20")
  page = "also write a page of the responses in this order, each token in the colour of its loss"
  parser.add_argument("--page", metavar="FILE.html", type=Path, help=page)
  args = parser.parse_args(argv[1:])
  try:
    if (args.by == "token") != (args.response is not None):
      raise UsageError("--response: expected it with --by=token, which lists the tokens of one response, and only there")
    if args.group is not None and args.by != "response":
      raise UsageError("--group: found without --by=response, expected it with the responses of one group")
    if args.leave_out and args.by == "token":
      raise UsageError("--leave_out: found with --by=token, expected groups or responses")
    if args.page is not None and not args.page.parent.is_dir():
      raise UsageError(f"--page: found no folder {args.page.parent}, expected an existing one")
    print("\n".join(_lines(args)))
  except (MissingPackageError, OSError, UsageError, ValueError) as error:
    return refuse(error)
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED
  return 0


def _lines(args: argparse.Namespace) -> list[str]:
  from jaxrl_llm import train  # Late: bad input is refused without JAX.
  from jaxrl_llm.devices import compilation_cache, xla_flags
  from jaxrl_llm.run.jobs.bundle.contents import is_exact

  compilation_cache.cache_compilations()
  xla_flags.set_flags(exact=is_exact(args.source))
  from jaxrl_llm.run.jobs.blame import table
  from jaxrl_llm.run.jobs.bundle import repeat
  from jaxrl_llm.run.jobs.bundle.capture import capture
  from jaxrl_llm.run.jobs.bundle.opened import open_bundle

  with tempfile.TemporaryDirectory() as folder:
    path = Path(args.source)
    if not args.source.endswith(".zip"):
      path = Path(folder) / "step.zip"
      with contextlib.redirect_stdout(io.StringIO()):  # The screen of the steps that are repeated.
        capture(args.source, path, proceed=train.proceed)
    opened = repeat.before(open_bundle(path), args.update - 1)
    blamed = table.blame(opened, by="group" if args.by == "group" else "response", order=args.order)
    if args.by == "token":
      lines = table.token_lines(opened, blamed, args.response)
      return lines + _page(args, opened, blamed)
    if args.group is not None and args.group not in {part[0]["group"] for part in blamed.parts}:
      raise UsageError(f"--group: found {args.group}, expected one of update {args.update}")
    lines = table.lines_of(opened, blamed, most=args.most, group=args.group)
    lines += table.change_lines(opened, blamed, args.leave_out) if args.leave_out else []
    return lines + _page(args, opened, blamed)


def _page(args: argparse.Namespace, opened: Any, blamed: Any) -> list[str]:
  """Writes the page if there is to be one, and returns its name."""
  from jaxrl_llm.run.jobs.blame import page

  if args.page is None:
    return []
  page.write(args.page, opened, blamed, source=args.source, most=args.most, group=args.group, response=args.response)
  return [str(args.page)]


if __name__ == "__main__":
  sys.exit(main(sys.argv))
