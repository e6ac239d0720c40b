"""Tests of the layout of a run's weights while it decodes; steps are tested in `test_cache`."""

import jax

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import preset
from jaxrl_llm.models.decoding import serving_of

SPARSE, DENSE = preset("nano-moe", vocab_size=264), preset("nano", vocab_size=264)


def test_only_a_mixture_has_a_layout_of_its_own():
  mesh = mesh_lib.make_mesh(fsdp=4, devices=jax.devices()[:4])
  assert serving_of(SPARSE, mesh, layout=None) is not None
  assert serving_of(DENSE, mesh, layout=None) is None


def test_a_sampler_with_its_own_devices_has_one_if_they_share_the_experts():
  _, spread = mesh_lib.make_meshes(fsdp=4, sampler=4, sampler_expert=4)
  _, copied = mesh_lib.make_meshes(fsdp=4, sampler=4, sampler_tensor=2)
  assert serving_of(SPARSE, spread, layout=None).rules["vocab"] == ("tensor", "expert", "fsdp")
  assert serving_of(SPARSE, copied, layout=None) is None
