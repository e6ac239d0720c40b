"""Generated tasks of reasoning-gym by name, `gym:NAME`, at a chosen difficulty.

The reward `gym` judges a response with the task's own verifier.

References:
  Reasoning Gym: reasoning environments for reinforcement learning with verifiable rewards,
  arXiv:2505.24760, 2025.
"""

import dataclasses
import fractions
import functools
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from jaxrl_llm.messages import MissingPackageError, Problem, did_you_mean, one_line
from jaxrl_llm.tasks.files import tables
from jaxrl_llm.tasks.files.columns import BLANK
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.files.text_files import Records
from jaxrl_llm.tasks.problem_set import ProblemSetEntry, Setup, Style, make_task
from jaxrl_llm.tasks.task import Task

PREFIX = "gym:"
TEMPLATE = "{question}\n\nGive the final answer between <answer> and </answer>."
UNJUDGED = ("coin_flip", "game_of_life_halting", "puzzle24")
"""Tasks whose verifier accepts wrong answers, so that they need a reward other than `gym`."""

_ENTRY = ("question", "answer", "metadata")
_EXCLUDED = ("composite",)  # Combines other tasks, which a mixture does here.


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
  """Loads a task of reasoning-gym.

  Args:
    name: Name of the task, with the prefix `gym:`.
    setup: Settings common to all tasks. `levels` are steps of the task's curriculum, from 0; None
      is the task's default difficulty.
    size: Number of problems to generate at each level; duplicates are left out and counted.
    seed: Seed of the generator.
    config: Settings of the task itself, as an object or as JSON; a level overrides them.
    test_fraction: Fraction of the problems held out.
    prompt_template: Prompt template, with columns in braces.
    reward: Name or names of reward functions; the first is the verifier.

  Raises:
    MissingPackageError: If the package reasoning-gym is missing.
    ValueError: If there is no such task, level or setting. One line.
  """
  name = check_name(name)
  settings = read_settings(name, config)
  style = Style(prompt_template, (), test_fraction=test_fraction).with_settings(reward=reward)
  if "gym" in style.rewards and name in UNJUDGED:
    raise ValueError(
      f"task.name: the verifier of {PREFIX}{name} accepts wrong answers; set task.reward, for example to exact_match"
    )
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
    bad_rows="drop",  # A generator may repeat itself, which is not a fault.
  )


def entry(name: str) -> ProblemSetEntry:
  """Returns the registry entry of a task, by its name with the prefix `gym:`."""
  return ProblemSetEntry(functools.partial(gym_task, name), lambda config=None, **_: read_settings(check_name(name), config))


def names() -> list[str]:
  """Returns the names of all tasks of reasoning-gym except `composite`, with the prefix `gym:`.

  Raises:
    MissingPackageError: If the package reasoning-gym is missing.
  """
  return [f"{PREFIX}{name}" for name in sorted(_package().factory.DATASETS) if name not in _EXCLUDED]


def check_name(name: str) -> str:
  """Returns reasoning-gym's own name of a task, without the prefix, if there is such a task.

  Raises:
    MissingPackageError: If the package reasoning-gym is missing.
    ValueError: If there is no such task. One line, with the nearest name.
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
    raise MissingPackageError("tasks gym:NAME need the package reasoning-gym: pip install 'jaxrl_llm[tasks]'") from error
  return reasoning_gym


def read_settings(name: str, config: str | Mapping[str, Any] | None) -> str:
  """Returns the settings of a task itself as JSON with sorted keys.

  Args:
    name: Name of the task, without the prefix.
    config: Settings, as an object or as JSON; None is none.

  Raises:
    ValueError: If the config is not an object, or the task does not have a setting. One line.
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
  """Returns the generator of a task's problems."""
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
  except (AssertionError, TypeError) as error:  # Raised by an invalid config.
    problem = f"task.config: {PREFIX}{name} does not take {settings}"
    if level is not None:
      problem = f"task.levels: {PREFIX}{name} does not take the settings of its curriculum at level {level}"
    raise ValueError(f"{problem} ({one_line(error, typed=False)})") from error


def _records(name: str, levels: Sequence[int] | None, settings: str, *, size: int, seed: int) -> Records:
  for level in levels or (None,):
    # Each level has its own seed; otherwise neighbouring levels would often share problems.
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
  """Converts a value to a form that JSON stores without loss.

  Verifiers compare tuples with tuples, and look up numbers in dictionaries.
  """
  if isinstance(value, tuple):
    return {"tuple": [_packed(item) for item in value]}
  if isinstance(value, list):
    return [_packed(item) for item in value]
  if isinstance(value, Mapping):
    return {"items": [[_packed(key), _packed(item)] for key, item in value.items()]}
  if isinstance(value, fractions.Fraction):
    return {"fraction": [value.numerator, value.denominator]}
  return value
