"""Weights on their way from the learner's devices to the sampler's: what arrives, where, and over which path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import mesh as mesh_lib
from jaxrl_llm.models import Lora, make_model, preset, trainable
from jaxrl_llm.weight_sync import make_weight_sync

NANO = preset("nano", vocab_size=264)


def synced(meshes, *, dtype, shape=NANO):
  """Weights on the learner's mesh, whether each is trained, and what moves them."""
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


@pytest.mark.parametrize("meshes", MESHES, ids=str)
def test_what_arrives_is_what_left_in_the_samplers_dtype(meshes):
  params, sync, sampler = synced(meshes, dtype="bfloat16")
  arrived = sync.move(params, None, 3)
  assert arrived.version == 3
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x.astype(y.dtype)), np.asarray(y)), params, arrived.params)
  assert arrived.params["layers"]["mlp"]["gate"].dtype == jnp.bfloat16
  assert arrived.params["final_norm"]["scale"].dtype == jnp.float32  # Norms compute in float32.
  of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
  assert of(arrived.params) == of(sync.arrived)
  assert {x.sharding.mesh for x in jax.tree.leaves(arrived.params)} == {sampler}


@pytest.mark.parametrize("meshes", MESHES, ids=str)
def test_every_piece_that_a_device_of_the_sampler_wants_lies_whole_on_one_of_the_learners(meshes, monkeypatch):
  """`jax.device_put` then copies it from device to device; any other goes through the memory of the host."""
  params, sync, _ = synced(meshes, dtype="float32")
  calls, device_put = [], jax.device_put
  monkeypatch.setattr(jax, "device_put", lambda *args: (calls.append(args), device_put(*args))[1])
  sync.move(params, None, 0)
  (staged, placed), = calls  # One transfer for all weights.
  for x, sharding in zip(jax.tree.leaves(staged), jax.tree.leaves(placed), strict=True):
    pieces = lambda s, shape=x.shape: {str(piece) for piece in s.devices_indices_map(shape).values()}
    assert pieces(sharding) <= pieces(x.sharding)


def test_a_layout_that_the_learner_cannot_have_still_arrives(monkeypatch):
  """Five devices cannot hold two halves each whole: here the host helps."""
  monkeypatch.setattr(jax, "device_count", lambda: 7)
  params, sync, _ = synced({"sampler": 2, "sampler_tensor": 2}, dtype="float32")
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), params, sync.move(params, None, 0).params)


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
