"""Tasks to train a policy on: problems, prompts and demonstrations.

This package uses NumPy and text, but not JAX.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from jaxrl_llm.messages import Problem, did_you_mean, problem_of
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.pictures import check_installed
from jaxrl_llm.settings import signature
from jaxrl_llm.settings.values import COUNT, INSIDE, LINES, NATURAL, texts
from jaxrl_llm.tasks import mixture, prompt_template
from jaxrl_llm.tasks.files import storage
from jaxrl_llm.tasks.files.storage import IMAGES, GeneratedProblems, Row
from jaxrl_llm.tasks.image_prompts import check_reads_pictures
from jaxrl_llm.tasks.problem_set import ProblemSetEntry, Setup
from jaxrl_llm.tasks.sets import arithmetic, drills, figures, gym, packaged, products, published, word_problems
from jaxrl_llm.tasks.sets.environment import environment_task
from jaxrl_llm.tasks.sets.own_files import check_file, file_task
from jaxrl_llm.tasks.shots import with_shots
from jaxrl_llm.tasks.task import Task

__all__ = ["TASKS", "Row", "Setup", "Task", "factory", "has_parts", "is_of_environment", "make", "names", "task_problems"]


def generated_task(builder: type[GeneratedProblems], setup: Setup, **judged: Any) -> Task:
  """Returns a task of generated problems, which needs no settings.

  Args:
    builder: Class that builds the dataset; its name is the task's name.
    setup: Settings common to all tasks.
    **judged: Reward attributes of the `Task`.

  Raises:
    ValueError: If a level does not exist, or the dataset cannot be built or read. One line.
  """
  if IMAGES in builder.columns:
    check_reads_pictures(builder.name, setup.pictures)
  levels = builder.LEVELS if setup.levels is None else tuple(setup.levels)
  if not levels or not set(levels) <= set(builder.LEVELS):
    raise ValueError(f"task.levels: found {levels}, expected one or more of {builder.LEVELS}")
  splits = {
    split: [row | {"prompt": builder.TEMPLATE.format(question=row["question"])} for row in rows if row["level"] in levels]
    for split, rows in storage.load_splits(builder, data_dir=setup.data_dir).items()
  }
  if setup.tokenizer is not None:
    judged["step_rewards"] = None  # Step rewards interpret the ids as bytes.
  return Task(name=builder.name, tokenizer=setup.tokenizer or ByteTokenizer(), **splits, **judged)


def _generated(builder: type[GeneratedProblems], **judged: Any) -> ProblemSetEntry:
  check = {"check": check_installed} if IMAGES in builder.columns else {}
  return ProblemSetEntry(partial(generated_task, builder, **judged), **check)


TASKS = {
  "arithmetic": _generated(arithmetic.Arithmetic, rewards=("final_answer",), step_rewards=arithmetic.step_rewards),
  "figures": _generated(figures.Figures, rewards=("final_answer",)),
  "blank_figures": _generated(figures.BlankFigures, rewards=("final_answer",)),
  "gsm_symbolic": _generated(word_problems.GsmSymbolic, rewards=("final_number",), form_reward="answer_form"),
  "hinted_arithmetic": _generated(arithmetic.HintedArithmetic, rewards=("final_answer",)),
  "largest": _generated(drills.Largest, rewards=("final_number",)),
  "products": _generated(products.Products, rewards=("final_answer",)),
  "sums": _generated(drills.Sums, rewards=("final_number",)),
  "tally": _generated(drills.Tally, rewards=("final_number",)),
  "times": _generated(drills.Times, rewards=("final_number",)),
}
"""Generated tasks by name. They need no settings."""


def mixture_task(setup: Setup, *, parts: Sequence[str] = (), source: str | os.PathLike | None = None) -> Task:
  """Returns a weighted mixture of tasks; see `mixture.mix`.

  Args:
    setup: Settings common to all tasks. `levels` must be None, since levels differ between tasks.
    parts: Tasks and weights, such as ("gsm8k=0.7", "gym:countdown=0.3").
    source: Folder with one subfolder of files per published set, under the set's name; None
      downloads the files.

  Raises:
    ValueError: If the parts cannot be mixed. One line.
  """
  weights = mixture.parse_parts(parts)
  if setup.levels is not None:
    raise ValueError(f"task.levels: found {tuple(setup.levels)} for a mixture, whose parts have levels of their own; expected None")
  made = []
  for name in weights:
    settings = {"source": os.path.join(source, name)} if source is not None and "source" in signature.settings_of(_entry(name).load) else {}
    made.append(make(name, **setup._asdict(), **settings))
  return mixture.mix(made, list(weights.values()))


def check_parts(parts: Sequence[str] = (), **others: object) -> None:
  """Checks that the parts can be mixed; ignores the mixture's other settings.

  Raises:
    ValueError: If the parts cannot be mixed. One line.
  """
  del others
  for name in mixture.parse_parts(parts):
    if name in SETS and SETS[name].needs_settings:
      raise ValueError(f"task.parts: found {name!r}, expected tasks that need no settings of their own")
    for problem in task_problems(name, {}):
      raise ValueError(problem)


SETS = {
  "environment": ProblemSetEntry(environment_task, needs_settings=True, is_of_environment=True),
  "file": ProblemSetEntry(file_task, check_file, needs_settings=True),
  **published.SETS,
  **packaged.SETS,
  "mixture": ProblemSetEntry(mixture_task, check_parts, needs_settings=True, has_parts=True),
}
"""Tasks by name whose problems come from files or packages."""


def names() -> tuple[str, ...]:
  """Returns the names of all tasks except reasoning-gym's, which are `gym:NAME`."""
  return (*TASKS, *SETS)


def is_of_environment(name: str) -> bool:
  """Returns whether an environment makes a task's problems and rewards the responses."""
  return name in SETS and SETS[name].is_of_environment


def has_parts(name: str) -> bool:
  """Returns whether a task mixes other tasks, with weights and shots of their own."""
  return name in SETS and SETS[name].has_parts


RULES = {
  "test_fraction": INSIDE,
  "prompt_template": LINES,
  "size": COUNT,
  "seed": NATURAL,
  "parts": texts("tasks with weights, as in ('gsm8k=0.7', 'gym:countdown=0.3')", least=1),
}
"""Legal values of settings, which mean the same in every task; others have a type."""


def factory(name: str) -> Callable[..., Task]:
  """Returns the function `(setup, **settings) -> task` of a task.

  Raises:
    MissingPackageError: If the task needs a package that is missing.
    ValueError: If there is no such task. One line, with the fix.
  """
  if name.startswith(gym.PREFIX):
    gym.check_name(name)
  elif name not in names():
    raise ValueError(Problem("task.name", repr(name), f"one of {', '.join(names())}, gym:NAME{did_you_mean(name, names())}"))
  return _entry(name).load


def task_problems(name: str, settings: Mapping[str, Any]) -> Iterator[Problem | str]:
  """Yields what is wrong with a task's name and settings, without loading any data.

  Args:
    name: Name of the task, as passed to `make`.
    settings: Task-specific settings that are set.

  Yields:
    Problems with their fixes, or plain texts if no setting is at fault.
  """
  try:
    known = signature.settings_of(factory(str(name)))
  except (ImportError, ValueError) as error:
    yield problem_of(error)
    return
  for setting in settings:
    if setting not in known:
      yield signature.unread(f"task.{setting}", settings[setting], known, f"task {name}")
      return
  try:
    _entry(name).check(**settings)
    if (template := settings.get("prompt_template")) is not None:
      prompt_template.fields(template)
  except (ImportError, ValueError) as error:
    yield problem_of(error)


def _entry(name: str) -> ProblemSetEntry:
  return gym.entry(name) if name.startswith(gym.PREFIX) else (TASKS | SETS)[name]


def make(
  name: str,
  *,
  test_name: str | None = None,
  test_source: str | os.PathLike | None = None,
  test_levels: Collection[int] | None = None,
  **settings: Any,
) -> Task:
  """Loads a task, and first builds its dataset if it is absent, which takes a few seconds.

  Args:
    name: Name of the task, one of `names` or `gym:NAME`.
    test_name: Another task whose test problems replace this task's own; None keeps its own.
    test_source: The `source` setting of that other task.
    test_levels: Difficulty levels of the test problems; None keeps `levels`, or all of another
      task.
    **settings: Settings common to all tasks, which are the fields of `Setup`, and task-specific
      ones, such as `path`.

  Raises:
    MissingPackageError: If a dataset has to be built and the package that generates it is missing.
    ValueError: If there is no such task, level or setting, a folder cannot be written, a dataset is
      damaged, or rows are bad. One line, with the fix.

  Example:
    >>> make("aritmetic")
    Traceback (most recent call last):
    ...
    ValueError: task.name: found 'aritmetic', expected one of ...; did you mean 'arithmetic'?
  """
  setup = Setup(**{field: settings.pop(field) for field in Setup._fields if field in settings})
  for problem in task_problems(name, settings):
    raise ValueError(problem)
  if test_name is None and test_levels is None:
    task = _entry(name).load(setup, **settings)
    return task if has_parts(name) else with_shots(task, setup.shots, setup.shot_template, vary=setup.vary_shots)
  test_settings = settings if test_name is None else {} if test_source is None else {"source": test_source}
  of_test = setup._replace(levels=test_levels, max_tokens=None, columns=setup.columns if test_name is None else ())
  other = make(test_name or name, **of_test._asdict(), **test_settings)
  return mixture.with_test(make(name, **setup._asdict(), **settings), other)
