"""The programs of a teacher, which add to the advantages of sampled tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.devices.compilation import compiled_for
from jaxrl_llm.learner.needs import needed_by_logprobs
from jaxrl_llm.learner.train_step import map_micro_batches, policy_outputs
from jaxrl_llm.models import Model
from jaxrl_llm.objectives.distillation import teacher_advantages
from jaxrl_llm.segments import reduce_metrics
from jaxrl_llm.types import Metrics, Params, TrainBatch


class TeacherPrograms(NamedTuple):
  """A teacher on the learner's mesh.

  Attributes:
    model: Pure functions of the teacher's params.
    abstract_params: Shapes, dtypes and shardings of the params.
    score: `(params, rows) -> Scores` of rows of a batch, or of those that only the teacher reads.
  """

  model: Model
  abstract_params: Params
  score: Callable[[Params, TrainBatch], "Scores"]


class Scores(NamedTuple):
  """What a teacher says of each counted token.

  Attributes:
    logprobs: Log-probability, in nats.
    entropy: Entropy of the teacher at the token, in nats.
  """

  logprobs: Float[Array, "B T"]
  entropy: Float[Array, "B T"]


Advise = Callable[[Scores, TrainBatch], tuple[Float[Array, "B T"], Metrics]]
"""Function that adds the advantages of scored tokens to those of a batch; see `make_advise`."""


def make_teacher_programs(
  mesh: Mesh,
  model: Model,
  params: Params,
  batches: Sequence[TrainBatch],
  *,
  temperature: float,
  rows_at_once: int | None,
) -> TeacherPrograms:
  """Makes the programs of a teacher; compiles nothing yet.

  Args:
    mesh: Mesh of the learner.
    model: Model of the teacher.
    params: Params of the teacher, as shapes, dtypes and shardings.
    batches: Abstract batches of the rows that it reads, one for each number of rows.
    temperature: Temperature of the teacher's distribution.
    rows_at_once: Number of rows of a micro-batch over all devices; None for all rows of a batch.
  """
  outputs_of = partial(policy_outputs, model.logprobs, make_filter(temperature=temperature), learns_entropy=False)

  def scores(params: Params, batch: TrainBatch) -> Scores:
    outputs = outputs_of(params, batch)
    return Scores(outputs.logprobs, outputs.entropy)

  def score(params: Params, batch: TrainBatch) -> Scores:
    return map_micro_batches(partial(scores, params), batch, rows_at_once)

  jitted = jax.jit(score, out_shardings=mesh_lib.token_sharding(mesh))
  return TeacherPrograms(model, params, compiled_for(jitted, [(params, read_by_teacher(batch)) for batch in batches]))


def make_advise(mesh: Mesh, batches: Sequence[TrainBatch], *, coef: float, advice: str) -> Advise:
  """Makes the program that adds the advantages of scored tokens to those of a batch.

  Args:
    mesh: Mesh of the learner.
    batches: Abstract batches of the learner, one for each number of rows.
    coef: Strength of the rule.
    advice: Key of `distillation.ADVICE`.
  """

  def advise(scores: Scores, batch: TrainBatch) -> tuple[Array, Metrics]:
    further, metrics = teacher_advantages(batch, scores.logprobs, scores.entropy, coef=coef, advice=advice)
    return batch.advantages + further, reduce_metrics(metrics, batch.mask, batch.mask)

  jitted = jax.jit(advise, out_shardings=(mesh_lib.token_sharding(mesh), mesh_lib.replicated(mesh)))
  return compiled_for(jitted, [(Scores(batch.mask, batch.mask), read_by_teacher(batch)) for batch in batches])


def read_by_teacher(batch: TrainBatch) -> TrainBatch:
  """Keeps the arrays that a teacher reads; it takes its live routes."""
  return needed_by_logprobs(batch)._replace(routing=None)


def abstract_params(mesh: Mesh, model: Model) -> Params:
  """Returns a model's params as shapes, dtypes and shardings.

  Raises:
    ValueError: If the mesh does not divide a weight.
  """
  params = jax.eval_shape(model.init, jax.random.key(0))
  shardings = mesh_lib.param_shardings(mesh, model.logical_axes, params)
  return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params, shardings)
