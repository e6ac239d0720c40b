"""JobSets for TPU pods in a Kubernetes cluster: reading, writing and checking their manifests.

The check covers what a cluster would refuse. `jobset_schema.json` beside this file holds every
field of a JobSet; `jobset_schema.py` documents its source.
"""

import functools
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from experiments.launch.jobset_schema import SCHEMA
from jaxrl_llm.messages import one_line

MAX_NAME = 63
"""Maximum length of a pod's name without its random suffix: it is a network name."""

_ONE_DEVICE_A_CHIP = ("tpu-v4-podslice", "tpu-v5p-slice", "tpu-v5-lite-podslice", "tpu-v6e-slice")
# The line with which xpk starts the command that it is given.
_STARTED = re.compile(r"^ *\((?P<command>.*)\) & PID=\$!;$", re.MULTILINE)
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def read(path: Path) -> dict[str, Any]:
  """Reads a JobSet in the form that the cluster accepts.

  Empty fields are dropped, as the API server does. Rules of the failure policy get their default
  names, as JobSet's webhook does before any check. Manifests made from text templates, as xpk's
  are, rely on both.

  Args:
    path: Path of a manifest with one document.

  Raises:
    ValueError: If the file is not YAML or not a single object.
  """
  try:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
  except yaml.YAMLError as error:
    raise ValueError(f"{path} is not YAML: {one_line(error, typed=False, limit=1000)}") from error
  if not isinstance(document, dict):
    raise ValueError(f"{path} holds no JobSet: found {type(document).__name__}, expected an object")
  document = _without_nulls(document)
  policy = document.get("spec", {}).get("failurePolicy", {})
  policy["rules"] = [{"name": f"failurePolicyRule{index}", **rule} for index, rule in enumerate(policy.get("rules", []))]
  return document


def _without_nulls(node: Any) -> Any:
  if isinstance(node, dict):
    return {key: _without_nulls(value) for key, value in node.items() if value is not None}
  return [_without_nulls(value) for value in node] if isinstance(node, list) else node


def write(document: Mapping[str, Any], path: Path, *, comment: str) -> None:
  """Writes a JobSet, with its scripts as readable text.

  Args:
    document: JobSet in the form that `read` returns.
    path: Path of the file.
    comment: First lines of the file.
  """
  head = "".join(f"# {line}\n" for line in comment.splitlines())
  path.write_text(head + dump(document), encoding="utf-8")


def dump(document: Mapping[str, Any]) -> str:
  """Formats a JobSet as readable YAML.

  Example:
    >>> print(dump({"codes": [42, 134], "run": "cd x\\nls\\n"}).strip())
    codes: [42, 134]
    run: |
      cd x
      ls
  """
  return yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
  """Dumper that keeps multi-line texts as such and writes repeated values in full."""

  def ignore_aliases(self, data):
    return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
  return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.SequenceNode:
  numbers = bool(values) and all(isinstance(value, int) for value in values)
  return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=numbers or None)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def problems(document: Mapping[str, Any]) -> list[str]:
  """Returns what a cluster would refuse, by the schema and by rules that it cannot express.

  Args:
    document: JobSet in the form that `read` returns.

  Returns:
    One line for each problem.

  Example:
    >>> head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    >>> problems({**head, "metadata": {"name": "a"}, "spec": {"replicas": 2}})
    ["spec: Additional properties are not allowed ('replicas' was unexpected)"]
  """
  errors = sorted(_validator().iter_errors(document), key=lambda error: list(map(str, error.absolute_path)))
  messages = [f"{error.json_path.removeprefix('$.')}: {error.message[:300]}" for error in errors]
  return messages or list(_broken_rules(document))


@functools.cache
def _validator() -> Any:
  try:
    import jsonschema
  except ImportError as error:
    raise ImportError(
      "manifests are checked with jsonschema; install it with `pip install 'jaxrl-llm[sweeps]'`"
    ) from error
  return jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))


def _broken_rules(document: Mapping[str, Any]) -> Iterator[str]:
  """Yields violations of the rules that Kubernetes and JobSet check in code."""
  name = document["metadata"].get("name", "")
  if not _NAME.fullmatch(name):
    yield f"metadata.name: found {name!r}, expected lower-case letters, digits and dashes"
  jobs = document["spec"].get("replicatedJobs", [])
  if not jobs:
    yield "spec.replicatedJobs: found none, expected at least one"
  for number, job in enumerate(jobs):
    where = f"spec.replicatedJobs[{number}]"
    spec = job["template"]["spec"]
    pod = spec["template"].get("spec", {})
    longest = f"{name}-{job['name']}-{job.get('replicas', 1) - 1}-{spec.get('completions', 1) - 1}"
    if len(longest) > MAX_NAME:
      yield (
        f"{where}: its pods' names, as in {longest!r}, have {len(longest)} characters, expected at most {MAX_NAME}"
      )
    containers = [container["name"] for container in pod.get("containers", [])]
    if not containers:
      yield f"{where}: found a pod without containers, expected at least one"
    policy = spec.get("podFailurePolicy")
    if policy is not None and pod.get("restartPolicy") != "Never":
      yield f"{where}: found podFailurePolicy with restartPolicy {pod.get('restartPolicy')!r}, expected 'Never'"
    for codes in [rule["onExitCodes"] for rule in (policy or {}).get("rules", []) if "onExitCodes" in rule]:
      yield from (f"{where}: {line}" for line in _wrong_codes(codes, containers))
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for mount in [mount for container in pod.get("containers", []) for mount in container.get("volumeMounts", [])]:
      if mount["name"] not in volumes:
        yield f"{where}: found {mount['name']!r} in volumeMounts, expected one of the pod's volumes"


def _wrong_codes(codes: Mapping[str, Any], containers: list[str]) -> Iterator[str]:
  values = codes["values"]
  if values != sorted(set(values)) or not 0 < len(values) <= 255 or (codes["operator"] == "In" and 0 in values):
    yield "onExitCodes.values: expected 1 to 255 exit codes in ascending order, without 0 if they are to match"
  if "containerName" in codes and codes["containerName"] not in containers:
    yield f"onExitCodes.containerName: found {codes['containerName']!r}, expected one of {', '.join(containers)}"


def facts(document: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the facts that a JobSet of xpk states, for comparison with a request.

  Args:
    document: Valid JobSet.
  """
  (job,) = document["spec"]["replicatedJobs"]
  spec = job["template"]["spec"]
  policy = spec.get("podFailurePolicy", {}).get("rules", [])
  ending = [
    rule["onExitCodes"]
    for rule in policy
    if rule.get("action") == "FailJob" and rule["onExitCodes"]["operator"] == "NotIn"
  ]
  return {
    "name": document["metadata"]["name"],
    "queue": bool(document["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")),
    "slices": job.get("replicas"),
    "restarts": document["spec"].get("failurePolicy", {}).get("maxRestarts", 0),
    "restart after": sorted(set.intersection(*(set(codes["values"]) for codes in ending))) if ending else [],
    "grace_seconds": spec["template"]["spec"].get("terminationGracePeriodSeconds"),
    "command": command(document),
  }


def command(document: Mapping[str, Any]) -> list[str]:
  """Returns the command of the first container of xpk's JobSet, as the shell will see it.

  It is empty if it cannot be read.
  """
  container = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
  match = _STARTED.search(container["command"][-1])
  try:
    return shlex.split(match["command"].replace("$$", "$").removeprefix("exec ")) if match else []
  except ValueError:  # The command is truncated.
    return []


def chips(document: Mapping[str, Any]) -> int:
  """Returns the number of chips of all slices of a JobSet.

  It is 0 if a chip is not one of JAX's devices, or if no chips are requested.
  """
  (job,) = document["spec"]["replicatedJobs"]
  selector = job["template"]["spec"]["template"]["spec"].get("nodeSelector", {})
  if selector.get("cloud.google.com/gke-tpu-accelerator") not in _ONE_DEVICE_A_CHIP:
    return 0
  return job["replicas"] * math.prod(int(size) for size in selector["cloud.google.com/gke-tpu-topology"].split("x"))
