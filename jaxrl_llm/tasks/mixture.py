"""Several tasks as one: training problems in proportion to weights, each judged by its own task's verifier."""

import bisect
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.messages import Problem
from jaxrl_llm.tasks.files import report as report_lib
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.task import Task
from jaxrl_llm.text_types import Completion, RewardFn


class MixedRows(Sequence):
  """The rows of several sources, one source after the other; `pipeline.example_iterator` draws from them by weight.

  Args:
    parts: the sources, none empty.
    weights: of each, above 0; None draws by size, as from one source.

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


class MarkedRows(Sequence):
  """The rows of a task, each with the task's name in `task` and its verifier's in `reward`."""

  def __init__(self, rows: Sequence[Row], *, task: str, reward: str):
    self._rows, self._mark = rows, {"task": task, "reward": reward}

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return [row | self._mark for row in self._rows[index]]
    return self._rows[index] | self._mark

  def __iter__(self):
    return (row | self._mark for row in self._rows)


def parse_parts(parts: Sequence[str]) -> dict[str, float]:
  """Weights by task, from texts such as "gsm8k=0.7"; a task alone has weight 1.

  Raises:
    ValueError: no parts, one twice, or a weight that is none. One line.

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
  """One task of several.

  Args:
    tasks: with the same tokenizer, each with training problems.
    weights: the share of each in training is its weight by the sum of all. Test problems are all of all.

  Returns:
    The task, named "mixture"; its rows say in `reward` which of its `rewards` is theirs.

  Raises:
    ValueError: a task without training problems, or one name for two verifiers.
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
  """A task with another one's test problems in place of its own.

  Raises:
    ValueError: one name for two verifiers.
  """
  found = report_lib.merge([report for report in (task.report, other.report) if report is not None])
  if task.rewards[0] == other.rewards[0] and not task.routed:
    return task._replace(test=other.test, report=found, fingerprint=_fingerprint([task, other]))
  both = routed_task([task, other])
  train, demonstrations = (_marked(task, split) for split in ("train", "demonstrations"))
  return both._replace(name=task.name, train=train, test=_marked(other, "test"), demonstrations=demonstrations)


def routed_task(tasks: Sequence[Task]) -> Task:
  """The first of some tasks with the rewards, verifiers and reports of all; its rows stay its own.

  Raises:
    ValueError: one name for two verifiers.
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
    fingerprint=_fingerprint(tasks),
  )


def routed(verifiers: Mapping[str, RewardFn]) -> RewardFn:
  """The reward that gives each row to the verifier it names in `reward`; it can be sent to another process where `verifiers` can."""
  return functools.partial(_route, dict(verifiers))


def _route(verifiers: Mapping[str, RewardFn], completion: Completion, example: Mapping[str, Any]) -> float:
  return verifiers[example["reward"]](completion, example)


def _fingerprint(tasks: Sequence[Task]) -> str:
  return "-".join(task.fingerprint or task.name for task in tasks)


def _marked(task: Task, split: str) -> Sequence[Row]:
  rows = getattr(task, split)
  return rows if task.routed else MarkedRows(rows, task=task.name, reward=task.rewards[0])
