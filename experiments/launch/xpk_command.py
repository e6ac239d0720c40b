"""What xpk is told of a trial: the flags of `xpk workload create`, and how values get through two shells and Kubernetes unchanged."""

import hashlib
import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from experiments.launch import slices
from experiments.launch.rows import SweepError
from experiments.launch.trial import Trial

VERSION = "1.16.0"
"""Of xpk, which all of this was tried with."""

RESTARTED = (42, *range(127, 256))
"""Exit statuses after which xpk's JobSets start again: 42 is ours after SIGTERM or a hang, the others are signals. 1 and 2 end a trial."""

_MAX_NAME = 28  # xpk takes 39; 28 is its limit where slices are joined to larger ones.
_LEAST = {"num_slices": 1, "max_restarts": 0, "grace_seconds": 1, "keep_seconds": 0}


class Options(NamedTuple):
  """The target's own flags.

  Attributes:
    cluster: name of the cluster, as `xpk cluster create` made it.
    tpu_type: of a slice, such as "v5p-128" (its cores: 64 chips) or "v6e-32".
    num_slices: of one trial.
    max_restarts: after preemptions and other losses of a pod.
    docker_image: with the project in it; see pods.md.
    project: of Google Cloud.
    zone: of the cluster.
    storage: names of xpk's storages that the workdirs lie on, with commas.
    grace_seconds: from SIGTERM to SIGKILL.
    keep_seconds: how long a job that has ended stays visible, and so for how long a relaunch knows of it.
    env: further environment variables, NAME=VALUE each.
    xpk: the command.
    xpk_args: further arguments of `xpk workload create`.
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
  """What cannot be launched; the message is the lines to show."""


# Where nothing was said: enough for xpk to write a manifest, and plain to see in it.
PLACEHOLDERS = {"docker_image": "REGION-docker.pkg.dev/PROJECT/REPOSITORY/jaxrl-llm:TAG", "project": "PROJECT", "zone": "us-east5-a"}

# A slice that was preempted comes back when it comes back: the others are to wait for it, not to give up after five minutes with an error.
_ENVIRONMENT = {"JAXRL_LLM_START_TIMEOUT": "86400"}


def job_name(trial: Trial) -> str:
  """A name that Kubernetes and xpk take: the beginning and the end of the trial's, and a hash of its workdir.

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
  """`xpk workload create` for a trial.

  Args:
    trial: its command must hold no line breaks.
    options: of the target.

  Raises:
    XpkError: a value that xpk cannot write.
  """
  for name, least in _LEAST.items():
    if getattr(options, name) < least:
      raise XpkError(f"--{name}: found {getattr(options, name)}, expected {least} or more")
  if any(character in "".join(trial.command) for character in "\n\r"):
    raise XpkError(f"trial {trial.name}: a value with a line break, which xpk's manifests cannot hold; take it from a file")
  environment = _ENVIRONMENT | _named(options.env)
  # `exec`: SIGTERM is for Python, not for a shell around it. `$$`: Kubernetes replaces $(NAME), quoted or not, and reads $$ as $.
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
  """A trial's command, with what its config does not say of several slices.

  Raises:
    XpkError: the config says something else of them.
  """
  try:
    return [*trial.command, *slices.mesh_arguments(trial.command, options.num_slices)]
  except ValueError as error:
    raise error_of(trial, error) from error


def error_of(trial: Trial, error: Exception) -> XpkError:
  """An error that names its trial on each line."""
  return XpkError("\n".join(f"trial {trial.name}: {line}" for line in str(error).splitlines()))


def _words(text: str) -> list[str]:
  try:
    return shlex.split(text)
  except ValueError as error:
    raise XpkError(f"--xpk_args: {error} in {text!r}") from error


def _named(env: Sequence[str]) -> dict[str, str]:
  found = {}
  for each in env:
    name, equals, value = each.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
      raise XpkError(f"--env: found {each!r}, expected NAME=VALUE")
    if '"' in value or "\\" in value:
      raise XpkError(f"--env: the value of {name} has a quote or a backslash, which xpk's manifests cannot hold")
    found[name] = value
  return found
