"""Pods of TPUs in a Google Kubernetes cluster: a JobSet for each trial, queued by Kueue, written and submitted by xpk.

xpk is a command, not a library of ours: it pins old versions of packages and lives in an environment of its own (`pipx install xpk`).
A dry run needs nothing else: no cluster, no gcloud, no kubectl. `experiments/pods.md` has the road from there to a running sweep.
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

_HINT = f"install it with `pipx install xpk=={VERSION}`, or say where it is with --xpk=PATH"
_WORKDIRS = "Say where --storage is mounted, as in --workdirs=/mnt/runs/SWEEP"


def write(trials: Sequence[Trial], folder: Path, *, options: Options) -> list[Path]:
  """Manifests of all trials, made by xpk's own dry run and checked, and the commands that would submit them.

  Args:
    trials: of the sweep.
    folder: gets `manifests/JOB.yaml` and `submit.sh`.
    options: of the target.

  Returns:
    The files.

  Raises:
    XpkError: xpk is not there, refuses something, or writes what a cluster would refuse.
  """
  xpk = find(options.xpk)
  if not PurePosixPath(trials[0].workdir).is_absolute():
    print(f"note: workdirs in {trials[0].workdir}, inside of the pods: they end with them. {_WORKDIRS}", file=sys.stderr)
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
  """The command `xpk`.

  Raises:
    XpkError: there is none.
  """
  found = shutil.which(given or "xpk")
  if found is None:
    raise XpkError(f"--xpk={given}: no such command; {_HINT}" if given else f"--target=xpk: xpk is not on the PATH; {_HINT}")
  return found


def _dry_run(command: Sequence[str], path: Path) -> None:
  """Lets xpk write a manifest, without a look at any cluster."""
  path.unlink(missing_ok=True)
  result = subprocess.run(
    [*command, "--dry-run", "--skip-validation", f"--output-manifest-file={path}"],
    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
  )  # fmt: skip
  # Behind the manifest it looks for links to show, and may stumble over a name that no cloud knows.
  if not path.exists():
    raise XpkError(f"xpk wrote no manifest (exit status {result.returncode}): {_last_line(result.stdout)}")


def _last_line(text: str) -> str:
  lines = [line for line in text.splitlines() if line.strip()]
  return lines[-1].strip()[:500] if lines else "it said nothing"


def finish(path: Path, trial: Trial, *, options: Options) -> None:
  """Checks a manifest that xpk has written, and writes it again as a cluster takes it.

  Args:
    path: of the manifest.
    trial: whose it is.
    options: of the target.

  Raises:
    XpkError: it is not valid, or does not say what was asked for.
  """
  try:
    document = jobset.read(path)
    found = jobset.problems(document) or differences(document, trial, options=options)
    if not found and (chips := jobset.chips(document)):
      slices.check_chips(command_for(trial, options), chips)
  except (ValueError, ImportError) as error:
    raise error_of(trial, error) from error
  if found:
    raise XpkError("\n".join(f"{path}: {line}" for line in found))
  comment = f"By xpk's dry run, for {trial.name}; checked. Empty fields are left out, as a cluster does.\nworkdir: {trial.workdir}"
  jobset.write(document, path, comment=comment)


def differences(document: Mapping[str, Any], trial: Trial, *, options: Options) -> list[str]:
  """Where a manifest says something else than was asked for: what xpk does not know it leaves out without a word.

  Args:
    document: of a JobSet that is valid.
    trial: whose it is.
    options: of the target.
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
  return [f"{name}: found {said[name]!r}, expected {asked[name]!r}; this was tried with xpk {VERSION}" for name in wrong]


def submit(trials: Sequence[Trial], folder: Path, *, options: Options, tell=print) -> list[str]:
  """Submits what is neither waiting, running nor finished in the cluster.

  Args:
    trials: of the sweep.
    folder: for the manifests.
    options: of the target; image, project, zone and storage must be there.
    tell: takes a line for each trial.

  Returns:
    The names of the jobs that were submitted.

  Raises:
    XpkError: see `write`; something is missing; the cluster cannot be asked.
  """
  xpk = find(options.xpk)
  needed = (*PLACEHOLDERS, "storage")
  if missing := [f"--{name}" for name in needed if not getattr(options, name)]:
    raise XpkError(f"{', '.join(missing)}: not set; a submission needs all of {', '.join(f'--{name}' for name in needed)}")
  if not PurePosixPath(trials[0].workdir).is_absolute():
    raise XpkError(f"--workdirs: found {trials[0].workdir}, expected a folder of the storage. {_WORKDIRS}")
  there, todo = jobs(options), []
  for trial in trials:
    if (state := there.get(job_name(trial), "")) in (WAITING, FINISHED):
      tell(f"{trial.name}: {job_name(trial)} is {state}; skipped")
    else:
      todo.append(trial)
  if todo:
    write(todo, folder, options=options)  # All of them are good before the first is sent.
  for trial in todo:
    state = there.get(job_name(trial), "")
    # Of a job that has failed xpk asks whether to delete it first: yes.
    _run([xpk, *create_command(trial, options)[1:], *(["--quiet"] if state else [])])
    tell(f"{trial.name}: {job_name(trial)} {'was ' + state + ', and is submitted again' if state else 'is submitted'}")
  return [job_name(trial) for trial in todo]


def jobs(options: Options) -> dict[str, str]:
  """The jobs of a cluster by name: `WAITING`, `FINISHED` or `FAILED`.

  Args:
    options: of the target.

  Raises:
    XpkError: the cluster cannot be asked.
  """
  where = [f"--cluster={options.cluster}", f"--project={options.project}", f"--zone={options.zone}"]
  _run([find(options.xpk), "workload", "list", *where])  # It also points kubectl at the cluster.
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
    raise XpkError(f"{command[0]} is not on the PATH; experiments/pods.md says what to install") from error
  if result.returncode:
    raise XpkError(f"{shlex.join(command[:3])}: exit status {result.returncode}: {_last_line(result.stderr or result.stdout)}")
  return result.stdout
