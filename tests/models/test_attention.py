"""Tests of the attention backends: values and gradients against plain loops, padding, meshes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.kernels import chunked
from jaxrl_llm.kernels.visibility import Window, blocks_seen, within
from jaxrl_llm.models import attention, make_model, preset
from jaxrl_llm.models.striping import stripes_of
from tests.kernels.windows import positions_of
from tests.marks import few
from tests.programs import equations

B, T, H, K, C = 2, 40, 4, 2, 8


class Layout(NamedTuple):
  segments: np.ndarray
  prefixes: np.ndarray | None
  positions: np.ndarray | None = None  # Of rows with a sliding window of `WINDOW` tokens.

  def as_rows(self, stripes=None):
    """Makes the rows that attention sees."""
    packed = attention.packed(self.segments, self.prefixes, stripes)
    return packed if self.positions is None else within(packed, self.positions, WINDOW)


def rows(*runs):
  """Lays out rows of runs, each given as (segment, prefix, number of tokens)."""
  ids = np.array([[np.repeat([run[i] for run in row], [run[2] for run in row]) for row in runs] for i in (0, 1)], np.int32)
  return Layout(*ids)


LAYOUTS = {
  # Two sequences and padding; one sequence, a lone token, and padding in front of a third.
  "packed": rows([(1, 0, 17), (2, 0, 15), (0, 0, 8)], [(1, 0, 20), (2, 0, 1), (0, 0, 9), (3, 0, 10)])._replace(prefixes=None),
  # A prompt with three responses and padding among them; two prompts with two responses each, whose
  # numbers are in no order.
  "shared": rows(
    [(1, 0, 9), (2, 1, 12), (3, 1, 1), (0, 0, 5), (4, 1, 13)],
    [(6, 0, 7), (2, 6, 8), (5, 0, 4), (3, 5, 6), (4, 6, 10), (1, 5, 3), (0, 0, 2)],
  ),
}
WINDOW = 7  # Shorter than most prompts, and than a block.
LAYOUTS["windows"] = LAYOUTS["shared"]._replace(positions=positions_of(*LAYOUTS["shared"][:2]))
ON_CPU = [name for name in attention.BACKENDS if name != "cudnn"]
TOLERANCE = {"float32": dict(rtol=2e-5, atol=2e-6), "bfloat16": dict(rtol=4e-2, atol=2e-2)}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  """Blocks so small that a row has several, and its length is no multiple of theirs."""
  monkeypatch.setitem(attention._BLOCK, "cpu", 16)


def inputs(rng, num_kv_heads=K, dtype="float32", batch=B, length=T):
  shapes = [(batch, length, H, C), (batch, length, num_kv_heads, C), (batch, length, num_kv_heads, C), (batch, length, H, C)]
  return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def loop(q, k, v, layout):
  """Computes attention one query at a time, in float64."""
  out, (segments, prefixes, positions) = np.zeros(q.shape), layout
  for b, t, h in np.ndindex(*q.shape[:3]):
    own = {segments[b, t], 0 if prefixes is None else prefixes[b, t]} - {0}
    near = lambda s, b=b, t=t: positions is None or positions[b, t] - positions[b, s] < WINDOW
    if seen := [s for s in range(t + 1) if segments[b, s] in own and near(s)]:
      kv = h * k.shape[2] // q.shape[2]
      scores = np.array([q[b, t, h] @ k[b, s, kv] for s in seen]) / np.sqrt(q.shape[3])
      weights = np.exp(scores - scores.max())
      out[b, t, h] = (weights / weights.sum()) @ np.array([v[b, s, kv] for s in seen])
  return out


def value_and_gradients(backend, q, k, v, cotangent, layout, mesh=None, stripes=None):
  """Computes attention, and the gradients of a loss that reads it only at real tokens."""

  @jax.jit
  def run(q, k, v, layout):
    def loss(q, k, v):
      y = attention.row_attention(q, k, v, layout.as_rows(stripes), backend=backend, mesh=mesh)
      return jnp.sum(jnp.where((layout.segments > 0)[..., None, None], y * cotangent, 0).astype(jnp.float32)), y

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

  (_, y), gradients = run(q, k, v, jax.tree.map(jnp.asarray, layout))
  return np.asarray(y, np.float64), [np.asarray(g, np.float64) for g in gradients]


def check_against_xla(actual, expected, layout, **tolerance):
  (y, gradients), (expected_y, expected), real = actual, expected, layout.segments > 0
  assert np.isfinite(y).all()
  np.testing.assert_allclose(y[real], expected_y[real], **tolerance)
  for name, x, expected_x in zip("qkv", gradients, expected, strict=True):
    np.testing.assert_allclose(x, expected_x, **tolerance, err_msg=f"gradient of {name}")
    assert (x[~real] == 0).all()  # Padding has no effect.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ON_CPU)
def test_values_are_those_of_a_loop(backend, layout, rng):
  layout = jax.tree.map(jnp.asarray, LAYOUTS[layout])
  q, k, v, _ = inputs(rng, num_kv_heads=1 if layout.prefixes is None else K)
  y = jax.jit(lambda *x: attention.row_attention(*x, layout.as_rows(), backend=backend, mesh=None))(q, k, v)
  expected = loop(*(np.asarray(x, np.float64) for x in (q, k, v)), jax.tree.map(np.asarray, layout))
  real = np.asarray(layout.segments > 0)
  np.testing.assert_allclose(np.asarray(y)[real], expected[real], **TOLERANCE["float32"])
  assert np.isfinite(y).all()


@pytest.mark.parametrize("backend, layout, dtype", few([
  ("chunked", "windows", "float32"), ("chunked", "shared", "float32"), ("chunked", "shared", "bfloat16"),
  ("flash", "packed", "bfloat16"),  # Emulated, and slow; others are in test_flash.py.
], 0, 1, 3))  # fmt: skip
def test_gradients_are_those_of_xla(backend, layout, dtype, rng):
  arrays, layout = inputs(rng, dtype=dtype), LAYOUTS[layout]
  # Every dtype is compared with float32, so that two roundings cannot agree by chance.
  expected = value_and_gradients("xla", *(x.astype(jnp.float32) for x in arrays), layout)
  check_against_xla(value_and_gradients(backend, *arrays, layout), expected, layout, **TOLERANCE[dtype])


@pytest.mark.parametrize("backend", ON_CPU)
def test_rows_of_padding_alone_are_finite(backend, rng):
  nothing = Layout(np.zeros((B, T), np.int32), None)
  y, gradients = value_and_gradients(backend, *inputs(rng), nothing)
  assert all(np.isfinite(x).all() for x in (y, *gradients))
  assert all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("backend, shape, batch", few([
  ("xla", (1, 2, 1, 2, 2), 4), ("xla", (1, 2, 1, 4, 1), 4),
  ("chunked", (2, 2, 1, 1, 2), 4), ("chunked", (1, 2, 1, 2, 2), 4), ("chunked", (2, 1, 1, 4, 1), 4),
  # 3 rows cannot be split over 2 devices: every device has all of them, but only a part of each.
  ("chunked", (2, 1, 1, 2, 2), 3),
  ("flash", (1, 2, 1, 2, 2), 2),
], 0, 3, 6))  # fmt: skip
def test_a_mesh_changes_nothing(backend, shape, batch, rng):
  mesh = mesh_lib.make_mesh(**dict(zip(mesh_lib.AXES, shape, strict=True)))
  arrays = inputs(rng, batch=batch)
  layout = jax.tree.map(lambda x: np.concatenate([x, x[::-1]])[:batch], LAYOUTS["shared" if backend == "xla" else "windows"])
  expected = value_and_gradients("xla", *arrays, layout)
  check_against_xla(value_and_gradients(backend, *arrays, layout, mesh=mesh), expected, layout, **TOLERANCE["float32"])


@pytest.mark.parametrize("backend, parts, length", few([
  ("xla", 2, 40), ("chunked", 2, 40), ("chunked", 8, 40), ("chunked", 2, 132), ("flash", 2, 40),
], 0, 1))  # fmt: skip
def test_the_order_of_stripes_changes_nothing(backend, parts, length, rng):
  mesh = mesh_lib.make_mesh(data=1, context=parts, devices=jax.devices()[:parts])
  arrays, stripes = inputs(rng, length=length), stripes_of(length, mesh)
  layout = LAYOUTS["shared" if backend == "xla" else "windows"]
  layout = jax.tree.map(lambda x: np.pad(x, [(0, 0), (0, length - T)], mode="edge"), layout)
  expected = value_and_gradients("xla", *arrays, layout)
  in_stripes = jax.tree.map(lambda x: x[:, stripes.slots], (*arrays, layout))
  y, gradients = value_and_gradients(backend, *in_stripes, mesh=mesh, stripes=stripes)
  back = lambda x: x[:, np.argsort(stripes.slots)]
  check_against_xla((back(y), list(map(back, gradients))), expected, layout, **TOLERANCE["float32"])


def test_rows_that_the_axis_context_does_not_divide_stay_whole(rng):
  mesh = mesh_lib.make_mesh(data=1, context=8)
  q, k, v, _ = inputs(rng, batch=1, length=12)
  one = attention.packed(jnp.ones((1, 12), jnp.int32))
  run = lambda backend: jax.jit(lambda *x: attention.row_attention(*x, one, backend=backend, mesh=mesh))(q, k, v)
  np.testing.assert_allclose(run("chunked"), run("xla"), **TOLERANCE["float32"])


def test_only_blocks_with_visible_keys_are_visited():
  layout = rows([(1, 0, 8), (2, 1, 8), (3, 1, 8), (4, 0, 4), (0, 0, 12)])
  segments, prefixes = (jnp.asarray(x.reshape(1, 5, 8)) for x in layout[:2])
  last = jnp.arange(5) * 8 + 7
  assert blocks_seen(segments, None, segments, last)[0].astype(int).tolist() == [
    [1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0],
  ]  # fmt: skip
  assert blocks_seen(segments, prefixes, segments, last)[0, :, 0].tolist() == [True, True, True, False, False]
  # The last tokens of the prompt are near the first ones of a response.
  positions = jnp.asarray(positions_of(*layout[:2]).reshape(1, 5, 8))
  for size, expected in ((9, [1, 1, 1, 0, 0]), (1, [1, 0, 0, 0, 0])):
    window = Window(positions - size + 1, positions)
    assert blocks_seen(segments, prefixes, segments, last, window)[0, :, 0].astype(int).tolist() == expected


def test_no_array_holds_every_score(rng):
  """In both passes, the largest array has a few blocks of scores, or the size of the queries."""
  length, (q, k, v, _) = 2048, inputs(rng, batch=1, length=2048)
  one = jnp.ones((1, length), jnp.int32)
  loss = lambda q, k, v: chunked.chunked_attention(q, k, v, one, one).sum()
  program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v).jaxpr
  assert max(x.aval.size for equation in equations(program) for x in equation.outvars) <= length * H * C


def test_a_model_uses_its_backend(monkeypatch):
  seen = []
  for name in attention.BACKENDS:
    monkeypatch.setitem(attention.BACKENDS, name, lambda q, *rest, name=name: seen.append(name) or q)
  tokens = jnp.ones((2, T), jnp.int32)
  for name in ("flash", "chunked", "auto"):
    model = make_model(preset("nano", vocab_size=16)._replace(attention=name))
    params = jax.eval_shape(model.init, jax.random.key(0))
    jax.eval_shape(model.logits, params, tokens, tokens, tokens)
  assert list(dict.fromkeys(seen)) == ["flash", "chunked", "xla"]


@pytest.mark.parametrize("platform, dtype, head_dim, length, expected", [
  ("cpu", "float32", 64, 64, "xla"), ("cpu", "bfloat16", 64, 65, "chunked"), ("gpu", "float32", 64, 512, "xla"),
  ("gpu", "float32", 64, 4096, "flash"), ("gpu", "float32", 80, 4096, "chunked"), ("gpu", "bfloat16", 64, 2047, "cudnn"),
  ("gpu", "bfloat16", 64, 2048, "flash"), ("gpu", "float16", 128, 4096, "cudnn"), ("gpu", "bfloat16", 256, 512, "xla"),
  ("tpu", "bfloat16", 128, 512, "flash"), ("tpu", "float32", 64, 64, "flash"),
  ("tpu", "bfloat16", 80, 512, "xla"), ("tpu", "bfloat16", 80, 4096, "chunked"),
])  # fmt: skip
def test_auto_selects_a_backend(platform, dtype, head_dim, length, expected):
  assert attention.suited(platform, jnp.dtype(dtype), head_dim, length) == expected


def test_cudnn_refuses_float32(rng):
  q, k, v, _ = inputs(rng)
  mask = attention.packed(jnp.asarray(LAYOUTS["packed"].segments)).mask
  message = r"^model.attention: found 'cudnn' with activations of float32, expected bfloat16 or float16; set model.dtype='bfloat16', or "
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda *x: attention.cudnn_attention(*x, mask), q, k, v)


def test_a_backend_on_the_wrong_platform_is_refused(rng, monkeypatch):
  q, k, v, _ = inputs(rng, dtype="bfloat16")
  seen = attention.packed(jnp.asarray(LAYOUTS["packed"].segments))
  run = lambda backend: attention.row_attention(q, k, v, seen, backend=backend, mesh=None)
  message = "^model.attention: found 'cudnn', which runs on gpu, but the platform is cpu; expected 'auto' or 'xla'$"
  with pytest.raises(ValueError, match=message):
    run("cudnn")
  monkeypatch.setattr(jax, "default_backend", lambda: "METAL")
  message = "^model.attention: found 'flash', which runs on tpu or gpu or cpu, but the platform is METAL; expected 'auto'"
  with pytest.raises(ValueError, match=f"{message} or 'xla'$"):
    run("flash")


@pytest.mark.parametrize("name, hint", [("flsh", "did you mean 'flash'?"), ("splash", "did you mean 'flash'?"), ("", "")])
def test_an_unknown_backend_is_refused(name, hint):
  with pytest.raises(ValueError, match="^model.attention: found .*expected one of auto, xla, chunked, cudnn, fl") as caught:
    attention.check_backend(name)
  assert hint in str(caught.value) and "\n" not in str(caught.value)
