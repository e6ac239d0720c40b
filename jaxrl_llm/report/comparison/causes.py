"""What differs between two runs besides their numbers: config, data and machine."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.config.fields import flatten
from jaxrl_llm.messages import shown
from jaxrl_llm.report.comparison.arms import UNCOUNTED, differences
from jaxrl_llm.report.comparison.loop_parts import PARTS, Difference
from jaxrl_llm.report.comparison.runs import RunRecord

# Fields that act only from a part of the first RL step on. All others may act from the start.
_ACTS_FROM = {
  "reward.": "rewards", "advantage.": "advantages", "critic.": "advantages", "correction.": "updates", "objective.": "updates",
  "learner.learning_rate": "learning rates", "learner.schedule": "learning rates", "learner.warmup_steps": "learning rates",
  "num_steps": "learning rates",
}  # fmt: skip
# Variables of the environment that change no bit.
_IDLE = re.compile("LOG|DUMP|MEM_FRACTION|PREALLOCATE")
NAMES = [part.name for part in PARTS]
"""Names of the parts of an RL step, in order."""


class Cause(NamedTuple):
  """A difference of config, data or machine.

  Attributes:
    kind: "config", "data" or "machine".
    name: What differs.
    a: Value in the first run.
    b: Value in the second run.
    acts_from: Index in `PARTS` of the part from which it acts; -1 from the start of the run.
  """

  kind: str
  name: str
  a: str
  b: str
  acts_from: int = -1

  def __str__(self) -> str:
    return f"{self.name}: {self.a} and {self.b}"


def find_causes(a: RunRecord, b: RunRecord) -> tuple[list[Cause], list[str]]:
  """Returns what differs in config, data and machine, and notes on what is not recorded."""
  notes = [f"not recorded in {run.name}: config.json" for run in (a, b) if not run.config]
  causes, idle = [], []
  if a.config and b.config:
    changed = differences([a.config, b.config])
    # A field that only one config has follows from another one, such as the objective's name.
    for field in sorted(changed, key=lambda field: "–" in changed[field]):
      if field.startswith((*UNCOUNTED, "warm_start.cache")):
        idle.append(field)
      else:
        causes.append(Cause("config", f"config.{field}", *map(_value, changed[field]), _acts_from(field)))
  if idle:
    notes.append(f"differ without effect on a number: {listed(idle)}")
  for kind, name, x, y in _facts(a.summary, b.summary):
    if x is not None and y is not None and x != y:
      causes.append(Cause(kind, name, x, y))
  absent = [
    name
    for name in ("processor", "environment", "source_sha256", "resumed_at")
    if name not in a.summary or name not in b.summary
  ]
  notes += [
    f"{run.name} has {run.summary['attempts']} attempts; versions and environment are those of the last"
    for run in (a, b)
    if run.summary.get("attempts", 1) > 1
  ]
  if absent:
    notes.append(f"not recorded in both: {', '.join(absent)}")
  return causes, notes


def _facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None, str | None]]:
  """Yields kind, name and both values of each fact of two summaries; None is not recorded."""
  for name in ("base", "teacher", "data_fingerprint"):
    if name in a and name in b:
      yield "data", name, *(_value(x[name]) for x in (a, b))
  counts = [flatten(x["data"]) if isinstance(x.get("data"), dict) else {} for x in (a, b)]
  for name in sorted(counts[0].keys() & counts[1].keys()):
    yield "data", f"data.{name}", *(_value(of[name]) for of in counts)
  for section in ("versions", "environment"):
    of_a, of_b = (x.get(section) if isinstance(x.get(section), dict) else None for x in (a, b))
    if of_a is None or of_b is None:
      continue
    for name in sorted(name for name in of_a.keys() | of_b.keys() if not _IDLE.search(name)):
      yield "machine", name, *("none" if name not in of else str(of[name]) for of in (of_a, of_b))
  for name in ("device", "processes", "processor"):
    yield "machine", name, *(None if x.get(name) is None else str(x[name]) for x in (a, b))
  sources = [x.get("source_sha256") for x in (a, b)]
  yield "machine", "source of jaxrl_llm", *(x and f"{x[:8]}…" for x in sources)


def _acts_from(field: str) -> int:
  for name, part in _ACTS_FROM.items():
    if field == name or name.endswith(".") and field.startswith(name):
      return NAMES.index(part)
  return -1


def _value(value: Any) -> str:
  return "none" if value is None else "absent" if value == "–" else shown(value, limit=60)


def can_act(cause: Cause, first: Difference, *, refills: bool) -> bool:
  """Returns whether a cause can have acted by the first difference.

  With refills, rewards and what follows from them decide what is drawn in the same step.
  """
  follows = first.phase == "rl" and (first.step > 1 or refills) or first.part == "saved weights"
  if cause.acts_from < 0 or follows:
    return True
  if first.phase in ("warm_start", "reward_model"):
    return cause.name.startswith("config.objective.")  # It may imitate.
  return first.step > 0 if first.position is None else cause.acts_from <= first.position


def listed(items: Sequence[str], most: int = 6) -> str:
  """Returns the first items of a list as text, and how many more there are."""
  return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
