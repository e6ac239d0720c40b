"""Mixtures of tasks: training problems drawn by weight, each judged by its own task's verifier."""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.messages import Problem
from jaxrl_llm.tasks.files import report as report_lib
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.files.tables import ConvertedRows
from jaxrl_llm.tasks.task import Task
from jaxrl_llm.text_types import Completion, RewardFn


class MixedRows(Sequence):
  """A concatenation of several sources, from which `pipeline.example_iterator` draws by weight.

  Args:
    parts: Non-empty sources of rows.
    weights: Weight of each source, above 0; None draws by size, as from a single source.

  Example:
    >>> rows = MixedRows([[{"question": "a"}], [{"question": "b"}, {"question": "c"}]], (0.5, 0.5))
    >>> len(rows), rows[2]
    (3, {'question': 'c'})
  """

  def __init__(self, parts: Sequence[Sequence[Row]], weights: Sequence[float] | None = None):
    self.parts, self.weights = tuple(parts), None if weights is None else tuple(weights)
    self._ends = list(itertools.accumulate(map(len, self.parts)))

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def __getitem__(self, index):
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    index = range(len(self))[index]
    part = bisect.bisect_right(self._ends, index)
    return self.parts[part][index - (self._ends[part - 1] if part else 0)]

  def __iter__(self):
    return itertools.chain.from_iterable(self.parts)


def parse_parts(parts: Sequence[str]) -> dict[str, float]:
  """Parses weights by task from texts such as "gsm8k=0.7"; the default weight is 1.

  Raises:
    ValueError: If there are no parts, a task occurs twice, or a weight is not a positive finite
      number. One line.

  Example:
    >>> parse_parts(("gsm8k=3", "gym:countdown"))
    {'gsm8k': 3.0, 'gym:countdown': 1.0}
  """
  weights = {}
  for part in parts:
    name, mark, text = str(part).rpartition("=")
    name, text = (name, text) if mark else (text, "1")
    try:
      weight = float(text)
    except ValueError:
      weight = math.nan
    if not 0 < weight < math.inf or not name:
      raise ValueError(Problem("task.parts", repr(part), "a task and its weight, such as 'gsm8k=0.7'"))
    if name in weights:
      raise ValueError(Problem("task.parts", f"{name!r} twice", "each task once"))
    weights[name] = weight
  if not weights:
    raise ValueError(Problem("task.parts", "none", "tasks and their weights, such as ('gsm8k=0.7', 'gym:countdown=0.3')"))
  return weights


def mix(tasks: Sequence[Task], weights: Sequence[float]) -> Task:
  """Combines several tasks into one.

  Args:
    tasks: Tasks with the same tokenizer, each with training problems.
    weights: Weight of each task. Its share in training is its weight divided by the sum of
      all weights. The mixture has the test problems of all tasks.

  Returns:
    The task, named "mixture". Each row names its verifier, one of the task's `rewards`, in
    `reward`.

  Raises:
    ValueError: If a task has no training problems, or two verifiers have the same name.
  """
  for task in tasks:
    if not len(task.train):
      raise ValueError(f"task.parts: {task.name} has test problems only, expected some to train on; name it in task.test_name instead")
  mixed = routed_task(tasks)
  demonstrations = [_marked(task, "demonstrations") for task in tasks if len(task.demonstrations)]
  return mixed._replace(
    name="mixture",
    train=MixedRows([_marked(task, "train") for task in tasks], weights),
    test=MixedRows([_marked(task, "test") for task in tasks]),
    demonstrations=MixedRows(demonstrations),
  )


def with_test(task: Task, other: Task) -> Task:
  """Returns a task with its test problems replaced by those of another task.

  Raises:
    ValueError: If two verifiers have the same name.
  """
  both = routed_task([task, other])
  if task.rewards[0] == other.rewards[0] and not (task.routed or other.routed):
    return task._replace(test=other.test, report=both.report, fingerprint=both.fingerprint)
  train, demonstrations = (_marked(task, split) for split in ("train", "demonstrations"))
  return both._replace(name=task.name, train=train, test=_marked(other, "test"), demonstrations=demonstrations)


def routed_task(tasks: Sequence[Task]) -> Task:
  """Returns the first task with the rewards, verifiers and reports of all; its rows do not change.

  Raises:
    ValueError: If two verifiers have the same name.
  """
  verifiers: dict[str, RewardFn] = {}
  for task in tasks:
    for name, fn in task.verifiers.items():
      if verifiers.setdefault(name, fn) is not fn:
        raise ValueError(f"task {task.name}: found a second verifier named {name!r}, expected distinct names")
  reports = [task.report for task in tasks if task.report is not None]
  names = dict.fromkeys(name for task in tasks for name in (task.rewards if task.routed else task.rewards[:1]))
  return tasks[0]._replace(
    rewards=tuple(names),
    form_reward=None,
    step_rewards=None,
    verifiers=verifiers,
    report=report_lib.merge(reports) if reports else None,
    routed=True,
    fingerprint="-".join(task.fingerprint or task.name for task in tasks),
  )


def route(verifiers: Mapping[str, RewardFn], completion: Completion, example: Mapping[str, Any]) -> float:
  """Returns the reward of the verifier that a row names in its `reward`."""
  return verifiers[example["reward"]](completion, example)


def _marked(task: Task, split: str) -> Sequence[Row]:
  """Returns rows with the task's name in `task` and its verifier's name in `reward`."""
  rows, mark = getattr(task, split), {"task": task.name, "reward": task.rewards[0]}
  return rows if task.routed else ConvertedRows(rows, lambda row: row | mark)
