"""The data of a run: its task, the lengths of its texts, and the environment that replies."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm import tasks
from jaxrl_llm.config import entries, outliers, policy, sizes
from jaxrl_llm.config.check import environment_settings, task_settings
from jaxrl_llm.config.fields import given
from jaxrl_llm.config.outliers import NO_LIMITS, SizeLimits
from jaxrl_llm.devices import hosts
from jaxrl_llm.messages import Problem
from jaxrl_llm.pretrained.pictures import PictureConfig
from jaxrl_llm.rollouts import environments
from jaxrl_llm.rollouts.environments import Environment
from jaxrl_llm.rollouts.rules import Rules
from jaxrl_llm.tasks import Task, prompt_template
from jaxrl_llm.tasks.files.storage import IMAGES
from jaxrl_llm.tasks.image_prompts import image_tokens
from jaxrl_llm.tasks.pipeline import encode_demonstrations, prompt_lengths
from jaxrl_llm.tasks.privileged import SETTING


def load_task(config: ConfigDict, *, limits: SizeLimits = NO_LIMITS, shots: int | None = None) -> Task:
  """Loads the task that a config names, without problems longer than its sizes or its model allow.

  Args:
    config: Checked config.
    limits: Sizes above which problems are left out in any case.
    shots: Number of solved problems in front of every prompt; None is the config's.

  Raises:
    MissingPackageError: If a dataset must be built and the package that generates it is missing.
    ValueError: If problems or files cannot be used. One line, with the fix.
  """
  widest, budget = _prompt_limit(config), config.rollout.max_new_tokens
  least = lambda *values: min((value for value in values if value is not None), default=None)
  task = tasks.make(
    config.task.name,
    levels=config.task.levels,
    data_dir=config.task.data_dir,
    tokenizer=policy.tokenizer(config),
    bad_rows=config.task.bad_rows,
    max_prompt_tokens=least(widest, limits.prompt),
    max_tokens=least(None if widest is None else widest + budget, limits.demonstration),
    max_answer_tokens=budget,
    test_name=config.task.test_name,
    test_source=config.task.test_source,
    test_levels=config.task.test_levels,
    shots=config.task.shots if shots is None else shots,
    shot_template=config.task.shot_template,
    vary_shots=config.task.vary_shots,
    pictures=picture_settings(config),
    max_pictures=least(config.rollout.prompt_images, limits.pictures),
    problems=partial(environment_problems, config) if tasks.is_of_environment(config.task.name) else None,
    columns=columns_of_teachers(config),
    **task_settings(config),
  )
  if config.num_steps and not len(task.train):
    raise ValueError(
      f"config.task.name: task {task.name} has test problems only; train on another task and set "
      f"task.test_name={task.name!r}"
    )
  return task


def load_measured(config: ConfigDict, *, replies: str | None = None) -> tuple[Task, sizes.Lengths, list[str]]:
  """Loads the task that a config names and measures it.

  If sizes follow from the data, problems that all others would pay for are left out and counted;
  see `outliers.find_limits`.

  Args:
    config: Checked config.
    replies: Pattern of what is not imitated; see `Environment`.

  Returns:
    The task, the lengths of its texts, and lines that describe what is left out.
  """
  shape, shots = policy.model_config(config, vocab_size=1), config.task.shots
  if config.rollout.prompt_buckets is not None and (shape.vision is None or config.rollout.prompt_images is not None):
    task = load_task(config)
    return task, measure_lengths(task, config, replies=replies), []
  # Solved problems would carry a long text into other prompts.
  task = load_task(config, shots=0)
  lengths = measure_lengths(task, config, replies=replies, shown=bool(shots))
  limits = NO_LIMITS if task.report is None else outliers.find_limits(config, lengths, sizes.Bounds(d_model=shape.d_model))
  lines = outliers.describe_limits(limits, lengths)
  if shots or limits != NO_LIMITS:
    task = load_task(config, limits=limits)
    lengths = measure_lengths(task, config, replies=replies)
  return task, lengths, lines


def columns_of_teachers(config: ConfigDict) -> tuple[str, ...]:
  """Returns the columns of problems that only teachers read."""
  section = config.teacher
  named = () if section.privileged is None else prompt_template.fields(section.privileged, setting=SETTING)
  return tuple(name for name in (*named, section.column) if name not in (None, "prompt"))


def environment_problems(config: ConfigDict, seeds: Sequence[int]) -> list[dict[str, Any]]:
  """Returns the problems that an environment makes of seeds, the same ones in all processes.

  Raises:
    ValueError: If it has none, cannot be made or fails. One line.
  """
  problems = make_environment(config).problems
  if problems is None:
    wanted = f"another one: {config.environment.name} has no problems of its own"
    raise ValueError(f"config.task.name: found {config.task.name!r}, expected {wanted}")
  return json.loads(hosts.gather_text(json.dumps(problems(seeds)))[0])


def picture_settings(config: ConfigDict) -> PictureConfig | None:
  """Returns how the model of a config reads pictures; None if it reads text alone."""
  vision = policy.model_config(config, vocab_size=1).vision
  return None if vision is None else vision.pictures


def _prompt_limit(config: ConfigDict) -> int | None:
  """Returns the largest number of tokens of a prompt that is kept; None for any."""
  if config.rollout.prompt_buckets is not None:
    return max(config.rollout.prompt_buckets)
  most = policy.model_config(config, vocab_size=1).max_positions
  return None if most is None else max(most - config.rollout.max_new_tokens, 1)


def measure_lengths(task: Task, config: ConfigDict, *, replies: str | None = None, shown: bool = False) -> sizes.Lengths:
  """Measures the texts of a task: the prompts, and the demonstrations that are imitated.

  Args:
    task: Task to measure.
    config: Checked config.
    replies: Pattern of what is not imitated; see `Environment`.
    shown: Whether to measure demonstrations without a warm start too.

  Raises:
    ValueError: If a warm start has no demonstrations. One line, with the fix.
  """
  settings = picture_settings(config)
  prompts, held_out = (prompt_lengths(source, task.tokenizer, pictures=settings) for source in (task.train, task.test))
  warm_steps = config.warm_start.num_steps
  if warm_steps and not len(task.demonstrations):
    raise ValueError(f"config.warm_start.num_steps={warm_steps}: task {task.name} has no demonstrations to imitate, expected 0")
  imitated = task.demonstrations if warm_steps or shown else ()
  shown = encode_demonstrations(imitated, task.tokenizer, replies=replies, pictures=settings)
  of_rows = zip([*task.train, *task.test], [*prompts, *held_out], strict=True)
  with_pictures = [(length, len(row[IMAGES]), max(image_tokens(row, settings))) for row, length in of_rows if row.get(IMAGES)]
  lengths = [len(x.prompt) + len(x.response) for x in shown]
  return sizes.Lengths(prompts, held_out, lengths, with_pictures, demonstrated=[len(x.prompt) for x in shown])


def make_rules(config: ConfigDict) -> Rules | None:
  """Returns the rules of conversations; None if the config names no environment.

  Raises:
    ValueError: If the environment cannot be made. One line, with the fix.
  """
  section = config.environment
  if section.name is None:
    return None
  made, limits = make_environment(config), {}
  if made.concurrency is not None:
    limits["num_threads"] = made.concurrency
  if config.rollout.group_size % made.shares_opening:
    expected = f"a multiple of {made.shares_opening}, the number of samples that share their first turn in environment {section.name}"
    raise ValueError(Problem("config.rollout.group_size", str(config.rollout.group_size), expected))
  given_rules = {name: x for name, x in given(section).items() if name in entries.OF_CONVERSATIONS}
  return Rules(made, **given_rules, **limits)


def make_environment(config: ConfigDict) -> Environment:
  """Makes the environment that a config names, with the config's settings.

  Raises:
    MissingPackageError: If a package of the environment is missing.
    ValueError: If the environment cannot be made or reached, or the sandbox does not work here. One
      line, with the fix.
  """
  section = config.environment
  settings = environment_settings(config)
  shared, names = environments.shared_settings(section.name)
  settings |= {name: x for name, x in (given(config[shared]) if shared else {}).items() if name in names}
  try:
    return environments.make(section.name, reply_timeout_s=entries.values_of("environment", config)["timeout_s"], **settings)
  except ValueError as error:
    raise ValueError(f"config.{f'{shared}.{names[0]}: ' if names else ''}{error}") from error


