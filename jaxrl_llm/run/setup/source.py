"""Sources of the weights to evaluate: a run's checkpoint, published weights, or the config itself.

Nothing is loaded here.
"""

import re
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm.config.fields import FIELDS
from jaxrl_llm.config.recorded import saved_config
from jaxrl_llm.messages import MissingPackageError, UsageError, did_you_mean
from jaxrl_llm.pretrained import where
from jaxrl_llm.rewards.rubric import path_of
from jaxrl_llm.workdir import checkpoint
from jaxrl_llm.workdir.bucket import address
from jaxrl_llm.workdir.bucket.copies import localize

_EXPECTED = "expected the workdir of a run, WORKDIR@STEP, a folder in Hugging Face's format, a .gguf file or hub:OWNER/NAME"
# Fields of `config.model` that the weights of a checkpoint depend on.
_SHAPE = ("preset", "path", "lora_rank", "lora_alpha", "lora_targets")


class Source(NamedTuple):
  """Weights to evaluate.

  Attributes:
    kind: Kind of the source: "run" for a run's checkpoint, "files" for published weights, "initial"
      for the weights that the config begins with.
    path: Workdir of the run, or the value for `config.model.path`; None for "initial".
    step: Number of the run's checkpoint; None for other kinds.
  """

  kind: str
  path: Path | str | None = None
  step: int | None = None


def find(text: str | None) -> Source:
  """Finds the source that `--checkpoint` names, as the user wrote it; None if it was not given.

  Raises:
    UsageError: If nothing is there, there is no such step, or the folder holds something else.
  """
  if text is None:
    return Source("initial")
  if text.startswith(where.PREFIXES) or text.endswith(".gguf"):
    return Source("files", text)
  if address.is_address(text):
    return _find_in_bucket(text)
  base, step = text, None
  if not Path(text).expanduser().exists() and (match := re.fullmatch(r"(.+)@([0-9]+)", text)):
    base, step = match[1], int(match[2])
  path = Path(base).expanduser()
  if not path.exists():
    raise UsageError(f"--checkpoint: found {text!r}, which does not exist; {_EXPECTED}{_near(path)}")
  if path.name == "checkpoints":
    path = path.parent
  elif path.parent.name == "checkpoints" and path.name.isdecimal() and step is None:
    path, step = path.parent.parent, int(path.name)
  if saved_config(path) is None:
    if step is None and path.is_dir() and any(path.glob("*.safetensors")):
      return Source("files", base)
    raise UsageError(f"--checkpoint: found {text!r}, which is neither a run nor a published model; {_EXPECTED}")
  steps = checkpoint.whole_steps(path / "checkpoints")
  if not steps:
    if any(folder.name.isdecimal() for folder in (path / "checkpoints").glob("*")):
      raise UsageError(
        f"--checkpoint: found {text!r}, whose checkpoints have no manifest.json: they are from an earlier version or "
        "incomplete"
      )
    raise UsageError(f"--checkpoint: found {text!r}, a run that has not saved a checkpoint yet; try again later")
  if step is not None and step not in steps:
    shown = ", ".join(map(str, steps[-10:]))
    raise UsageError(
      f"--checkpoint: found no checkpoint {step} in {path}, expected one of {shown} (warm-start and RL steps count "
      "together; the run keeps checkpoint.keep of them)"
    )
  return Source("run", path, steps[-1] if step is None else step)


def _find_in_bucket(text: str) -> Source:
  match = re.fullmatch(r"(.+)@([0-9]+)", text)
  base, step = (match[1], int(match[2])) if match else (text, None)
  try:
    return find(str(localize(base, step=step)) + ("" if step is None else f"@{step}"))
  except (MissingPackageError, ValueError) as error:
    raise UsageError(f"--checkpoint: {error}") from error


def refuse_other_model(config: ConfigDict, workdir: Path) -> None:
  """Refuses a config that describes another model than the run's checkpoints hold.

  Raises:
    UsageError: If a field differs. One line for each field.
  """
  saved = saved_config(workdir)["model"]
  lines = [
    f"config.model.{name}: found {config.model[name]!r}, expected {saved[name]!r} as in the run in {workdir}; omit "
    "--config, or this field, to use the run's own config"
    for name in _SHAPE
    if name in saved and config.model[name] != saved[name] and not (name == "preset" and config.model.path is not None)
  ]
  if lines:
    raise UsageError("\n".join(lines))


def judged_by_the_verifier(config: ConfigDict) -> ConfigDict:
  """Returns a config without teachers and models as judges, for a policy that is not trained."""
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict({path: field.default for path, field in FIELDS.items() if path.startswith("teacher.")})
  # The key of a judge may be missing here.
  config.reward.terms = tuple(term for term in config.reward.terms if path_of(str(term)) is None)
  # The run may have learned from the others alone.
  config.reward.verifier_weight = config.reward.verifier_weight or FIELDS["reward.verifier_weight"].default
  return config


def _near(path: Path) -> str:
  there = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
  close = did_you_mean(path.name, there, "{}")
  return f"; did you mean {str(path.parent / close)!r}?" if close else ""
