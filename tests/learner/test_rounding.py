"""Weights in bfloat16: updates far below their spacing add up, and repeat bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.devices.offload import offloaded
from jaxrl_llm.learner.rounding import in_bfloat16, rounded
from jaxrl_llm.learner.train_step import make_optimizer
from tests.marks import few

ADAM = dict(learning_rate=1e-6, warmup_steps=0, weight_decay=0.0, b1=0.9, b2=0.99, max_grad_norm=1.0)


def trained(dtype, *, num_updates, sharding=None, saved_at=None, **settings):
  """Trains weights of deviation 0.02 on gradients of constant signs; returns how far they moved."""
  rng = np.random.default_rng(0)
  start, signs = rng.normal(size=(80, 50)) * 0.02, np.sign(rng.normal(size=(80, 50)))
  optimizer, _ = make_optimizer(**ADAM | settings)
  place = (lambda x: x) if sharding is None else (lambda x: jax.device_put(x, sharding))
  params = {"m": {"kernel": place(jnp.asarray(start, dtype))}}
  grads, state = {"m": {"kernel": place(jnp.asarray(1e-3 * signs, dtype))}}, optimizer.init(params)

  @jax.jit
  def step(params, state):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  first = params
  for update in range(num_updates):
    if update == saved_at:
      params, state = jax.tree.map(jnp.asarray, jax.device_get((params, state)))
    params, state = step(params, state)
  assert params["m"]["kernel"].dtype == dtype and optax.tree_utils.tree_get(state, "nu")["m"]["kernel"].dtype == dtype
  return -np.sign(signs) * (np.float64(params["m"]["kernel"]) - np.float64(first["m"]["kernel"])), (params, state)


CASES = [dict(), dict(b2=0.999), dict(learning_rate=1e-5), dict(moments_dtype="bfloat16"), dict(learning_rate=2e-4, weight_decay=0.1)]


@pytest.mark.parametrize("settings", few(CASES, 0, rest="slow"), ids=str)
def test_weights_move_as_far_as_in_float32(settings):
  """By rounding to nearest they moved by 2% of that at a rate of 1e-6, and by 14% at 1e-5."""
  moved = {dtype: trained(dtype, num_updates=200, **settings)[0] for dtype in ("float32", "bfloat16")}
  assert np.mean(moved["bfloat16"]) == pytest.approx(np.mean(moved["float32"]), rel=0.1)
  if not settings:
    np.testing.assert_allclose(np.mean(moved["float32"]), 200 * 1e-6, rtol=1e-3)


@pytest.mark.slow
def test_a_second_moment_with_a_long_memory_is_not_swallowed():
  """Rounded to nearest, it stays at a third of the squared gradient: updates are too long."""
  _, (_, state) = trained("bfloat16", num_updates=2000, b2=0.999)
  mean = np.mean(np.float64(optax.tree_utils.tree_get(state, "nu")["m"]["kernel"]))
  # Gradients of norm 0.063 are not clipped.
  assert mean == pytest.approx(1e-6 * (1 - 0.999**2000), rel=0.02)


def test_devices_and_a_restart_change_no_bit():
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
  alone = trained("bfloat16", num_updates=6)[1]
  for other in (dict(sharding=NamedSharding(mesh, PartitionSpec("x", "y"))), dict(saved_at=3)):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(alone), jax.device_get(trained("bfloat16", num_updates=6, **other)[1]))


def test_other_weights_are_updated_as_before():
  rng = np.random.default_rng(1)
  params = {"a": jnp.float32(rng.normal(size=30)), "scale": jnp.float32(rng.normal(size=3))}
  adam = optax.adamw(1e-3, mu_dtype="bfloat16")
  grads, state = jax.tree.map(jnp.sin, params), adam.init(params)
  jax.tree.map(np.testing.assert_array_equal, in_bfloat16(adam).update(grads, state, params), adam.update(grads, state, params))
  # Beside a weight in bfloat16 too; tensor by tensor, the same bits are drawn.
  mixed = params | {"a": params["a"].astype(jnp.bfloat16)}
  state = adam.init(mixed)
  together, by_tensor = (jax.jit(make(in_bfloat16(adam)).update)(grads, state, mixed) for make in (lambda x: x, offloaded))
  close = lambda a, b: np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=1e-6)
  jax.tree.map(close, together, by_tensor)
  close(together[0]["scale"], adam.update(grads, state, mixed)[0]["scale"])


def test_rounding_is_unbiased_and_keeps_what_is_exact():
  x, bits = jnp.float32([1.0, -3.0, 0.0, 1 + 2.0**-9, -1e-30, jnp.inf]), jnp.arange(2**16, dtype=jnp.uint32)
  means = jnp.mean(jax.vmap(lambda b: rounded(x, b))(bits), axis=0)
  np.testing.assert_allclose(means[:5], x[:5], rtol=1e-6)
  assert np.isinf(means[5]) and np.all(np.isnan(rounded(jnp.full(4, jnp.nan), bits[-4:])))
