"""A new project: `jaxrl-llm new NAME`

It writes the folder NAME with a config, a task, a reward and a test that passes at once. The first
run takes about a minute on two CPU cores.
"""

import os
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.messages import Problem, one_line, refuse, shown

TEMPLATE = Path(__file__).resolve().with_name("template")
_NAME = "my_project"  # Name of the project in the template.

FILES = {
  "README.md": "README.md",
  "config.py": f"configs/{_NAME}.py",
  "problems.py": "problems.py",
  "rewards.py": "rewards.py",
  "project_test.py": f"test_{_NAME}.py",
  "gitignore": ".gitignore",
}
"""Files of a project by their names in the template."""


def main(argv: Sequence[str]) -> int:
  """Runs a command line and returns its exit status.

  Args:
    argv: Arguments, beginning with the program's name.

  Returns:
    0 after a project was written, 2 for bad input.
  """
  if {"-h", "--help"} & set(argv[1:]):
    print(__doc__)
    return 0
  try:
    if len(argv) != 2:
      given = shown(" ".join(argv[1:])) if argv[1:] else "no name"
      raise ValueError(Problem("jaxrl-llm new", given, f"the name of a project, as in jaxrl-llm new {_NAME}"))
    name = argv[1]
    write_project(name, Path.cwd())
  except (OSError, ValueError) as error:
    return refuse(one_line(error, typed=False, limit=400))
  print(f"wrote {name}: its README.md says what is where. To train:\n\n  cd {name}\n  jaxrl-llm train --config=configs/{name}.py")
  return 0


def check_name(name: str, parent: Path) -> None:
  """Refuses a name that a project cannot have.

  Args:
    name: Name of the project.
    parent: Folder in which the project would be made.

  Raises:
    ValueError: If the name is not a word, or is taken. One line, with a name that would do.

  Example:
    >>> check_name("my-project", Path("."))
    Traceback (most recent call last):
    ...
    ValueError: jaxrl-llm new: found 'my-project', expected letters, digits and underscores, with a
    letter first; for instance my_project
  """
  if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name, flags=re.ASCII):
    words = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_0123456789")[:40] or _NAME
    raise ValueError(
      Problem("jaxrl-llm new", shown(name), f"letters, digits and underscores, with a letter first; for instance {_free(words, parent)}")
    )
  if os.path.lexists(parent / name):
    kind = "folder" if (parent / name).is_dir() else "file"
    raise ValueError(Problem("jaxrl-llm new", f"a {kind} {name!r} here", f"a new name; for instance {_free(name, parent)}"))


def write_project(name: str, parent: Path) -> Path:
  """Writes a project by one rename, so that an interrupted command leaves no half of it.

  Args:
    name: Name of the project.
    parent: Folder in which the project is made.

  Returns:
    The folder of the project.

  Raises:
    ValueError: If the name is not a word, or is taken. One line.
    OSError: If the folder cannot be written.
  """
  check_name(name, parent)
  scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
  try:
    for source, target in FILES.items():
      path = scratch / target.replace(_NAME, name)
      path.parent.mkdir(exist_ok=True)
      path.write_text((TEMPLATE / source).read_text(encoding="utf-8").replace(_NAME, name), encoding="utf-8")
    runpy.run_path(str(scratch / "problems.py"))["write"](scratch / "problems.jsonl")
    scratch.chmod(0o777 & ~_umask())  # A temporary folder is the user's alone.
    scratch.rename(parent / name)
  except BaseException:
    shutil.rmtree(scratch, ignore_errors=True)
    raise
  return parent / name


def _free(name: str, parent: Path) -> str:
  """Returns the name, or the first of its numbered variants that is not taken."""
  return next(each for number in range(1, 10_000) if not os.path.lexists(parent / (each := name if number == 1 else f"{name}_{number}")))


def _umask() -> int:
  """Returns the process's mask of permissions, which can only be read by setting it."""
  os.umask(mask := os.umask(0))
  return mask


if __name__ == "__main__":
  sys.exit(main(sys.argv))
