"""The configs that runs have recorded, as `config.json` in their workdirs."""

import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.config import renamed
from jaxrl_llm.config.fields import base, flatten, is_open, unread_defaults
from jaxrl_llm.messages import UsageError, one_line


def saved_config(workdir: Path) -> dict[str, Any] | None:
  """Returns the config of a run; None if there is no run.

  A published model has a `config.json` too, with other fields.
  """
  try:
    saved = tuples(json.loads((workdir / "config.json").read_text()))
  except (OSError, ValueError):
    return None
  is_run = isinstance(saved, dict) and {"objective", "rollout", "model"} <= saved.keys()
  return renamed.current(saved, updates=False) if is_run else None


def run_config(workdir: Path) -> ConfigDict:
  """Reads the config of a run.

  Fields that are newer than the run take their defaults, and a line reports this.

  Raises:
    UsageError: If the run is from another version, with fields that this one does not know.
  """
  saved, config = saved_config(workdir), base()
  known, there = flatten(config), flatten(saved)
  try:
    config.update(saved)
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    fields = ", ".join(field for field in there if not (field in known or is_open(field))) or one_line(error, typed=False)
    raise UsageError(
      f"{workdir / 'config.json'}: the run is from another version ({fields}); pass its config with --config=FILE"
    ) from error
  config.update_from_flattened_dict(unread_defaults(config))  # Earlier versions let them pass.
  if newer := [f"{field}={value!r}" for field, value in known.items() if field not in there]:
    print(f"{workdir} is from an earlier version; defaults of new fields: {', '.join(newer)}")
  return config


def tuples(value: Any) -> Any:
  """Turns the lists of a JSON value into tuples, as a config has them."""
  if isinstance(value, dict):
    return {name: tuples(x) for name, x in value.items()}
  return tuple(map(tuples, value)) if isinstance(value, list) else value
