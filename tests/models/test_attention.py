"""Every backend computes what a plain loop does, at every real token, in both directions; and none lets padding poison a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxrl_llm import mesh as mesh_lib
from jaxrl_llm.models import attention, make_model, preset

B, T, H, K, C = 2, 40, 4, 2, 8
# Two sequences and padding; one sequence, a lone token, and padding in front of a third.
SEGMENTS = np.array([[1] * 17 + [2] * 15 + [0] * 8, [1] * 20 + [2] + [0] * 9 + [3] * 10], np.int32)
REAL = SEGMENTS > 0
ON_CPU = [name for name in attention.BACKENDS if name != "cudnn"]
TOLERANCE = {"float32": dict(rtol=2e-5, atol=2e-6), "bfloat16": dict(rtol=4e-2, atol=2e-2)}


def inputs(rng, num_kv_heads=K, dtype="float32", batch=B):
  shapes = [(batch, T, H, C), (batch, T, num_kv_heads, C), (batch, T, num_kv_heads, C), (batch, T, H, C)]
  return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def loop(q, k, v, segments):
  """One query at a time, float64."""
  out = np.zeros(q.shape)
  for b, t, h in np.ndindex(*q.shape[:3]):
    seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t] > 0]
    if seen:
      kv = h * k.shape[2] // q.shape[2]
      scores = np.array([q[b, t, h] @ k[b, s, kv] for s in seen]) / np.sqrt(q.shape[3])
      weights = np.exp(scores - scores.max())
      out[b, t, h] = (weights / weights.sum()) @ np.array([v[b, s, kv] for s in seen])
  return out


def value_and_gradients(backend, q, k, v, cotangent, segments=SEGMENTS, mesh=None):
  """The attention, and the gradients of a loss that reads it at real tokens alone."""

  @jax.jit
  def run(q, k, v, segments):
    def loss(q, k, v):
      y = attention.row_attention(q, k, v, attention.packed(segments), backend=backend, mesh=mesh)
      return jnp.sum(jnp.where((segments > 0)[..., None, None], y * cotangent, 0).astype(jnp.float32)), y

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

  (_, y), gradients = run(q, k, v, jnp.asarray(segments))
  return np.asarray(y, np.float64), [np.asarray(g, np.float64) for g in gradients]


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("backend", ON_CPU)
def test_values_are_those_of_a_loop(backend, num_kv_heads, rng):
  q, k, v, _ = inputs(rng, num_kv_heads)
  y = jax.jit(lambda *x: attention.row_attention(*x, attention.packed(jnp.asarray(SEGMENTS)), backend=backend, mesh=None))(q, k, v)
  expected = loop(*(np.asarray(x, np.float64) for x in (q, k, v)), SEGMENTS)
  np.testing.assert_allclose(np.asarray(y)[REAL], expected[REAL], **TOLERANCE["float32"])
  assert np.isfinite(y).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", [name for name in ON_CPU if name != "xla"])
def test_gradients_are_those_of_xla(backend, dtype, rng):
  arrays = inputs(rng, dtype=dtype)
  y, gradients = value_and_gradients(backend, *arrays)
  # Held against float32 whatever the dtype, so that two roundings cannot agree by chance.
  expected_y, expected = value_and_gradients("xla", *(x.astype(jnp.float32) for x in arrays))
  np.testing.assert_allclose(y[REAL], expected_y[REAL], **TOLERANCE[dtype])
  for found, wanted in zip(gradients, expected, strict=True):
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, wanted, **TOLERANCE[dtype])
    assert (found[~REAL] == 0).all()  # Padding takes no part.


@pytest.mark.parametrize("backend", ON_CPU)
def test_rows_of_padding_alone_are_finite(backend, rng):
  y, gradients = value_and_gradients(backend, *inputs(rng), segments=np.zeros_like(SEGMENTS))
  assert all(np.isfinite(x).all() for x in (y, *gradients))
  assert all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("batch", [4, 3])  # 3 rows do not divide over 4: they lie whole on every device.
@pytest.mark.parametrize("backend", ["splash"])
def test_a_mesh_changes_nothing(backend, batch, rng):
  shape = (2, 2, 1, 2)
  mesh = Mesh(np.array(jax.devices()).reshape(shape), mesh_lib.AXES, axis_types=(AxisType.Auto,) * 4)
  arrays, segments = inputs(rng, batch=batch), np.concatenate([SEGMENTS, SEGMENTS[:, ::-1]])[:batch]
  y, gradients = value_and_gradients(backend, *arrays, segments=segments, mesh=mesh)
  expected_y, expected = value_and_gradients("xla", *arrays, segments=segments)
  np.testing.assert_allclose(y[segments > 0], expected_y[segments > 0], **TOLERANCE["float32"])
  for found, wanted in zip(gradients, expected, strict=True):
    np.testing.assert_allclose(found, wanted, **TOLERANCE["float32"])


def test_a_long_row_of_the_kernel_is_many_blocks(rng, monkeypatch):
  """Blocks in which no token may see any other: their maximum is that of nothing."""
  monkeypatch.setattr(attention, "_BLOCKS", (128,))
  segments = np.repeat([[1, 2, 2, 3]], 80, axis=1).reshape(1, -1)  # Boundaries at 80, 240: neither is a block's.
  q, k, v = (jnp.asarray(rng.normal(size=(1, 320, heads, C)), jnp.float32) for heads in (2, 1, 1))
  y = attention.splash_attention(q, k, v, jnp.asarray(segments), interpret=True)
  expected = attention.xla_attention(q, k, v, attention.packed(jnp.asarray(segments)).mask)
  np.testing.assert_allclose(y, expected, **TOLERANCE["float32"])


def test_a_model_takes_its_backend(monkeypatch):
  seen = []
  for name in attention.BACKENDS:
    monkeypatch.setitem(attention.BACKENDS, name, lambda q, *rest, name=name: seen.append(name) or q)
  tokens = jnp.ones((2, T), jnp.int32)
  for name in ("dot_product", "splash", "auto"):
    model = make_model(preset("nano", vocab_size=16)._replace(attention=name))
    params = jax.eval_shape(model.init, jax.random.key(0))
    jax.eval_shape(model.logits, params, tokens, tokens, tokens)
  assert list(dict.fromkeys(seen)) == ["dot_product", "splash", "xla"]


@pytest.mark.parametrize("platform, dtype, head_dim, expected", [
  ("cpu", "float32", 64, "xla"), ("cpu", "bfloat16", 64, "xla"), ("gpu", "float32", 64, "xla"), ("gpu", "bfloat16", 64, "cudnn"),
  ("gpu", "float16", 128, "cudnn"), ("gpu", "bfloat16", 256, "xla"), ("tpu", "bfloat16", 128, "splash"), ("tpu", "float32", 64, "splash"),
  ("tpu", "bfloat16", 80, "xla"),
])  # fmt: skip
def test_auto(platform, dtype, head_dim, expected):
  assert attention.suited(platform, jnp.dtype(dtype), head_dim) == expected


def test_cudnn_refuses_float32(rng):
  q, k, v, _ = inputs(rng)
  mask = attention.packed(jnp.asarray(SEGMENTS)).mask
  message = r"^model.attention: found 'cudnn' with activations of float32, expected bfloat16 or float16; set model.dtype='bfloat16', or "
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda *x: attention.dot_product_attention(*x, mask, implementation="cudnn"), q, k, v)


def test_a_backend_on_the_wrong_platform(rng, monkeypatch):
  q, k, v, _ = inputs(rng, dtype="bfloat16")
  run = lambda backend: attention.row_attention(q, k, v, attention.packed(jnp.asarray(SEGMENTS)), backend=backend, mesh=None)
  with pytest.raises(ValueError, match="^model.attention: found 'cudnn' on a cpu, which runs on gpu; expected 'auto' or 'xla'$"):
    run("cudnn")
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  with pytest.raises(ValueError, match="^model.attention: found 'splash' on a gpu, which runs on tpu or cpu; expected 'auto' or 'xla'$"):
    run("splash")


@pytest.mark.parametrize("name, hint", [("splsh", "did you mean 'splash'?"), ("flash", ""), ("", "")])
def test_an_unknown_backend(name, hint):
  with pytest.raises(ValueError, match="^model.attention: found .*expected one of auto, xla, dot_product, cudnn, splash") as caught:
    attention.check_backend(name)
  assert hint in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["auto", *attention.BACKENDS])
def test_known_backends(name):
  attention.check_backend(name)
