"""An experiment assembled from its config: task, mesh, model, objective and compiled programs."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray
from ml_collections import ConfigDict

from jaxrl_llm import objectives, tasks
from jaxrl_llm.advantages.estimators import ESTIMATORS, Credit, Evidence, make_credit
from jaxrl_llm.config import outliers, policy, sizes
from jaxrl_llm.config.check import environment_settings, given, row_problems, size_problems, task_settings
from jaxrl_llm.config.fields import flatten
from jaxrl_llm.config.outliers import NO_LIMITS, Limits
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.evaluation.held_out import check_metrics
from jaxrl_llm.learner import memory
from jaxrl_llm.learner.needs import fields_needed
from jaxrl_llm.learner.programs import Programs, make_programs, pictures_at_once, records_routes, room_in_rows
from jaxrl_llm.models import ModelConfig, make_model
from jaxrl_llm.models.decoding import serving_of
from jaxrl_llm.pretrained.pictures import PictureConfig
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rewards.at_random import random_terms
from jaxrl_llm.rewards.from_config import make_rewards
from jaxrl_llm.rewards.grader import Grader
from jaxrl_llm.rollouts import environments
from jaxrl_llm.rollouts.conversations import Rules
from jaxrl_llm.rollouts.environments import Environment
from jaxrl_llm.rollouts.gallery import Gallery
from jaxrl_llm.rollouts.samplers import engine_columns, limit_of, make_samplers, room_in_prompts
from jaxrl_llm.rollouts.weight_sync import make_weight_sync
from jaxrl_llm.run.setup.drawing import Drawing, drain_problems, make_drawing, why_drain
from jaxrl_llm.run.setup.teacher import Teacher, check_self, check_teacher, find_teachers
from jaxrl_llm.tasks import Task, prompt_template
from jaxrl_llm.tasks.files.storage import IMAGES
from jaxrl_llm.tasks.image_prompts import image_tokens, prompt_ids
from jaxrl_llm.tasks.pipeline import encode_demonstrations, prompt_lengths
from jaxrl_llm.tasks.privileged import SETTING, PrivilegedFn, check_names, privileged_prompts
from jaxrl_llm.types import Objective, TrainState


class Experiment(NamedTuple):
  """The parts of a run.

  A program compiles when it first runs, for every declared bucket at once, and never again.

  Attributes:
    config: Config with every size set; see `config.sizes`.
    lengths: Lengths of the task's texts.
    left_out: Lines that describe the problems that are left out because of their size.
    task: Problems, demonstrations and tokenizer.
    mesh: Devices of the learner.
    objective: Objective that RL minimises.
    rewards: Terms of the training reward.
    verifier: The task's verifier, by which evaluations judge.
    init: Function `(key) -> state` that makes a sharded state at step 0 of the warm start.
    needs: Optional fields that are read, such as `old_logprobs`, `ref_logprobs`, `values`; the loop
      computes these and no others.
    credit: Function from rewards and log-probabilities to advantages and value targets.
    compare: The same without whitening; None if the estimator does not compare the samples of a
      prompt.
    learner: Programs that read weights on `mesh`: updates and log-probability passes.
    drawing: What draws rollouts and the samples of evaluations.
    teachers: Teachers of the policy by name, "" for the only one, whose weights are not loaded yet.
    privileged: Function from a problem to the prompt that its teacher reads; None for the policy's.
  """

  config: ConfigDict
  lengths: sizes.Lengths
  left_out: list[str]
  task: Task
  mesh: Mesh
  objective: Objective
  rewards: list[WeightedReward]
  verifier: WeightedReward
  init: Callable[[PRNGKeyArray], TrainState]
  needs: frozenset[str]
  credit: Callable[[Evidence], Credit]
  compare: Callable[[Evidence], Credit] | None
  learner: Programs
  drawing: Drawing
  teachers: Mapping[str, Teacher] = MappingProxyType({})
  privileged: PrivilegedFn | None = None

  @property
  def replies(self) -> str | None:
    """Pattern of what is read but not imitated in demonstrations; see `Environment`."""
    rules = self.drawing.rules
    return None if rules is None else rules.environment.replies


def load_task(config: ConfigDict, *, limits: Limits = NO_LIMITS, shots: int | None = None) -> Task:
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
  return Rules(made, max_turns=section.max_turns, max_turn_tokens=section.max_turn_tokens, timeout_s=section.timeout_s, **limits)


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
  settings |= {name: config[shared][name] for name in names}
  try:
    return environments.make(section.name, reply_timeout_s=section.timeout_s, **settings)
  except ValueError as error:
    raise ValueError(f"config.{f'{shared}.{names[0]}: ' if names else ''}{error}") from error


def kl_coef_in_loss(config: ConfigDict) -> float:
  """Returns the objective's `kl_coef`, or its default; 0 if it has none."""
  if config.objective.get("kl_coef") is not None:
    return config.objective.kl_coef
  parameters = inspect.signature(objectives.OBJECTIVES[config.objective.name]).parameters
  return parameters["kl_coef"].default if "kl_coef" in parameters else 0.0


def build_experiment(config: ConfigDict) -> Experiment:
  """Assembles an experiment; allocates nothing on the devices.

  Args:
    config: Checked config; see `config.check`. Sizes that are None are chosen here.

  Raises:
    ValueError: If there are too few devices, they do not divide a size, or a dataset is damaged.
      None of this can be checked before the devices are known.
  """
  mesh, sampler_mesh = mesh_lib.make_meshes(**config.mesh)
  shards = (mesh_lib.num_row_shards(mesh), mesh_lib.num_row_shards(sampler_mesh))
  if problems := list(row_problems(config, *shards, context=mesh.shape["context"])):
    raise ValueError("\n".join(problems))
  rules = make_rules(config)
  task, lengths, left_out = load_measured(config, replies=rules and rules.environment.replies)
  shape = policy.model_config(config, vocab_size=task.tokenizer.vocab_size)
  if (top_k := config.rollout.top_k) > shape.vocab_size:
    raise ValueError(f"config.rollout.top_k: found {top_k}, expected at most {shape.vocab_size}, the tokens of the vocabulary; 0 keeps all")
  privileged = None if config.teacher.privileged is None else privileged_prompts(task, config.teacher.privileged)
  if privileged is not None:
    lengths = lengths._replace(privileged=[len(privileged(row)) for row in task.train])
  is_cpu = mesh_lib.platform_of(mesh) == "cpu"
  bounds = sizes.Bounds(shards[0], mesh.shape["context"], shape.d_model, 16 if is_cpu else 128, shape.max_positions)
  config = sizes.choose_sizes(config, lengths, bounds)
  if problems := list(size_problems(config, longest_demonstration=max(lengths.demonstrations, default=None))):
    raise ValueError("\n".join(problems))
  check_lengths(task.name, lengths, config, max_positions=shape.max_positions)
  check_pictures(task.name, lengths, config)
  if config.teacher.paths is not None:
    check_names(task.train, config.teacher.column, [text.split("=", 1)[0] for text in config.teacher.paths])
  teachers = find_teachers(config)
  for teacher in teachers.values():
    check_teacher(teacher, config, task.tokenizer, shape)
  if config.teacher.path == "self":
    check_self(config, shape)
  check_privileged(lengths, config, [shape] if config.teacher.path == "self" else [teacher.shape for teacher in teachers.values()])
  taught = {name: teacher.shape for name, teacher in teachers.items()}
  objective = policy.make_objective(config)
  needs = fields_needed(config, objective)
  why = why_drain(config, sampler_mesh)
  columns = engine_columns(config, sampler_mesh) if why is None else None
  if problems := list(drain_problems(config, rules, why)):
    raise ValueError("\n".join(problems))
  limit = limit_of(config, sampler_mesh)
  if config.rollout.slots is None and not is_cpu and limit is not None:
    estimate = memory.footprint(config, shape, mesh, sampler_mesh, objective, needs=needs, engine_columns=columns, teachers=taught)
    fitting = dict(limit=limit, engine_columns=columns)
    config.rollout.slots = memory.slots_that_fit(config, shape, sampler_mesh, estimate, **fitting)
  learner = make_programs(config, mesh, shape, objective, needs=needs, teachers=taught)
  abstract_params, model = learner.abstract_state.params, learner.model
  make_params = policy.first_params(config, model, jax.tree.map(lambda x: x.sharding, abstract_params))
  serving = serving_of(shape, sampler_mesh, layout=config.serving.layout)
  sampling_shape = shape._replace(
    dtype=config.model.sampler_dtype or shape.dtype,
    decode_attention=config.serving.attention,
    decode_weights=config.serving.weights,
  )
  sampling_model = make_model(sampling_shape, mesh=sampler_mesh, serving=serving)
  sync, sampled_params = None, abstract_params
  if sampler_mesh != mesh:
    options = dict(dtype=sampling_model.config.dtype, trainable=learner.trainable)
    sync = make_weight_sync(abstract_params, model.logical_axes, learner=mesh, sampler=sampler_mesh, **options)
    sampled_params = sync.arrived
  options = dict(turn_stops=rules and rules.environment.stops, records_routes=records_routes(config, shape), on_engine=why is None)
  programs = make_samplers(config, sampling_model, task.tokenizer, sampled_params, **options)
  parts = dict(sync=sync, rules=rules, gallery=make_gallery(config, task, learner, shape), why=why)
  drawing = make_drawing(config, sampling_model, task.tokenizer, programs, **parts)
  terms = make_rewards(task, config)
  check_metrics(config.eval.metrics, terms[0])
  if "step_rewards" in needs and rules is None and not any(term.steps for term in terms):
    raise ValueError(
      f"config.advantage.estimator: found {config.advantage.estimator!r}, expected another one, because task "
      f"{task.name} has no step verifier"
    )
  estimator = dict(estimator=config.advantage.estimator, group_size=config.rollout.group_size)
  settings = given(config.advantage, "estimator", "whiten")
  credit = make_credit(**estimator, **settings, whiten=config.advantage.whiten)
  compare = make_credit(**estimator, **settings) if config.advantage.whiten else credit
  return Experiment(
    config=config,
    lengths=lengths,
    left_out=left_out,
    task=task,
    mesh=mesh,
    objective=objective,
    rewards=terms if config.reward.at_random is None else random_terms(terms),
    verifier=terms[0],
    init=lambda key: learner.start(make_params(key)),
    learner=learner,
    needs=needs,
    credit=credit,
    compare=compare if ESTIMATORS[config.advantage.estimator].compares_groups else None,
    drawing=drawing,
    teachers=teachers,
    privileged=privileged,
  )


def make_gallery(config: ConfigDict, task: Task, learner: Programs, shape: ModelConfig) -> Gallery | None:
  """Returns the pictures of a task's problems; None if they show none."""
  rows, prompts = room_in_rows(config, shape), room_in_prompts(config, shape)
  if rows is None:
    return None
  if task.tokenizer.image_id != shape.vision.image_token:
    ids = f"image token {task.tokenizer.image_id} in the tokenizer, expected {shape.vision.image_token}, as in the model's config"
    raise ValueError(f"config.model.path: found {ids}; use the tokenizer of the checkpoint")
  ids = lambda example: prompt_ids(example, task.tokenizer, shape.vision.pictures)
  mesh, features = learner.model.mesh, learner.features
  placed = features and (lambda params, patches: features(params, mesh_lib.place_rows(mesh, patches)))
  return Gallery(prompts, rows, prompt_ids=ids, features=placed, at_once=pictures_at_once(rows, mesh))


def make_grader(config: ConfigDict, terms: Sequence[WeightedReward], *, judgements: Path | None = None) -> Grader:
  """Opens the grader of a reward's terms, with the settings of `config.reward`.

  Args:
    config: Checked config.
    terms: Terms of the reward.
    judgements: Folder in which judgements of judges outlast the run; None for none.

  Raises:
    ValueError: If a reward function cannot be built, or a judge does not answer. One line.
  """
  section = config.reward
  limits = dict(timeout_s=section.timeout_s, max_chars=section.max_chars, memory_gb=section.worker_memory_gb)
  return Grader(terms, num_workers=section.workers, judgements=judgements, process=jax.process_index(), **limits)


def check_pictures(task: str, lengths: sizes.Lengths, config: ConfigDict) -> None:
  """Refuses sizes of pictures that problems exceed, or that no problem needs.

  Args:
    task: Name of the task.
    lengths: Lengths of its texts.
    config: Config whose sizes are set.

  Raises:
    ValueError: If one does not fit the problems. One line, with the fix.
  """
  most, values = max((count for _, count, _ in lengths.pictures), default=None), flatten(config)
  for path in sizes.IMAGE_SIZES:
    if most is None and values[path] is not None:
      raise ValueError(f"config.{path}: found {values[path]}, expected None, because no problem of task {task} shows a picture")
    if most is not None and path != "model.image_tokens" and values[path] < most:
      raise ValueError(f"config.{path}: found {values[path]}, expected at least {most}, the pictures of a problem of task {task}")


def check_privileged(lengths: sizes.Lengths, config: ConfigDict, teachers: Sequence[ModelConfig]) -> None:
  """Refuses prompts of a teacher that do not fit its rows or its positions.

  Args:
    lengths: Lengths of the task's texts.
    config: Config whose sizes are set.
    teachers: Shapes of the models that read them.

  Raises:
    ValueError: If one is too long, or there are too few rows. One line, with the fix.
  """
  if not lengths.privileged:
    return
  section, longest = config.teacher, max(lengths.privileged)
  needed = longest + config.rollout.max_new_tokens
  sequence = f"{needed} tokens, the longest prompt of teacher.privileged ({longest}) and a response"
  rooms = {"teacher": section} | ({"learner": config.learner} if section.gkd_coef else {})
  for name, room in rooms.items():
    if needed > room.row_tokens:
      raise ValueError(f"config.{name}.row_tokens: found {room.row_tokens}, expected at least {sequence}")
  for shape in teachers:
    if shape.max_positions is not None and needed > shape.max_positions:
      fix = "a shorter prompt, or problems with shorter columns"
      raise ValueError(f"config.teacher.privileged: found {sequence}, expected at most the model's {shape.max_positions}: {fix}")
  sequences = config.rollout.num_prompts * config.rollout.group_size // config.learner.updates_per_rollout
  for name, room in rooms.items():
    widest = longest if name == "teacher" else max(longest, *config.rollout.prompt_buckets)
    rows, most = sizes.most_rows_behind(config, widest, room.row_tokens), widest + config.rollout.max_new_tokens
    if max(room.row_buckets) < rows:
      need = f"{sequences} sequences of up to {most} tokens can need {rows} rows of {room.row_tokens}"
      raise ValueError(f"config.{name}.row_buckets: found {room.row_buckets}, expected a number of at least {rows}: {need}")


def check_lengths(task: str, lengths: sizes.Lengths, config: ConfigDict, *, max_positions: int | None = None) -> None:
  """Refuses prompts and demonstrations that exceed the declared shapes, before any training.

  Args:
    task: Name of the task.
    lengths: Lengths of its texts.
    config: Config whose sizes are set.
    max_positions: Number of positions of the model; None for any.

  Raises:
    ValueError: If one is too long. The message names the setting, the longest example's length and
      the fix.
  """
  buckets, new_tokens = config.rollout.prompt_buckets, config.rollout.max_new_tokens
  longest, widest = max([*lengths.prompts, *lengths.held_out], default=0), max(buckets)
  if longest > widest:
    raise ValueError(
      f"config.rollout.prompt_buckets={buckets}: task {task} has a prompt of {longest} tokens, expected at most {widest}; "
      f"add a bucket of at least {longest}, or have it chosen from the data: --config.rollout.prompt_buckets=None"
    )
  budget = widest + new_tokens
  if max_positions is not None and budget > max_positions:
    raise ValueError(
      f"config.rollout.max_new_tokens={new_tokens}: sequences may reach {budget} tokens, expected at most the model's {max_positions}; "
      f"lower it to {max(max_positions - widest, 0)}"
    )
  if (demonstrated := max(lengths.demonstrations, default=0)) > budget:
    raise ValueError(
      f"config.rollout.max_new_tokens={new_tokens}: a demonstration has {demonstrated} tokens with its prompt, expected at most {budget}; "
      f"raise it to at least {demonstrated - widest}"
    )
