"""An experiment assembled from its config: task, mesh, model, objective and compiled programs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray
from ml_collections import ConfigDict

from jaxrl_llm.advantages import estimators
from jaxrl_llm.advantages.estimators import Credit, Estimator, Evidence
from jaxrl_llm.config import entries, policy, sizes
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner import memory
from jaxrl_llm.learner.needs import fields_needed
from jaxrl_llm.learner.programs import Programs, make_programs
from jaxrl_llm.objectives.corrected import mismatch_weights
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rewards.at_random import random_terms
from jaxrl_llm.rewards.from_config import make_rewards
from jaxrl_llm.rewards.grader import Grader
from jaxrl_llm.rollouts.samplers import engine_columns, limit_of
from jaxrl_llm.run.setup.checks import check_devices, check_rewards, check_sizes, check_teacher_names, check_teachers
from jaxrl_llm.run.setup.data import load_measured, make_rules
from jaxrl_llm.run.setup.drawing import Drawing, by_engine, make_drawing
from jaxrl_llm.run.setup.teacher import Teacher, find_teachers
from jaxrl_llm.tasks import Task
from jaxrl_llm.tasks.privileged import PrivilegedFn, privileged_prompts
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
    estimator: Estimator of advantages.
    credit: Function from rewards and log-probabilities to advantages and value targets.
    mismatch_weights: Function by which a correction weighs tokens, if advantages depend on it; see
      `objectives.corrected`.
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
  estimator: Estimator
  credit: Callable[[Evidence], Credit]
  compare: Callable[[Evidence], Credit] | None
  learner: Programs
  drawing: Drawing
  mismatch_weights: Callable[..., Float[Array, "N R"]] | None = None
  teachers: Mapping[str, Teacher] = MappingProxyType({})
  privileged: PrivilegedFn | None = None

  @property
  def replies(self) -> str | None:
    """Pattern of what is read but not imitated in demonstrations; see `Environment`."""
    rules = self.drawing.rules
    return None if rules is None else rules.environment.replies


def kl_coef_in_loss(config: ConfigDict) -> float:
  """Returns the objective's `kl_coef`, or its default; 0 if it has none."""
  return entries.values_of("objective", config).get("kl_coef", 0.0)


def build_experiment(config: ConfigDict) -> Experiment:
  """Assembles an experiment; allocates nothing on the devices.

  Args:
    config: Checked config; see `config.check`. Sizes that are None are chosen here.

  Raises:
    ValueError: If there are too few devices, they do not divide a size, or a dataset is damaged.
      None of this can be checked before the devices are known.
  """
  mesh, sampler_mesh = mesh_lib.make_meshes(**config.mesh)
  check_devices(config, mesh, sampler_mesh)
  rules = make_rules(config)
  task, lengths, left_out = load_measured(config, replies=rules and rules.environment.replies)
  shape = policy.model_config(config, vocab_size=task.tokenizer.vocab_size)
  privileged = None if config.teacher.privileged is None else privileged_prompts(task, config.teacher.privileged)
  if privileged is not None:
    lengths = lengths._replace(privileged=[len(privileged(row)) for row in task.train])
  is_cpu = mesh_lib.platform_of(mesh) == "cpu"
  divisors = mesh_lib.num_row_shards(mesh), mesh.shape["context"]
  config = sizes.choose_sizes(config, lengths, sizes.Bounds(*divisors, shape.d_model, 16 if is_cpu else 128, shape.max_positions))
  check_sizes(config, task, lengths, shape)
  check_teacher_names(config, task)
  teachers = find_teachers(config)
  check_teachers(config, task, lengths, shape, teachers)
  taught = {name: teacher.shape for name, teacher in teachers.items()}
  objective = policy.make_objective(config)
  needs = fields_needed(config, objective)
  limit, columns = limit_of(config, sampler_mesh), engine_columns(config, sampler_mesh) if by_engine(config) else None
  sizes_of_run = dict(needs=needs, engine_columns=columns, teachers=taught)
  shape = memory.fitted(config, shape, mesh, sampler_mesh, objective, limit=None if is_cpu else limit, **sizes_of_run)
  learner = make_programs(config, mesh, shape, objective, needs=needs, teachers=taught)
  make_params = policy.first_params(config, learner.model, jax.tree.map(lambda x: x.sharding, learner.abstract_state.params))
  drawing = make_drawing(config, learner, sampler_mesh, task.tokenizer, rules=rules)
  terms = make_rewards(task, config)
  check_rewards(config, task.name, terms, needs=needs, has_replies=rules is not None)
  estimator, whiten = estimators.of_section(**config.advantage), config.advantage.whiten
  credit = estimators.make_credit(estimator, config.rollout.group_size, whiten=whiten)
  compare = estimators.make_credit(estimator, config.rollout.group_size) if whiten else credit
  weights = mismatch_weights(policy.corrections(config)) if "importance" in needs else None
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
    estimator=estimator,
    credit=credit,
    compare=compare if estimator.compares_groups else None,
    drawing=drawing,
    mismatch_weights=weights,
    teachers=teachers,
    privileged=privileged,
  )


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


