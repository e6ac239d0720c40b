"""A step in a box: `python -m jaxrl_llm.cli.bundle WORKDIR@STEP --out=FILE.zip`

Writes all that the updates of one RL step read, and what came of them, to one file; or takes the
updates of such a file once more, anywhere.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.config import command_line
from jaxrl_llm.messages import INTERRUPTED, MissingPackageError, UsageError, refuse

FORMS = ("included", "adapters", "reference")
"""What a bundle can hold of the state before the step."""

_RULES = """
Updates repeat to the bit on the same kind of device with the same packages, and the last line says
so. --config.FIELD=VALUE changes what a learner alone can honour: objective, corrections, optimizer,
mesh, precision. Responses that are left out leave the weights of the others as they are. The exit
status is 0, 1 if an unchanged repetition differs, 2 for bad input.
"""


def main(argv: Sequence[str]) -> int:
  """Runs a command line, beginning with the program's name, and returns its exit status."""
  parser = argparse.ArgumentParser("python -m jaxrl_llm.cli.bundle", description="Puts an RL step in a box, or runs it.", epilog=_RULES)
  parser.add_argument("source", metavar="WORKDIR@STEP|FILE.zip", help="a run and an RL step, from 1; or a bundle")
  parser.add_argument("--out", metavar="FILE.zip", type=Path, help="file to write")
  what = "'adapters' leaves out the frozen weights below them, which config.model.path has; 'reference' leaves out all"
  what += " weights and the optimizer's state, which the run's checkpoint has; default: included"
  parser.add_argument("--weights", choices=FORMS, help=what)
  parser.add_argument("--run", action="store_true", help="take the updates of a bundle once more")
  numbers = dict(type=_numbers, default=(), metavar="N,N")
  parser.add_argument("--drop_group", **numbers, help="groups to leave out, by their numbers from 0")
  parser.add_argument("--only_group", **numbers, help="groups to keep alone")
  parser.add_argument("--only_response", **numbers, help="responses of the step to keep alone, by their numbers from 0")
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of activations and products: --config.model.dtype")
  path, overrides, rest = command_line.split(argv[1:])
  args = parser.parse_args(rest)
  try:
    if path:
      raise UsageError(f"--config: found {path!r}, expected none: the run and the bundle have their own")
    if args.dtype is not None:
      overrides["model.dtype"] = [args.dtype]
    if args.run or args.source.endswith(".zip"):
      return _run(args, overrides)
    given = [flag for flag in ("drop_group", "only_group", "only_response") if getattr(args, flag)]
    if unused := given + [f"config.{field}" for field in overrides]:
      raise UsageError(f"--{unused[0]}: found with a run, expected it with a bundle and --run")
    if args.out is None:
      raise UsageError("--out: found none, expected the file to write, as in --out=step412.zip")
    _write(args)
  except (MissingPackageError, OSError, UsageError, ValueError) as error:
    return refuse(error)
  except KeyboardInterrupt:
    print("interrupted; nothing was written", file=sys.stderr)
    return INTERRUPTED
  return 0


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(map(int, text.split(",")))


def _write(args: argparse.Namespace) -> None:
  from jaxrl_llm import train  # Late: bad input is refused without JAX.
  from jaxrl_llm.devices import compilation_cache, xla_flags
  from jaxrl_llm.run.jobs.bundle.capture import capture
  from jaxrl_llm.run.jobs.bundle.contents import is_exact

  compilation_cache.cache_compilations()
  xla_flags.set_flags(exact=is_exact(args.source))
  for line in capture(args.source, args.out, proceed=train.proceed, form=args.weights or "included"):
    print(line)


def _run(args: argparse.Namespace, overrides: dict[str, list[str]]) -> int:
  if not args.run:
    raise UsageError(f"{shlex.quote(args.source)}: found a bundle without --run, expected --run, or WORKDIR@STEP and --out to write one")
  if args.out is not None or args.weights is not None:
    raise UsageError("--run: found with --out or --weights, which belong to the writing of a bundle; leave them out")
  from jaxrl_llm.devices import compilation_cache, xla_flags
  from jaxrl_llm.run.jobs.bundle.contents import is_exact

  compilation_cache.cache_compilations()
  xla_flags.set_flags(exact=is_exact(args.source))
  from jaxrl_llm.run.jobs.bundle import repeat
  from jaxrl_llm.run.jobs.bundle.opened import open_bundle

  opened = open_bundle(Path(args.source), overrides)
  about = opened.about
  size = f"{len(about['rows'])} updates of {about['rows'][0]} rows, {len(opened.responses)} responses"
  print(f"RL step {about['step']} of {about['run']}: {size}")
  for field, (was, now) in opened.changed.items():
    print(f"config.{field}: {was!r} -> {now!r}")
  responses = repeat.chosen(opened, drop=args.drop_group, groups=args.only_group, responses=args.only_response)
  if responses is not None:
    print(f"the loss of {len(responses)} responses counts, with their weights among all")
  updates, state = repeat.repeat(opened, responses)
  print("\n".join(repeat.table(about["updates"], updates)))
  is_equal, lines = repeat.verdict(opened, updates, state)
  print("\n".join(lines))
  return 0 if is_equal or opened.changed or responses is not None else 1


if __name__ == "__main__":
  sys.exit(main(sys.argv))
