"""Prompts that only a teacher reads: the policy's, with more in it, such as the answer."""

from collections.abc import Callable, Sequence

from jaxrl_llm.messages import Problem, did_you_mean, shown
from jaxrl_llm.tasks import prompt_template
from jaxrl_llm.tasks.files.storage import IDS, IMAGES, Row
from jaxrl_llm.tasks.image_prompts import prompt_ids
from jaxrl_llm.tasks.task import Task

SETTING = "config.teacher.privileged"

PrivilegedFn = Callable[[Row], list[int]]
"""Function from a problem to the ids of the prompt that its teacher reads."""


def privileged_prompts(task: Task, template: str) -> PrivilegedFn:
  """Returns the function that encodes the prompts of a teacher.

  They are encoded as the policy's are, inside the chat template if there is one.

  Args:
    task: Task of the problems.
    template: Prompt with columns of the problem in braces. `{prompt}` is the policy's own prompt,
      and `{response}` the problem's first demonstration.

  Raises:
    ValueError: If there is no such column, a problem has no demonstration, or the prompts are not
      text. One line.

  Example:
    >>> from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
    >>> rows = [{"question": "1+2", "prompt": "1+2=", "answer": "3"}]
    >>> task = Task("sums", ByteTokenizer(), rows, (), (), ("final_number",))
    >>> task.tokenizer.decode(privileged_prompts(task, "{prompt}It is {answer}. {prompt}")(rows[0]))
    '1+2=It is 3. 1+2='
  """
  first = task.train[0]
  if IDS in first or IMAGES in first:
    kind = "pictures" if IMAGES in first else "messages of an environment"
    raise ValueError(Problem(SETTING, shown(template), f"None for task {task.name}, whose prompts have {kind}"))
  prompt_template.check_template(template, sorted(name for name in first if name != "place"), setting=SETTING)
  responses: dict[tuple, str] | None = None
  # Two problems may share a question; their prompts tell them apart.
  key_of = lambda row: tuple(row[name] for name in ("question", "prompt") if name in task.demonstrations[0])
  if "response" in prompt_template.fields(template, setting=SETTING):
    responses = {}
    for row in task.demonstrations:
      responses.setdefault(key_of(row), row["response"])
    for row in task.train:
      if not responses or not responses.get(key_of(row)):
        fix = f"a column that every problem of task {task.name} has: {shown(row['question'], limit=60)} has no demonstration"
        raise ValueError(Problem(SETTING, "{response}", fix))

  def encode(row: Row) -> list[int]:
    row = row if responses is None else row | {"response": responses[key_of(row)]}
    return prompt_ids(row | {"prompt": prompt_template.render(template, row)}, task.tokenizer)

  return encode


def check_names(rows: Sequence[Row], column: str, names: Sequence[str], *, setting: str = "config.teacher.column") -> None:
  """Checks that every problem names one of several teachers, and that every teacher is named.

  Args:
    rows: Training problems.
    column: Column with the names.
    names: Names of the teachers.
    setting: Setting that messages name.

  Raises:
    ValueError: If not. One line, with the nearest column or name.

  Example:
    >>> try:
    ...   check_names([{"task": "maths"}], "task", ["math", "code"])
    ... except ValueError as error:
    ...   print(str(error)[:70])
    config.teacher.column: found 'maths' in column 'task' of a problem, ex
  """
  first = rows[0]
  if column not in first:
    known = sorted(name for name in first if name != "place")
    raise ValueError(Problem(setting, repr(column), f"one of the columns {', '.join(known)}{did_you_mean(column, known)}"))
  used = {str(row[column]) for row in rows}
  for name in sorted(used - set(names)):
    fix = f"one of the names in teacher.paths, {', '.join(names)}{did_you_mean(name, names)}"
    raise ValueError(Problem(setting, f"{name!r} in column {column!r} of a problem", fix))
  for name in names:
    if name not in used:
      raise ValueError(Problem("config.teacher.paths", repr(name), f"only names that a problem has in column {column!r}"))
