"""Layouts of the weights for decoding: which axes, and what is refused."""

import jax
import pytest

from jaxrl_llm.devices import mesh as mesh_lib


@pytest.mark.parametrize(
  ("sizes", "num_experts", "expected"),
  [
    (dict(fsdp=8), 16, dict(data=1, fsdp=8, expert=1)),
    (dict(fsdp=4, expert=2), 16, dict(data=1, fsdp=4, expert=2)),
    (dict(fsdp=8), 4, dict(data=2, fsdp=4, expert=1)),  # More devices than experts.
    (dict(fsdp=4, expert=2), 2, dict(data=4, fsdp=1, expert=2)),
    (dict(data=2, fsdp=4), 6, dict(data=4, fsdp=2, expert=1)),  # 4 does not divide 6.
    (dict(fsdp=2, expert=2, tensor=2), 8, dict(data=1, fsdp=2, expert=2, tensor=2)),
  ],
)
def test_experts_are_spread_as_far_as_they_divide(sizes, num_experts, expected):
  mesh = mesh_lib.make_mesh(**sizes)
  layout = mesh_lib.choose_layout(mesh, "spread", num_experts=num_experts, vocab_size=264)
  assert {axis: size for axis, size in layout.mesh.shape.items() if axis in expected} == expected
  # Rows stay where they are.
  assert layout.mesh.devices.ravel().tolist() == mesh.devices.ravel().tolist()
  assert layout.rules["expert"] == ("expert", "fsdp") and layout.rules["embed"] is None


@pytest.mark.parametrize(("vocab_size", "axes"), [(264, ("tensor", "expert", "fsdp")), (260, ("tensor", "expert")), (263, None)])
def test_the_vocabulary_is_spread_as_far_as_it_divides(vocab_size, axes):
  layout = mesh_lib.choose_layout(mesh_lib.make_mesh(fsdp=4, expert=2), "spread", num_experts=8, vocab_size=vocab_size)
  assert layout.rules["vocab"] == (("tensor",) if axes is None else axes)


def test_a_mixture_is_spread_and_a_dense_model_is_not():
  sharded, whole = mesh_lib.make_mesh(fsdp=8), mesh_lib.make_mesh(data=8)
  sizes = dict(vocab_size=264)
  assert mesh_lib.choose_layout(sharded, None, num_experts=8, **sizes) is not None
  assert mesh_lib.choose_layout(sharded, "learner", num_experts=8, **sizes) is None
  assert mesh_lib.choose_layout(sharded, None, num_experts=None, **sizes) is None
  assert mesh_lib.choose_layout(whole, None, num_experts=8, **sizes) is None


def test_experts_of_a_sampler_with_its_own_devices_lie_by_the_same_rules():
  learner, sampler = mesh_lib.make_meshes(fsdp=4, sampler=4, sampler_expert=2, sampler_tensor=2)
  layout = mesh_lib.choose_layout(sampler, None, num_experts=8, vocab_size=264)
  assert layout.mesh == sampler
  assert dict(layout.rules) == dict(mesh_lib.choose_layout(learner, None, num_experts=8, vocab_size=264).rules)
  shared = mesh_lib.choose_layout(mesh_lib.make_mesh(expert=8), None, num_experts=8, vocab_size=264)
  assert dict(layout.rules) == dict(shared.rules) and shared.mesh.shape["expert"] == 8


def test_a_layout_without_effect_is_refused():
  sizes = dict(vocab_size=264)
  with pytest.raises(ValueError, match="^config.serving.layout: found 'spread', expected None, because the model has no experts$"):
    mesh_lib.choose_layout(mesh_lib.make_mesh(fsdp=8), "spread", num_experts=None, **sizes)
  with pytest.raises(ValueError, match="^config.serving.layout: .* because mesh.fsdp and mesh.expert are 1"):
    mesh_lib.choose_layout(mesh_lib.make_mesh(data=8), "spread", num_experts=8, **sizes)
  with pytest.raises(ValueError, match="^mesh.expert=8 does not divide the model's 4 experts; choose a divisor of 4$"):
    mesh_lib.choose_layout(mesh_lib.make_mesh(expert=8), "spread", num_experts=4, **sizes)


def test_weights_lie_by_the_rules_of_the_layout():
  mesh = mesh_lib.make_mesh(fsdp=4, expert=2)
  layout = mesh_lib.choose_layout(mesh, "spread", num_experts=16, vocab_size=264)
  axes = {"experts": ("layers", "expert", "embed", "mlp"), "q": ("layers", "embed", "heads", "head_dim"), "head": ("embed", "vocab")}
  shapes = {"experts": (2, 16, 8, 4), "q": (2, 8, 4, 2), "head": (8, 264)}
  shapes = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
  held = mesh_lib.param_shardings(layout.mesh, axes, shapes, rules=layout.rules)
  assert {name: held[name].shard_shape(x.shape) for name, x in shapes.items()} == {
    "experts": (2, 2, 8, 4), "q": (2, 8, 4, 2), "head": (8, 33)
  }  # fmt: skip
  with pytest.raises(ValueError, match="mesh.expert x mesh.fsdp=8 does not divide axis 'expert' of experts, which has size 12"):
    mesh_lib.param_shardings(layout.mesh, axes, shapes | {"experts": jax.ShapeDtypeStruct((2, 12, 8, 4), "float32")}, rules=layout.rules)
