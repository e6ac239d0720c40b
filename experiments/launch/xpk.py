"""TPU pods in a Google Kubernetes cluster: one JobSet per trial, queued by Kueue, submitted by xpk.

xpk is a command and not a dependency, because it pins old versions of packages: install it in an
environment of its own (`pipx install xpk`). A dry run needs nothing else: no cluster, no gcloud, no
kubectl. `experiments/pods.md` describes the steps from there to a running sweep.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from experiments.launch import jobset, slices
from experiments.launch.trial import Trial
from experiments.launch.xpk_command import (
  PLACEHOLDERS,
  RESTARTED,
  VERSION,
  Options,
  XpkError,
  command_for,
  create_command,
  error_of,
  job_name,
)

WAITING, FINISHED, FAILED = "waiting or running", "finished", "failed"
"""States of a job in the cluster."""

_HINT = f"install it with `pipx install xpk=={VERSION}`, or give its path with --xpk=PATH"
_WORKDIRS = "Set --workdirs to a folder on the mounted --storage, as in --workdirs=/mnt/runs/SWEEP"


def write(trials: Sequence[Trial], folder: Path, *, options: Options) -> list[Path]:
  """Writes the manifests of all trials and a script that would submit them.

  xpk's own dry run makes the manifests, which are then checked.

  Args:
    trials: Trials of the sweep.
    folder: Folder of the sweep, in which `manifests/JOB.yaml` and `submit.sh` are written.
    options: Options of the target.

  Returns:
    The paths of the files.

  Raises:
    XpkError: If xpk is missing, refuses a trial, or writes what a cluster would refuse.
  """
  xpk = find(options.xpk)
  if not PurePosixPath(trials[0].workdir).is_absolute():
    print(
      f"note: workdirs in {trials[0].workdir} lie inside the pods and are lost when these end. {_WORKDIRS}",
      file=sys.stderr,
    )
  (folder / "manifests").mkdir(parents=True, exist_ok=True)
  paths, commands = [], []
  for trial in trials:
    path = folder / "manifests" / f"{job_name(trial)}.yaml"
    command = create_command(trial, options)
    _dry_run([xpk, *command[1:]], path)
    finish(path, trial, options=options)
    paths.append(path)
    commands.append(shlex.join(command))
  script = folder / "submit.sh"
  script.write_text("#!/bin/sh -ex\n" + "".join(f"{command}\n" for command in commands), encoding="utf-8")
  return [*paths, script]


def find(given: str = "") -> str:
  """Finds the command `xpk`.

  Raises:
    XpkError: If there is none.
  """
  path = shutil.which(given or "xpk")
  if path is None:
    raise XpkError(
      f"--xpk={given}: no such command; {_HINT}" if given else f"--target=xpk: xpk is not on the PATH; {_HINT}"
    )
  return path


def _dry_run(command: Sequence[str], path: Path) -> None:
  """Makes xpk write a manifest without contacting a cluster."""
  path.unlink(missing_ok=True)
  result = subprocess.run(
    [*command, "--dry-run", "--skip-validation", f"--output-manifest-file={path}"],
    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
  )  # fmt: skip
  # After the manifest xpk looks for links to show, and may fail on a name that no cloud knows.
  if not path.exists():
    raise XpkError(f"xpk wrote no manifest (exit status {result.returncode}): {_last_line(result.stdout)}")


def _last_line(text: str) -> str:
  lines = [line for line in text.splitlines() if line.strip()]
  return lines[-1].strip()[:500] if lines else "it printed nothing"


def finish(path: Path, trial: Trial, *, options: Options) -> None:
  """Checks a manifest that xpk has written, and rewrites it in the form that a cluster accepts.

  Args:
    path: Path of the manifest.
    trial: Trial of the manifest.
    options: Options of the target.

  Raises:
    XpkError: If the manifest is invalid or differs from the request.
  """
  try:
    document = jobset.read(path)
    messages = jobset.problems(document) or differences(document, trial, options=options)
    if not messages and (chips := jobset.chips(document)):
      slices.check_chips(command_for(trial, options), chips)
  except (ValueError, ImportError) as error:
    raise error_of(trial, error) from error
  if messages:
    raise XpkError("\n".join(f"{path}: {line}" for line in messages))
  comment = (
    f"By xpk's dry run, for {trial.name}; checked. Empty fields are left out, as a cluster does.\n"
    f"workdir: {trial.workdir}"
  )
  jobset.write(document, path, comment=comment)


def differences(document: Mapping[str, Any], trial: Trial, *, options: Options) -> list[str]:
  """Compares a manifest with the request, because xpk silently drops what it does not know.

  Args:
    document: Valid JobSet.
    trial: Trial of the manifest.
    options: Options of the target.

  Returns:
    One line for each difference.
  """
  said = jobset.facts(document)
  said["restart after"] = sorted(set(RESTARTED) & set(said["restart after"]))
  asked = {
    "name": job_name(trial),
    "queue": True,
    "slices": options.num_slices,
    "restarts": options.max_restarts,
    "restart after": sorted(RESTARTED),
    "grace_seconds": options.grace_seconds,
    "command": command_for(trial, options),
  }
  wrong = [name for name in said if said[name] != asked[name]]
  return [
    f"{name}: found {said[name]!r}, expected {asked[name]!r}; the launcher was tried with xpk {VERSION}"
    for name in wrong
  ]


def submit(trials: Sequence[Trial], folder: Path, *, options: Options, tell=print) -> list[str]:
  """Submits the trials that are neither waiting, running nor finished in the cluster.

  Args:
    trials: Trials of the sweep.
    folder: Folder of the sweep, for the manifests.
    options: Options of the target, with image, project, zone and storage.
    tell: Function that prints a line for each trial.

  Returns:
    The names of the submitted jobs.

  Raises:
    XpkError: If an option is missing, the cluster cannot be queried, or `write` fails.
  """
  xpk = find(options.xpk)
  needed = (*PLACEHOLDERS, "storage")
  if missing := [f"--{name}" for name in needed if not getattr(options, name)]:
    raise XpkError(
      f"{', '.join(missing)}: not set; a submission requires {', '.join(f'--{name}' for name in needed)}"
    )
  if not PurePosixPath(trials[0].workdir).is_absolute():
    raise XpkError(f"--workdirs: found {trials[0].workdir}, expected a folder on the storage. {_WORKDIRS}")
  there, todo = jobs(options), []
  for trial in trials:
    if (state := there.get(job_name(trial), "")) in (WAITING, FINISHED):
      tell(f"{trial.name}: {job_name(trial)} is {state}; skipped")
    else:
      todo.append(trial)
  if todo:
    write(todo, folder, options=options)  # All manifests are valid before the first is submitted.
  for trial in todo:
    state = there.get(job_name(trial), "")
    # If the job has failed, xpk asks whether to delete it first; --quiet answers yes.
    _run([xpk, *create_command(trial, options)[1:], *(["--quiet"] if state else [])])
    tell(
      f"{trial.name}: {job_name(trial)} {'was ' + state + ', and is submitted again' if state else 'is submitted'}"
    )
  return [job_name(trial) for trial in todo]


def jobs(options: Options) -> dict[str, str]:
  """Returns the states of a cluster's jobs by name: `WAITING`, `FINISHED` or `FAILED`.

  Args:
    options: Options of the target.

  Raises:
    XpkError: If the cluster cannot be queried.
  """
  where = [f"--cluster={options.cluster}", f"--project={options.project}", f"--zone={options.zone}"]
  _run([find(options.xpk), "workload", "list", *where])  # This also points kubectl at the cluster.
  text = _run(["kubectl", "get", "jobsets", "-o", "json"])
  try:
    items = json.loads(text)["items"]
    return {item["metadata"]["name"]: _state(item) for item in items}
  except (ValueError, KeyError, TypeError) as error:
    raise XpkError(f"kubectl get jobsets: found no list of jobs ({type(error).__name__}: {error})") from error


def _state(item: Mapping[str, Any]) -> str:
  met = {condition["type"] for condition in item.get("status", {}).get("conditions", []) if condition.get("status") == "True"}
  return FINISHED if "Completed" in met else FAILED if "Failed" in met else WAITING


def _run(command: Sequence[str]) -> str:
  try:
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
  except FileNotFoundError as error:
    raise XpkError(f"{command[0]} is not on the PATH; experiments/pods.md lists what to install") from error
  if result.returncode:
    raise XpkError(
      f"{shlex.join(command[:3])}: exit status {result.returncode}: {_last_line(result.stderr or result.stdout)}"
    )
  return result.stdout
