"""Checks of a reward model's config, before any device starts."""

import math
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.config.check import OF_LEARNER, OF_TOKENIZERS, field_problems, in_config, indivisible
from jaxrl_llm.config.fields import REWARD_MODEL_FIELDS, unread_problems, unused
from jaxrl_llm.config.trackers import tracker_problems
from jaxrl_llm.messages import Problem, did_you_mean, problem_of
from jaxrl_llm.models import ModelConfig, preset, read_config, read_reward_config
from jaxrl_llm.models.attention import check_backend
from jaxrl_llm.models.remat import AUTO, check_policy
from jaxrl_llm.models.reward_model import is_classifier, trunk_config
from jaxrl_llm.pretrained import where
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.chat_options import parse_options
from jaxrl_llm.rewards.model import load_reward_tokenizer
from jaxrl_llm.tasks import preference_pairs
from jaxrl_llm.text_types import Tokenizer

_OF_FILES = ("path", "test_path", "test_fraction", "margin_column")


def job_problems(config: ConfigDict) -> list[str]:
  """Returns every problem of a resolved config, one line each; empty if there is none."""
  wrong, readable = field_problems(config, REWARD_MODEL_FIELDS, "a config made by configs/reward_model.py")
  if readable:
    wrong += [*tracker_problems(config.log.trackers), *_task_problems(config), *_model_problems(config)]
    wrong = wrong or [*_relations(config), *unread_problems(config, REWARD_MODEL_FIELDS)]
  return list(map(str, wrong))


def shape_of(config: ConfigDict) -> ModelConfig:
  """Returns the model's shape with the options of `config.model`; reads headers, no weights.

  Raises:
    ValueError: If the preset is unknown, or the checkpoint is missing or unusable.
  """
  section = config.model
  if section.path is None:
    shape = preset(section.preset, vocab_size=ByteTokenizer().vocab_size)
  else:
    shape = read_reward_config(section.path) if is_classifier(section.path) else read_config(where.resolve(section.path))
  options = {name: section[name] for name in ("dtype", "param_dtype", "remat", "attention")}
  return trunk_config(shape._replace(**options))


def tokenizer_of(config: ConfigDict) -> Tokenizer:
  """Returns the checkpoint's tokenizer; the byte tokenizer without one, or if the config asks."""
  section, task = config.model, config.task
  if section.path is None or section.tokenizer is not None:
    return ByteTokenizer()
  rows = shape_of(config).vocab_size
  return load_reward_tokenizer(section.path, pad_token=task.pad_token, vocab_rows=rows, **prompt_settings(config))


def prompt_settings(config: ConfigDict) -> dict[str, Any]:
  """Returns how prompts are written and read, which the reward model's notes keep for RL."""
  task = config.task
  options = parse_options(task.chat_options or ()) or None
  return dict(chat=task.chat, system=task.system, chat_options=options, special_tokens=task.special_tokens)


def load_pairs(config: ConfigDict) -> preference_pairs.Pairs:
  """Loads the pairs that a config names.

  Raises:
    ValueError: If files, columns or rows cannot be used. One line.
  """
  task = config.task
  if task.name == "arithmetic":
    pairs, tokenizer = preference_pairs.generated(task.levels), tokenizer_of(config)
    longest = max(
      len(ids)
      for rows in (pairs.train, pairs.test)
      for row in rows
      for ids in preference_pairs.encode_pair(row, tokenizer)
    )
    if longest > task.max_tokens:
      raise ValueError(f"config.task.max_tokens: found {task.max_tokens}, expected at least {longest}, the longest generated sequence")
    return pairs
  columns = preference_pairs.PairColumns(task.prompt_column or None, task.chosen_column, task.rejected_column, task.margin_column)
  files = {name: task[name] for name in ("path", "test_path", "test_fraction", "data_dir", "bad_rows", "max_tokens")}
  return preference_pairs.from_files(tokenizer_of(config), columns=columns, **files)


def _task_problems(config: ConfigDict) -> Iterator[Problem | str]:
  task = config.task
  if task.name not in preference_pairs.SOURCES:
    names = preference_pairs.SOURCES
    yield Problem("config.task.name", repr(task.name), f"one of {', '.join(names)}{did_you_mean(task.name, names)}")
    return
  if task.name == "file":
    try:
      preference_pairs.check_files(path=task.path, test_path=task.test_path, test_fraction=task.test_fraction)
    except ValueError as error:
      yield in_config(problem_of(error))
    return
  for name in _OF_FILES:
    if task[name] is not None:
      yield Problem(f"config.task.{name}", repr(task[name]), f"None, because task.name is {task.name!r}; set task.name='file'")


def _model_problems(config: ConfigDict) -> Iterator[Problem | str]:
  tokenizer = config.model.tokenizer
  if tokenizer not in (None, "bytes") or (tokenizer and config.model.path is None):
    why = "" if config.model.path else ", because without model.path it is 'bytes' anyway"
    yield Problem("config.model.tokenizer", repr(tokenizer), f"None{why or ' or ' + repr('bytes')}")
    return
  try:
    check_backend(config.model.attention)
    check_policy(config.model.remat)
    if config.model.remat == AUTO:
      names = "a policy by name, such as 'none' or 'full', because the memory of this training is not predicted"
      yield Problem("config.model.remat", repr(AUTO), names)
      return
    rows, ids = shape_of(config).vocab_size, tokenizer_of(config).vocab_size
    if ids > rows:
      text = f"{tokenizer!r}, which has {ids} ids, more than the {rows} rows of the model's embedding"
      yield Problem("config.model.tokenizer", text)
  except (ImportError, ValueError) as error:
    yield in_config(problem_of(error))
  if config.model.path is None or tokenizer:
    yield from unused(config, [f"task.{name}" for name in OF_TOKENIZERS], "the byte tokenizer ignores it")


def _relations(config: ConfigDict) -> Iterator[str]:
  learner, mesh, longest = config.learner, config.mesh, 2 * config.task.max_tokens
  if learner.row_tokens < longest:
    yield (
      f"config.learner.row_tokens={learner.row_tokens} is below {longest}, two sequences of config.task.max_tokens="
      f"{config.task.max_tokens}: a pair lies in one row; raise it to at least {longest}"
    )
  else:
    needed = -(-learner.batch_pairs // (learner.row_tokens // longest))
    if max(learner.row_buckets) < needed:
      yield (
        f"config.learner.row_buckets={learner.row_buckets}: {learner.batch_pairs} pairs of up to {longest} tokens can need {needed} rows "
        f"of {learner.row_tokens}; add a bucket of at least {needed}"
      )
  if (limit := shape_of(config).max_positions) is not None and config.task.max_tokens > limit:
    yield f"config.task.max_tokens: found {config.task.max_tokens}, expected at most the model's {limit}"
  # With a -1 the number of devices is not known yet; 1 divides every number of rows.
  sizes = (mesh.data, mesh.fsdp, mesh.expert)
  yield from row_problems(config, 1 if -1 in sizes else math.prod(sizes))


def row_problems(config: ConfigDict, shards: int) -> Iterator[str]:
  """Returns a problem for each number of rows that the devices cannot take in equal parts.

  `shards` is the number of parts that the devices split the rows into; a device takes
  `learner.rows_per_device` rows at a time.
  """
  return indivisible("learner.row_buckets", config.learner.row_buckets, shards, OF_LEARNER, config.learner.rows_per_device or 1)
