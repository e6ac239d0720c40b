"""Tests of rematerialisation policies: they change the memory of a gradient and nothing else."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import Experts, make_model, preset
from jaxrl_llm.models.remat import POLICIES
from tests.marks import few

DENSE = preset("nano", vocab_size=264)._replace(num_layers=4)
SHAPES = {"dense": DENSE, "experts": DENSE._replace(experts=Experts(4, 2, 32, layers=(1, 3)))}


@functools.cache
def gradient_of(shape: str, policy: str):
  """Computes the loss and gradient, and the bytes of temporaries."""
  model = make_model(SHAPES[shape]._replace(remat=policy, attention="chunked"))
  tokens = jax.random.randint(jax.random.key(1), (4, 64), 0, 264)
  rows = (tokens, jnp.tile(jnp.arange(64), (4, 1)), jnp.ones_like(tokens))
  loss = lambda params: jnp.mean(model.hidden(params, *rows).hidden[..., :8] ** 2)
  params = model.init(jax.random.key(0))
  program = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
  return *program(params), program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
  ("shape", "policy"),
  few([*(("dense", name) for name in POLICIES if name != "none"), ("experts", "full")], rest="slow", by_hand=range(1, len(POLICIES) - 1)),
)
def test_no_policy_changes_the_loss_or_a_gradient(shape, policy):
  (loss, grads, _), (same_loss, same_grads, _) = gradient_of(shape, "none"), gradient_of(shape, policy)
  np.testing.assert_allclose(same_loss, loss, rtol=1e-6)
  chex.assert_trees_all_close(same_grads, grads, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_memory_shrinks_with_what_a_policy_keeps():
  none, dots, full = (gradient_of("dense", policy)[2] for policy in ("none", "dots", "full"))
  assert full < 0.8 * dots and dots < 0.8 * none


def test_attention_alone_is_kept():
  """The loops of chunked attention run once forward and once backward, not forward again."""
  full, attention, dots = (gradient_of("dense", policy)[2] for policy in ("full", "attention", "dots"))
  assert full < attention < dots

  def loops(policy):
    model = make_model(DENSE._replace(remat=policy, attention="chunked"))
    tokens = jnp.ones((1, 256), jnp.int32)
    loss = lambda params: jnp.sum(model.hidden(params, tokens, tokens, tokens).hidden)
    return str(jax.make_jaxpr(jax.grad(loss))(jax.eval_shape(model.init, jax.random.key(0)))).count("while[")

  assert loops("attention") < loops("full")
