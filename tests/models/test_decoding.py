"""Tests of the layout of a run's weights while it decodes; steps are tested in `test_cache`."""

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import preset
from jaxrl_llm.models.decoding import serving_of

SPARSE, DENSE = preset("nano-moe", vocab_size=264), preset("nano", vocab_size=264)


def test_a_mixture_has_a_layout_of_its_own_if_its_devices_share_the_experts():
  learner, spread = mesh_lib.make_meshes(fsdp=4, sampler=4, sampler_expert=4)
  _, copied = mesh_lib.make_meshes(fsdp=4, sampler=4, sampler_tensor=2)
  assert serving_of(SPARSE, learner, layout=None) is not None and serving_of(DENSE, learner, layout=None) is None
  assert serving_of(SPARSE, spread, layout=None).rules["vocab"] == ("tensor", "expert", "fsdp")
  assert serving_of(SPARSE, copied, layout=None) is None
