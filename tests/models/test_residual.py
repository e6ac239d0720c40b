"""The residual stream over devices: what each keeps between layers, and that results stay."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import make_model, preset

TOKENS = (4, 32)


def rows():
  tokens = jax.random.randint(jax.random.key(1), TOKENS, 0, 264)
  return tokens, jnp.broadcast_to(jnp.arange(TOKENS[1]), TOKENS), jnp.ones(TOKENS, jnp.int32)


def gradient(name: str, mesh):
  """Returns the params of a model and the jitted gradient of a sum over its hidden states."""
  model = make_model(preset(name, vocab_size=264, remat="full")._replace(attention="xla"), mesh=mesh)
  params = model.init(jax.random.key(0))
  if mesh is not None:
    params = jax.device_put(params, mesh_lib.param_shardings(mesh, model.logical_axes, params))
  place = (lambda x: x) if mesh is None else lambda x: mesh_lib.place_tokens(mesh, x)
  loss = lambda params, rows: jnp.sum(jnp.sin(model.hidden(params, *rows).hidden))
  return jax.jit(jax.value_and_grad(loss)), params, place(rows())


@pytest.mark.parametrize("name", [pytest.param("nano", marks=pytest.mark.exhaustive), pytest.param("nano-moe", marks=pytest.mark.slow)])
def test_a_device_keeps_its_part_of_the_width_and_results_stay(name):
  config = preset(name, vocab_size=264)
  mesh = mesh_lib.make_mesh(fsdp=2, context=2, tensor=2, devices=jax.devices()[:8])
  sharded, *arguments = gradient(name, mesh)
  text = sharded.lower(*arguments).compile().as_text()
  kept = {int(x) for x in re.findall(rf"f32\[{config.num_layers},2,16,(\d+)\]", text)}
  assert kept == {config.d_model // 2}
  whole, *of_one = gradient(name, None)
  for one, many in zip(*(jax.tree.leaves(f(*x)) for f, x in ((whole, of_one), (sharded, arguments))), strict=True):
    np.testing.assert_allclose(many, one, atol=1e-5 * max(np.abs(one).max(), 1))
