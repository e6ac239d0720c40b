"""Config changes between two attempts at a run: which are legal, and how data positions move."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FIXED: dict[str, str] = {
  "seed": "everything drawn so far depends on it",
  "model.preset": "the checkpoint's weights have that shape",
  "model.path": "the run began with those weights",
  "model.tokenizer": "the weights were trained on its ids",
  "model.param_dtype": "the checkpoint's weights have that dtype",
  "model.lora_rank": "the checkpoint's adapters have that rank",
  "model.lora_alpha": "the adapters were trained with that scale",
  "model.lora_targets": "the checkpoint holds those adapters",
  "learner.moments_dtype": "the checkpoint's moments have that dtype",
  "rollout.spare_prompts": "the checkpoint may hold unfinished groups",
  "warm_start.num_steps": "RL begins where that warm start ends",
  "task.": "the run has a position in these problems, and its accuracies were measured on them",
}
"""Fields that no flag allows to change, with the reason; a final dot marks a section."""

SCHEDULED = ("learner.updates_per_rollout", "critic.value_warmup_steps")
"""Fields that set how many updates of the policy a step makes, which a linear schedule counts."""

FREE = ("task.data_dir",)
"""Fields of a fixed section that may change."""


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
  """Returns the fields that differ between two configs flattened by path, with both values."""
  fields = sorted(old.keys() | new.keys())
  return {field: (old.get(field), new.get(field)) for field in fields if old.get(field) != new.get(field)}


def refusals(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each change that a run cannot take.

  Args:
    old: Fields of the run's config by path, as JSON stores them.
    new: Fields of the config to resume with.

  Example:
    >>> list(refusals({"seed": 0, "num_steps": 4}, {"seed": 1, "num_steps": 8}))
    ['config.seed: found 1, expected 0 as at the start of the run, because everything drawn so far
    depends on it']
  """
  changed = differences(old, new)
  for field, (was, now) in changed.items():
    section = f"{field.partition('.')[0]}."
    why = None if field in FREE else FIXED.get(field, FIXED.get(section))
    if field == "objective.name" and ("advantage.estimator" in old) != ("advantage.estimator" in new):
      why = "a reward model and a policy are different models"  # Only a policy has advantages.
    if field in SCHEDULED and "linear" in (old["learner.schedule"], new["learner.schedule"]):
      why = "the linear learner.schedule counts the policy's updates, and would end before or after the run"
    shapes_groups = section in ("rollout.", "environment.") and field not in ("rollout.spare_prompts", "environment.timeout_s")
    if shapes_groups and (old.get("rollout.spare_prompts") or 0) > 0:
      why = f"{FIXED['rollout.spare_prompts']} (rollout.spare_prompts)"
    if why is not None:
      yield f"config.{field}: found {now!r}, expected {was!r} as at the start of the run, because {why}"
  before, after = (_models(fields) if changed else {} for fields in (old, new))
  of_reference = "teacher.frozen" if bool(old.get("teacher.frozen")) != bool(new.get("teacher.frozen")) else "objective.kl_coef"
  for field, part in (("advantage.estimator", "critic"), (of_reference, "reference")):
    if before.get(part) != after.get(part):
      had, has, holds = ("a", "no", f"a {part}") if before.get(part) else ("no", "a", "none")
      why = f"because the checkpoint holds {holds}"
      yield (
        f"config.{field}: found {has} {part} in this config, expected {had} {part} as at the start of the run, {why}"
      )


def _models(fields: Mapping[str, Any]) -> dict[str, bool]:
  """Returns whether a run of a config holds a critic, and whether it holds a frozen reference."""
  if "advantage.estimator" not in fields:  # The config of a reward model.
    return {"critic": False, "reference": False}
  from jaxrl_llm.advantages import estimators
  from jaxrl_llm.config import policy
  from jaxrl_llm.config.fields import nested

  config = nested(fields)
  needs = estimators.of_section(**config.advantage).needs
  penalised = bool(fields["reward.kl_coef"]) or "ref_logprobs" in needs | policy.bare_objective(config).needs
  keeps = (penalised and fields["model.lora_rank"] is None) or bool(fields.get("teacher.frozen"))
  return {"critic": "values" in needs, "reference": keeps}


def convert_position(state: Mapping[str, Any], *, was: int, now: int, what: str) -> tuple[dict[str, Any], str | None]:
  """Converts the position of an iterator to another batch size without skipping a row.

  Args:
    state: State of the iterator, in batches of the old size.
    was: Number of rows per batch when the state was saved.
    now: Number of rows per batch now.
    what: Plural of the rows, for the message.

  Returns:
    The state in batches of the new size, and a line about the rows that are drawn again; None if
    there are none.

  Example:
    >>> convert_position({"next_index": 3}, was=8, now=12, what="prompts")
    ({'next_index': 2}, None)
    >>> convert_position({"next_index": 3}, was=8, now=16, what="prompts")[1]
    'the run had drawn 24 prompts, which is not a multiple of 16: it resumes after 16, so 8 prompts
    are drawn again'
  """
  # A curriculum has no position: it draws by the pass rates that it has measured.
  if was == now or "next_index" not in state:
    return dict(state), None
  done = state["next_index"] * was
  again = done % now
  line = (
    f"the run had drawn {done} {what}, which is not a multiple of {now}: it resumes after {done - again}, so {again} "
    f"{what}"
  )
  return dict(state) | {"next_index": done // now}, f"{line} are drawn again" if again else None


def written_on(workdir: Path) -> tuple[int, int] | None:
  """Returns the step of a run's newest checkpoint and the number of devices that wrote it.

  None if no manifest is readable.
  """
  manifests = [path for path in (workdir / "checkpoints").glob("*/manifest.json") if path.parent.name.isdecimal()]
  for path in sorted(manifests, key=lambda path: -int(path.parent.name)):
    try:
      return int(path.parent.name), int(json.loads(path.read_text(encoding="utf-8"))["devices"])
    except (OSError, ValueError, KeyError, TypeError):
      continue  # Damaged; the restore skips it as well.
  return None


def check_devices(workdir: Path, devices: int, *, allowed: bool) -> str | None:
  """Refuses to resume if the number of devices has changed since the newest checkpoint.

  Another number of devices changes the order in which sums are added.

  Args:
    workdir: Folder of the run.
    devices: Number of devices over all processes.
    allowed: Whether the user allows the change.

  Returns:
    A line about the difference; None if there is none.

  Raises:
    ValueError: If the difference is not allowed. One line.
  """
  step, written = written_on(workdir) or (0, devices)
  if written == devices:
    return None
  line = (
    f"checkpoint {step} of {workdir} was written on {written} devices, found {devices}: results will agree within "
    "rounding only"
  )
  if not allowed:
    raise ValueError(f"{line}; run on {written} devices, or pass --allow_config_change")
  return line
