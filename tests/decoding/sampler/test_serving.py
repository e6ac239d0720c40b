"""Decoding with another weight layout and with the kernel: tokens and log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.pod import hlo
from jaxrl_llm.decoding.sampler import make_sampler, seeded
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import Experts, Lora, make_model, moe, preset, ragged
from jaxrl_llm.models.decoding import serving_of
from jaxrl_llm.rollouts.weight_sync import make_weight_sync
from tests.marks import few

MIXTURE = preset("nano", vocab_size=264)._replace(num_layers=3, experts=Experts(16, 4, 32, layers=(1, 2)))
SAMPLING = dict(group_size=4, max_new_tokens=24, stop_ids=(1, 2, 3, 4), pad_id=0)


def sample(model, mesh, prompts, **settings):
  """Returns the params, and rollouts of seeded prompts with these settings."""
  shardings = mesh_lib.param_shardings(mesh, model.logical_axes, jax.eval_shape(model.init, jax.random.key(0)))
  params = jax.jit(model.init, out_shardings=shardings)(jax.random.key(0))
  placed = mesh_lib.place_rows(mesh, (prompts, np.ones(prompts.shape, bool)))
  return params, jax.jit(make_sampler(model, **(SAMPLING | settings)))(params, *placed, seeded(jax.random.key(3), 4 * len(prompts)))


def prompts(count):
  return np.random.default_rng(0).integers(5, 200, (count, 6)).astype(np.int32)


def assert_as_the_learner(model, params, rollouts):
  """Asserts that log-probabilities are those of a forward pass over whole rows."""
  tokens = jnp.concatenate([rollouts.prompts, rollouts.tokens], axis=1)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  logits = jax.jit(model.logits)(params, tokens, positions, jnp.ones_like(tokens))
  first = rollouts.prompts.shape[1] - 1
  expected = jnp.take_along_axis(jax.nn.log_softmax(logits[:, first:-1]), rollouts.tokens[..., None], axis=2)[..., 0]
  counted = np.asarray(rollouts.mask) > 0
  assert counted.sum() > 100
  np.testing.assert_allclose(np.asarray(rollouts.logprobs)[counted], np.asarray(expected)[counted], atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("sizes", "options", "few_tokens"),
  [
    (dict(fsdp=4, expert=2), {}, False),
    (dict(fsdp=8), dict(experts=Experts(4, 2, 32, layers=(0, 2))), True),
    (dict(fsdp=2, expert=2, tensor=2), dict(lora=Lora(4, 8.0)), True),
  ],
  ids=["sorted", "more devices than experts", "adapters"],
)
def test_another_layout_draws_the_same_tokens(sizes, options, few_tokens, monkeypatch):
  if not few_tokens:
    monkeypatch.setattr(moe, "_MASKED_TOKENS", 0)
  mesh, shape = mesh_lib.make_mesh(**sizes), MIXTURE._replace(**options)
  layout = serving_of(shape, mesh, layout="spread")
  settings = dict(slots=16, record_routing=True)
  learner_model = make_model(shape, mesh=mesh)
  params, expected = sample(learner_model, mesh, prompts(8), **settings)
  _, drawn = sample(make_model(shape, mesh=mesh, serving=layout), mesh, prompts(8), **settings)
  np.testing.assert_array_equal(drawn.tokens, expected.tokens)
  np.testing.assert_array_equal(drawn.routing, expected.routing)
  assert_as_the_learner(learner_model, params, drawn)


@pytest.fixture(scope="module")
def alone():
  """The model, its params and seeded rollouts on one device."""
  mesh = mesh_lib.make_mesh(devices=jax.devices()[:1])
  model = make_model(MIXTURE, mesh=mesh)
  return model, *sample(model, mesh, prompts(8), slots=16, record_routing=True)


@pytest.mark.parametrize(
  ("sizes", "few_tokens"),
  few([
    (dict(sampler_expert=4), True),
    pytest.param(dict(sampler_expert=2, sampler_tensor=2), True, marks=pytest.mark.exhaustive),
    pytest.param(dict(sampler_expert=2), False, marks=pytest.mark.exhaustive),
  ], rest="slow"),
  ids=["masked", "masked and tensor", "sorted and two copies"],
)
def test_a_sampler_with_its_own_devices_draws_the_same_tokens_and_moves_no_weights(sizes, few_tokens, alone, monkeypatch):
  if not few_tokens:
    monkeypatch.setattr(moe, "_MASKED_TOKENS", 0)
  learner, mesh = mesh_lib.make_meshes(data=1, fsdp=2, expert=2, sampler=4, **sizes)
  model = make_model(MIXTURE, mesh=mesh, serving=serving_of(MIXTURE, mesh, layout=None))
  one_device, params, expected = alone
  params = jax.device_put(params, mesh_lib.param_shardings(learner, model.logical_axes, params))
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
  arrived = make_weight_sync(abstract, model.logical_axes, learner=learner, sampler=mesh, dtype="float32").move(params, None, 0).params
  placed = mesh_lib.place_rows(mesh, (prompts(8), np.ones((8, 6), bool)))
  sampler = jax.jit(make_sampler(model, **SAMPLING, slots=16, record_routing=True))
  requests = mesh_lib.place_rows(mesh, seeded(jax.random.key(3), 32))
  compiled = sampler.lower(arrived, *placed, requests).compile()
  sizes = [x.num_bytes for x in hlo.collectives(compiled.as_text(), num_devices=mesh.size)]
  # Before the loop too, where a compiler may gather weights once, only states and logits travel.
  assert 0 < max(sizes) <= 16 * 264 * 4 < arrived["embedding"].nbytes < arrived["sparse_layers"]["mlp"]["gate"].nbytes / 2
  drawn = compiled(arrived, *placed, requests)
  np.testing.assert_array_equal(drawn.tokens, expected.tokens)
  np.testing.assert_array_equal(drawn.routing, expected.routing)
  assert_as_the_learner(one_device, alone[1], jax.tree.map(np.asarray, drawn))


@pytest.mark.parametrize("platform", few(["tpu", "gpu"], rest="slow", by_hand=(1,)))
def test_the_kernel_draws_the_same_tokens(platform, monkeypatch):
  monkeypatch.setitem(ragged.KERNELS, "cpu", ragged.KERNELS[platform]._replace(is_emulated=True))
  mesh, shape = mesh_lib.make_mesh(fsdp=2, tensor=2), preset("nano", vocab_size=264)._replace(num_layers=1, head_dim=128)
  settings = dict(slots=8, max_new_tokens=256, cache_blocks=(128, 128))
  _, expected = sample(make_model(shape._replace(decode_attention="xla"), mesh=mesh), mesh, prompts(4), **settings)
  model = make_model(shape._replace(decode_attention="ragged"), mesh=mesh)
  params, drawn = sample(model, mesh, prompts(4), **settings)
  np.testing.assert_array_equal(drawn.tokens, expected.tokens)
  assert_as_the_learner(model, params, drawn)
