"""Tests of the layout of a run's weights and cache; steps are tested in `test_cache`."""

import jax
import jax.numpy as jnp

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.models.cache import num_bytes, num_columns
from jaxrl_llm.models.decoding import serving_of

SPARSE, DENSE = preset("nano-moe", vocab_size=264), preset("nano", vocab_size=264)


def test_a_mixture_has_a_layout_of_its_own_if_its_devices_share_the_experts():
  learner, spread = mesh_lib.make_meshes(fsdp=4, sampler=4, sampler_expert=4)
  _, copied = mesh_lib.make_meshes(fsdp=4, sampler=4, sampler_tensor=2)
  assert serving_of(SPARSE, learner, layout=None) is not None and serving_of(DENSE, learner, layout=None) is None
  assert serving_of(SPARSE, spread, layout=None).rules["vocab"] == ("tensor", "expert", "fsdp")
  assert serving_of(SPARSE, copied, layout=None) is None


def test_a_layer_with_a_window_keeps_no_more_tokens_than_it_sees():
  """Prompts of 12 tokens, and responses of up to 4, and then 12; the window has 5."""
  model = make_model(preset("nano-window", vocab_size=264))

  def caches(params):
    cache, _ = model.prefill(params, jnp.zeros((2, 12), jnp.int32), jnp.ones((2, 12), bool), dtype="float32")
    first = model.grow(cache, 6, 4, dtype="float32", most=12)
    return first, model.grow(first, 6, 8, dtype="float32", most=12)

  first, last = jax.eval_shape(caches, jax.eval_shape(model.init, jax.random.key(0)))
  assert [num_columns(blocks) for blocks in first.blocks] == [5, 4]
  assert [num_columns(blocks) for blocks in last.blocks] == [5, 12]
  assert [prompt.v.shape[2] for prompt in last.prompts] == [5, 12]
  sizes = dict(num_prompts=2, prompt_tokens=12, num_rows=6, new_tokens=12, dtype="float32")
  assert num_bytes(model.config, **sizes) == sum(x.size * 4 for x in jax.tree.leaves(last))
  assert num_bytes(model.config, keeps_all=True, **sizes) == 2 * 2 * 2 * 8 * 4 * (2 * 12 + 6 * 12)
