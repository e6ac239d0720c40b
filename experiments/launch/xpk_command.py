"""Flags of `xpk workload create` for a trial, quoted for two shells and Kubernetes."""

import hashlib
import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from experiments.launch import slices
from experiments.launch.rows import SweepError
from experiments.launch.trial import Trial

VERSION = "1.16.0"
"""Version of xpk with which the launcher was tried."""

RESTARTED = (42, *range(127, 256))
"""Exit statuses after which xpk's JobSets start again.

The project's 42 follows SIGTERM or a hang; the others are signals. 1 and 2 end a trial.
"""

_MAX_NAME = 28  # xpk allows 39 characters, but 28 if slices are joined to larger ones.
_LEAST = {"num_slices": 1, "max_restarts": 0, "grace_seconds": 1, "keep_seconds": 0}


class Options(NamedTuple):
  """Flags of the xpk target.

  Attributes:
    cluster: Name of the cluster, as created with `xpk cluster create`.
    tpu_type: Type of a slice, such as "v5p-128" (128 cores: 64 chips) or "v6e-32".
    num_slices: Number of slices of a trial.
    max_restarts: Maximum number of restarts after preemptions and other losses of a pod.
    docker_image: Docker image that contains the project; see pods.md.
    project: Google Cloud project.
    zone: Zone of the cluster.
    storage: Names of xpk's storages that hold the workdirs, separated by commas.
    grace_seconds: Time from SIGTERM to SIGKILL, in s.
    keep_seconds: Time for which an ended job stays visible, and a relaunch knows of it, in s.
    env: Further environment variables, each as NAME=VALUE.
    xpk: Path of the command.
    xpk_args: Further arguments of `xpk workload create`.
  """

  cluster: str
  tpu_type: str
  num_slices: int = 1
  max_restarts: int = 10
  docker_image: str = ""
  project: str = ""
  zone: str = ""
  storage: str = ""
  grace_seconds: int = 120
  keep_seconds: int = 7 * 86_400
  env: tuple[str, ...] = ()
  xpk: str = ""
  xpk_args: str = ""


class XpkError(SweepError):
  """Reason why a launch is impossible; the message consists of the lines to show."""


# Values of missing options: enough for xpk to write a manifest, and easy to see in it.
PLACEHOLDERS = {
  "docker_image": "REGION-docker.pkg.dev/PROJECT/REPOSITORY/jaxrl-llm:TAG",
  "project": "PROJECT",
  "zone": "us-east5-a",
}

# The return of a preempted slice takes an unknown time. The other slices must wait for it and not
# end with an error after five minutes.
_ENVIRONMENT = {"JAXRL_LLM_START_TIMEOUT": "86400"}


def job_name(trial: Trial) -> str:
  """Returns a name that Kubernetes and xpk accept.

  It consists of the beginning and the end of the trial's name, and a hash of its workdir.

  Example:
    >>> job_name(Trial("gspo-qwen3-30b-a3b-clip-range-1f2e3d4c", None, "/mnt/runs/clip/1f2e3d4c", ()))
    'gspo-qwen3-1f2e3d4c-5fa1d09d'
  """
  digest = hashlib.sha256(trial.workdir.encode()).hexdigest()[:8]
  slug = re.sub(r"[^a-z0-9]+", "-", trial.name.lower()).strip("-")
  slug = slug if slug[:1].isalpha() else f"t-{slug}"
  if len(slug) > _MAX_NAME - 9:
    slug = f"{slug[:10].rstrip('-')}-{slug[-8:].lstrip('-')}"  # The end is the row's id.
  return f"{slug.rstrip('-')}-{digest}"


def create_command(trial: Trial, options: Options) -> list[str]:
  """Builds the command `xpk workload create` for a trial.

  Args:
    trial: Trial whose command contains no line breaks.
    options: Options of the target.

  Raises:
    XpkError: If xpk cannot express a value.
  """
  for name, least in _LEAST.items():
    if getattr(options, name) < least:
      raise XpkError(f"--{name}: found {getattr(options, name)}, expected {least} or more")
  if any(character in "".join(trial.command) for character in "\n\r"):
    raise XpkError(
      f"trial {trial.name}: found a value with a line break, which xpk's manifests cannot hold; read it from a file"
    )
  environment = _ENVIRONMENT | _named(options.env)
  # `exec` makes SIGTERM reach Python instead of a shell around it.
  # Kubernetes replaces $(NAME), quoted or not, and reads $$ as $.
  command = "exec " + shlex.join(command_for(trial, options)).replace("$", "$$")
  return [
    *("xpk", "workload", "create"),
    f"--workload={job_name(trial)}",
    f"--cluster={options.cluster}",
    f"--project={options.project or PLACEHOLDERS['project']}",
    f"--zone={options.zone or PLACEHOLDERS['zone']}",
    f"--tpu-type={options.tpu_type}",
    f"--num-slices={options.num_slices}",
    f"--max-restarts={options.max_restarts}",
    f"--termination-grace-period-seconds={options.grace_seconds}",
    f"--ttl-seconds-after-finished={options.keep_seconds}",
    f"--docker-image={options.docker_image or PLACEHOLDERS['docker_image']}",
    *(f"--storage={name}" for name in options.storage.split(",") if name),
    *(f"--env={name}={value}" for name, value in environment.items()),
    *_words(options.xpk_args),
    f"--command={command}",
  ]


def command_for(trial: Trial, options: Options) -> list[str]:
  """Returns a trial's command with the flags that its config lacks for several slices.

  Raises:
    XpkError: If the config contradicts the number of slices.
  """
  try:
    return [*trial.command, *slices.mesh_arguments(trial.command, options.num_slices)]
  except ValueError as error:
    raise error_of(trial, error) from error


def error_of(trial: Trial, error: Exception) -> XpkError:
  """Returns an error that names its trial in each line."""
  return XpkError("\n".join(f"trial {trial.name}: {line}" for line in str(error).splitlines()))


def _words(text: str) -> list[str]:
  try:
    return shlex.split(text)
  except ValueError as error:
    raise XpkError(f"--xpk_args: {error} in {text!r}") from error


def _named(env: Sequence[str]) -> dict[str, str]:
  variables = {}
  for each in env:
    name, equals, value = each.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
      raise XpkError(f"--env: found {each!r}, expected NAME=VALUE")
    if '"' in value or "\\" in value:
      raise XpkError(f"--env: found a quote or a backslash in the value of {name}, which xpk's manifests cannot hold")
    variables[name] = value
  return variables
