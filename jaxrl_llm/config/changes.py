"""What of a config may change between two attempts at a run, and what such a change does to where the run stands in its data."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FIXED: dict[str, str] = {
  "seed": "what was drawn so far follows from it",
  "model.preset": "the checkpoint holds weights of that shape",
  "model.path": "the run began with those weights",
  "model.tokenizer": "the weights were trained on its ids",
  "model.param_dtype": "the checkpoint holds weights of that kind",
  "model.lora_rank": "the checkpoint holds adapters of that shape",
  "model.lora_alpha": "the adapters were trained with that weight",
  "model.lora_targets": "the checkpoint holds those adapters",
  "learner.moments_dtype": "the checkpoint holds moments of that kind",
  "rollout.spare_prompts": "the checkpoint may hold groups that are half drawn",
  "warm_start.num_steps": "RL began, or is to begin, where that warm start ends",
  "task.": "the run stands at a place in these problems, and its accuracies are theirs",
}
"""Fields that no flag lets change, with the reason; one that ends with a dot is a section."""

FREE = ("task.data_dir",)
"""Fields of such a section that may."""


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
  """Returns the fields that differ, with both values, between two configs flattened by path."""
  fields = sorted(old.keys() | new.keys())
  return {field: (old.get(field), new.get(field)) for field in fields if old.get(field) != new.get(field)}


def refusals(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each change that a run cannot take.

  Args:
    old: Fields of the run's config by path, as JSON has them.
    new: Fields of the config that it is to go on with.

  Example:
    >>> list(refusals({"seed": 0, "num_steps": 4}, {"seed": 1, "num_steps": 8}))
    ['config.seed: found 1, expected 0 as the run began, because what was drawn so far follows from it']
  """
  changed = differences(old, new)
  for field, (was, now) in changed.items():
    section = f"{field.partition('.')[0]}."
    why = None if field in FREE else FIXED.get(field, FIXED.get(section))
    if field == "objective.name" and ("advantage.estimator" in old) != ("advantage.estimator" in new):
      why = "a reward model and a policy are other models"  # Only a policy has advantages.
    if field.startswith("rollout.") and field != "rollout.spare_prompts" and (old.get("rollout.spare_prompts") or 0) > 0:
      why = f"{FIXED['rollout.spare_prompts']} (rollout.spare_prompts)"
    if why is not None:
      yield f"config.{field}: found {now!r}, expected {was!r} as the run began, because {why}"
  before, after = (_models(fields) if changed else {} for fields in (old, new))
  for field, part in (("advantage.estimator", "critic"), ("objective.kl_coef", "reference")):
    if before.get(part) != after.get(part):
      had, has, holds = ("a", "no", f"a {part}") if before.get(part) else ("no", "a", "none")
      why = f"because the checkpoint holds {holds}"
      yield f"config.{field}: found {has} {part} in this config, expected {had} {part} as the run began, {why}"


def _models(fields: Mapping[str, Any]) -> dict[str, bool]:
  """Returns whether a run of a config holds a critic and a frozen reference beside the policy."""
  if "advantage.estimator" not in fields:  # A reward model's.
    return {"critic": False, "reference": False}
  from jaxrl_llm import objectives
  from jaxrl_llm.advantages.estimators import ESTIMATORS

  needs = ESTIMATORS[fields["advantage.estimator"]].needs
  hyper = {field.partition(".")[2]: x for field, x in fields.items() if field.startswith("objective.") and x is not None}
  penalised = bool(fields["reward.kl_coef"]) or "ref_logprobs" in needs | objectives.make(hyper.pop("name"), **hyper).needs
  return {"critic": "values" in needs, "reference": penalised and fields["model.lora_rank"] is None}


def position(state: Mapping[str, Any], *, was: int, now: int, what: str) -> tuple[dict[str, Any], str | None]:
  """Returns where an iterator goes on whose batches have another size now, so that nothing is left out.

  Args:
    state: State of the iterator, in batches.
    was: Rows of a batch when it was saved.
    now: Rows of a batch today.
    what: Plural of the rows, for the line.

  Returns:
    The state in today's batches, and a line on what is drawn again, None if nothing is.

  Example:
    >>> position({"next_index": 3}, was=8, now=12, what="prompts")
    ({'next_index': 2}, None)
    >>> position({"next_index": 3}, was=8, now=16, what="prompts")[1]
    'the run stood at 24 prompts, which batches of 16 do not end at: it goes on from 16, so 8 prompts are drawn again'
  """
  if was == now or "next_index" not in state:  # A curriculum has no place: it draws by what it has seen.
    return dict(state), None
  done = state["next_index"] * was
  again = done % now
  line = f"the run stood at {done} {what}, which batches of {now} do not end at: it goes on from {done - again}, so {again} {what}"
  return dict(state) | {"next_index": done // now}, f"{line} are drawn again" if again else None


def written_on(workdir: Path) -> tuple[int, int] | None:
  """Returns the newest checkpoint of a run, and the number of devices that wrote it; None if nothing says so."""
  manifests = [path for path in (workdir / "checkpoints").glob("*/manifest.json") if path.parent.name.isdecimal()]
  for path in sorted(manifests, key=lambda path: -int(path.parent.name)):
    try:
      return int(path.parent.name), int(json.loads(path.read_text(encoding="utf-8"))["devices"])
    except (OSError, ValueError, KeyError, TypeError):
      continue  # A damaged one, which the restore passes over as well.
  return None


def check_devices(workdir: Path, devices: int, *, allowed: bool) -> str | None:
  """Refuses to go on, on another number of devices than wrote the newest checkpoint: sums are then added in another order.

  Args:
    workdir: Folder of the run.
    devices: Number of devices of all processes together.
    allowed: Whether the user has asked for it.

  Returns:
    A line about the difference; None if there is none.

  Raises:
    ValueError: The difference is not allowed. One line.
  """
  step, written = written_on(workdir) or (0, devices)
  if written == devices:
    return None
  line = f"checkpoint {step} of {workdir} was written on {written} devices, found {devices}: results will be equal within rounding only"
  if not allowed:
    raise ValueError(f"{line}; give the run {written} devices, or add --allow_config_change")
  return line
