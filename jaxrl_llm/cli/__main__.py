"""The console script: `jaxrl-llm COMMAND [OPTION ...]`

Each command is the same code as a module that `python -m` runs. Nothing but the chosen command is
imported, so that help, a new project and a misspelt name need no jax.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm import __version__
from jaxrl_llm.messages import USAGE_ERROR, did_you_mean, refuse, shown

SWEEPS = Path("experiments", "launch", "__main__.py")
"""File of the sweep launcher, which is part of the repository and not of the package."""


class Command(NamedTuple):
  """A command of the console script.

  Attributes:
    module: Module that `python -m` runs.
    sentence: Line of the help.
    example: Arguments to begin with.
  """

  module: str
  sentence: str
  example: str


COMMANDS = {
  "new": Command("jaxrl_llm.cli.new", "write a project to start from: a config, a task, a reward and a test", "my_project"),
  "train": Command("jaxrl_llm.main", "train, or resume a run", "--config=configs/my_project.py"),
  "evaluate": Command("jaxrl_llm.evaluate", "measure a checkpoint on held-out problems", "--checkpoint=runs/my_project"),
  "report": Command("jaxrl_llm.report", "write the page of a run, or of a comparison of several", "runs/my_project"),
  "export": Command("jaxrl_llm.export", "save a policy as a folder that transformers and vLLM open", "runs/my_project exported"),
  "serve": Command("jaxrl_llm.serve", "serve a checkpoint over HTTP", "--checkpoint=runs/my_project"),
  "bundle": Command("jaxrl_llm.cli.bundle", "put an RL step in a box, and take its updates again", "runs/my_project@3 --out=step3.zip"),
  "blame": Command("jaxrl_llm.cli.blame", "say which groups and responses an update came from", "runs/my_project@3"),
  "join": Command("jaxrl_llm.cli.join", "draw responses for a run with rollout.samplers", "--workdir=runs/my_project"),
  "launch": Command("experiments.launch", "run a sweep; needs a checkout of the repository", "--config=configs/gspo.py --sweep=FILE"),
}
"""Commands by name, in the order of a first day."""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command.

  Args:
    argv: Arguments, beginning with the program's name; None means those of the process.

  Returns:
    The exit status: that of the command, or 2 for a command that does not exist.
  """
  program, *args = sys.argv if argv is None else argv
  if not args or args[0] in ("-h", "--help", "help"):
    print(help_text())
    return 0 if args else USAGE_ERROR
  if args[0] == "--version":
    print(__version__)
    return 0
  name, rest = args[0], args[1:]
  if name not in COMMANDS:
    hint = did_you_mean(name, COMMANDS, "; did you mean jaxrl-llm {}?")
    return refuse(f"jaxrl-llm: found {shown(name)}, expected one of {', '.join(COMMANDS)}{hint}")
  if name == "launch":
    return launch(rest)
  return run_module(COMMANDS[name].module, [f"{program} {name}", *rest])


def help_text() -> str:
  """Returns the text of `jaxrl-llm --help`."""
  width = max(map(len, COMMANDS))
  lines = [f"  {name:{width}}  {command.sentence}" for name, command in COMMANDS.items()]
  shorter = ("new", "train", "evaluate", "export")
  begin = [f"  jaxrl-llm {name} {COMMANDS[name].example}" for name in shorter]
  begin.insert(1, "  cd my_project")
  return "\n".join(
    [
      "usage: jaxrl-llm COMMAND [OPTION ...]", "", "Reinforcement learning of language models in JAX.", "", *lines, "",
      "jaxrl-llm COMMAND --help describes a command, jaxrl-llm --version prints the version. To begin:", "", *begin,
    ]
  )  # fmt: skip


def run_module(module: str, argv: list[str]) -> int:
  """Runs a module as `python -m` does, with the current folder on Python's path.

  A script begins with its own folder there, in which the rewards and environments of a project
  would not be found.

  Args:
    module: Name of the module.
    argv: Arguments, beginning with the program's name.

  Returns:
    The exit status.
  """
  if (here := os.getcwd()) not in sys.path:
    sys.path.insert(0, here)
  before, sys.argv = sys.argv, argv
  try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  except SystemExit as error:
    if error.code is None or isinstance(error.code, int):
      return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
  finally:
    sys.argv = before
  return 0


def launch(args: Sequence[str]) -> int:
  """Runs the sweep launcher of the checkout that the current folder is. Returns its exit status."""
  if not SWEEPS.is_file():
    where = f"found no {SWEEPS.parent.as_posix()} in {Path.cwd()}"
    return refuse(f"jaxrl-llm launch: {where}, expected a checkout of the repository, whose sweeps it runs")
  return subprocess.call([sys.executable, "-m", "experiments.launch", *args])


if __name__ == "__main__":
  sys.exit(main())
