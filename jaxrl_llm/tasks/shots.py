"""Few-shot prompts: solved training problems in front of every problem."""

import hashlib
from collections.abc import Callable, Sequence

from jaxrl_llm.tasks import prompt_template
from jaxrl_llm.tasks.files.storage import IMAGES, Row, uniform
from jaxrl_llm.tasks.files.tables import ConvertedRows
from jaxrl_llm.tasks.task import Task


def with_shots(task: Task, shots: int, template: str, *, vary: bool = False) -> Task:
  """Returns a task whose prompts begin with solved training problems.

  The solved problems are chosen by a hash; those with a demonstration are preferred. A task without
  training problems stays as it is.

  Args:
    task: Task without shots.
    shots: Number of solved problems; 0 returns the task.
    template: Text of a solved problem, with columns of its row in braces; `{solution}` is its
      demonstration, or its answer if there is none.
    vary: Whether each prompt has solved problems of its own, of its problem's level where there are
      enough, and never the problem itself. They stay training problems. Otherwise all prompts begin
      with the same ones, which are not trained on.

  Raises:
    ValueError: If there are too few training problems, or the template names an unknown column. One
      line, with the fix.
  """
  if not shots or not len(task.train):
    return task
  if IMAGES in task.train[0]:
    raise ValueError(f"config.task.shots: found {shots} for task {task.name}, whose problems have pictures, expected 0")
  candidates: dict[str, Row] = {}
  for row in task.demonstrations if len(task.demonstrations) else task.train:
    candidates.setdefault(row["prompt"], row)
  if len(candidates) <= shots:
    raise ValueError(
      f"config.task.shots: found {shots}, expected fewer than the {len(candidates)} training problems "
      f"of task {task.name}"
    )
  prompt_template.check_template(
    template, [*next(iter(candidates.values())), "solution"], setting="task.shot_template"
  )
  texts = lambda rows: [prompt_template.render(template, row | {"solution": row["response"] or row["answer"]}) for row in rows]
  if vary:
    prefix, key, left_out = _varied(list(candidates.values()), shots, texts), f"{shots} of {template}", ()
  else:
    left_out = sorted(candidates, key=lambda prompt: (uniform("shot", candidates[prompt]["question"]), prompt))[:shots]
    key = "".join(texts(map(candidates.get, left_out)))
    prefix = lambda row: key

  def prefixed(rows: Sequence[Row], left_out: Sequence[str] = ()) -> ConvertedRows:
    kept = [i for i, row in enumerate(rows) if row["prompt"] not in left_out]
    return ConvertedRows(rows, lambda row: row | {"prompt": prefix(row) + row["prompt"]}, indices=kept)

  digest = hashlib.blake2b(f"{task.fingerprint}\0{key}".encode(), digest_size=8).hexdigest()
  return task._replace(
    train=prefixed(task.train, left_out),
    test=prefixed(task.test),
    demonstrations=prefixed(task.demonstrations, left_out),
    fingerprint=None if task.fingerprint is None else digest,
  )


def _varied(pool: Sequence[Row], shots: int, texts: Callable[[Sequence[Row]], list[str]]) -> Callable[[Row], str]:
  """Returns the function from a problem to the text of solved problems of its own."""
  by_level: dict[object, list[Row]] = {}
  for row in pool:
    by_level.setdefault(row["level"], []).append(row)

  def prefix(row: Row) -> str:
    question, chosen, place = row["question"], {}, 0
    of_level = by_level.get(row["level"], ())
    rows = of_level if len(of_level) > shots else pool
    while len(chosen) < shots:
      other = rows[int(len(rows) * uniform("shot", question, place))]
      place += 1
      if other["prompt"] != row["prompt"]:
        chosen.setdefault(other["prompt"], other)
    return "".join(texts(list(chosen.values())))

  return prefix
