"""Everything that can be wrong with a reward model's config, found before any device starts."""

import difflib
import math
from collections.abc import Iterator

from ml_collections import ConfigDict

from jaxrl_llm.config.check import of_wrong_type, other_fields, outside
from jaxrl_llm.config.fields import ABOVE_ZERO, COUNT, NOT_NEGATIVE, OPTIONAL, RANGES, Check, flatten, kind
from jaxrl_llm.models import ModelConfig, preset, read_config, read_reward_config
from jaxrl_llm.models.attention import check_backend
from jaxrl_llm.models.remat import check_policy
from jaxrl_llm.models.reward_model import is_classifier, trunk_config
from jaxrl_llm.pretrained import where
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rewards.model import load_reward_tokenizer
from jaxrl_llm.run.reward_model import OBJECTIVE
from jaxrl_llm.tasks import preference_pairs
from jaxrl_llm.text_types import Tokenizer

OWN: dict[str, Check] = {
  "num_steps": COUNT,
  "objective.margin": (lambda x: isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x), "a finite number"),
  "objective.center_coef": NOT_NEGATIVE,
  "task.max_tokens": COUNT,
  "task.chosen_column": (lambda x: x != "" and kind("task.chosen_column")[0](x), "the name of a column"),
  "task.rejected_column": (lambda x: x != "" and kind("task.rejected_column")[0](x), "the name of a column"),
  "learner.batch_pairs": COUNT,
  "learner.learning_rate": ABOVE_ZERO,
  "eval.num_pairs": COUNT,
}
"""Ranges of the fields that an RL config does not have, or has with another range; the others are as there."""

UNRANGED = (
  "objective.name", "model.preset", "model.path", "model.tokenizer", "model.attention", "model.remat", "task.name", "task.levels",
  "task.path", "task.test_path", "task.prompt_column", "task.margin_column", "task.chat", "task.system", "task.pad_token", "task.data_dir",
  "learner.offload_optimizer", "log.tensorboard", "checkpoint.asynchronous",
)  # fmt: skip
"""Fields with no range: names, which are looked up, and switches."""

SHARED = (
  "checkpoint.every", "checkpoint.every_minutes", "checkpoint.keep", "checkpoint.keep_best", "checkpoint.keep_every_hours", "eval.every",
  "learner.b1", "learner.b2", "learner.max_grad_norm", "learner.max_skipped", "learner.micro_batches", "learner.moments_dtype",
  "learner.row_buckets", "learner.row_tokens", "learner.schedule", "learner.warmup_steps", "learner.weight_decay", "mesh.context",
  "mesh.data", "mesh.expert", "mesh.fsdp", "mesh.slices", "mesh.tensor", "model.dtype", "model.param_dtype", "seed", "task.bad_rows",
  "task.test_fraction", "watchdog.seconds", "watchdog.stop_seconds",
)  # fmt: skip
"""Fields with the range that they have in an RL config."""

_OF_FILES = ("path", "test_path", "test_fraction", "margin_column")
_OF_TOKENIZERS = ("chat", "system", "pad_token")


def ranges(fields: dict) -> dict[str, Check]:
  """The range of each field that has one."""
  return {path: (RANGES | OPTIONAL | OWN)[path] for path in fields if path in RANGES | OPTIONAL | OWN}


def problems(config: ConfigDict) -> list[str]:
  """Every problem of a config, a line each; none is an empty list.

  Args:
    config: resolved, with all fields of `configs/reward_model.py`.
  """
  fields = flatten(config)
  if lines := other_fields(fields, (*OWN, *UNRANGED, *SHARED), "a config as configs/reward_model.py"):
    return lines
  checks = ranges(fields) | {path: kind(path) for path in UNRANGED}
  found = outside(fields, checks, optional=(*OPTIONAL, *UNRANGED))
  known = {line.partition(":")[0] for line in found}
  if any(of_wrong_type(path, fields[path]) for path in checks if f"config.{path}" in known):
    return found  # What looks further could not read them.
  if config.objective.name != OBJECTIVE:
    found.append(f"config.objective.name: found {config.objective.name!r}, expected {OBJECTIVE!r}, which trains reward models")
  found += [*_task_problems(config), *_model_problems(config)]
  return found or list(_relations(config))


def shape_of(config: ConfigDict) -> ModelConfig:
  """The model's shape, with the options of `config.model`; reads headers, no weights.

  Raises:
    ValueError: an unknown preset, or a checkpoint that is not there or cannot be used.
  """
  section = config.model
  if section.path is None:
    shape = preset(section.preset, vocab_size=ByteTokenizer().vocab_size)
  else:
    shape = read_reward_config(section.path) if is_classifier(section.path) else read_config(where.resolve(section.path))
  options = {name: section[name] for name in ("dtype", "param_dtype", "remat", "attention")}
  return trunk_config(shape._replace(**options))


def tokenizer_of(config: ConfigDict) -> Tokenizer:
  """The checkpoint's tokenizer; without one, that of bytes."""
  section, task = config.model, config.task
  if section.path is None or section.tokenizer is not None:
    return ByteTokenizer()
  rows = shape_of(config).vocab_size
  return load_reward_tokenizer(section.path, chat=task.chat, system=task.system, pad_token=task.pad_token, vocab_rows=rows)


def load_pairs(config: ConfigDict) -> preference_pairs.Pairs:
  """The pairs that a config names.

  Raises:
    ValueError: files, columns or rows that cannot be used. One line.
  """
  task = config.task
  if task.name == "arithmetic":
    found, tokenizer = preference_pairs.generated(task.levels), tokenizer_of(config)
    longest = max(len(ids) for rows in (found.train, found.test) for row in rows for ids in preference_pairs.encode_pair(row, tokenizer))
    if longest > task.max_tokens:
      raise ValueError(f"config.task.max_tokens: found {task.max_tokens}, expected at least {longest}, the longest generated sequence")
    return found
  columns = preference_pairs.PairColumns(task.prompt_column or None, task.chosen_column, task.rejected_column, task.margin_column)
  files = {name: task[name] for name in ("path", "test_path", "test_fraction", "data_dir", "bad_rows", "max_tokens")}
  return preference_pairs.from_files(tokenizer_of(config), columns=columns, **files)


def _task_problems(config: ConfigDict) -> Iterator[str]:
  task = config.task
  if task.name not in preference_pairs.SOURCES:
    near = difflib.get_close_matches(str(task.name), preference_pairs.SOURCES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    yield f"config.task.name: found {task.name!r}, expected one of {', '.join(preference_pairs.SOURCES)}{hint}"
    return
  if task.name == "file":
    try:
      preference_pairs.check_files(path=task.path, test_path=task.test_path, test_fraction=task.test_fraction)
    except ValueError as error:
      yield f"config.{error}" if str(error).startswith("task.") else str(error)
    return
  for name in _OF_FILES:
    if task[name] is not None:
      yield f"config.task.{name}: found {task[name]!r}, expected None, because task.name is {task.name!r}; set task.name='file'"


def _model_problems(config: ConfigDict) -> Iterator[str]:
  tokenizer = config.model.tokenizer
  if missing := [name for name in ("preset", "attention", "remat") if config.model[name] is None]:
    yield from (f"config.model.{name}: found None, expected a name" for name in missing)
    return
  if tokenizer not in (None, "bytes") or (tokenizer and config.model.path is None):
    why = "" if config.model.path else ", because without model.path it is 'bytes' anyway"
    yield f"config.model.tokenizer: found {tokenizer!r}, expected None{why or ' or ' + repr('bytes')}"
    return
  try:
    check_backend(config.model.attention)
    check_policy(config.model.remat)
    rows, ids = shape_of(config).vocab_size, tokenizer_of(config).vocab_size
    if ids > rows:
      yield f"config.model.tokenizer: found {tokenizer!r}, whose {ids} ids the model's embedding of {rows} rows does not hold"
  except (ImportError, ValueError) as error:
    text = str(error)
    yield text if text.startswith("config.") or not text.startswith("model.") else f"config.{text}"
  if config.model.path is None or tokenizer:
    for name in _OF_TOKENIZERS:
      if config.task[name] is not None:
        yield f"config.task.{name}: found {config.task[name]!r}, expected None, because the tokenizer of bytes has nothing to set up"


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
  # With a -1 the number of devices is known only once they are; 1 divides every number of rows.
  sizes = (mesh.data, mesh.fsdp, mesh.expert)
  yield from row_problems(config, 1 if -1 in sizes else math.prod(sizes))


def row_problems(config: ConfigDict, shards: int) -> Iterator[str]:
  """Numbers of rows that micro-batches or devices do not divide.

  Args:
    config: the config.
    shards: pieces that the rows are split into.
  """
  divisor = shards * config.learner.micro_batches
  for rows in config.learner.row_buckets:
    if rows % divisor:
      need = f"{shards} devices (mesh data x fsdp x expert) x {config.learner.micro_batches} micro-batches"
      yield f"config.learner.row_buckets: {rows} is not a multiple of {need}; the nearest that is: {-(-rows // divisor) * divisor}"
