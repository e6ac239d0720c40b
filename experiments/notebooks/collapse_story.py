"""Lecture 7: commands that a lecture runs as its reader would, and the rewards of a run."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from typing import Any

import numpy as np

from experiments.ablations.plots import BLUE, GREY, ORANGE, letter
from experiments.notebooks.pictures import Picture, Table, picture
from experiments.notebooks.run_pictures import Run, read
from experiments.notebooks.run_pictures import samples as show_samples
from experiments.notebooks.sources import ROOT
from jaxrl_llm.workdir import nonfinite

FOLDER = pathlib.Path("runs/lecture_7")
"""Folder of the lecture's runs, relative to the root of the repository."""

_EDGE, _RIGHT = 25, 3  # Largest reward of the picture, and the reward of a right answer.


def begin() -> None:
  """Deletes what an earlier reading of the lecture has left."""
  shutil.rmtree(ROOT / FOLDER, ignore_errors=True)


def shell(command: str, *, last: int = 40) -> None:
  """Runs a command of the package in the root of the repository; prints it and what it says.

  Args:
    command: Command line that begins with `python`.
    last: Number of lines at the end that are printed.

  Raises:
    RuntimeError: If the command fails.
  """
  _, *args = shlex.split(command)
  own = os.environ | {"COLUMNS": "120"}
  result = subprocess.run([sys.executable, *args], cwd=ROOT, env=own, capture_output=True, text=True)
  if result.returncode:
    raise RuntimeError(result.stderr[-2000:])
  lines = result.stdout.replace(f"{ROOT}/", "").replace(str(pathlib.Path.home()), "~").splitlines()
  print("\n".join([f"$ {' '.join(command.split())}", *(line.rstrip() for line in lines[-last:])]))


def blame(source: str, *options: str) -> None:
  """Takes an update apart; see `shell`.

  Args:
    source: Run of the lecture and step, or bundle.
    *options: Options of the command.
  """
  shell(f"python -m jaxrl_llm.cli.blame {FOLDER}/{source} {' '.join(options)}")


def run_of(name: str) -> Run:
  """Reads a run of the lecture."""
  return read(ROOT / FOLDER / name)


def warning(run: Run) -> tuple[int, int]:
  """Returns the step and the update of the first gradient that was not finite.

  On a processor on which all are finite, this is the step of the largest, and its first update.
  """
  dumps = [nonfinite.read_dump(path)[1] for path in (run.workdir / nonfinite.FOLDER).glob("step_*.npz")]
  if dumps:
    return min((about["step"], about["update"] + 1) for about in dumps)
  return max((row["actor/grad_norm"], row["step"]) for row in run.rows if row["phase"] == "rl")[1], 1


def samples(run: Run, step: int, *, count: int = 4) -> Table:
  """Returns the responses with the highest rewards of a step, among answers below 0."""
  rows = [row for row in run.samples if row["step"] == step and float(row["answer"]) < 0]
  highest = sorted(rows, key=lambda row: -row["reward"])[:count]
  return show_samples(run._replace(samples=highest), step, count=count)


def rewards(run: Run) -> Picture:
  """Draws the reward of every response against the step, by the sign of the right answer."""
  alt = "Reward of each response against the RL step, for right answers below 0 and others."
  return picture(_rewards, run, height=2.4, alt=alt, width=5.0)


def _rewards(figure: Any, run: Run) -> None:
  """Draws the scatter, a little spread around each step."""
  axes, rng = figure.subplots(), np.random.default_rng(0)
  for is_below, color, label in ((False, BLUE, "right answer 0 or above"), (True, ORANGE, "right answer below 0")):
    chosen = [row for row in run.samples if (float(row["answer"]) < 0) == is_below]
    steps = np.array([row["step"] for row in chosen]) + rng.uniform(-0.25, 0.25, len(chosen))
    axes.plot(steps, np.clip([row["reward"] for row in chosen], -_EDGE, _EDGE), ".", color=color, label=label, markersize=3)
  axes.axhline(_RIGHT, color=GREY, linewidth=0.8)
  axes.set_ylim(-_EDGE - 1, _EDGE + 1)
  axes.set_xlabel("RL step")
  letter(axes, "a", "reward of a response")
  figure.legend(loc="outside lower center", ncols=2)
