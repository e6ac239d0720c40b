"""What only a run's devices, data and teachers can show to be wrong in its config."""

from collections.abc import Collection, Mapping, Sequence

from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm.config import sizes
from jaxrl_llm.config.check import row_problems, size_problems
from jaxrl_llm.config.fields import flatten
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.evaluation.held_out import check_metrics
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.run.setup.teacher import Teacher, check_self, check_teacher
from jaxrl_llm.tasks import Task
from jaxrl_llm.tasks.privileged import check_names


def check_devices(config: ConfigDict, mesh: Mesh, sampler_mesh: Mesh) -> None:
  """Refuses sizes that the devices do not divide.

  Args:
    config: Checked config.
    mesh: Devices of the learner.
    sampler_mesh: Devices of the sampler.

  Raises:
    ValueError: If they do not. One line for each size.
  """
  shards = map(mesh_lib.num_row_shards, (mesh, sampler_mesh))
  problems = list(row_problems(config, *shards, context=mesh.shape["context"]))
  if config.log.gradient_noise_every and mesh.size > 1:
    every, why = config.log.gradient_noise_every, "gradients of single responses are measured on one device"
    problems.append(f"config.log.gradient_noise_every: found {every} with {mesh.size} devices, expected 0: {why}")
  if problems:
    raise ValueError("\n".join(problems))


def check_sizes(config: ConfigDict, task: Task, lengths: sizes.Lengths, shape: ModelConfig) -> None:
  """Refuses sizes that do not fit each other, the texts of a task or the model.

  Args:
    config: Config whose sizes are set.
    task: Problems and demonstrations.
    lengths: Lengths of its texts.
    shape: Shape of the policy.

  Raises:
    ValueError: If one does not fit. One line for each, with the fix.
  """
  if (top_k := config.rollout.top_k) > shape.vocab_size:
    raise ValueError(f"config.rollout.top_k: found {top_k}, expected at most {shape.vocab_size}, the tokens of the vocabulary; 0 keeps all")
  if problems := list(size_problems(config, longest_demonstration=max(lengths.demonstrations, default=None))):
    raise ValueError("\n".join(problems))
  check_lengths(task.name, lengths, config, max_positions=shape.max_positions)
  check_pictures(task.name, lengths, config)


def check_teacher_names(config: ConfigDict, task: Task) -> None:
  """Refuses names of teachers that are not those of the problems, before any teacher is looked for.

  Raises:
    ValueError: If they are not. One line.
  """
  if config.teacher.paths is not None:
    check_names(task.train, config.teacher.column, [text.split("=", 1)[0] for text in config.teacher.paths])


def check_teachers(
  config: ConfigDict, task: Task, lengths: sizes.Lengths, shape: ModelConfig, teachers: Mapping[str, Teacher]
) -> None:
  """Refuses teachers that cannot read what the policy writes.

  Args:
    config: Config whose sizes are set.
    task: Problems and tokenizer.
    lengths: Lengths of its texts.
    shape: Shape of the policy.
    teachers: Teachers by name.

  Raises:
    ValueError: If one cannot. One line, with the fix.
  """
  for teacher in teachers.values():
    check_teacher(teacher, config, task.tokenizer, shape)
  teaches_itself = config.teacher.path == "self"
  if teaches_itself:
    check_self(config, shape)
  check_privileged(lengths, config, [shape] if teaches_itself else [teacher.shape for teacher in teachers.values()])


def check_rewards(config: ConfigDict, task: str, terms: Sequence[WeightedReward], *, needs: Collection[str], has_replies: bool) -> None:
  """Refuses metrics and estimators that the rewards of a task cannot feed.

  Args:
    config: Checked config.
    task: Name of the task.
    terms: Terms of the reward, the task's verifier first.
    needs: Fields that the losses read.
    has_replies: Whether an environment replies, and rewards turns.

  Raises:
    ValueError: If they cannot. One line.
  """
  check_metrics(config.eval.metrics, terms[0])
  if "step_rewards" in needs and not has_replies and not any(term.steps for term in terms):
    raise ValueError(
      f"config.advantage.estimator: found {config.advantage.estimator!r}, expected another one, because task {task} has no step verifier"
    )


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
    rows = sizes.most_rows(sizes.with_prompts_of(config, widest, room.row_tokens))
    most = widest + config.rollout.max_new_tokens
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
