"""The fork of a branch: the run and the RL step that it continues from, as in `--branch`."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.messages import Problem, shown

FOLDER, FILE, ROLLOUTS = "branched_from", "fork.json", "rollouts.zip"
"""Folder in a branch with the config of the other run, and the files in it with the fork and with
the rollouts that the branch learns from."""


class Fork(NamedTuple):
  """The origin of a branch.

  Attributes:
    workdir: Absolute path of the run that is branched.
    step: RL step, from 1, after which the branch goes its own way; 0 is the state before RL.
    recorded: Number of RL steps after it that learn from the rollouts of the run.
  """

  workdir: str
  step: int
  recorded: int = 0


def parse(text: str) -> Fork:
  """Parses the value of `--branch`.

  Raises:
    ValueError: If it is not WORKDIR@STEP, or the run is in a bucket. One line.

  Example:
    >>> parse("/runs/gspo@412")
    Fork(workdir='/runs/gspo', step=412, recorded=0)
  """
  match = re.fullmatch(r"(.+)@([0-9]+)", text)
  if match is None:
    raise ValueError(Problem("--branch", shown(text), "WORKDIR@STEP, a run and an RL step, as in runs/gspo@412"))
  if "://" in text:
    raise ValueError(Problem("--branch", shown(text), "a folder: download the run from its bucket first"))
  return Fork(str(Path(match[1]).expanduser().absolute()), int(match[2]))


def fork_of(workdir: Path) -> Fork | None:
  """Returns the fork of the branch in a workdir; None if the workdir holds no branch."""
  try:
    return Fork(**json.loads((workdir / FOLDER / FILE).read_text(encoding="utf-8")))
  except FileNotFoundError:
    return None


def origin(fork: Fork, workdir: Path) -> Path:
  """Returns the folder with the config of the run that is branched.

  It is in the branch itself once that exists, so that the branch does not need the other run.

  Args:
    fork: Fork of the branch.
    workdir: Folder of the branch, which need not exist.
  """
  return workdir / FOLDER if fork_of(workdir) == fork else Path(fork.workdir)


def num_warm_steps(config: Mapping[str, Any]) -> int:
  """Returns the number of the checkpoint before the first RL step, for a config by section."""
  return config["warm_start"]["num_steps"]
