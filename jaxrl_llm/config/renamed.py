"""Fields that others have replaced: what to write instead, and what a recorded config means."""

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm.config.fields import FIELDS, OPEN
from jaxrl_llm.messages import Problem, shown
from jaxrl_llm.settings.signature import Setting
from jaxrl_llm.settings.values import COLUMN, NUMBER, Check


class Renamed(NamedTuple):
  """The successor of a field.

  Attributes:
    path: Field to set instead.
    meaning: What it means.
    rule: Rule by which its value follows from that of the old field.
    instead: Function from the old value, or its text, and the config to what to write instead; None
      if that does not follow.
  """

  path: str
  meaning: str
  rule: str
  instead: Callable[[Any, ConfigDict], str | None]


def problem(path: str, value: Any, config: ConfigDict) -> Problem:
  """Returns the problem of a field of `RENAMED` that is still set, with the value to use instead.

  Args:
    path: Path of the old field.
    value: Value of the old field, or its text on the command line.
    config: Config that sets the new field's neighbours, such as the buckets of rows.

  Example:
    >>> from jaxrl_llm.config.fields import base
    >>> config = base()
    >>> config.learner.row_buckets, config.mesh.data = (32, 64), 4
    >>> str(problem("learner.micro_batches", "8", config))
    'config.learner.micro_batches: found 8, expected config.learner.rows_per_device=2, the rows that
    a device takes at a time'
  """
  new, instead = RENAMED[path], RENAMED[path].instead(value, config)
  text = value if isinstance(value, str) and re.fullmatch(r"\d+|True|False", value) else shown(value)
  expected = f"config.{new.path}, {new.meaning}: {new.rule}" if instead is None else f"{instead}, {new.meaning}"
  return Problem(f"config.{path}", text, expected)


def _rows_per_device(value: Any, config: ConfigDict) -> str | None:
  """Returns the number of rows per device to write instead of a number of micro-batches."""
  try:
    number = int(value)
  except (TypeError, ValueError):
    return None
  path = "config.learner.rows_per_device"
  if number == 1:
    return f"{path}=None"
  learner, mesh = config.get("learner", {}), config.get("mesh", {})
  sizes, buckets = [mesh.get(axis) for axis in ("data", "fsdp", "expert")], learner.get("row_buckets")
  if not buckets or not all(isinstance(size, int) and size > 0 for size in sizes):
    return None
  size, rest = divmod(max(buckets), max(number, 1) * math.prod(sizes))
  return None if rest or not size else f"{path}={size}"


def _fields_of_queue(is_queue: bool, section: Mapping[str, Any] | ConfigDict) -> dict[str, str]:
  """Returns the fields of `rollout` that mean what `rollout.queue` meant in a section."""
  waits = is_queue and section.get("staleness") and section.get("update_in_flight") is None
  return {"driver": "loop" if is_queue else "auto"} | ({"update_in_flight": "wait"} if waits else {})


def _driver(value: Any, config: ConfigDict) -> str | None:
  """Returns what to write instead of `rollout.queue`."""
  if str(value) not in ("True", "False"):
    return None
  fields = _fields_of_queue(str(value) == "True", config.get("rollout", {}))
  return " and ".join(f"config.rollout.{name}={new!r}" for name, new in fields.items())


def _grading(value: Any, config: ConfigDict) -> str | None:
  """Returns what to write instead of `rollout.report_every`."""
  return "config.rollout.driver='loop'" if str(value).isdigit() and int(value) else "config.rollout.driver='auto'"


RENAMED = {
  "learner.micro_batches": Renamed(
    "learner.rows_per_device",
    "the rows that a device takes at a time",
    "the largest of row_buckets / (micro_batches x devices of mesh data x fsdp x expert), or None for micro_batches=1",
    _rows_per_device,
  ),
  "rollout.queue": Renamed(
    "rollout.driver",
    "which says what draws rollouts",
    "'loop' for True, with update_in_flight='wait' if it was None and there is a lag, and 'auto' for False",
    _driver,
  ),
  "rollout.report_every": Renamed(
    "rollout.driver",
    "because the loop has responses graded as they finish",
    "'loop' for a number above 0, and 'auto' for 0",
    _grading,
  ),
}
"""Fields that are gone, by path."""


_BAND = Check(lambda x: isinstance(x, tuple | list) and len(x) == 2, "two numbers, as in (0.5, 5.0)", tuple)
_ON = Check(lambda x: isinstance(x, bool), "True or False", bool)

CORRECTIONS = {
  name: Setting(None, check, f"Earlier spelling of correction.terms=({term!r},).")
  for name, check, term in (
    ("tis", NUMBER, "tis:cap=VALUE"),
    ("mis", NUMBER, "mis:cap=VALUE"),
    ("level", COLUMN, "tis:cap=2.0&level=VALUE"),
    ("icepop", _BAND, "icepop:low=0.5&high=5.0"),
    ("geometric_rejection", _BAND, "geometric_rejection:low=0.5&high=2.0"),
    ("off_policy_mask", NUMBER, "off_policy_mask:delta=VALUE"),
    ("off_policy_anchor", COLUMN, "off_policy_mask:delta=0.1&anchor=VALUE"),
    ("top_entropy", NUMBER, "top_entropy:share=VALUE"),
    ("bypass", _ON, "bypass"),
  )
}
"""Fields of `correction` by their earlier names, which `correction_terms` reads."""


def correction_terms(section: Mapping[str, Any] | ConfigDict) -> tuple[str, ...]:
  """Returns `correction.terms` with what the earlier fields of the section add to it.

  Raises:
    ValueError: If a field belongs to a correction that is not there. One line.

  Example:
    >>> correction_terms({"terms": ("bypass",), "tis": 2.0, "level": "sequence", "icepop": None})
    ('bypass', 'tis:cap=2.0&level=sequence')
  """
  old, terms = {name: x for name, x in section.items() if name in CORRECTIONS and x is not None}, list(section.get("terms") or ())
  parts = {"tis": ("level",), "mis": ("level",), "off_policy_mask": ("off_policy_anchor",)}
  of_value = {"tis": ("cap",), "mis": ("cap",), "off_policy_mask": ("delta",), "top_entropy": ("share",), "bypass": ()}
  shared = {name: old.pop(name) for name in ("level", "off_policy_anchor") if name in old}
  for name, value in old.items():
    values = value if isinstance(value, tuple | list) else (value,)
    settings = dict(zip(of_value.get(name, ("low", "high")), values, strict=False))
    settings |= {key.removeprefix("off_policy_"): shared[key] for key in parts.get(name, ()) if key in shared}
    text = "&".join(f"{key}={x}" for key, x in settings.items())
    terms += [] if value is False else [f"{name}:{text}" if text else name]
  for name, value in shared.items():
    owners = [owner for owner, names in parts.items() if name in names]
    if not old.keys() & set(owners):
      raise ValueError(Problem(f"correction.{name}", shown(value), f"None, because {' and '.join(owners)} are not set"))
  return tuple(terms)


def hint(text: str) -> str | None:
  """Returns the fix of a message of `ml_collections` that a field of `RENAMED` does not exist.

  Example:
    >>> hint('Key "micro_batches" does not exist and cannot be added')
    'learner.micro_batches is now learner.rows_per_device, the rows that a device takes at a time:
    the largest of row_buckets / (micro_batches x devices of mesh data x fsdp x expert), or None for
    micro_batches=1'
  """
  for path, new in RENAMED.items():
    if re.search(rf"\b{path.rpartition('.')[2]}\b", text):
      return f"{path} is now {new.path}, {new.meaning}: {new.rule}"
  return None


_DEFAULTS = {
  "sandbox": {
    "timeout_s": 10.0, "total_s": 60.0, "memory_gb": 1.0, "output_mb": 4.0, "imports": True, "recursion_limit": 50_000, "time_scale": 2.0,
    "image": "python:3.12-slim", "url": "",
  },
  "environment": {"max_turns": 4, "timeout_s": 60.0},
  "alarms": {"window": 128, "reward_sigmas": 3.0, "policy_kl_above": 0.01},
}  # fmt: skip
"""Defaults that earlier versions recorded, None for others, whether or not a setting was given."""


def _given(name: str, section: Any) -> Any:
  """Returns an open section without the settings that have their defaults."""
  defaults = _DEFAULTS.get(name, {})
  if not isinstance(section, Mapping):
    return section
  return {key: x for key, x in section.items() if f"{name}.{key}" in FIELDS or x != defaults.get(key)}


def current(saved: Mapping[str, Any], *, updates: bool = True) -> dict[str, Any]:
  """Returns a recorded config in the fields of this version.

  `learner.micro_batches=1` means what `learner.rows_per_device=None` means, with the same bits. No
  value has the meaning of another number: it split every bucket of rows into as many parts. Such a
  number stays, for the caller to refuse.

  Settings of entries that have their defaults are left out, and corrections are terms.

  Args:
    saved: Config by section, as a run recorded it.
    updates: Whether the config is read for updates. Nothing else depends on the number, so that it
      is dropped.

  Example:
    >>> current({"seed": 0, "learner": {"b1": 0.9, "micro_batches": 1}})
    {'seed': 0, 'learner': {'b1': 0.9, 'rows_per_device': None}}
    >>> current({"rollout": {"queue": True, "staleness": 2, "update_in_flight": None}})
    {'rollout': {'staleness': 2, 'update_in_flight': 'wait', 'driver': 'loop'}}
    >>> current({"objective": {"name": "sapo", "tau_pos": None}, "correction": {"bypass": True}})
    {'objective': {'name': 'sapo'}, 'correction': {'terms': ('bypass',)}}
  """
  new = {name: _given(name, section) if name in OPEN else section for name, section in saved.items()}
  if isinstance(correction := new.get("correction"), Mapping):
    with contextlib.suppress(TypeError, ValueError):  # Nothing that a run has recorded.
      new["correction"] = {"terms": correction_terms(correction)}
  learner, rollout = saved.get("learner"), saved.get("rollout")
  if isinstance(learner, Mapping) and "micro_batches" in learner and (not updates or learner["micro_batches"] == 1):
    new["learner"] = {name: value for name, value in learner.items() if name != "micro_batches"} | {"rows_per_device": None}
  if isinstance(rollout, Mapping) and {"queue", "report_every"} & rollout.keys():
    rest = {name: value for name, value in rollout.items() if name not in ("queue", "report_every")}
    new["rollout"] = rest | _fields_of_queue(bool(rollout.get("queue")), rollout)
  return new
