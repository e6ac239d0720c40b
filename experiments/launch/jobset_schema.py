"""`python -m experiments.launch.jobset_schema` writes jobset_schema.json, the schema of a JobSet.

It is a JSON Schema without prose. Its source is kubeflow-trainer-api (Apache-2.0), whose classes
are generated from the OpenAPI documents of Kubernetes and JobSet; install it in an environment of
its own (`pip install kubeflow-trainer-api==2.3.0`). All fields and types are taken from there.
Values that those documents name only in prose are added here. Unknown fields are refused, as
`kubectl apply` does.
"""

import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).with_suffix(".json")

_PACKAGE = "kubeflow-trainer-api"
_ANY_OF_TWO = {  # The generated classes try one type after the other.
  "IoK8sApimachineryPkgApiResourceQuantity": {
    "type": ["integer", "number", "string"],
    "pattern": r"^[+-]?[0-9.]+([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$",
  },
  "IoK8sApimachineryPkgUtilIntstrIntOrString": {"type": ["integer", "string"]},
}
# JobSet's values are those of v0.10.1, which xpk 1.16.0 installs in a cluster.
# The others are Kubernetes'.
_VALUES = {
  "JobsetV1alpha2FailurePolicyRule.action": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"],
  "JobsetV1alpha2FailurePolicy.restartStrategy": ["Recreate", "BlockingRecreate"],
  "JobsetV1alpha2DependsOn.status": ["Ready", "Complete"],
  "JobsetV1alpha2StartupPolicy.startupPolicyOrder": ["AnyOrder", "InOrder"],
  "JobsetV1alpha2SuccessPolicy.operator": ["All", "Any"],
  "IoK8sApiBatchV1JobSpec.completionMode": ["Indexed", "NonIndexed"],
  "IoK8sApiBatchV1PodFailurePolicyRule.action": ["FailJob", "FailIndex", "Ignore", "Count"],
  "IoK8sApiBatchV1PodFailurePolicyOnExitCodesRequirement.operator": ["In", "NotIn"],
  "IoK8sApiCoreV1PodSpec.restartPolicy": ["Always", "OnFailure", "Never"],
  "IoK8sApiCoreV1PodSpec.dnsPolicy": ["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"],
  "IoK8sApiCoreV1Container.imagePullPolicy": ["Always", "IfNotPresent", "Never"],
  "IoK8sApiCoreV1Toleration.operator": ["Exists", "Equal"],
  "IoK8sApiCoreV1Toleration.effect": ["NoSchedule", "PreferNoSchedule", "NoExecute"],
}
_REASONS = ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"]


def schema() -> dict[str, Any]:
  """Builds the schema of a whole JobSet from the classes of the installed package."""
  model = importlib.import_module("kubeflow_trainer_api.models.jobset_v1alpha2_job_set_spec").JobsetV1alpha2JobSetSpec
  spec = model.model_json_schema(by_alias=True)
  definitions = {name: _ANY_OF_TWO.get(name) or _plain(each) for name, each in spec.pop("$defs").items()}
  definitions["JobsetV1alpha2JobSetSpec"] = _plain(spec)
  for path, values in _VALUES.items():
    name, field = path.split(".")
    definitions[name]["properties"][field]["enum"] = values
  definitions["JobsetV1alpha2FailurePolicyRule"]["properties"]["onJobFailureReasons"]["items"]["enum"] = _REASONS
  for each in definitions.values():
    if "properties" in each:
      each["additionalProperties"] = False
  source = f"{_PACKAGE} {importlib.metadata.version(_PACKAGE)}"
  return {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$comment": f"JobSet, jobset.x-k8s.io/v1alpha2. Derived from {source}, Copyright The Kubeflow Authors, Apache-2.0, by "
    "jobset_schema.py: descriptions removed, permitted values of JobSet v0.10.1 added.",
    "type": "object",
    "properties": {
      "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
      "kind": {"const": "JobSet"},
      "metadata": {"$ref": "#/$defs/IoK8sApimachineryPkgApisMetaV1ObjectMeta"},
      "spec": {"$ref": "#/$defs/JobsetV1alpha2JobSetSpec"},
    },
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "$defs": dict(sorted(definitions.items())),
  }


def _plain(node: Any) -> Any:
  """Removes prose and defaults from a schema; an optional field may be absent but not null."""
  if isinstance(node, list):
    return [_plain(each) for each in node]
  if not isinstance(node, dict):
    return node
  if {"type": "null"} in node.get("anyOf", []):
    (rest,) = [each for each in node["anyOf"] if each != {"type": "null"}]
    return _plain(rest)
  fields = {name: _plain(each) for name, each in node.get("properties", {}).items()}
  rest = {key: _plain(value) for key, value in node.items() if key not in ("description", "title", "default", "properties")}
  return rest | ({"properties": fields} if fields else {})


def write(path: Path = SCHEMA) -> None:
  """Writes the schema, one line per definition, so that a newer source gives a readable diff."""
  content = schema()
  lines = [f"    {json.dumps(name)}: {json.dumps(each)}" for name, each in content.pop("$defs").items()]
  head = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in content.items()]
  path.write_text("\n".join(["{", *head, '  "$defs": {', ",\n".join(lines), "  }", "}"]) + "\n")


if __name__ == "__main__":
  write()
  print(f"wrote {SCHEMA.name}")
