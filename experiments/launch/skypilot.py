"""TPUs that SkyPilot finds: one managed job per trial, on spot machines that are replaced if lost.

A trial has one slice. SkyPilot starts the same command on every host of the slice, and the hosts
find each other as on any TPU VM. It sets no limit on restarts after the exit status 42. SkyPilot
(tried with 0.14.1) is a command in an environment of its own, `pipx install 'skypilot[gcp]'`; a dry
run does not need it.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from experiments.launch import jobset, slices
from experiments.launch.rows import SweepError
from experiments.launch.trial import Trial
from experiments.launch.xpk_command import job_name

RESTARTED = (42, 134, 137, 143)
"""Exit statuses after which a trial starts again.

They are the project's 42 after SIGTERM or a hang, a lost peer, SIGKILL and SIGTERM.
"""

_TPU = re.compile(r"(tpu-)?(v\d+[a-z]*)-(\d+)")
# The Python of TPU VMs may be older than the project's.
_SETUP = "\n".join((
  "python3 -m pip install -q uv",
  "python3 -m uv venv -q --allow-existing --python 3.12 .venv",
  "python3 -m uv pip install -q --python .venv/bin/python -e '.[tpu]'",
))  # fmt: skip
_ENDED_BADLY = ("FAILED", "CANCELLED")


class Options(NamedTuple):
  """Flags of the SkyPilot target.

  Attributes:
    tpu_type: Type of the slice, such as "v5p-128" (128 cores) or "v6e-32".
    bucket: Bucket of the workdirs, as in gs://my-bucket.
    mount: Folder at which the bucket is mounted, and which contains the workdirs.
    infra: Location, in SkyPilot's notation: gcp, gcp/us-east5 or gcp/us-east5/us-east5-a.
    machines: Kind of machines: "spot", which are cheaper and may be preempted, or "on-demand".
    setup: Shell commands to run before the first start on a machine, in the folder of this
      checkout.
    env: Further environment variables, each as NAME=VALUE.
    sky: Path of the command.
  """

  tpu_type: str
  bucket: str = ""
  mount: str = "/mnt/runs"
  infra: str = "gcp"
  machines: str = "spot"
  setup: str = _SETUP
  env: tuple[str, ...] = ()
  sky: str = "sky"


class SkyPilotError(SweepError):
  """Reason why a launch is impossible; the message consists of the lines to show."""


def task(trial: Trial, options: Options) -> dict[str, Any]:
  """Describes a trial as a task of SkyPilot.

  Args:
    trial: Trial of the sweep.
    options: Options of the target.

  Raises:
    SkyPilotError: If SkyPilot would refuse a setting later, or the config needs several slices.
  """
  match = _TPU.fullmatch(options.tpu_type)
  if match is None:
    raise SkyPilotError(
      f"--tpu_type: found {options.tpu_type!r}, expected a generation and a number of cores or chips, "
      "as in v5p-128 or v6e-32"
    )
  if options.machines not in ("spot", "on-demand"):
    raise SkyPilotError(f"--machines: found {options.machines!r}, expected spot or on-demand")
  try:
    slices.mesh_arguments(trial.command, 1)
  except ValueError as error:
    raise SkyPilotError(f"trial {trial.name}: {error}") from error
  where = {
    "infra": options.infra,
    "accelerators": f"tpu-{match[2]}-{match[3]}",
    "use_spot": options.machines == "spot",
  }
  return {
    "name": job_name(trial),
    "resources": where | {"job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": list(RESTARTED)}},
    "num_nodes": 1,
    "workdir": ".",
    "file_mounts": {options.mount: {"source": options.bucket or "gs://BUCKET", "mode": "MOUNT"}},
    "envs": dict(_named(each) for each in options.env),
    "setup": options.setup,
    "run": f"export PATH=$PWD/.venv/bin:$PATH\n{shlex.join(trial.command)}\n",
  }


def _named(each: str) -> tuple[str, str]:
  name, equals, value = each.partition("=")
  if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
    raise SkyPilotError(f"--env: found {each!r}, expected NAME=VALUE")
  return name, value


def write(trials: Sequence[Trial], folder: Path, *, options: Options) -> list[Path]:
  """Writes a YAML file for each trial, and a script that would submit them.

  Args:
    trials: Trials of the sweep.
    folder: Folder of the sweep, in which `skypilot/JOB.yaml` and `submit.sh` are written.
    options: Options of the target.

  Returns:
    The paths of the files.
  """
  if lost := _lost(trials, options):
    print(f"note: {lost}", file=sys.stderr)
  (folder / "skypilot").mkdir(parents=True, exist_ok=True)
  paths, lines = [], ["#!/bin/sh -ex"]
  for trial in trials:
    description = task(trial, options)
    path = folder / "skypilot" / f"{description['name']}.yaml"
    path.write_text(f"# {trial.name}\n" + jobset.dump(description), encoding="utf-8")
    paths.append(path)
    lines.append(shlex.join(_launch(options.sky, path)))
  script = folder / "submit.sh"
  script.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return [*paths, script]


def _lost(trials: Sequence[Trial], options: Options) -> str:
  """Explains why workdirs outside the bucket are lost; empty if they are in it."""
  if PurePosixPath(options.mount) in PurePosixPath(trials[0].workdir).parents:
    return ""
  return (
    f"workdirs in {trials[0].workdir} are lost with their machine; "
    f"set --workdirs={options.mount}/SWEEP, where the bucket is mounted"
  )


def _launch(sky: str, path: Path) -> list[str]:
  return [sky, "jobs", "launch", "--yes", "--async", str(path)]


def submit(trials: Sequence[Trial], folder: Path, *, options: Options, tell=print) -> list[str]:
  """Submits the trials that are neither waiting, running nor finished.

  Args:
    trials: Trials of the sweep.
    folder: Folder of the sweep, for the YAML files.
    options: Options of the target, with a bucket.
    tell: Function that prints a line for each trial.

  Returns:
    The names of the submitted jobs.

  Raises:
    SkyPilotError: If the bucket or SkyPilot is missing, the queue cannot be read, or `task` fails.
  """
  if not options.bucket:
    raise SkyPilotError("--bucket: not set; a submission requires one for the workdirs, as in --bucket=gs://my-bucket")
  if lost := _lost(trials, options):
    raise SkyPilotError(lost)
  if shutil.which(options.sky) is None:
    raise SkyPilotError(
      f"--target=skypilot: {options.sky} is not on the PATH; install it with `pipx install 'skypilot[gcp]'`"
    )
  paths, there, done = write(trials, folder, options=options), jobs(options.sky), []
  for trial, path in zip(trials, paths, strict=False):  # The last path is the script's.
    name = job_name(trial)
    state = there.get(name, "")
    if state and not state.startswith(_ENDED_BADLY):
      tell(f"{trial.name}: {name} is {state}; skipped")
      continue
    _run(_launch(options.sky, path))
    tell(f"{trial.name}: {name} {'was ' + state + ', and is submitted again' if state else 'is submitted'}")
    done.append(name)
  return done


def jobs(sky: str) -> dict[str, str]:
  """Returns the newest state of every managed job by name, such as "RUNNING".

  Of jobs with the same name, the one with the highest number counts.

  Raises:
    SkyPilotError: If the queue cannot be read.
  """
  text = _run([sky, "jobs", "queue", "--all", "--output", "json"])
  try:
    rows = json.loads(text)
    return {row["job_name"]: _state(row) for row in sorted(rows, key=lambda row: row["job_id"])}
  except (ValueError, KeyError, TypeError) as error:
    raise SkyPilotError(f"sky jobs queue: found no list of jobs ({type(error).__name__}: {error})") from error


def _state(row: Mapping[str, Any]) -> str:
  return str(row["status"]).rsplit(".", 1)[-1]


def _run(command: Sequence[str]) -> str:
  result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
  if result.returncode:
    lines = (result.stderr or result.stdout).strip().splitlines() or ["it printed nothing"]
    raise SkyPilotError(f"{shlex.join(command[:3])}: exit status {result.returncode}: {lines[-1].strip()[:500]}")
  return result.stdout
