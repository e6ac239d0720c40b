"""How weights come from the learner's devices to those that only sample."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxrl_llm.mesh import param_shardings, staging_mesh
from jaxrl_llm.models import lower_precision
from jaxrl_llm.train_step import combine, partition
from jaxrl_llm.types import Params


class SamplerWeights(NamedTuple):
  """Weights on the sampler's devices; each of the two trees has None in the place of the other's.

  Attributes:
    trained: those that change from step to step.
    frozen: the base under adapters, which moves once in a run.
    version: RL steps that they have behind them.
  """

  trained: Params
  frozen: Params
  version: int

  @property
  def params(self) -> Params:
    """All of them."""
    return combine(self.trained, self.frozen)


class WeightSync(NamedTuple):
  """What moves weights, and what arrives.

  Attributes:
    move: `(params, frozen, version) -> SamplerWeights`; where `frozen` is not None, those weights are there already and stay.
    arrived: the params as the sampler has them: shapes, dtypes and shardings.
  """

  move: Callable[[Params, Params | None, int], SamplerWeights]
  arrived: Params


def make_weight_sync(
  params: Params, logical_axes: PyTree, *, learner: Mesh, sampler: Mesh, dtype: str, trainable: PyTree | None = None
) -> WeightSync:
  """What moves weights from the learner's mesh to the sampler's, of other devices.

  A program of the learner's casts them to the sampler's dtype and lays them out as the sampler wants them, over the links between the
  learner's devices. What is left is one `jax.device_put` of plain copies: no more bytes than needed, and none through the host.

  Args:
    params: of the policy, abstract, with the learner's shardings.
    logical_axes: of the model.
    learner: mesh of the learner.
    sampler: mesh of the sampler.
    dtype: of the sampler.
    trainable: the params tree with True where a weight is trained; None is everywhere.

  Raises:
    ValueError: a weight that the sampler's mesh does not divide.

  Note:
    On its way a weight takes as much memory on each of the learner's devices as on one of the sampler's. Where the learner's devices are
    no multiple of those that share a copy of the weights, they keep the learner's layout, and `device_put` goes through the host.
  """
  lower, staging = partial(lower_precision, dtype=dtype), staging_mesh(learner, sampler)
  lowered = jax.eval_shape(lower, params)
  placed = param_shardings(sampler, logical_axes, lowered, fields={"tensor": "mesh.sampler_tensor"})
  staged = jax.tree.map(lambda x: x.sharding, params) if staging is learner else param_shardings(staging, logical_axes, lowered)

  def mover(staged: PyTree, placed: PyTree) -> Callable[[Params], Params]:
    if not jax.tree.leaves(placed):
      return lambda part: part
    stage = jax.jit(lower, out_shardings=staged)
    return lambda part: jax.device_put(stage(part), placed)

  trained_mover, frozen_mover = map(mover, partition(staged, trainable), partition(placed, trainable))

  def move(params: Params, frozen: Params | None, version: int) -> SamplerWeights:
    changed, unchanged = partition(params, trainable)
    moved = SamplerWeights(trained_mover(changed), frozen_mover(unchanged) if frozen is None else frozen, version)
    return jax.block_until_ready(moved)  # Whoever asks wants to sample with them, and the clock the time that it takes.

  arrived = jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), lowered, placed)
  return WeightSync(move, arrived)
