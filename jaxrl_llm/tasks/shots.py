"""Few-shot prompts: solved training problems in front of every problem."""

import hashlib
from collections.abc import Sequence

from jaxrl_llm.tasks import prompt_template
from jaxrl_llm.tasks.files.storage import Row, uniform
from jaxrl_llm.tasks.task import Task


class PrefixedRows(Sequence):
  """Some rows of a source, with a text in front of their prompts.

  Example:
    >>> PrefixedRows([{"prompt": "1+2="}, {"prompt": "3+4="}], [1], "1+2=3\\n")[0]
    {'prompt': '1+2=3\\n3+4='}
  """

  def __init__(self, rows: Sequence[Row], indices: Sequence[int], prefix: str):
    self._rows, self._indices, self._prefix = rows, indices, prefix

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    row = self._rows[self._indices[index]]
    return row | {"prompt": self._prefix + row["prompt"]}


def with_shots(task: Task, shots: int, template: str) -> Task:
  """Returns a task whose prompts begin with solved problems, the same ones for every prompt.

  The solved problems are training problems, chosen by a hash of their questions; those with a
  demonstration are preferred. They are not trained on. A task without training problems stays as it
  is.

  Args:
    task: Task without shots.
    shots: Number of solved problems; 0 returns the task.
    template: Text of a solved problem, with columns of its row in braces; `{solution}` is its
      demonstration, or its answer if there is none.

  Raises:
    ValueError: If there are too few training problems, or the template names an unknown column. One
      line, with the fix.
  """
  if not shots or not len(task.train):
    return task
  found: dict[str, Row] = {}
  for row in task.demonstrations if len(task.demonstrations) else task.train:
    found.setdefault(row["question"], row)
  if len(found) <= shots:
    raise ValueError(f"config.task.shots: found {shots}, expected fewer than the {len(found)} training problems of task {task.name}")
  chosen = sorted(found, key=lambda question: uniform("shot", question))[:shots]
  solved = [row | {"solution": row["response"] or row["answer"]} for row in map(found.get, chosen)]
  prompt_template.check(template, solved[0], setting="task.shot_template")
  prefix = "".join(prompt_template.render(template, row) for row in solved)

  def prefixed(rows: Sequence[Row], left_out: Sequence[str] = ()) -> PrefixedRows:
    return PrefixedRows(rows, [i for i, row in enumerate(rows) if row["question"] not in left_out], prefix)

  digest = hashlib.blake2b(f"{task.fingerprint}\0{prefix}".encode(), digest_size=8).hexdigest()
  return task._replace(
    train=prefixed(task.train, chosen),
    test=prefixed(task.test),
    demonstrations=prefixed(task.demonstrations, chosen),
    fingerprint=None if task.fingerprint is None else digest,
  )
