"""The programs of a frozen teacher, which add to the advantages of sampled tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.devices.compiling import compiled_for
from jaxrl_llm.learner.needs import needed_by_logprobs
from jaxrl_llm.learner.train_step import map_micro_batches, policy_outputs
from jaxrl_llm.models import Model, ModelConfig, make_model
from jaxrl_llm.objectives.distillation import teacher_advantages
from jaxrl_llm.sampler import make_filter
from jaxrl_llm.segments import reduce_metrics
from jaxrl_llm.types import Metrics, Params, TrainBatch


class TeacherPrograms(NamedTuple):
  """A frozen teacher on the learner's mesh.

  Attributes:
    model: Pure functions of the teacher's params.
    abstract_params: Shapes, dtypes and shardings of the params.
    advise: `(params, batch) -> (advantages [B T], metrics)`, those of the batch with the teacher's
      added; see `distillation.teacher_advantages`.
  """

  model: Model
  abstract_params: Params
  advise: Callable[[Params, TrainBatch], tuple[Float[Array, "B T"], Metrics]]


def make_teacher_programs(
  mesh: Mesh, shape: ModelConfig, batches: Sequence[TrainBatch], *, coef: float, temperature: float, rows_at_once: int | None
) -> TeacherPrograms:
  """Makes the programs of a teacher; compiles nothing yet.

  Args:
    mesh: Mesh of the learner.
    shape: Shape of the teacher.
    batches: Abstract batches, one for each number of rows.
    coef: Advantage per nat.
    temperature: Temperature of the teacher's distribution.
    rows_at_once: Number of rows of a micro-batch over all devices; None for all rows of a batch.

  Raises:
    ValueError: If the mesh does not divide a weight.
  """
  model = make_model(shape, mesh=mesh)
  params = abstract_params(mesh, model)
  outputs_of = partial(policy_outputs, model.logprobs, make_filter(temperature=temperature), learns_entropy=False)

  def scores(params: Params, batch: TrainBatch) -> tuple[Array, Array]:
    outputs = outputs_of(params, batch)
    return outputs.logprobs, outputs.entropy

  def advise(params: Params, batch: TrainBatch) -> tuple[Array, Metrics]:
    logprobs, entropy = map_micro_batches(partial(scores, params), batch, rows_at_once)
    further, metrics = teacher_advantages(batch, logprobs, entropy, coef=coef)
    return batch.advantages + further, reduce_metrics(metrics, batch.mask, batch.mask)

  jitted = jax.jit(advise, out_shardings=(mesh_lib.token_sharding(mesh), mesh_lib.replicated(mesh)))
  return TeacherPrograms(model, params, compiled_for(jitted, [(params, read_by_teacher(batch)) for batch in batches]))


def read_by_teacher(batch: TrainBatch) -> TrainBatch:
  """Keeps the arrays that a teacher reads; it takes its live routes."""
  return needed_by_logprobs(batch)._replace(routing=None)


def abstract_params(mesh: Mesh, model: Model) -> Params:
  """Returns a model's params as shapes, dtypes and shardings."""
  params = jax.eval_shape(model.init, jax.random.key(0))
  shardings = mesh_lib.param_shardings(mesh, model.logical_axes, params)
  return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params, shardings)
