"""Everything that can be wrong with a config, found before any device starts: all problems in one message, each with its fix."""

import difflib
import inspect
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.config.fields import OPTIONAL, RANGES, SWITCHES, TUPLES, UNRANGED, Check, flatten, given, holds, kind, shown

TEXTS = ("rollout.stop_strings", "model.lora_targets", "task.parts", "reward.terms", "reward.settings", "eval.metrics")
"""Fields that hold several texts."""


def unknown_fields(paths: Iterable[str], config: ConfigDict) -> list[str]:
  """A line for each path that is not a field of the config, with the nearest one."""
  known = list(flatten(config))
  sections = {path.rsplit(".", 1)[0] for path in known if "." in path}
  lines = []
  for path in paths:
    if path in known:
      continue
    if path in sections:
      inside = [name for name in known if name.startswith(f"{path}.")]
      inside = ", ".join(inside[:10]) + (f" and {len(inside) - 10} more" if len(inside) > 10 else "")
      lines.append(f"config.{path} is a section and cannot be set; set one of its fields: {inside}")
      continue
    # A right name in the wrong section is nearer to what was meant than a like path; a like name in any section comes last.
    leaves = {name: name.rsplit(".", 1)[-1] for name in known}
    leaf = path.rsplit(".", 1)[-1]
    alike = difflib.get_close_matches(leaf, leaves.values(), n=1)
    near = [name for name in known if leaves[name] == leaf]
    near = near or difflib.get_close_matches(path, known, n=1) or [name for name in known if leaves[name] in alike]
    hint = f"; did you mean {' or '.join(f'config.{name}' for name in near[:3])}?" if near else "; --dry_run lists all fields"
    lines.append(f"unknown field config.{shown(path)[1:-1]}{hint}")
  return lines


def type_in_words(config: ConfigDict, path: str) -> str:
  """What a field may hold, also one that holds None so far."""
  *sections, name = path.split(".")
  for section in sections:
    config = config[section]
  numbers = "one or more texts" if path in TEXTS else "one or more whole numbers, as in '(24, 32)'"
  kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: numbers}
  if path in ("correction.icepop", "correction.geometric_rejection"):
    return "two numbers, as in '(0.5, 5.0)'"
  kind = config.get_type(name)
  return kinds.get(kind, kind.__name__)


def problems(config: ConfigDict) -> list[str]:
  """Every problem of a config, a line each; none is an empty list.

  Args:
    config: resolved, with all fields of `configs/fields.py`.
  """
  from jaxrl_llm.objectives.corrected import RULES

  fields = flatten(config)
  checks = {**RANGES, **OPTIONAL, **{path: kind(path) for path in UNRANGED}}
  judged = {"objective.name", *(f"correction.{name}" for name in RULES)}
  if lines := other_fields(fields, {*checks, *judged}, "a config made by configs.common", optional={*_hyperparameters()}):
    return lines
  found = outside(fields, checks, optional=(*OPTIONAL, *UNRANGED))
  known = {line.partition(":")[0] for line in found}
  if any(of_wrong_type(path, fields[path]) for path in checks if f"config.{path}" in known):
    return found  # What looks further could not read them.
  found += [line for line in _choices(config) if line.partition(":")[0] not in known]
  if not any(line.startswith(("config.model.", "config.moe.")) for line in found):
    found += _model_problems(config)
  if config.reward.model_path is not None:
    found += _reward_model_problems(config)
  # Relations between fields make sense only of fields that make sense.
  return found or [*_relations(config), *_refusals(config)]


def other_fields(fields: Mapping[str, Any], expected: Collection[str], made: str, optional: Collection[str] = ()) -> list[str]:
  """Lines about fields that a config lacks, or has and nothing reads.

  Args:
    fields: found, by path.
    expected: their paths.
    made: how a config with all of them is made.
    optional: paths of fields that a config may lack.
  """
  lines = []
  if missing := sorted(set(expected) - set(fields)):
    lines.append(f"config: {len(missing)} fields are missing, such as {', '.join(missing[:3])}; expected {made}")
  for path in fields:
    if path not in expected and path not in optional:
      near = difflib.get_close_matches(path, (*expected, *optional), n=1)
      lines.append(f"unknown field config.{shown(path)[1:-1]}" + (f"; did you mean config.{near[0]}?" if near else f"; expected {made}"))
  return lines


def outside(fields: Mapping[str, Any], checks: Mapping[str, Check], *, optional: Collection[str]) -> list[str]:
  """A line for each field that by itself is not what its check asks for.

  Args:
    fields: found, by path.
    checks: of the fields.
    optional: fields that may hold None.
  """
  lines = []
  for path, check in checks.items():
    value = fields[path]
    if (value is not None or path not in optional) and not holds(check, value):
      lines.append(f"config.{path}: found {shown(value)}, expected {check[1]}")
  return lines


def shortened(line: str) -> str:
  """A line that recites an endless value, with its middle left out."""
  return line if len(line) <= 600 else f"{line[:400]} ... {line[-150:]}"


def of_wrong_type(path: str, value: Any) -> bool:
  """Whether a value that is no good is of another type than the field's, so that nothing can be said about what follows from it."""
  if path in TUPLES:
    return not isinstance(value, tuple)
  if path in UNRANGED:
    return not isinstance(value, bool if path in SWITCHES else str)
  return isinstance(value, bool) or not isinstance(value, int | float | str)


def _hyperparameters() -> Iterator[str]:
  """Fields of the objectives' hyper-parameters, which the objectives judge; one that a config lacks has its default."""
  from jaxrl_llm import objectives

  for make in objectives.OBJECTIVES.values():
    yield from (f"objective.{name}" for name in inspect.signature(make).parameters)


def _refusals(config: ConfigDict) -> Iterator[str]:
  from jaxrl_llm import objectives
  from jaxrl_llm.config.refusals import refusals
  from jaxrl_llm.objectives.corrected import corrected

  objective = objectives.make(config.objective.name, **given(config.objective, "name"))
  return refusals(config, objective, corrected(objective, **given(config.correction)))


def _choices(config: ConfigDict) -> Iterator[str]:
  """Names that must exist. Importing these rooms starts no device."""
  yield from _task_problems(config)
  from jaxrl_llm import objectives
  from jaxrl_llm.advantages.estimators import ESTIMATORS
  from jaxrl_llm.objectives.corrected import corrected
  try:
    objective = objectives.make(config.objective.name, **given(config.objective, "name"))
  except ValueError as error:
    yield f"config.objective: {error}"
    return
  try:
    corrected(objective, **given(config.correction))
  except ValueError as error:
    yield f"config.correction: {error}"
  yield from _metric_problems(config)
  if config.advantage.estimator not in ESTIMATORS:
    near = difflib.get_close_matches(str(config.advantage.estimator), ESTIMATORS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    yield f"config.advantage.estimator: found {config.advantage.estimator!r}, expected one of {', '.join(ESTIMATORS)}{hint}"


def _metric_problems(config: ConfigDict) -> Iterator[str]:
  from jaxrl_llm.evaluation import parse_metric

  for name in config.eval.metrics:
    if not isinstance(name, str):
      continue  # The field's range says so.
    try:
      metric = parse_metric(name)
    except ValueError as error:
      yield f"config.eval.metrics: {error}"
      continue
    if metric.n > config.eval.samples:
      yield f"config.eval.metrics: found {name!r}, expected n of at most {config.eval.samples}, the samples of each problem (eval.samples)"


def task_settings(config: ConfigDict) -> dict[str, Any]:
  """The settings that a task reads for itself, where they are set."""
  common = ("name", "levels", "chat", "system", "pad_token", "data_dir", "bad_rows", "curriculum", "test_name", "test_source")
  return given(config.task, *common)


def environment_settings(config: ConfigDict) -> dict[str, Any]:
  """The settings that an environment reads for itself, where they are set; 0 sets none, so that the command line can take one back."""
  settings = given(config.environment, "name", "max_turns", "max_turn_tokens", "timeout_s", "weight")
  return {name: value for name, value in settings.items() if value != 0}


def _task_problems(config: ConfigDict) -> Iterator[str]:
  from jaxrl_llm import tasks
  from jaxrl_llm.rewards import from_config
  from jaxrl_llm.rewards.sandbox import BACKENDS
  from jaxrl_llm.rollouts import environments

  lines = list(tasks.problems(config.task.name, task_settings(config)))
  if config.task.test_name is not None:
    source = config.task.test_source
    found = tasks.problems(config.task.test_name, {} if source is None else {"source": source})
    lines += [line.replace("task.name", "task.test_name").replace("task.source", "task.test_source") for line in found]
  elif config.task.test_source is not None:
    lines.append(f"task.test_source: found {config.task.test_source!r}, expected None, because task.test_name is None")
  if config.environment.name is not None:
    try:
      environments.check(config.environment.name, environment_settings(config))
    except ValueError as error:
      lines.append(str(error))
  if (backend := config.sandbox.backend) not in ("auto", *BACKENDS):
    near = difflib.get_close_matches(str(backend), BACKENDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    lines.append(f"sandbox.backend: found {backend!r}, expected one of auto, {', '.join(BACKENDS)}{hint}")
  lines += from_config.problems(config)
  yield from (f"config.{line}" if line.startswith(("task.", "sandbox.", "environment.")) else line for line in lines)


def _model_problems(config: ConfigDict) -> Iterator[str]:
  """A model that does not exist or that its settings do not fit; reads the headers of a checkpoint, and its tokenizer."""
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
      trainable(shape, make_model(shape).logical_axes)
  except ValueError as error:
    text = str(error)
    yield text if text.startswith("config.") or not text.startswith("model.") else f"config.{text}"
    return
  section = config.model
  if section.lora_rank is None:
    for name in ("lora_alpha", "lora_targets"):
      if section[name] is not None:
        yield f"config.model.{name}: found {section[name]!r}, expected None, because model.lora_rank is None: there are no adapters"
  if section.path is None:
    for name in ("chat", "system", "pad_token"):
      if config.task[name] is not None:
        yield f"config.task.{name}: found {config.task[name]!r}, expected None, because without model.path there is no tokenizer to set up"
  if shape.experts is None:
    for name, unset in (("replay", None), ("balance_coef", 0), ("z_coef", 0), ("measure_every", 0)):
      if config.moe[name] != unset:
        yield f"config.moe.{name}: found {config.moe[name]!r}, expected {unset}, because the model is dense: it has no experts"


def _reward_model_problems(config: ConfigDict) -> Iterator[str]:
  """A reward model that is not there or cannot be used; reads headers and its tokenizer."""
  from jaxrl_llm.rewards import model

  path = config.reward.model_path
  if config.environment.name is not None:
    yield f"config.reward.model_path: found {path!r}, expected None: a reward model reads one response, and environment.name is set"
  budget = max(config.rollout.prompt_buckets, default=0) + config.rollout.max_new_tokens
  yield from model.problems(path, chat=config.task.chat, budget=budget)


def _relations(config: ConfigDict) -> Iterator[str]:
  rollout, learner, warm = config.rollout, config.learner, config.warm_start
  if config.num_steps == 0 and warm.num_steps == 0:
    yield "config.num_steps=0 and config.warm_start.num_steps=0: there is nothing to train; raise one"
  if rollout.num_prompts % learner.updates_per_rollout:
    yield (
      f"config.rollout.num_prompts={rollout.num_prompts} is not a multiple of config.learner.updates_per_rollout="
      f"{learner.updates_per_rollout}: each update takes whole groups"
    )
  for path, buckets in (("learner", learner.row_buckets), ("warm_start", warm.row_buckets)):
    for rows in buckets:
      if rows % learner.micro_batches:
        yield f"config.{path}.row_buckets: {rows} rows do not split into config.learner.micro_batches={learner.micro_batches} equal parts"
  yield from _device_relations(config)

  longest = max(rollout.prompt_buckets) + rollout.max_new_tokens
  if longest > learner.row_tokens:
    yield (
      f"config.learner.row_tokens={learner.row_tokens} is below the longest sequence, {longest} = max(config.rollout.prompt_buckets) + "
      f"config.rollout.max_new_tokens; raise it to at least {longest}"
    )
  else:
    sequences = rollout.num_prompts * rollout.group_size // learner.updates_per_rollout
    checked = [("learner", learner.row_buckets, sequences)]
    if warm.num_steps:
      checked.append(("warm_start", warm.row_buckets, warm.batch_size))
    for path, buckets, count in checked:
      # First fit can leave no two rows that would go into one, so rows hold at least this many of the longest sequences.
      needed = -(-count // (learner.row_tokens // longest))
      if max(buckets) < needed:
        yield (
          f"config.{path}.row_buckets={buckets}: {count} sequences of up to {longest} tokens can need {needed} rows of "
          f"{learner.row_tokens}; add a bucket of at least {needed}"
        )
  if rollout.cache_blocks is not None and sum(rollout.cache_blocks) != rollout.max_new_tokens:
    yield (
      f"config.rollout.cache_blocks={rollout.cache_blocks} adds up to {sum(rollout.cache_blocks)}, expected "
      f"config.rollout.max_new_tokens={rollout.max_new_tokens}"
    )
  if config.reward.overlong_buffer > rollout.max_new_tokens:
    yield (
      f"config.reward.overlong_buffer={config.reward.overlong_buffer} is above config.rollout.max_new_tokens={rollout.max_new_tokens}: "
      "every response would be penalised"
    )


def _device_relations(config: ConfigDict) -> Iterator[str]:
  mesh = config.mesh
  if mesh.sampler_tensor > 1 and mesh.sampler == 0:
    yield f"config.mesh.sampler_tensor: found {mesh.sampler_tensor}, expected 1, because mesh.sampler is 0: no device only samples"
    return
  if mesh.sampler % mesh.sampler_tensor:
    yield (
      f"config.mesh.sampler_tensor: found {mesh.sampler_tensor}, expected a divisor of mesh.sampler={mesh.sampler}, "
      "the devices that only sample"
    )
    return
  # With a -1 the number is known only once the devices are; 1 divides every number of rows.
  sizes = (mesh.data, mesh.fsdp, mesh.expert)
  learner = 1 if -1 in sizes else math.prod(sizes)
  context = 1 if mesh.context == -1 else mesh.context
  yield from row_problems(config, learner, mesh.sampler // mesh.sampler_tensor or learner, context=context)


def row_problems(config: ConfigDict, learner_shards: int, sampler_shards: int, *, context: int = 1) -> Iterator[str]:
  """Numbers of rows and slots that the devices do not divide.

  Args:
    config: the config.
    learner_shards: pieces that the rows of updates are split into.
    sampler_shards: pieces that prompts are split into.
    context: pieces that the slots of a row of an update are split into.
  """
  of_learner = "devices (mesh data x fsdp x expert)"
  of_sampler = "copies of the sampler (mesh.sampler / mesh.sampler_tensor)" if config.mesh.sampler else of_learner
  micro = config.learner.micro_batches
  prompts, spare = config.rollout.num_prompts, config.rollout.spare_prompts
  counts = (
    ("rollout.num_prompts" + (" + rollout.spare_prompts" if spare else ""), (prompts + spare,), sampler_shards, of_sampler, 1),
    ("eval.batch_prompts", (config.eval.batch_prompts,), sampler_shards, of_sampler, 1),
    ("rollout.slots", (config.rollout.slots or sampler_shards,), sampler_shards, of_sampler, 1),
    ("learner.row_buckets", config.learner.row_buckets, learner_shards, of_learner, micro),
    ("warm_start.row_buckets", config.warm_start.row_buckets, learner_shards, of_learner, micro),
  )
  for path, values, shards, places, parts in counts:
    divisor = 1 if shards == 1 else shards * parts  # Micro-batches alone are another check's.
    for value in values:
      if value % divisor:
        need = f"{shards} {places}" + (f" x {parts} micro-batches" if parts > 1 else "")
        yield f"config.{path}: {value} is not a multiple of {need}; the nearest that is: {-(-value // divisor) * divisor}"
  if config.learner.row_tokens % context:
    nearest = -(-config.learner.row_tokens // context) * context
    yield (
      f"config.learner.row_tokens: {config.learner.row_tokens} is not a multiple of {context} devices (mesh.context), which share "
      f"the slots of a row; the nearest that is: {nearest}"
    )
