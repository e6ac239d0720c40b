"""Tests of weights in 8 bits: their error, and decoding with them in every kind of model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.sampler import make_sampler, seeded
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import Experts, Lora, make_model, moe, preset
from jaxrl_llm.models.decoding import serving_of
from jaxrl_llm.models.decoding_weights import unstacked_shardings
from jaxrl_llm.models.quantized import FORMATS, Quantized, matmul, quantize
from tests.marks import few

NANO = preset("nano", vocab_size=264)._replace(num_layers=3)
MIXTURE = NANO._replace(experts=Experts(16, 4, 32, layers=(1, 2)))
LARGEST = {"int8": 127, "float8": 448}
# Axes that a product sums over, counted from behind: weights of all layers are stacked.
SUMMED = {"q": (-3,), "k": (-3,), "v": (-3,), "o": (-3, -2), "gate": (-2,), "up": (-2,), "down": (-2,)}


def rounded(weight, axes, name):
  """Rounds one weight and returns it in float32."""
  if name == "int8":
    scale = np.abs(np.asarray(weight)).max(axis=axes, keepdims=True) / np.float32(LARGEST[name])
    return jnp.asarray(np.round(weight / np.where(scale > 0, scale, 1)) * scale)
  # XLA rounds to float8 through float16, which NumPy does not.
  values, scale = jax.jit(lambda x: quantize(x, tuple(axis % x.ndim for axis in axes), name))(weight)
  return values.astype(jnp.float32) * jnp.expand_dims(scale, axes)


def all_rounded(params, shape, name):
  def leaf(path, x):
    *rest, last = (part.key for part in path)
    if not rest:
      heads = {"embedding": (1,)} if shape.tie_embeddings else {"head": (0,)}
      return rounded(x, heads[last], name) if last in heads else x
    return rounded(x, SUMMED[last], name) if last in SUMMED else x

  return jax.tree_util.tree_map_with_path(leaf, params)


@pytest.mark.parametrize("name", FORMATS)
def test_the_error_is_bounded(rng, name):
  weight = rng.standard_normal((64, 6, 8)).astype(np.float32)
  weight[:, 2, 3] = 0
  values, scale = quantize(jnp.asarray(weight), (0,), name)
  error = np.abs(np.asarray(values, np.float32) * np.asarray(scale) - weight)
  assert scale.shape == (6, 8) and scale[2, 3] == 1 and values.dtype.itemsize == 1
  # Float8 has three bits after the leading one, and its smallest number is 2⁻⁹.
  bound = scale / 2 if name == "int8" else np.maximum(np.abs(weight) * 2**-4, np.asarray(scale) * 2**-10)
  assert np.all(error <= bound * (1 + 1e-6)) and error.max() > 1e-3


def test_a_product_in_bfloat16_is_summed_in_float32(rng):
  x = jnp.asarray(rng.standard_normal((4, 512)), jnp.bfloat16)
  weight = quantize(jnp.asarray(rng.standard_normal((512, 3)), jnp.float32), (0,), "int8")
  exact = np.asarray(x, np.float64) @ (np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64))
  y = matmul(x, weight)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8)


CASES = {
  "tied head": (NANO, {}, 0),
  "adapters": (NANO._replace(tie_embeddings=False, qkv_bias=True, lora=Lora(4, 8.0)), {}, 0),
  "mixture": (MIXTURE, {}, 0),
  "masked": (MIXTURE, dict(fsdp=4, expert=2), 512),
  "sorted": (MIXTURE._replace(tie_embeddings=False), dict(fsdp=2, expert=2, tensor=2), 0),
}


EVERY = [pytest.param(*case, name, id=f"{label}-{name}") for label, case in CASES.items() for name in FORMATS]


@pytest.mark.parametrize(("shape", "sizes", "masked_tokens", "name"), few(EVERY, 0, rest="slow", by_hand=range(2, len(EVERY))))
def test_decoding_equals_that_of_rounded_weights(shape, sizes, masked_tokens, name, monkeypatch):
  """Prompts of one token: the others would be prefilled, with the exact weights."""
  monkeypatch.setattr(moe, "_MASKED_TOKENS", masked_tokens)
  mesh = mesh_lib.make_mesh(**sizes, devices=jax.devices()[: 8 if sizes else 1])
  layout = serving_of(MIXTURE, mesh, layout="spread") if sizes else None
  in_8_bits = make_model(shape._replace(decode_weights=name), mesh=mesh, serving=layout)
  exact = make_model(shape, mesh=mesh, serving=layout)
  params = jax.jit(exact.init)(jax.random.key(0))
  if shape.lora is not None:
    params = jax.tree_util.tree_map_with_path(lambda path, x: x + 0.1 if "_lora_b" in path[-1].key else x, params)
  prompts = np.random.default_rng(0).integers(5, 200, (8, 1)).astype(np.int32)
  draw = lambda model, params: jax.jit(
    make_sampler(model, group_size=4, max_new_tokens=16, stop_ids=(1, 2), pad_id=0, slots=16)
  )(params, prompts, np.ones(prompts.shape, bool), seeded(jax.random.key(1), 32))
  drawn, expected = draw(in_8_bits, params), draw(exact, all_rounded(params, shape, name))
  np.testing.assert_array_equal(drawn.tokens, expected.tokens)
  error = np.abs(np.asarray(drawn.logprobs) - np.asarray(expected.logprobs))
  # Two experts may be so close that the last bit of a product decides between them, on some
  # machines for one of the 512 tokens. A wrong weight changes them all.
  np.testing.assert_array_less(np.sort(error, axis=None)[: -1 if shape.experts else None], 1e-5)
  np.testing.assert_array_less(error, 0.1)
  plain = draw(exact, params)
  assert np.abs(np.asarray(plain.logprobs) - np.asarray(drawn.logprobs))[:, 0].max() > 1e-4, "nothing was rounded"


def test_values_and_scales_lie_where_the_weights_do():
  mesh = mesh_lib.make_mesh(fsdp=2, expert=2, tensor=2)
  layout = serving_of(MIXTURE, mesh, layout="spread")
  model = make_model(MIXTURE._replace(decode_weights="int8"), mesh=mesh, serving=layout)
  abstract = jax.eval_shape(model.init, jax.random.key(0))
  weights = jax.eval_shape(model.decoding_weights, abstract)
  shardings = mesh_lib.param_shardings(layout.mesh, model.logical_axes, abstract, rules=layout.rules)
  places = unstacked_shardings(model.config, weights, shardings)
  assert jax.tree.structure(places) == jax.tree.structure(weights)
  block = places.blocks[1]
  gate, down, q = block["mlp"]["gate"].get_value(), block["mlp"]["down"].get_value(), block["attention"]["q"].get_value()
  experts = ("expert", "fsdp")
  assert tuple(gate.values.spec) == (experts, None, "tensor") and tuple(gate.scale.spec) == (experts, "tensor")
  assert tuple(down.values.spec) == (experts, "tensor", None) and tuple(down.scale.spec) == (experts, None)
  assert tuple(q.values.spec) == (None, "tensor") and tuple(q.scale.spec) == ("tensor",)
  assert isinstance(weights.rest["embedding"], Quantized) and not isinstance(block["mlp"]["router"].get_value(), Quantized)
