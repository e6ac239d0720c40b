"""Every generated task of reasoning-gym by its name, `gym:NAME`, at a difficulty. Its own verifier judges it: the reward `gym`.

References:
  Reasoning Gym: reasoning environments for reinforcement learning with verifiable rewards, arXiv:2505.24760, 2025.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from jaxrl_llm.messages import Problem, did_you_mean, one_line
from jaxrl_llm.tasks.files import tables
from jaxrl_llm.tasks.files.columns import BLANK
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.files.text_files import Records
from jaxrl_llm.tasks.problem_set import Entry, Setup, Style, make_task
from jaxrl_llm.tasks.task import Task

PREFIX = "gym:"
TEMPLATE = "{question}\n\nGive the final answer between <answer> and </answer>."
UNJUDGED = ("coin_flip", "game_of_life_halting", "puzzle24")
"""Tasks whose verifier takes wrong answers for right, so that they need another reward than `gym`."""

_ENTRY = ("question", "answer", "metadata")
_NOT_ALONE = ("composite",)  # Made of other tasks: that is what a mixture is for.


def gym_task(
  name: str,
  setup: Setup,
  *,
  size: int = 1000,
  seed: int = 0,
  config: str | Mapping[str, Any] | None = None,
  test_fraction: float = 0.1,
  prompt_template: str = TEMPLATE,
  reward: str | Sequence[str] = "gym",
) -> Task:
  """A task of reasoning-gym.

  Args:
    name: with `gym:` in front.
    setup: what every task is told. Its `levels` are steps of the task's curriculum, from 0; None is the task's own setting.
    size: problems to generate at each level; equal ones are left out and counted.
    seed: of the generator.
    config: the task's own settings, which a level overrules; an object, or one in JSON.
    test_fraction: of the problems, held out.
    prompt_template: the prompt.
    reward: name or names of reward functions; the first is the verifier.

  Raises:
    ImportError: without the package reasoning-gym.
    ValueError: no such task, level or setting. One line.
  """
  name = check_name(name)
  settings = read_settings(name, config)
  style = Style(prompt_template, (), test_fraction=test_fraction).with_settings(reward=reward)
  if "gym" in style.rewards and name in UNJUDGED:
    raise ValueError(f"task.name: the verifier of {PREFIX}{name} takes wrong answers for right; set task.reward, such as to exact_match")
  levels = sorted(set(setup.levels)) if setup.levels is not None else None
  if not isinstance(size, int) or size < 2:
    raise ValueError(f"task.size: found {size!r}, expected a whole number of at least 2")
  for level in levels or ():
    _dataset(name, level, settings, size=1)
  return make_task(
    f"{PREFIX}{name}",
    {"train": functools.partial(_records, name, levels, settings, size=size, seed=seed)},
    _row,
    key=tables.key_of([], [1, metadata.version("reasoning-gym"), name, levels, settings, size, seed]),
    style=style,
    setup=setup,
    columns=("gym", "settings", "entry"),
    bad_rows="drop",  # Generated twice is no fault of anybody's.
  )


def entry(name: str) -> Entry:
  """A task of reasoning-gym, by its name with `gym:` in front."""
  return Entry(functools.partial(gym_task, name), lambda config=None, **_: read_settings(check_name(name), config))


def names() -> list[str]:
  """All tasks of reasoning-gym, with `gym:` in front.

  Raises:
    ImportError: without the package reasoning-gym.
  """
  return [f"{PREFIX}{name}" for name in sorted(_package().factory.DATASETS) if name not in _NOT_ALONE]


def check_name(name: str) -> str:
  """The name that reasoning-gym has for a task.

  Raises:
    ImportError: without the package reasoning-gym.
    ValueError: no such task; with the nearest.
  """
  if name not in (known := names()):
    hint = did_you_mean(name, known) or f", such as {', '.join(known[:3])}"
    raise ValueError(Problem("task.name", repr(name), f"one of reasoning-gym's {len(known)} tasks{hint}"))
  return name.removeprefix(PREFIX)


def _package():
  try:
    import reasoning_gym
    import reasoning_gym.factory
  except ImportError as error:
    raise ImportError("tasks gym:NAME need the package reasoning-gym: pip install 'jaxrl_llm[tasks]'") from error
  return reasoning_gym


def read_settings(name: str, config: str | Mapping[str, Any] | None) -> str:
  """A task's own settings as JSON, in one order; its name is without the prefix.

  Raises:
    ValueError: no object, or a setting that the task does not have. One line.
  """
  if config is None or isinstance(config, str):
    try:
      config = json.loads(config or "{}")
    except ValueError as error:
      expected = "an object in JSON such as '{\"max_terms\": 4}'"
      raise ValueError(Problem("task.config", f"{config!r} ({error})", expected)) from error
  if not isinstance(config, Mapping):
    raise ValueError(Problem("task.config", repr(config), "an object in JSON"))
  known = [field.name for field in dataclasses.fields(_package().factory.DATASETS[name][1]) if field.name not in ("size", "seed")]
  for key in config:
    if key not in known:
      hint = did_you_mean(key, known)
      raise ValueError(Problem("task.config", repr(key), f"settings of {PREFIX}{name}: {', '.join(known)}{hint}"))
  return json.dumps(dict(config), sort_keys=True)


@functools.lru_cache(maxsize=64)
def _dataset(name: str, level: int | None, settings: str, *, size: int = 1, seed: int = 0):
  """A generator of problems."""
  gym, settings = _package(), json.loads(settings)
  settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()} | {"size": size, "seed": seed}
  try:
    if level is None:
      return gym.factory.create_dataset(name, **settings)
    if not gym.factory.has_curriculum(name):
      raise ValueError(f"task.levels: found {level}, but {PREFIX}{name} has no curriculum; expected None, and settings in task.config")
    curriculum = gym.factory.create_curriculum(name)
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if not 0 <= level <= highest:
      raise ValueError(f"task.levels: found {level}, expected levels of {PREFIX}{name}, 0 to {highest}")
    curriculum.set_global_level(level)
    config = curriculum.generate_configuration(settings)
    return gym.factory.DATASETS[name][0](config=config)
  except (AssertionError, TypeError) as error:  # How its configs say that they are not valid.
    wrong = f"task.config: {PREFIX}{name} does not take {settings}"
    if level is not None:
      wrong = f"task.levels: {PREFIX}{name} does not take what its curriculum has at level {level}"
    raise ValueError(f"{wrong} ({one_line(error, typed=False)})") from error


def _records(name: str, levels: Sequence[int] | None, settings: str, *, size: int, seed: int) -> Records:
  for level in levels or (None,):
    # Every level has its own seed, or neighbours would often have the same problems.
    dataset = _dataset(name, level, settings, size=size, seed=seed + 1_000_003 * (level or 0))
    for index in range(size):
      entry = dataset[index]
      place = f"level{level}-{index}" if level is not None else str(index)
      record = {"gym": name, "settings": settings, "level": level or 0, "id": place}
      yield f"{PREFIX}{name}:{place}", record | {part: entry[part] for part in _ENTRY}


def _row(record: Mapping[str, Any]) -> Row:
  answer = "" if record["answer"] is None else str(record["answer"])
  entry = json.dumps(_packed({part: record[part] for part in _ENTRY}), ensure_ascii=False)
  return BLANK | {part: record[part] for part in ("gym", "settings", "level", "id", "question")} | {"answer": answer, "entry": entry}


def _packed(value: Any) -> Any:
  """What JSON can hold without a loss: verifiers compare tuples with tuples, and look numbers up in dictionaries."""
  if isinstance(value, tuple):
    return {"tuple": [_packed(item) for item in value]}
  if isinstance(value, list):
    return [_packed(item) for item in value]
  if isinstance(value, Mapping):
    return {"items": [[_packed(key), _packed(item)] for key, item in value.items()]}
  return value
