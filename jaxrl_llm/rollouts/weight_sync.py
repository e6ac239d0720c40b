"""Verified transfer of weights from the learner's devices to the sampler's.

Both sides compute the checksum of every weight (see `checksum`). No token is drawn unless both sums
agree.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import chex
import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from jaxrl_llm.devices.mesh import SAMPLER_FIELDS, param_shardings, replicated, staging_mesh
from jaxrl_llm.models import lower_precision
from jaxrl_llm.models.checksums import Checksum, checksums
from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.types import Params


class WeightSyncError(RuntimeError):
  """The sampler's devices do not hold the expected weights, so nothing may be drawn."""


class SamplerWeights(NamedTuple):
  """Weights on the sampler's devices, in two trees with None in place of each other's weights.

  Attributes:
    trained: Weights that change from step to step.
    frozen: Base weights under adapters, which are moved once per run.
    version: Number of RL steps that the weights were trained for.
  """

  trained: Params
  frozen: Params
  version: int

  @property
  def params(self) -> Params:
    """Both trees combined."""
    return combine(self.trained, self.frozen)


def compare(sent: Mapping[str, Checksum], arrived: Mapping[str, Checksum]) -> None:
  """Compares the learner's and the sampler's checksums on the host.

  Raises:
    WeightSyncError: If a weight is not as it was sent, or has non-finite numbers. The message names
      the first such weight, with both sums or the number of non-finite ones.
  """
  wrong = [name for name in sent if int(sent[name].bits) != int(arrived[name].bits)]
  if wrong:
    sums = f"the learner sent {int(sent[wrong[0]].bits):08x}, the sampler holds {int(arrived[wrong[0]].bits):08x}"
    raise WeightSyncError(
      f"{wrong[0]}: {sums}; {len(wrong)} of {len(sent)} weights differ from what was sent; nothing is drawn"
    )
  if broken := [name for name, x in arrived.items() if int(x.nonfinite)]:
    number = int(arrived[broken[0]].nonfinite)
    raise WeightSyncError(
      f"{broken[0]}: {number:,} numbers are not finite; {len(broken)} of {len(sent)} weights are affected; nothing "
      "is drawn"
    )


def check_version(held: SamplerWeights | None, step: int, *, staleness: int) -> None:
  """Refuses to draw with missing weights or with weights older than a step may learn from.

  Args:
    held: Weights that the sampler has; None if it has none yet.
    step: Number of RL steps before the one that learns from the rollouts.
    staleness: Number of steps by which weights may lag.

  Raises:
    WeightSyncError: If the sampler holds no weights, or another version.

  Example:
    >>> check_version(SamplerWeights({}, {}, version=3), 4, staleness=1)
    >>> check_version(SamplerWeights({}, {}, version=3), 4, staleness=0)
    Traceback (most recent call last):
    ...
    jaxrl_llm.rollouts.weight_sync.WeightSyncError: the sampler holds the weights after 3 ...
  """
  if held is None:
    raise WeightSyncError("the sampler holds no weights yet: nothing can be drawn")
  if not 0 <= step - held.version <= staleness:
    expected = f"{step}" if not staleness else f"{max(step - staleness, 0)} to {step}"
    raise WeightSyncError(
      f"the sampler holds the weights after {held.version} RL steps, expected those after {expected}; nothing is "
      "drawn"
    )


def put(tree: PyTree, shardings: PyTree) -> PyTree:
  """Copies arrays to other devices.

  In a run of several processes each copies what it holds, and nothing passes between them.

  Raises:
    WeightSyncError: If a device needs what no device of its process holds.
  """
  if jax.process_count() == 1:
    return jax.device_put(tree, shardings)

  def copied(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    held = {_places(shard.index, x.shape): shard.data for shard in x.addressable_shards}
    needed = sharding.addressable_devices_indices_map(x.shape)
    parts = [jax.device_put(held[_places(index, x.shape)], device) for device, index in needed.items()]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

  try:
    return jax.tree.map(copied, tree, shardings)
  except KeyError as error:
    fields = " and ".join(f"{field}=1" for field in SAMPLER_FIELDS.values())
    raise WeightSyncError(f"process {jax.process_index()}: its learner holds no copy of what its samplers need; set {fields}") from error


def _places(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


class WeightSync(NamedTuple):
  """A function that moves weights, and the weights that arrive.

  Attributes:
    move: `(params, frozen, version) -> SamplerWeights`. Frozen weights that are not None are
      already there and stay.
    arrived: Abstract params on the sampler: shapes, dtypes and shardings.
  """

  move: Callable[[Params, Params | None, int], SamplerWeights]
  arrived: Params


def make_weight_sync(
  params: Params, logical_axes: PyTree, *, learner: Mesh, sampler: Mesh, dtype: str, trainable: PyTree | None = None
) -> WeightSync:
  """Makes the function that moves weights from the learner's mesh to the sampler's.

  The meshes have different devices. A program on the learner's devices casts the weights to the
  sampler's dtype and lays them out as the sampler needs them, over the links between the learner's
  devices. The rest is one `jax.device_put` of plain copies, with no more bytes than needed and none
  through the host.

  Args:
    params: Abstract weights of the policy, with the learner's shardings.
    logical_axes: Logical axes of the model's weights.
    learner: The learner's mesh.
    sampler: The sampler's mesh.
    dtype: The sampler's dtype.
    trainable: Params tree with True where a weight is trained; None means all weights.

  Returns:
    The function, and the abstract params as they arrive.

  Raises:
    ValueError: If the sampler's mesh does not divide a weight.

  Note:
    `move` raises a WeightSyncError as `compare` does, and, before anything moves, for weights whose
    shapes or dtypes differ from those of `params`. In transit a weight takes as much memory on each
    learner device as on one sampler device. If the number of learner devices is no multiple of the
    sampler devices that share a copy of the weights (mesh.sampler_expert x mesh.sampler_tensor),
    the layout stays the learner's, and `device_put` goes through the host.
  """
  lower, staging = partial(lower_precision, dtype=dtype), staging_mesh(learner, sampler)
  lowered = jax.eval_shape(lower, params)
  placed = param_shardings(sampler, logical_axes, lowered, fields=SAMPLER_FIELDS)
  staged = jax.tree.map(lambda x: x.sharding, params) if staging is learner else param_shardings(staging, logical_axes, lowered)

  def mover(expected: Params, staged: PyTree, placed: PyTree) -> Callable[[Params], Params]:
    if not jax.tree.leaves(placed):
      return lambda part: part

    @partial(jax.jit, out_shardings=(staged, replicated(staging)))
    def stage(part: Params) -> tuple[Params, dict[str, Checksum]]:
      chex.assert_trees_all_equal_shapes_and_dtypes(
        part, expected, custom_message="weights to send, and those that the sampler was made for", exception_type=WeightSyncError
      )
      return (lowered := lower(part)), checksums(lowered)

    count = jax.jit(checksums, out_shardings=replicated(sampler))

    def moved(part: Params) -> Params:
      leaving, sent = stage(part)
      arrived = put(leaving, placed)
      compare(jax.device_get(sent), jax.device_get(count(arrived)))
      return arrived

    return moved

  trained_mover, frozen_mover = map(mover, *(partition(tree, trainable) for tree in (params, staged, placed)))

  def move(params: Params, frozen: Params | None, version: int) -> SamplerWeights:
    changed, unchanged = partition(params, trainable)
    moved = SamplerWeights(trained_mover(changed), frozen_mover(unchanged) if frozen is None else frozen, version)
    # Callers sample with them next, and the time of the transfer is measured.
    return jax.block_until_ready(moved)

  arrived = jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), lowered, placed)
  return WeightSync(move, arrived)
