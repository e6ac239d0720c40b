"""Tests of meshes and shardings: sizes, messages, slices, and places of params and batches."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AxisType, PartitionSpec

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner.train_step import init_state, make_optimizer
from jaxrl_llm.models import Lora, make_model, preset

NANO = preset("nano", vocab_size=264)


@pytest.mark.parametrize(
  ("num_devices", "sizes", "expected"),
  [
    (8, (-1, 1, 1, 1, 1), (8, 1, 1, 1, 1)),
    (8, (-1, 4, 1, 1, 1), (2, 4, 1, 1, 1)),
    (8, (2, -1, 1, 1, 2), (2, 2, 1, 1, 2)),
    (8, (1, 1, 1, 1, -1), (1, 1, 1, 1, 8)),
    (8, (2, 2, 1, 1, 2), (2, 2, 1, 1, 2)),
    (8, (-1, 8, 1, 1, 1), (1, 8, 1, 1, 1)),
    (1, (-1, 1, 1, 1, 1), (1, 1, 1, 1, 1)),
    (6, (3, 1, 1, 1, -1), (3, 1, 1, 1, 2)),
    (8, (-1, 2, 2, 1, 1), (2, 2, 2, 1, 1)),
    (8, (1, 2, 1, -1, 1), (1, 2, 1, 4, 1)),
  ],
)
def test_mesh_shape(num_devices, sizes, expected):
  assert mesh_lib.mesh_shape(num_devices, **dict(zip(mesh_lib.AXES, sizes, strict=True))) == expected


@pytest.mark.parametrize(
  ("num_devices", "sizes", "words"),
  [
    (8, (0, 1, 1, 1, 1), ["mesh.data: found 0, expected a positive size, or -1"]),
    (8, (1, 1, 1, 1, -2), ["mesh.tensor: found -2, expected a positive size, or -1"]),
    (8, (-1, -1, 1, 1, 1), ["mesh: found -1 on data and fsdp, expected it on at most one axis"]),
    (
      8,
      (2, 1, 1, 1, 1),
      ["mesh.data=2, mesh.fsdp=1, mesh.expert=1, mesh.context=1, mesh.tensor=1 needs 2 devices, found 8", "mesh.data=-1"],
    ),
    (8, (4, 4, 1, 1, 1), ["needs 16 devices, found 8; lower an axis", "device_count=16"]),
    (8, (-1, 3, 1, 1, 1), ["mesh.fsdp=3", "a multiple of 3 devices, found 8; choose sizes that divide 8, or simulate"]),
    (8, (-1, 16, 1, 1, 1), ["needs a multiple of 16 devices, found 8; lower an axis"]),
  ],
)
def test_sizes_that_do_not_fit_are_refused_with_a_fix(num_devices, sizes, words):
  with pytest.raises(ValueError) as error:
    mesh_lib.mesh_shape(num_devices, **dict(zip(mesh_lib.AXES, sizes, strict=True)))
  assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_the_last_devices_only_sample():
  learner, sampler = mesh_lib.make_meshes(fsdp=2, sampler=4, sampler_tensor=2)
  assert dict(learner.shape) == {"data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 1}
  assert dict(sampler.shape) == {"data": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
  assert [*learner.devices.flat, *sampler.devices.flat] == jax.devices()
  assert set(sampler.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(("sampler", "expert", "tensor", "copies"), [(4, 4, 1, 1), (4, 2, 2, 1), (6, 3, 1, 2), (4, 1, 4, 1)])
def test_a_sampler_has_an_axis_of_experts(sampler, expert, tensor, copies):
  sizes = dict(sampler=sampler, sampler_expert=expert, sampler_tensor=tensor)
  mesh = mesh_lib.make_meshes(**sizes)[1]
  assert dict(mesh.shape) == {"data": copies, "fsdp": 1, "expert": expert, "context": 1, "tensor": tensor}
  assert mesh_lib.num_row_shards(mesh) == copies * expert and [*mesh.devices.flat] == jax.devices()[-sampler:]


@pytest.mark.parametrize(("sizes", "expected"), [
  (dict(sampler=4, sampler_expert=4), (1, 1, 4, 1, 1)),
  (dict(sampler=4, sampler_expert=2, sampler_tensor=2), (1, 1, 2, 1, 2)),
  (dict(sampler=2, sampler_expert=2), (3, 1, 2, 1, 1)),
  (dict(sampler=4, sampler_tensor=2), (2, 1, 1, 1, 2)),
])  # fmt: skip
def test_weights_in_transit_are_arranged_as_the_samplers(sizes, expected):
  learner, sampler = mesh_lib.make_meshes(**sizes)
  staging = mesh_lib.staging_mesh(learner, sampler)
  assert tuple(staging.shape.values()) == expected and [*staging.devices.flat] == [*learner.devices.flat]


def test_a_learner_without_room_for_whole_copies_keeps_its_own_mesh():
  learner, sampler = mesh_lib.make_meshes(sampler=5, sampler_expert=5)
  assert mesh_lib.staging_mesh(learner, sampler) is learner


def test_without_devices_that_only_sample_there_is_one_mesh():
  learner, sampler = mesh_lib.make_meshes(fsdp=2)
  assert learner is sampler and learner.size == 8


@pytest.mark.parametrize(
  ("sizes", "words"),
  [
    ({"sampler": 8}, ["mesh.sampler: found 8 with 8 device(s), expected at most 7", "device_count=9"]),
    ({"sampler": 3, "fsdp": 2}, ["needs a multiple of 2 devices, found 5 (8 less mesh.sampler=3)", "device_count=5"]),
  ],
)
def test_a_learner_without_devices_is_refused(sizes, words):
  with pytest.raises(ValueError) as error:
    mesh_lib.make_meshes(**sizes)
  assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_chips_that_form_no_cuboid_keep_their_order(monkeypatch):
  """JAX knows no order for chips of a TPU that form no cuboid, and asserts."""

  def refuse(*args, **kwargs):
    raise AssertionError("no cuboid")

  monkeypatch.setattr(mesh_utils, "create_device_mesh", refuse)
  learner, sampler = mesh_lib.make_meshes(sampler=3)
  assert [*learner.devices.flat, *sampler.devices.flat] == jax.devices() and set(sampler.axis_types) == {AxisType.Auto}


def test_make_mesh_takes_all_devices_and_leaves_the_partitioning_to_the_compiler():
  mesh = mesh_lib.make_mesh(fsdp=2, tensor=2)
  assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2} and mesh.size == jax.device_count()
  assert set(mesh.axis_types) == {AxisType.Auto}
  assert mesh_lib.num_row_shards(mesh) == 4


def test_rules_name_every_axis_of_the_model_and_only_mesh_axes():
  sparse = preset("nano-moe", vocab_size=264)._replace(lora=Lora(rank=2, alpha=2.0))
  options = (NANO, NANO._replace(qkv_bias=True, tie_embeddings=False), sparse, preset("nano-vl", vocab_size=264))
  is_axes = lambda x: isinstance(x, tuple)
  names = {name for config in options for axes in jax.tree.leaves(make_model(config).logical_axes, is_leaf=is_axes) for name in axes}
  assert names == set(mesh_lib.RULES)
  assert set(mesh_lib.RULES.values()) <= {*mesh_lib.AXES, None}


def abstract_nano():
  model = make_model(NANO._replace(qkv_bias=True, tie_embeddings=False))
  return model, jax.eval_shape(model.init, jax.random.key(0))


def sharded_nano():
  """Returns a mesh, the shapes of the params, and their shardings over the mesh."""
  model, shapes = abstract_nano()
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  return mesh, shapes, mesh_lib.param_shardings(mesh, model.logical_axes, shapes)


def test_params_lie_where_the_rules_say():
  mesh, _, shardings = sharded_nano()
  attention, mlp = shardings["layers"]["attention"], shardings["layers"]["mlp"]
  expected = [
    (shardings["embedding"], ("tensor", "fsdp")),
    (shardings["head"], ("fsdp", "tensor")),
    (shardings["final_norm"]["scale"], ("fsdp",)),
    (attention["q"], (None, "fsdp", "tensor", None)),
    (attention["v"], (None, "fsdp", "tensor", None)),
    (attention["o"], (None, "tensor", None, "fsdp")),
    (attention["k_bias"], (None, "tensor", None)),
    (attention["q_norm"]["scale"], (None, None)),
    (mlp["gate"], (None, "fsdp", "tensor")),
    (mlp["down"], (None, "tensor", "fsdp")),
  ]
  for sharding, spec in expected:
    assert sharding.mesh == mesh and sharding.spec == PartitionSpec(*spec)


EXPERTS = ("layers", "expert", "mlp", "embed")
SHARED = ("tensor", "fsdp")


@pytest.mark.parametrize(
  ("fsdp", "axes", "shape", "spec"),
  [
    (32, EXPERTS, (48, 128, 768, 2048), (None, "expert", SHARED, None)),  # 64 lanes would be left.
    (16, EXPERTS, (48, 128, 768, 2048), (None, "expert", "tensor", "fsdp")),  # 128 are.
    (64, EXPERTS, (94, 128, 1536, 4096), (None, "expert", SHARED, None)),
    # 22 and a half rows would be left, and 12, which are one tile and a half; 32 does not divide
    # 100 experts.
    (32, EXPERTS, (48, 128, 720, 2048), (None, ("expert", "fsdp"), "tensor", None)),
    (32, EXPERTS, (48, 128, 384, 2048), (None, ("expert", "fsdp"), "tensor", None)),
    (32, EXPERTS, (48, 100, 384, 2048), (None, "expert", "tensor", "fsdp")),
    # 160 lanes are one tile and a quarter.
    (32, EXPERTS, (48, 128, 768, 5120), (None, "expert", SHARED, None)),
    (32, ("layers", "expert", "embed", "mlp"), (48, 128, 2048, 768), (None, "expert", "fsdp", "tensor")),
    (32, ("layers", "expert", "rank", "embed"), (48, 128, 32, 2048), (None, ("expert", "fsdp"), None, None)),
    # The compiler multiplies these by itself.
    (32, ("layers", "mlp", "embed"), (64, 27648, 2048), (None, "tensor", "fsdp")),
    (32, ("layers", "heads", "head_dim", "embed"), (48, 32, 128, 2048), (None, "tensor", None, "fsdp")),
    (32, ("layers", "embed"), (64, 2048), (None, "fsdp")),
    (16, ("vocab", "embed"), (151936, 1024), ("tensor", "fsdp")),
  ],
)
def test_fsdp_leaves_whole_tiles_of_the_last_axis_of_experts(fsdp, axes, shape, spec):
  mesh = mesh_lib.make_mesh(data=1, fsdp=fsdp, devices=chips(*[0] * fsdp))
  of = lambda **options: mesh_lib.param_shardings(mesh, {"x": axes}, {"x": jax.ShapeDtypeStruct(shape, "float32")}, **options)["x"].spec
  assert of() == PartitionSpec(*spec)
  decoding = mesh_lib.RULES | {"embed": None}
  assert of(rules=decoding) == PartitionSpec(*(decoding[axis] for axis in axes))


def test_an_axis_that_tensor_and_fsdp_split_is_divided_by_both():
  mesh = mesh_lib.make_mesh(data=1, fsdp=4, tensor=2)
  # Two experts are too few to be split.
  shapes = {size: jax.ShapeDtypeStruct((2, size, 256), "float32") for size in (64, 32)}
  held = mesh_lib.param_shardings(mesh, dict.fromkeys(shapes, EXPERTS[1:]), shapes)
  assert held[64].spec == PartitionSpec("expert", SHARED, None) and held[32].spec == PartitionSpec("expert", "tensor", "fsdp")


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ((1, 1, 1, 1, 8), "mesh.tensor=8 does not divide axis 'kv_heads' of layers/attention/k, which has size 2; choose a mesh.tensor that"),
    ((1, 2, 1, 1, 4), "mesh.tensor=4 does not divide axis 'kv_heads' of layers/attention/k, which has size 2; choose a mesh.tensor that"),
  ],
)
def test_a_dimension_that_does_not_divide_is_named(sizes, message):
  model, shapes = abstract_nano()
  mesh = mesh_lib.make_mesh(**dict(zip(mesh_lib.AXES, sizes, strict=True)))
  with pytest.raises(ValueError) as error:
    mesh_lib.param_shardings(mesh, model.logical_axes, shapes)
  assert str(error.value).startswith(message)


def test_moments_lie_where_their_parameters_lie_or_beside_them_on_the_hosts():
  mesh, shapes, params = sharded_nano()
  optimizer, _ = make_optimizer(learning_rate=1e-3, warmup_steps=2, weight_decay=0.1, b1=0.9, b2=0.95, max_grad_norm=1.0)
  state = jax.eval_shape(partial(init_state, optimizer=optimizer), shapes)
  there, here = (mesh_lib.state_shardings(mesh, optimizer, state, params, offload=x) for x in (True, False))
  assert jax.tree.structure(here) == jax.tree.structure(state)
  adam = [part for part in jax.tree.leaves(here.opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu")]
  assert len(adam) == 1 and adam[0].mu == params and adam[0].nu == params
  counters = [adam[0].count, here.step, here.skipped]
  assert all(sharding.is_fully_replicated for sharding in counters)
  kinds = jax.tree.map(lambda a, b, x: (a.memory_kind, b.memory_kind, x.ndim > 0, a.spec == b.spec), there, here, state)
  of_moments, of_others = {("pinned_host", "device", True, True)}, {("device", "device", False, True)}
  is_kind = lambda x: isinstance(x, tuple) and len(x) > 0 and isinstance(x[0], str)
  assert set(jax.tree.leaves(kinds.opt_state, is_leaf=is_kind)) == of_moments | of_others
  assert there.params == here.params == params


def test_axes_that_cannot_both_be_split_are_refused(monkeypatch):
  model, shapes = abstract_nano()
  monkeypatch.setitem(mesh_lib.RULES, "embed", "tensor")
  with pytest.raises(ValueError) as error:
    mesh_lib.param_shardings(mesh_lib.make_mesh(), model.logical_axes, shapes)
  assert str(error.value).startswith("embedding: its axes 'vocab' and 'embed' both lie over the mesh axis 'tensor', which can split only")


def test_a_name_without_a_rule_is_refused():
  message = "a/b: found axis 'hight' without a rule, expected one of embed, vocab, .*; add it to"
  with pytest.raises(ValueError, match=message):
    mesh_lib.param_shardings(mesh_lib.make_mesh(), {"a": {"b": ("hight",)}}, {"a": {"b": jnp.ones(4)}})


def test_an_axis_that_splits_nothing_is_refused():
  axes, shapes = {"scale": ("embed",)}, {"scale": jnp.ones(8)}
  with pytest.raises(ValueError, match="mesh.tensor=2: this axis splits neither rows nor any tensor of this model, expected 1"):
    mesh_lib.param_shardings(mesh_lib.make_mesh(tensor=2), axes, shapes)
  for axis in ("data", "fsdp", "expert", "context"):  # These split rows, or their slots.
    mesh_lib.param_shardings(mesh_lib.make_mesh(**({"data": -1, axis: 2} if axis != "data" else {})), axes, shapes)


def test_given_devices_are_used():
  mesh = mesh_lib.make_mesh(data=1, fsdp=2, context=2, devices=jax.devices()[4:])
  assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "expert": 1, "context": 2, "tensor": 1}
  assert [*mesh.devices.flat] == jax.devices()[4:]


@dataclasses.dataclass(frozen=True)
class Chip:
  """A device with the attributes that a mesh reads."""

  id: int
  slice_index: int
  platform: str = "cpu"
  device_kind: str = "cpu"
  process_index: int = 0


def chips(*slices):
  return [Chip(i, slice_index) for i, slice_index in enumerate(slices)]


def slices_of(mesh):
  return np.vectorize(lambda device: device.slice_index)(mesh.devices)


def test_only_data_crosses_slices():
  mesh = mesh_lib.make_mesh(data=4, fsdp=2, devices=chips(1, 0, 0, 1, 1, 0, 1, 0))
  indices = slices_of(mesh)[:, :, 0, 0, 0]
  assert indices.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
  learner, sampler = mesh_lib.make_meshes(fsdp=2, sampler=4, sampler_tensor=2, devices=chips(*[0] * 4, *[1] * 4))
  assert set(slices_of(learner).flat) == {0} and set(slices_of(sampler).flat) == {1}


@pytest.mark.parametrize(
  ("sizes", "slices", "words"),
  [
    ({"data": 1, "fsdp": 8}, [0] * 4 + [1] * 4, ["data axis of the learner has size 1, expected a multiple of its 2 slices", "mesh.data"]),
    ({"data": 3, "fsdp": 2}, [0, 0, 0, 1, 1, 1], ["has size 3, expected a multiple of its 2 slices", "choose a mesh.data that 2 divides"]),
    ({"slices": 2}, [0] * 8, ["mesh.slices: found 2, but the 8 device(s) make up 1 slice(s); expected 1, or None"]),
    ({"slices": 1}, [0] * 4 + [1] * 4, ["mesh.slices: found 1, but the 8 device(s) make up 2 slice(s)"]),
    ({"sampler": 2}, [0] * 4 + [1] * 4, ["the learner's 6 devices lie in slices of 4 and 2, expected equal parts", "mesh.sampler"]),
    ({"sampler": 4, "sampler_tensor": 3}, [0] * 8, ["mesh.sampler_tensor: found 3, expected a divisor of mesh.sampler=4"]),
    (
      {"sampler": 4, "sampler_tensor": 2, "sampler_expert": 3},
      [0] * 8,
      ["mesh.sampler_expert: found 3, expected a divisor of 2 (mesh.sampler / mesh.sampler_tensor)"],
    ),
    (
      {"sampler": 4, "sampler_expert": 4, "data": 4},
      [0, 0, 1, 1, 2, 2, 3, 3],
      ["the sampler has size 1, expected a multiple of its 2 slices", "choose mesh.sampler_expert and mesh.sampler_tensor that fit"],
    ),
  ],
)
def test_slices_that_do_not_fit_are_refused(sizes, slices, words):
  with pytest.raises(ValueError) as error:
    mesh_lib.make_meshes(**sizes, devices=chips(*slices))
  assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_each_process_has_as_many_devices_that_only_sample(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(ValueError, match="mesh.sampler: found 3 in a run of 2 processes, expected a multiple of 2: as many in each"):
    mesh_lib.make_meshes(sampler=3)
  devices = [dataclasses.replace(chip, process_index=i // 4) for i, chip in enumerate(chips(*[0] * 8))]
  learner, sampler = mesh_lib.make_meshes(sampler=4, sampler_expert=4, devices=devices)
  assert [chip.id for chip in learner.devices.flat] == [0, 1, 4, 5] and [chip.id for chip in sampler.devices.flat] == [2, 3, 6, 7]


def test_slots_are_split_over_context(rng):
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, context=2)
  batch = {"a": rng.standard_normal((8, 6, 3)).astype(np.float32), "b": np.arange(24).reshape(4, 6), "c": None}
  placed = mesh_lib.place_tokens(mesh, batch)
  chex.assert_trees_all_equal(placed, batch)
  assert {shard.data.shape for shard in placed["a"].addressable_shards} == {(2, 3, 3)}
  assert {shard.data.shape for shard in placed["b"].addressable_shards} == {(1, 3)}
  with pytest.raises(ValueError, match=r"mesh.context=2 does not divide the slots of x/y, which has shape \(4, 5\); choose .* divides 5"):
    mesh_lib.place_tokens(mesh, {"x": {"y": np.ones((4, 5))}})
  with pytest.raises(ValueError, match="mesh: 6 rows of b cannot be split"):
    mesh_lib.place_tokens(mesh, batch | {"b": np.ones((6, 2))})


@pytest.mark.parametrize("place", [mesh_lib.place_rows, mesh_lib.place_tokens])
def test_each_of_several_processes_places_its_own_pieces(place, monkeypatch, rng):
  """A process never passes a whole array to `jax.device_put`: it does not own all devices."""
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, context=2)
  batch = {"a": rng.standard_normal((8, 6)).astype(np.float32), "b": jnp.arange(24).reshape(4, 6)}
  expected = place(mesh, batch)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(jax, "device_put", None)
  placed = place(mesh, batch)
  chex.assert_trees_all_equal(placed, expected)
  assert jax.tree.map(lambda x: x.sharding, placed) == jax.tree.map(lambda x: x.sharding, expected)


def test_rows_are_split_over_data_and_fsdp_only(rng):
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  batch = {"a": rng.standard_normal((8, 3)).astype(np.float32), "b": np.arange(4)}
  placed = mesh_lib.place_rows(mesh, batch)
  chex.assert_trees_all_equal(placed, batch)
  assert {shard.data.shape for shard in placed["a"].addressable_shards} == {(2, 3)}
  assert {shard.data.shape for shard in placed["b"].addressable_shards} == {(1,)}
  assert {shard.data.shape for shard in jax.device_put(jnp.ones((2, 2)), mesh_lib.replicated(mesh)).addressable_shards} == {(2, 2)}
  with pytest.raises(ValueError, match="6 rows of b cannot be split over data x fsdp x expert = 4 devices; the nearest number that can: 8"):
    mesh_lib.place_rows(mesh, batch | {"b": np.arange(6)})
