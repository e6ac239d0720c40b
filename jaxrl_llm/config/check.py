"""Checks of a config before any device starts; all problems in one message, each with its fix."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.config import entries, renamed
from jaxrl_llm.config.fields import FIELDS, Field, flatten, given, is_open, table_of, unknown, unused
from jaxrl_llm.config.sizes import IMAGE_SIZES, most_rows, per_row
from jaxrl_llm.config.trackers import tracker_problems
from jaxrl_llm.messages import MissingPackageError, Problem, did_you_mean, problem_of, shown
from jaxrl_llm.settings.values import has_type, holds

OF_TOKENIZERS = ("chat", "system", "chat_options", "special_tokens", "pad_token")
"""Fields of `config.task` that only the tokenizer of a checkpoint reads."""

OF_LEARNER = "devices (mesh data x fsdp x expert)"
"""Name of the shards of an update's rows, for messages."""


def unknown_fields(paths: Iterable[str], config: ConfigDict) -> list[str]:
  """Returns a line for each path that is not a field of the config, with the closest field."""
  known = list(flatten(config))
  sections = {path.rsplit(".", 1)[0] for path in known if "." in path}
  lines = []
  for path in paths:
    if path in sections:
      inside = [name for name in known if name.startswith(f"{path}.")]
      inside = ", ".join(inside[:10]) + (f" and {len(inside) - 10} more" if len(inside) > 10 else "")
      lines.append(f"config.{path} is a section and cannot be set; set one of its fields: {inside}")
    elif path not in known and not is_open(path, table_of(config)):
      line = unknown(path, known, "")
      # Only this reads the signatures, which imports jax.
      lines.append(unknown(path, [*known, *entries.paths(config)], "--help_fields lists all fields") if line.endswith("; ") else line)
  return lines


def config_problems(config: ConfigDict) -> list[str]:
  """Returns every problem of a resolved config, one line each."""
  wrong, readable = field_problems(config, FIELDS, "a config made by configs.common")
  if readable:
    wrong += (of_entries := list(entries.problems(config)))
    from jaxrl_llm.config.refusals import refusals  # Imported late, because it imports jax.

    field_of = lambda problem: getattr(problem, "field", "")  # A string has no field.
    known = set(map(field_of, wrong))
    wrong += [problem for problem in _choices(config) if field_of(problem) not in known]
    if not of_entries:
      wrong += _entry_problems(config)
    of_model = ("config.model.", "config.moe.", "config.serving.", "config.mesh.sampler_expert")
    if not any(field_of(problem).startswith(of_model) for problem in wrong):
      wrong += [problem for problem in _model_problems(config) if field_of(problem) not in known]
    if config.reward.model_path is not None:
      wrong += _reward_model_problems(config)
    # Relations are checked only between fields that are valid by themselves.
    wrong = wrong or [*_relations(config), *refusals(config)]
  return list(map(str, wrong))


def in_config(problem: Problem | str) -> Problem | str:
  """Prefixes a problem's field with "config.", the form in messages about a config."""
  return problem.with_prefix("config") if isinstance(problem, Problem) else problem


def field_problems(
  config: ConfigDict, table: Mapping[str, Field], made: str
) -> tuple[list[Problem] | list[str], bool]:
  """Checks each field of a config by itself.

  Args:
    config: Config to check, of any origin.
    table: Fields that it must have.
    made: Text that says how to make a config with all fields.

  Returns:
    The problems, and whether all values have the right type, so that further checks can read them.
  """
  fields = flatten(config)
  gone = [path for path in fields if path in renamed.RENAMED and path not in table]
  lines = [str(renamed.problem(path, fields[path], config)) for path in gone]
  if missing := sorted(table.keys() - fields.keys() - {renamed.RENAMED[path].path for path in gone}):
    lines.append(f"config: found {len(missing)} missing field(s), such as {', '.join(missing[:3])}, expected {made}")
  known = {*table, *gone}
  lines += [unknown(path, known, f"expected {made}") for path in fields if path not in known and not is_open(path, table)]
  if lines:
    return lines, False
  wrong = {
    path: Problem(f"config.{path}", shown(fields[path]), field.check.words)
    for path, field in table.items()
    if not (fields[path] is None and field.takes_none) and not holds(field.check, fields[path])
  }
  return list(wrong.values()), all(has_type(table[path].check, fields[path]) for path in wrong)


def _choices(config: ConfigDict) -> Iterator[Problem | str]:
  """Yields a problem for each name that does not exist. These imports start no device."""
  yield from _task_problems(config)
  from jaxrl_llm.objectives.distillation import ADVICE
  from jaxrl_llm.objectives.penalties import KL_VALUES
  from jaxrl_llm.rewards.sandbox import BACKENDS
  from jaxrl_llm.tasks import prompt_template

  registries = {"reward.kl_estimator": KL_VALUES, "teacher.advice": ADVICE, "sandbox.backend": ("auto", *BACKENDS)}
  for path, names in registries.items():
    if (value := flatten(config)[path]) is not None and value not in names:
      yield Problem(f"config.{path}", repr(value), f"one of {', '.join(names)}{did_you_mean(value, names)}")
  yield from tracker_problems(config.log.trackers)
  yield from _metric_problems(config)
  if config.teacher.privileged is not None:
    try:
      prompt_template.fields(config.teacher.privileged, setting="config.teacher.privileged")
    except ValueError as error:
      yield error.args[0]


def _entry_problems(config: ConfigDict) -> Iterator[Problem | str]:
  """Yields a line for the first entry that its settings, each of them legal, do not make."""
  from jaxrl_llm.advantages import estimators
  from jaxrl_llm.config import policy

  field = "advantage"
  try:
    estimators.of_section(**config.advantage)
    field = "objective"
    policy.bare_objective(config)
    field = "correction.terms"
    policy.make_objective(config)
  except ValueError as error:
    problem = problem_of(error)
    yield in_config(problem) if isinstance(problem, Problem) else f"config.{field}: {problem}"


def _metric_problems(config: ConfigDict) -> Iterator[Problem]:
  from jaxrl_llm.evaluation import parse_metric

  field = "config.eval.metrics"
  for name in config.eval.metrics:
    if not isinstance(name, str):
      continue  # The field's own check reports it.
    try:
      metric = parse_metric(name)
    except ValueError as error:
      yield error.args[0]._replace(field=field)
      continue
    if metric.n > config.eval.samples:
      yield Problem(
        field, repr(name), f"n of at most {config.eval.samples}, the number of samples per problem (eval.samples)"
      )


def task_settings(config: ConfigDict) -> dict[str, Any]:
  """Returns the settings that the task itself reads, if they are set."""
  common = ("name", "levels", "data_dir", "bad_rows", "curriculum", "shots", "shot_template", "vary_shots")
  return given(config.task, *common, *OF_TOKENIZERS, "test_name", "test_source", "test_levels")


def environment_settings(config: ConfigDict) -> dict[str, Any]:
  """Returns the settings that the environment itself reads, if they are set."""
  return given(config.environment, "name", "weight", *entries.OF_CONVERSATIONS)


def _task_problems(config: ConfigDict) -> Iterator[Problem | str]:
  from jaxrl_llm import tasks
  from jaxrl_llm.rewards import from_config
  from jaxrl_llm.rollouts import environments

  wrong = list(tasks.task_problems(config.task.name, task_settings(config)))
  source = config.task.test_source
  if config.task.test_name is not None:
    renamed = {"task.name": "task.test_name", "task.source": "task.test_source"}
    for problem in tasks.task_problems(config.task.test_name, {} if source is None else {"source": source}):
      is_setting = isinstance(problem, Problem)
      wrong.append(problem._replace(field=renamed.get(problem.field, problem.field)) if is_setting else problem)
  elif source is not None:
    wrong.append(Problem("task.test_source", repr(source), "None, because task.test_name is None"))
  if config.environment.name is not None:
    try:
      environments.check_environment(config.environment.name, environment_settings(config))
    except (ImportError, ValueError) as error:
      wrong.append(problem_of(error))
    if environments.holds_problems(config.environment.name) and not tasks.is_of_environment(config.task.name):
      expected = f"'environment', because {config.environment.name} has problems of its own"
      wrong.append(Problem("task.name", repr(config.task.name), expected))
  yield from map(in_config, [*wrong, *from_config.reward_problems(config)])


def _model_problems(config: ConfigDict) -> Iterator[Problem | str]:
  """Yields problems of a model that does not exist or does not fit its settings.

  Reads the headers of a checkpoint, and its tokenizer.
  """
  from jaxrl_llm.config import policy
  from jaxrl_llm.models import make_model, trainable
  from jaxrl_llm.models.attention import check_backend
  from jaxrl_llm.models.remat import check_policy

  try:
    check_backend(config.model.attention)
    check_policy(config.model.remat)
    shape = policy.model_config(config, vocab_size=1)
    policy.tokenizer(config)
    if shape.lora is not None:
      trainable(shape, make_model(shape._replace(exact=False)).logical_axes)
  except MissingPackageError as error:
    yield f"config.model.path: found {config.model.path!r}, but {error}"
    return
  except ValueError as error:
    yield in_config(problem_of(error))
    return
  if config.model.lora_rank is None:
    yield from unused(config, ("model.lora_alpha", "model.lora_targets"), "model.lora_rank is None: there are no adapters")
  if config.model.path is None:
    yield from unused(config, [f"task.{name}" for name in OF_TOKENIZERS], "without model.path there is no tokenizer to configure")
  if shape.vision is None:
    values = flatten(config)
    sizes = [path for path in IMAGE_SIZES if values[path] is None or holds(FIELDS[path].check, values[path])]
    yield from unused(config, {"model.train_tower": False, **dict.fromkeys(sizes)}, "the model has no vision tower")
  else:
    yield from _tower_problems(config)
  if shape.experts is None:
    of_router = {"moe.replay": None, "moe.balance_coef": 0, "moe.z_coef": 0, "moe.measure_every": 0}
    yield from unused(config, {"mesh.sampler_expert": 1, "serving.layout": None} | of_router, "the model is dense: it has no experts")
  elif shape.experts.num_experts % config.mesh.sampler_expert:
    number = shape.experts.num_experts
    yield Problem("config.mesh.sampler_expert", config.mesh.sampler_expert, f"a divisor of {number}, the number of the model's experts")


def _tower_problems(config: ConfigDict) -> Iterator[Problem]:
  """Yields settings that are not implemented for models with a vision tower."""
  from jaxrl_llm.advantages import estimators

  for field, value, expected in (
    ("mesh.context", config.mesh.context, 1),
    ("mesh.sampler", config.mesh.sampler, 0),
    ("rollout.spare_prompts", config.rollout.spare_prompts, 0),
  ):
    if value != expected:
      yield Problem(f"config.{field}", repr(value), f"{expected!r} for a model with a vision tower, for which it is not implemented")
  if "values" in estimators.of_section(**config.advantage).needs:
    yield Problem("config.advantage.estimator", repr(config.advantage.estimator), "one without a critic for a model with a vision tower")
  if config.model.train_tower and config.model.lora_rank is not None:
    yield Problem("config.model.train_tower", True, "False beside model.lora_rank, which trains adapters alone")


def _reward_model_problems(config: ConfigDict) -> Iterator[Problem | str]:
  """Yields problems of a reward model that does not exist or cannot be used.

  Reads the headers of a checkpoint, and its tokenizer.
  """
  from jaxrl_llm.advantages import estimators
  from jaxrl_llm.rewards import model

  path = config.reward.model_path
  if config.environment.name is not None:
    yield Problem("config.reward.model_path", repr(path), "None: a reward model reads one response, and environment.name is set")
  if estimators.of_section(**config.advantage).from_zero:
    estimator = config.advantage.estimator
    why = f"its output can be negative, and advantage.estimator={estimator!r} takes rewards of 0 or more"
    yield Problem("config.reward.model_path", repr(path), f"None: {why}")
  budget = max(config.rollout.prompt_buckets or (0,)) + config.rollout.max_new_tokens
  yield from model.folder_problems(path, chat=config.task.get("chat"), budget=budget)


def _relations(config: ConfigDict) -> Iterator[str]:
  rollout, learner, warm = config.rollout, config.learner, config.warm_start
  prompts, budget, updates = rollout.num_prompts, rollout.max_new_tokens, learner.updates_per_rollout
  if config.num_steps == 0 and warm.num_steps == 0:
    yield "config.num_steps=0 and config.warm_start.num_steps=0: there is nothing to train; raise one of them"
  if prompts % updates:
    divisor = f"config.learner.updates_per_rollout={updates}: each update takes whole groups"
    yield f"config.rollout.num_prompts={prompts} is not a multiple of {divisor}"
  of_paths = {"learner": learner.row_buckets, "warm_start": warm.row_buckets, "teacher": config.teacher.row_buckets}
  for path, buckets in of_paths.items():
    for rows in buckets or ():
      if rows % (learner.rows_per_device or 1):
        yield (
          f"config.{path}.row_buckets: {rows} is not a multiple of config.learner.rows_per_device={learner.rows_per_device}, the rows that "
          "a device takes at a time"
        )
  yield from _device_relations(config)

  yield from size_problems(config)
  if (blocks := rollout.cache_blocks) is not None and sum(blocks) != budget:
    yield f"config.rollout.cache_blocks={blocks} adds up to {sum(blocks)}, expected config.rollout.max_new_tokens={budget}"
  if (buffer := config.reward.overlong_buffer) > budget:
    yield f"config.reward.overlong_buffer={buffer} is above config.rollout.max_new_tokens={budget}: every response would be penalised"


def size_problems(config: ConfigDict, *, longest_demonstration: int | None = None) -> Iterator[str]:
  """Yields a line for each size of packed rows that is too small for others.

  Args:
    config: Config whose fields are legal by themselves. Sizes that are None are not checked:
      `sizes.choose_sizes` replaces them.
    longest_demonstration: Number of tokens of the longest demonstration with its prompt; None if
      unknown, which takes the longest sequence of RL.
  """
  rollout, learner, warm = config.rollout, config.learner, config.warm_start
  if rollout.prompt_buckets is None or learner.row_tokens is None:
    return
  longest = max(rollout.prompt_buckets) + rollout.max_new_tokens
  if longest > learner.row_tokens:
    terms = f"{longest} = max(config.rollout.prompt_buckets) + config.rollout.max_new_tokens"
    yield f"config.learner.row_tokens={learner.row_tokens} is below the longest sequence, {terms}; raise it to at least {longest}"
    return
  count = rollout.num_prompts * rollout.group_size // learner.updates_per_rollout
  checked = [("learner", learner.row_buckets, count, longest, most_rows(config))]
  if warm.num_steps:
    shown = longest_demonstration or longest
    if shown > learner.row_tokens:
      longer = f"the longest demonstration, {shown} tokens with its prompt; raise it to at least {shown}, or set it to None"
      yield f"config.learner.row_tokens={learner.row_tokens} is below {longer}"
      return
    checked.append(("warm_start", warm.row_buckets, warm.batch_size, shown, -(-warm.batch_size // per_row(config, shown))))
  for path, buckets, count, tokens, needed in checked:
    if buckets is not None and max(buckets) < needed:
      need = f"{count} sequences of up to {tokens} tokens can need {needed} rows of {learner.row_tokens}"
      yield f"config.{path}.row_buckets={buckets}: {need}; add a bucket of at least {needed}"


def _device_relations(config: ConfigDict) -> Iterator[str]:
  mesh, sampler, expert, tensor = config.mesh, config.mesh.sampler, config.mesh.sampler_expert, config.mesh.sampler_tensor
  if sampler == 0 and not config.rollout.samplers and expert * tensor > 1:
    why = "mesh.sampler is 0: no devices are reserved for sampling"
    yield from map(str, unused(config, {"mesh.sampler_expert": 1, "mesh.sampler_tensor": 1}, why))
    return
  if sampler % tensor:
    yield (
      f"config.mesh.sampler_tensor: found {tensor}, expected a divisor of mesh.sampler={sampler}, the number of "
      "devices that only sample"
    )
    return
  if sampler // tensor % expert:
    yield (
      f"config.mesh.sampler_expert: found {expert}, expected a divisor of {sampler // tensor} (mesh.sampler / "
      "mesh.sampler_tensor)"
    )
    return
  # With a -1 the number is not known before the devices are; 1 divides every number of rows.
  sizes = (mesh.data, mesh.fsdp, mesh.expert)
  learner = 1 if -1 in sizes else math.prod(sizes)
  context = 1 if mesh.context == -1 else mesh.context
  yield from row_problems(config, learner, sampler // tensor or learner, context=context)


def row_problems(config: ConfigDict, learner_shards: int, sampler_shards: int, *, context: int = 1) -> Iterator[str]:
  """Yields a line for each number of rows or slots that does not divide evenly over the devices.

  Args:
    config: Config whose fields are legal by themselves.
    learner_shards: Number of shards of the rows of an update.
    sampler_shards: Number of shards of the prompts.
    context: Number of shards of the slots of an update's rows.
  """
  of_sampler = "parts of the sampler (mesh.sampler / mesh.sampler_tensor)" if config.mesh.sampler else OF_LEARNER
  of_slots = "devices (mesh.context), which share the slots of a row"
  # Without sharding, another check covers the rows that a device takes at a time.
  at_once = 1 if learner_shards == 1 else config.learner.rows_per_device or 1
  prompts, spare = config.rollout.num_prompts, config.rollout.spare_prompts
  for path, values, shards, places, rows in (
    ("rollout.num_prompts" + (" + rollout.spare_prompts" if spare else ""), (prompts + spare,), sampler_shards, of_sampler, 1),
    ("eval.batch_prompts", (config.eval.batch_prompts,), sampler_shards, of_sampler, 1),
    ("rollout.slots", (config.rollout.slots or sampler_shards,), sampler_shards, of_sampler, 1),
    ("learner.row_buckets", config.learner.row_buckets or (), learner_shards, OF_LEARNER, at_once),
    ("warm_start.row_buckets", config.warm_start.row_buckets or (), learner_shards, OF_LEARNER, at_once),
    ("learner.row_tokens", (config.learner.row_tokens or context,), context, of_slots, 1),
    ("teacher.row_buckets", config.teacher.row_buckets or (), learner_shards, OF_LEARNER, at_once),
    ("teacher.row_tokens", (config.teacher.row_tokens or context,), context, of_slots, 1),
  ):
    yield from indivisible(path, values, shards, places, rows)


def indivisible(path: str, values: Iterable[int], shards: int, places: str, at_once: int) -> Iterator[str]:
  """Yields a line for each value of a field that shards, each of `at_once` rows, do not divide."""
  divisor = shards * at_once
  for value in values:
    if value % divisor:
      need = f"{shards} {places}" + (f" x {at_once} rows at a time (learner.rows_per_device)" if at_once > 1 else "")
      yield f"config.{path}: {value} is not a multiple of {need}; the next multiple is {-(-value // divisor) * divisor}"
