"""What a policy is trained on: problems, how they are written as tokens, and demonstrations. NumPy and text; no JAX."""

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.messages import Problem, did_you_mean, problem_of, shown
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.tasks import mixture, prompt_template
from jaxrl_llm.tasks.files import storage
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.problem_set import Setup
from jaxrl_llm.tasks.sets import arithmetic, code, gym, packaged, products, published, word_problems
from jaxrl_llm.tasks.sets.own_files import check_file, file_task
from jaxrl_llm.tasks.task import Task
from jaxrl_llm.text_types import Tokenizer

__all__ = ["TASKS", "Row", "Task", "make", "names", "problems"]


def arithmetic_task(*, levels: Collection[int] | None, data_dir: str | os.PathLike | None, tokenizer: Tokenizer | None) -> Task:
  """Multi-step arithmetic; see `make`."""
  return Task(
    name="arithmetic",
    tokenizer=tokenizer or ByteTokenizer(),
    rewards=("final_answer",),
    step_rewards=arithmetic.step_rewards if tokenizer is None else None,  # They read the ids as bytes.
    **_load(arithmetic.Arithmetic, arithmetic.LEVELS, arithmetic.render_prompt, levels=levels, data_dir=data_dir),
  )


def gsm_symbolic_task(*, levels: Collection[int] | None, data_dir: str | os.PathLike | None, tokenizer: Tokenizer | None) -> Task:
  """Grade-school word problems; see `make`."""
  return Task(
    name="gsm_symbolic",
    tokenizer=tokenizer or ByteTokenizer(),
    rewards=("final_number",),
    form_reward="answer_form",
    **_load(word_problems.GsmSymbolic, word_problems.LEVELS, word_problems.render_prompt, levels=levels, data_dir=data_dir),
  )


def products_task(*, levels: Collection[int] | None, data_dir: str | os.PathLike | None, tokenizer: Tokenizer | None) -> Task:
  """Products, for a policy with a calculator; see `make`."""
  return Task(
    name="products",
    tokenizer=tokenizer or ByteTokenizer(),
    rewards=("final_answer",),
    **_load(products.Products, products.LEVELS, products.render_prompt, levels=levels, data_dir=data_dir),
  )


def _load(builder_class, known_levels, render_prompt, *, levels, data_dir) -> dict[str, list[Row]]:
  """The splits of a dataset, with prompts, at some of its levels."""
  levels = known_levels if levels is None else tuple(levels)
  if not levels or not set(levels) <= set(known_levels):
    raise ValueError(f"task.levels: found {levels}, expected one or more of {known_levels}")
  return {
    split: [row | {"prompt": render_prompt(row["question"])} for row in rows if row["level"] in levels]
    for split, rows in storage.load_splits(builder_class, data_dir=data_dir).items()
  }


TASKS: dict[str, Callable[..., Task]] = {
  "arithmetic": arithmetic_task,
  "gsm_symbolic": gsm_symbolic_task,
  "products": products_task,
}
"""Tasks that are generated, and need no settings."""


def mixture_task(setup: Setup, *, parts: Sequence[str] = (), source: str | os.PathLike | None = None) -> Task:
  """Several tasks with weights.

  Args:
    setup: what every task is told. Levels mean something else in each task, so there can be none.
    parts: tasks and weights, such as ("gsm8k=0.7", "gym:countdown=0.3").
    source: a folder with a folder of files for each published set, under its name; None downloads them.

  Returns:
    The task, see `mixture.mix`.

  Raises:
    ValueError: parts that cannot be mixed. One line.
  """
  weights = mixture.parse_parts(parts)
  if setup.levels is not None:
    raise ValueError(f"task.levels: found {tuple(setup.levels)} for a mixture, whose parts have levels of their own; expected None")
  made = []
  for name in weights:
    if name in ("file", "mixture"):
      raise ValueError(f"task.parts: found {name!r}, expected tasks that need no settings of their own")
    settings = {"source": os.path.join(source, name)} if source is not None and name in published.SETS else {}
    made.append(make(name, **setup._asdict(), **settings))
  return mixture.mix(made, list(weights.values()))


SETS: dict[str, Callable[..., Task]] = {
  "file": file_task,
  **published.SETS,
  **packaged.SETS,
  "mixture": mixture_task,
}
"""Tasks made of files or by packages: `(setup, **settings) -> task`."""


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
  known = () if name in TASKS else tuple(inspect.signature(_loader(name)).parameters)[1:]
  for setting in settings:
    if setting not in known:
      takes = f"takes {', '.join(known)}" if known else "takes no settings of its own"
      why = f"because task {name} does not read it and {takes}{did_you_mean(setting, known)}"
      yield Problem(f"task.{setting}", shown(settings[setting]), f"None, {why}")
      return
  try:
    _check(name, settings)
  except (ImportError, ValueError) as error:
    yield problem_of(error)


def _check(name: str, settings: Mapping[str, Any]) -> None:
  """Refuses settings that cannot work, as far as nothing has to be read for it."""
  if name == "file":
    check_file(**{setting: value for setting, value in settings.items() if setting != "reward"})
    return
  if (template := settings.get("prompt_template")) is not None:
    prompt_template.fields(template)
  if name == "livecodebench":
    code.within(settings.get("after"), settings.get("before"))
  elif name == "mixture":
    for part in mixture.parse_parts(settings.get("parts", ())):
      for problem in problems(part, {}) if part not in ("file", "mixture") else ():
        raise ValueError(problem)
  elif name.startswith(gym.PREFIX):
    gym.read_settings(gym.check_name(name), settings.get("config"))


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

  Returns:
    The task.

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
  if name in TASKS:
    return TASKS[name](levels=levels, data_dir=data_dir, tokenizer=tokenizer)
  setup = Setup(levels, data_dir, tokenizer, bad_rows, max_prompt_tokens, max_tokens)
  return _loader(name)(setup, **settings)


def _loader(name: str) -> Callable[..., Task]:
  return functools.partial(gym.gym_task, name) if name.startswith(gym.PREFIX) else SETS[name]
