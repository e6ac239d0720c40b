"""Trackers that show a run beside TensorBoard, and the packages that each of them needs."""

import importlib.util
import os
from collections.abc import Iterable, Iterator
from typing import Any

from jaxrl_llm.messages import Problem, did_you_mean

PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "trackio": ("trackio",)}
"""Modules by tracker, which is also the name of the extra that installs them."""


def tracker_problems(names: Iterable[Any]) -> Iterator[Problem]:
  """Yields a problem for each tracker that does not exist, is named twice or is not installed.

  Values of other types are left to the field's own check.

  Example:
    >>> str(*tracker_problems(["wand"]))
    "config.log.trackers: found 'wand', expected one of wandb, mlflow, trackio; did you mean
    'wandb'?"
  """
  field, names = "config.log.trackers", [name for name in names if isinstance(name, str)]
  for name in dict.fromkeys(names):
    if name == "tensorboard":
      yield Problem(field, repr(name), "config.log.tensorboard=True, the default, which writes its files")
    elif name not in PACKAGES:
      yield Problem(field, repr(name), f"one of {', '.join(PACKAGES)}{did_you_mean(name, PACKAGES)}")
    elif names.count(name) > 1:
      yield Problem(field, f"{name!r} {names.count(name)} times", "each tracker once")
    elif missing := [module for module in _needed(name) if not is_installed(module)]:
      yield Problem(field, f"{name!r}, which needs the package {missing[0]}", f"pip install 'jaxrl-llm[{name}]' first, or another tracker")


def is_installed(module: str) -> bool:
  """Returns whether a top-level module is installed.

  A folder of its name in the current folder is none: W&B writes one, called `wandb`.
  """
  spec = importlib.util.find_spec(module)
  return spec is not None and spec.origin is not None


def _needed(name: str) -> tuple[str, ...]:
  # The other packages of MLflow are for the database of a run, which a server replaces.
  return PACKAGES[name][:1] if os.environ.get("MLFLOW_TRACKING_URI") else PACKAGES[name]
