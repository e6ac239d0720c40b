"""The transfer of weights from the learner's devices to the sampler's, and its checks."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import Experts, Lora, make_model, preset, trainable
from jaxrl_llm.models.checksums import checksum, double_checksum
from jaxrl_llm.rollouts.weight_sync import SamplerWeights, WeightSyncError, check_version, make_weight_sync
from jaxrl_llm.run.steps import ahead, sample
from tests.marks import few
from tests.runs import run_here, tiny_config

NANO = preset("nano", vocab_size=264)
SPARSE = NANO._replace(num_layers=3, experts=Experts(8, 2, 32, layers=(1, 2)))


def synced(meshes, *, dtype, shape=NANO):
  """Returns weights on the learner's mesh, their weight sync and the sampler's mesh."""
  learner, sampler = mesh_lib.make_meshes(**meshes)
  model = make_model(shape)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  rng = np.random.default_rng(0)
  shardings = mesh_lib.param_shardings(learner, model.logical_axes, shapes)
  params = jax.tree.map(lambda x, s: jax.device_put(rng.standard_normal(x.shape).astype(x.dtype), s), shapes, shardings)
  trained = trainable(shape, model.logical_axes)
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
  return params, make_weight_sync(abstract, model.logical_axes, learner=learner, sampler=sampler, dtype=dtype, trainable=trained), sampler


MESHES = [
  {"fsdp": 2, "sampler": 4, "sampler_tensor": 2},
  {"data": 1, "fsdp": 2, "tensor": 2, "sampler": 4},
  {"sampler": 2, "sampler_tensor": 2},
  {"sampler": 7},
  {"sampler": 6, "sampler_tensor": 2, "fsdp": 2},
]
SPREAD = [
  {"fsdp": 4, "sampler": 4, "sampler_expert": 4},
  {"data": 1, "fsdp": 2, "expert": 2, "sampler": 4, "sampler_expert": 2, "sampler_tensor": 2},
  {"fsdp": 2, "tensor": 2, "sampler": 4, "sampler_expert": 2},
  {"data": 3, "tensor": 2, "sampler": 2, "sampler_expert": 2},
]
CASES = pytest.mark.parametrize(
  ("meshes", "shape"),
  few([*((x, NANO) for x in MESHES), *((x, SPARSE) for x in SPREAD)], 0, len(MESHES)),
  ids=lambda x: str(x) if isinstance(x, dict) else "sparse" if x.experts else "dense",
)


@CASES
def test_weights_arrive_unchanged_in_the_samplers_dtype(meshes, shape):
  params, sync, sampler = synced(meshes, dtype="bfloat16", shape=shape)
  arrived = sync.move(params, None, 3)
  assert arrived.version == 3
  chex.assert_trees_all_equal(jax.tree.map(lambda x, y: x.astype(y.dtype), params, arrived.params), arrived.params)
  assert arrived.params["layers"]["mlp"]["gate"].dtype == jnp.bfloat16
  assert arrived.params["final_norm"]["scale"].dtype == jnp.float32  # Norms compute in float32.
  of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
  assert of(arrived.params) == of(sync.arrived)
  assert {x.sharding.mesh for x in jax.tree.leaves(arrived.params)} == {sampler}


@CASES
def test_every_piece_of_a_sampler_device_is_whole_on_one_learner_device(meshes, shape, monkeypatch):
  """`jax.device_put` copies such pieces from device to device, all others through the host."""
  params, sync, _ = synced(meshes, dtype="float32", shape=shape)
  calls, device_put = [], jax.device_put
  monkeypatch.setattr(jax, "device_put", lambda *args: (calls.append(args), device_put(*args))[1])
  sync.move(params, None, 0)
  (staged, placed), = calls  # One transfer for all weights.
  for x, sharding in zip(jax.tree.leaves(staged), jax.tree.leaves(placed), strict=True):
    pieces = lambda s, shape=x.shape: {str(piece) for piece in s.devices_indices_map(shape).values()}
    assert pieces(sharding) <= pieces(x.sharding)


def test_both_sums_are_the_same_for_every_layout():
  x = jax.random.normal(jax.random.key(0), (8, 6, 4)).astype(jnp.bfloat16)
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "tensor"), "fsdp")))
  own, other, swapped = (np.asarray(jax.jit(double_checksum)(y)) for y in (x, spread, x[::-1]))
  np.testing.assert_array_equal(own, other)
  assert own[0] == checksum(x).bits and own[0] != own[1] and (own != swapped).all()


@pytest.mark.slow
def test_a_layout_that_the_learner_cannot_have_still_arrives(monkeypatch):
  """Five devices cannot hold two whole halves each: the transfer goes through the host."""
  monkeypatch.setattr(jax, "device_count", lambda: 7)
  params, sync, _ = synced({"sampler": 2, "sampler_tensor": 2}, dtype="float32")
  chex.assert_trees_all_equal(params, sync.move(params, None, 0).params)


@pytest.mark.slow
def test_under_adapters_the_base_moves_once():
  shape = NANO._replace(lora=Lora(rank=2, alpha=4.0))
  params, sync, _ = synced({"sampler": 2}, dtype="bfloat16", shape=shape)
  first = sync.move(params, None, 0)
  second = sync.move(jax.tree.map(lambda x: x + 1, params), first.frozen, 1)
  attention = second.params["layers"]["attention"]
  assert attention["q"] is first.params["layers"]["attention"]["q"]
  moved = (params["layers"]["attention"]["q_lora_a"] + 1).astype("bfloat16")
  np.testing.assert_array_equal(np.asarray(attention["q_lora_a"]), np.asarray(moved))


def test_a_mesh_that_does_not_divide_a_weight_names_the_samplers_setting():
  with pytest.raises(ValueError, match="mesh.sampler_tensor=4 does not divide axis 'kv_heads' of layers/attention/k, .* size 2"):
    synced({"sampler": 4, "sampler_tensor": 4}, dtype="float32")
  with pytest.raises(ValueError, match="mesh.sampler_expert=3 does not divide axis 'expert' of sparse_layers/mlp/down, .* size 8"):
    synced({"sampler": 3, "sampler_expert": 3}, dtype="float32", shape=SPARSE)


@pytest.mark.parametrize("meshes", [{}, {"fsdp": 2}, {"fsdp": 4, "tensor": 2}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checksum_is_the_same_for_every_layout(meshes, dtype, rng):
  mesh = mesh_lib.make_meshes(**meshes)[0]
  x = rng.standard_normal((8, 6)).astype(dtype)
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp"), "tensor"))
  computed = jax.jit(checksum)(jax.device_put(x, sharding))
  place = np.arange(x.size, dtype=np.uint64)
  factor = place * 0x9E3779B1 % 2**32
  factor = (factor ^ (factor >> np.uint64(15))) * 0x85EBCA77 % 2**32 | 1
  bits = x.ravel().view("uint16" if dtype == "bfloat16" else "uint32").astype(np.uint64)
  assert int(computed.bits) == int(np.sum(factor * bits % 2**32) % 2**32) and int(computed.nonfinite) == 0


def test_swapped_pieces_change_the_checksum(rng):
  x = rng.standard_normal((4, 64)).astype(np.float32)
  assert len({int(checksum(jnp.asarray(x[list(order)])).bits) for order in ((0, 1, 2, 3), (1, 0, 2, 3), (2, 3, 0, 1), (0, 3, 2, 1))}) == 4


def tampered(monkeypatch, change):
  """Replaces `jax.device_put` by one that transfers `change(name, weight)`."""
  device_put = jax.device_put

  def put(staged, placed):
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return device_put(jax.tree_util.tree_map_with_path(lambda path, x: change(name(path), x), staged), placed)

  monkeypatch.setattr(jax, "device_put", put)


def test_a_poisoned_weight_is_refused_by_name(monkeypatch):
  params, sync, _ = synced({"sampler": 4}, dtype="bfloat16")
  tampered(monkeypatch, lambda name, x: x.at[0, 0, 0].add(0.5) if name == "layers/mlp/gate" else x)
  with pytest.raises(WeightSyncError, match=r"^layers/mlp/gate: the learner sent \w{8}, the sampler holds \w{8}; 1 of \d+ weights"):
    sync.move(params, None, 1)


@pytest.mark.parametrize("change", [lambda x: x.astype("float16"), lambda x: x[..., :1]], ids=["dtype", "shape"])
def test_weights_of_another_model_are_refused_before_they_move(monkeypatch, change):
  params, sync, _ = synced({"sampler": 4}, dtype="bfloat16")
  monkeypatch.setattr(jax, "device_put", None)
  with pytest.raises(WeightSyncError, match="weights to send, and those that the sampler was made for"):
    sync.move(params | {"final_norm": jax.tree.map(change, params["final_norm"])}, None, 1)


def test_a_transfer_that_leaves_one_weight_stale_is_refused(monkeypatch):
  params, sync, _ = synced({"fsdp": 2, "sampler": 4, "sampler_tensor": 2}, dtype="float32")
  old = sync.move(params, None, 0).params["layers"]["attention"]["q"]
  tampered(monkeypatch, lambda name, x: np.asarray(old) if name == "layers/attention/q" else x)
  sync.move(params, None, 0)  # No weight has changed yet, so the old one is correct.
  with pytest.raises(WeightSyncError, match="^layers/attention/q: the learner sent"):
    sync.move(jax.tree.map(lambda x: x * 1.01, params), None, 1)


def test_weights_that_are_not_finite_are_refused():
  params, sync, _ = synced({"sampler": 2}, dtype="bfloat16")
  params["embedding"] = params["embedding"].at[0, :3].set(jnp.nan)
  with pytest.raises(WeightSyncError, match="^embedding: 3 numbers are not finite; 1 of"):
    sync.move(params, None, 1)


@pytest.mark.parametrize(("version", "step", "staleness"), [(3, 3, 0), (3, 3, 1), (3, 4, 1)])
def test_versions_within_the_staleness_are_accepted(version, step, staleness):
  check_version(SamplerWeights({}, {}, version), step, staleness=staleness)


@pytest.mark.parametrize(("version", "step", "staleness"), [(3, 4, 0), (3, 5, 1), (4, 3, 0), (4, 3, 1)])
def test_a_stale_version_is_refused(version, step, staleness):
  with pytest.raises(WeightSyncError, match=f"the weights after {version} RL steps, expected those after"):
    check_version(SamplerWeights({}, {}, version), step, staleness=staleness)
  with pytest.raises(WeightSyncError, match="no weights yet"):
    check_version(None, step, staleness=staleness)


@pytest.mark.slow
def test_a_run_checks_the_version_before_it_draws(tmp_path, monkeypatch):
  """A forgotten transfer: without the check the run would silently learn from older weights."""
  move = sample.move_weights
  for module in (ahead, sample):
    monkeypatch.setattr(module, "move_weights", lambda run: move(run) if run.record.rl_steps == 0 else None)
  config = tiny_config(overrides={"mesh.sampler": 1, "num_steps": 2, "eval.every": 2, "warm_start.num_steps": 0})
  with pytest.raises(WeightSyncError, match="the weights after 0 RL steps, expected those after 1"):
    run_here(config, tmp_path, devices=2)
