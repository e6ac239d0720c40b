"""Tests of the layout of a run's weights while it decodes; steps are tested in `test_cache`."""

import jax

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import preset
from jaxrl_llm.models.decoding import serving_of

SPARSE, DENSE = preset("nano-moe", vocab_size=264), preset("nano", vocab_size=264)


def test_only_a_mixture_on_shared_devices_has_a_layout_of_its_own():
  learner = mesh_lib.make_mesh(fsdp=4, devices=jax.devices()[:4])
  sampler = mesh_lib.make_mesh(fsdp=4, devices=jax.devices()[4:])
  assert serving_of(SPARSE, learner, learner, layout=None) is not None
  assert serving_of(DENSE, learner, learner, layout=None) is None
  assert serving_of(SPARSE, learner, sampler, layout=None) is None
