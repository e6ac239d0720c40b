"""What a policy is trained on: problems, how they are written as tokens, and demonstrations. NumPy and text; no JAX."""

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from jaxrl_llm.messages import Problem, did_you_mean, problem_of, shown
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.tasks import mixture, prompt_template
from jaxrl_llm.tasks.files import storage
from jaxrl_llm.tasks.files.storage import GeneratedProblems, Row
from jaxrl_llm.tasks.problem_set import Entry, Setup
from jaxrl_llm.tasks.sets import arithmetic, gym, packaged, products, published, word_problems
from jaxrl_llm.tasks.sets.own_files import check_file, file_task
from jaxrl_llm.tasks.task import Task
from jaxrl_llm.text_types import Tokenizer

__all__ = ["TASKS", "Row", "Task", "make", "names", "problems"]


def generated_task(
  builder: type[GeneratedProblems], known_levels: Sequence[int], render_prompt: Callable[[str], str], setup: Setup, **judged: Any
) -> Task:
  """A task whose problems are generated, and which needs no settings.

  Args:
    builder: of its dataset, which has the task's name.
    known_levels: levels of difficulty that it has.
    render_prompt: text of a prompt from a question.
    setup: what every task is told.
    **judged: its rewards, as in `Task`.

  Raises:
    ValueError: levels that it does not have, or a dataset that cannot be built or read. One line.
  """
  levels = known_levels if setup.levels is None else tuple(setup.levels)
  if not levels or not set(levels) <= set(known_levels):
    raise ValueError(f"task.levels: found {levels}, expected one or more of {known_levels}")
  splits = {
    split: [row | {"prompt": render_prompt(row["question"])} for row in rows if row["level"] in levels]
    for split, rows in storage.load_splits(builder, data_dir=setup.data_dir).items()
  }
  if setup.tokenizer is not None:
    judged["step_rewards"] = None  # They read the ids as bytes.
  return Task(name=builder.name, tokenizer=setup.tokenizer or ByteTokenizer(), **splits, **judged)


def _generated(module: ModuleType, builder: type[GeneratedProblems], **judged: Any) -> Entry:
  return Entry(partial(generated_task, builder, module.LEVELS, module.render_prompt, **judged))


TASKS = {
  "arithmetic": _generated(arithmetic, arithmetic.Arithmetic, rewards=("final_answer",), step_rewards=arithmetic.step_rewards),
  "gsm_symbolic": _generated(word_problems, word_problems.GsmSymbolic, rewards=("final_number",), form_reward="answer_form"),
  "products": _generated(products, products.Products, rewards=("final_answer",)),
}
"""Tasks that are generated, and need no settings."""


def mixture_task(setup: Setup, *, parts: Sequence[str] = (), source: str | os.PathLike | None = None) -> Task:
  """Several tasks with weights; see `mixture.mix`.

  Args:
    setup: what every task is told. Levels mean something else in each task, so there can be none.
    parts: tasks and weights, such as ("gsm8k=0.7", "gym:countdown=0.3").
    source: a folder with a folder of files for each published set, under its name; None downloads them.

  Raises:
    ValueError: parts that cannot be mixed. One line.
  """
  weights = mixture.parse_parts(parts)
  if setup.levels is not None:
    raise ValueError(f"task.levels: found {tuple(setup.levels)} for a mixture, whose parts have levels of their own; expected None")
  made = []
  for name in weights:
    settings = {"source": os.path.join(source, name)} if source is not None and "source" in _settings(_entry(name)) else {}
    made.append(make(name, **setup._asdict(), **settings))
  return mixture.mix(made, list(weights.values()))


def check_parts(parts: Sequence[str] = (), **others: object) -> None:
  """Refuses parts that cannot be mixed with a ValueError of one line; the mixture's other settings are not looked at."""
  del others
  for name in mixture.parse_parts(parts):
    if name in SETS and SETS[name].needs_settings:
      raise ValueError(f"task.parts: found {name!r}, expected tasks that need no settings of their own")
    for problem in problems(name, {}):
      raise ValueError(problem)


SETS = {
  "file": Entry(file_task, check_file, needs_settings=True),
  **published.SETS,
  **packaged.SETS,
  "mixture": Entry(mixture_task, check_parts, needs_settings=True),
}
"""Tasks made of files or by packages."""


def names() -> tuple[str, ...]:
  """All tasks by name, but for those of reasoning-gym, which are `gym:` and its name there."""
  return (*TASKS, *SETS)


def problems(name: str, settings: Mapping[str, Any]) -> Iterator[Problem | str]:
  """What is wrong with a task's name and settings, as far as that can be said without loading anything.

  Args:
    name: as in `make`.
    settings: those of the task's own that are set.

  Yields:
    Problems with their fixes; texts where no setting is to blame.
  """
  if str(name).startswith(gym.PREFIX):
    try:
      gym.check_name(name)
    except (ImportError, ValueError) as error:
      yield problem_of(error)
      return
  elif name not in names():
    yield Problem("task.name", repr(name), f"one of {', '.join(names())}, gym:NAME{did_you_mean(name, names())}")
    return
  entry = _entry(name)
  known = _settings(entry)
  for setting in settings:
    if setting not in known:
      takes = f"takes {', '.join(known)}" if known else "takes no settings of its own"
      why = f"because task {name} does not read it and {takes}{did_you_mean(setting, known)}"
      yield Problem(f"task.{setting}", shown(settings[setting]), f"None, {why}")
      return
  try:
    entry.check(**settings)
    if (template := settings.get("prompt_template")) is not None:
      prompt_template.fields(template)
  except (ImportError, ValueError) as error:
    yield problem_of(error)


def _entry(name: str) -> Entry:
  return gym.entry(name) if name.startswith(gym.PREFIX) else (TASKS | SETS)[name]


def _settings(entry: Entry) -> list[str]:
  parameters = inspect.signature(entry.load).parameters.values()
  return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def make(
  name: str,
  *,
  levels: Collection[int] | None = None,
  data_dir: str | os.PathLike | None = None,
  tokenizer: Tokenizer | None = None,
  bad_rows: str = "drop",
  max_prompt_tokens: int | None = None,
  max_tokens: int | None = None,
  test_name: str | None = None,
  test_source: str | os.PathLike | None = None,
  **settings: Any,
) -> Task:
  """Loads a task; its dataset is built first where it is absent, in some seconds.

  Args:
    name: one of `names`.
    levels: difficulties to keep, in all splits; None keeps all.
    data_dir: local folder that holds datasets; None is ~/.cache/jaxrl_llm/data.
    tokenizer: the checkpoint's, where the policy comes from one; None is the task's own, of bytes.
    bad_rows: "drop" leaves problems out that cannot be used, and counts them in the task's report; "error" refuses the first.
    max_prompt_tokens: longer prompts are bad rows; None is no limit. Generated tasks have theirs as they are.
    max_tokens: likewise, of a demonstration with its prompt.
    test_name: another task, whose test problems, of all levels, take the place of the task's own; None keeps those.
    test_source: as `source`, of that other task.
    **settings: the task's own, such as `path`.

  Raises:
    ImportError: a dataset to build without the package that generates it.
    ValueError: no such task, level or setting, a folder that cannot be written, a damaged dataset, or bad rows. One line, with the fix.

  Example:
    >>> make("aritmetic")
    Traceback (most recent call last):
    ...
    ValueError: task.name: found 'aritmetic', expected one of arithmetic, gsm_symbolic, ...; did you mean 'arithmetic'?
  """
  for problem in problems(name, settings):
    raise ValueError(problem)
  if test_name is not None:
    setup = {"data_dir": data_dir, "tokenizer": tokenizer, "bad_rows": bad_rows, "max_prompt_tokens": max_prompt_tokens}
    task = make(name, levels=levels, max_tokens=max_tokens, **setup, **settings)
    other = make(test_name, **setup, **({} if test_source is None else {"source": test_source}))
    return mixture.with_test(task, other)
  return _entry(name).load(Setup(levels, data_dir, tokenizer, bad_rows, max_prompt_tokens, max_tokens), **settings)
