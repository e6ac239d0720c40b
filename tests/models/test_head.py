"""Tests of chunked log-probabilities against all logits: gradients, filters, meshes, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.draw import inverse_cdf
from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import head as head_lib
from jaxrl_llm.models.head import chunk_tokens, token_logprobs
from jaxrl_llm.models.linear import matmul_in_float32
from tests.marks import few

BATCH, LENGTH, WIDTH, VOCAB = 8, 12, 16, 48


def unembed(head, x):
  return jnp.einsum("cd,dv->cv", x, head["w"], preferred_element_type=jnp.float32) + head["b"]


def plain_logprobs(head, hidden, targets, counted, filter_logits):
  """Computes the outputs of `token_logprobs` from all logits."""
  logits = filter_logits(jnp.einsum("btd,dv->btv", hidden, head["w"]) + head["b"], targets)
  log_softmax = jax.nn.log_softmax(logits)
  logprobs = jnp.take_along_axis(log_softmax, targets[..., None], axis=-1)[..., 0]
  return jnp.where(counted, logprobs, 0), jnp.where(counted, -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1), 0)


@pytest.fixture
def work(rng):
  head = {"w": jnp.float32(rng.standard_normal((WIDTH, VOCAB))), "b": jnp.float32(rng.standard_normal(VOCAB))}
  hidden = jnp.float32(rng.standard_normal((BATCH, LENGTH, WIDTH)))
  targets, counted = jnp.int32(rng.integers(VOCAB, size=(BATCH, LENGTH))), jnp.asarray(rng.random((BATCH, LENGTH)) < 0.6)
  weights = jnp.float32(rng.standard_normal((2, BATCH, LENGTH)))
  return head, hidden, targets, counted, weights


def loss_of(logprobs_fn, targets, counted, weights):
  def loss(head, hidden):
    outputs = logprobs_fn(head, hidden, targets, counted)[:2]
    return sum(jnp.sum(w * x * jnp.abs(x)) for w, x in zip(weights, outputs, strict=True)), outputs

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def chunked(**settings):
  """Returns `token_logprobs` with settings; by default it has no filters and learns the entropy."""
  return functools.partial(token_logprobs, **(dict(unembed=unembed, filter_logits=make_filter(), learns_entropy=True) | settings))


def assert_close(actual, expected):
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.max(jnp.abs(b)))))


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5}])
@pytest.mark.parametrize("chunk", few([1, 7, 200], 1))
def test_chunks_agree_with_all_logits(work, chunk, filters):
  head, hidden, targets, counted, weights = work
  filter_logits = make_filter(**filters)
  expected = loss_of(lambda *args: plain_logprobs(*args, filter_logits), targets, counted, weights)(head, hidden)
  actual = loss_of(chunked(filter_logits=filter_logits, chunk=chunk), targets, counted, weights)(head, hidden)
  assert_close(actual, expected)
  assert not np.any(np.asarray(actual[0][1][0])[~np.asarray(counted)])


MESHES = ({"fsdp": 8}, {"data": 2, "tensor": 4}, {"context": 4, "fsdp": 2}, {"expert": 2, "context": 2, "tensor": 2})


@pytest.mark.parametrize("shape", few(MESHES, 0))
def test_every_mesh_gives_the_same_results(work, shape):
  head, hidden, targets, counted, weights = work
  settings = dict(filter_logits=make_filter(top_p=0.9), chunk=4)
  alone = loss_of(chunked(**settings), targets, counted, weights)(head, hidden)
  mesh = mesh_lib.make_mesh(**shape)
  placed, (targets, counted) = mesh_lib.place_tokens(mesh, hidden), mesh_lib.place_tokens(mesh, (targets, counted))
  assert_close(loss_of(chunked(**settings, mesh=mesh), targets, counted, weights)(head, placed), alone)


@pytest.mark.parametrize("temperature", few([0.01, 1.0, 0.1, 1e-3, 1e-6], 0, rest="slow"))
def test_large_logits_lose_no_more_digits_than_in_the_sampler(temperature, rng):
  """Against float64: log-probabilities, their gradient, and an entropy that is never negative."""
  logits, uniforms, weights = jnp.float32(rng.normal(size=(512, 264)) * 8), jnp.float32(rng.random((512, 2))), rng.normal(size=512)
  filter_logits = make_filter(temperature=temperature)
  targets, drawn = jax.jit(lambda x: inverse_cdf(filter_logits(x), uniforms))(logits)

  def loss(x):
    settings = dict(unembed=lambda head, x: x + head, filter_logits=filter_logits, chunk=128)
    logprobs, entropy, _, norms = token_logprobs(jnp.zeros(264), x[None], targets[None], jnp.ones((1, 512), bool), **settings)
    return jnp.sum(jnp.float32(weights) * logprobs), (logprobs[0], entropy[0], norms[0])

  (_, (logprobs, entropy, norms)), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(logits)
  relative = np.float64(logits) / temperature
  relative -= relative.max(axis=1, keepdims=True)
  right = relative - np.log(np.sum(np.exp(relative), axis=1, keepdims=True))
  of_targets = right[np.arange(512), targets]
  error = lambda x: np.max(np.abs(np.float64(x) - of_targets))
  assert error(logprobs) <= error(drawn) * 1.01 + 1e-6 and np.min(entropy) >= 0
  of_logits = (np.arange(264) == np.asarray(targets)[:, None]) - np.exp(right)
  np.testing.assert_allclose(norms, np.sum(of_logits**2, axis=1), rtol=2e-4, atol=1e-12)
  of_logits *= weights[:, None]
  np.testing.assert_allclose(grad * temperature, of_logits, atol=2e-6)


def test_the_entropy_has_a_gradient_only_if_it_is_learned(work):
  head, hidden, targets, counted, _ = work
  entropy = lambda hidden, learns: jnp.sum(chunked(chunk=16, learns_entropy=learns)(head, hidden, targets, counted)[1])
  assert not np.any(jax.grad(entropy)(hidden, False)) and np.any(jax.grad(entropy)(hidden, True))


def test_a_batch_without_counted_tokens_has_no_loss(work):
  """Its gradient is zero."""
  head, hidden, targets, counted, weights = work
  (loss, _), grads = loss_of(chunked(chunk=8), targets, jnp.zeros_like(counted), weights)(head, hidden)
  assert loss == 0 and not any(np.any(x) for x in jax.tree.leaves(grads))


def test_memory_holds_only_one_chunk_of_logits():
  """For 2048 tokens and 8192 ids, all logits would take 64 MB; those of a chunk take 4 MB."""
  head = {"w": jax.ShapeDtypeStruct((32, 8192), jnp.float32), "b": jax.ShapeDtypeStruct((8192,), jnp.float32)}
  hidden, ids = jax.ShapeDtypeStruct((8, 256, 32), jnp.float32), jax.ShapeDtypeStruct((8, 256), jnp.int32)
  counted = jnp.ones((8, 256), bool)
  temp = lambda logprobs_fn: (
    jax.jit(jax.grad(lambda head, hidden, ids: jnp.sum(logprobs_fn(head, hidden, ids, counted)[0]), argnums=(0, 1)))
    .lower(head, hidden, ids)
    .compile()
    .memory_analysis()
    .temp_size_in_bytes
  )
  assert temp(chunked(chunk=128, learns_entropy=False)) < 20e6 < 64e6 < temp(lambda *args: plain_logprobs(*args, make_filter()))


GIB = 2**30


@pytest.mark.parametrize(
  ("memory", "vocab_size", "tensor", "tokens"),
  [
    (95.74 * GIB, 151_936, 1, 2048),
    (15.75 * GIB, 151_936, 1, 1024),
    (15.75 * GIB, 151_936, 4, 2048),
    (None, 262_144, 1, 1024),
    (95.74 * GIB, 10**9, 1, 128),
    (15.75 * GIB, 264, 1, 2048),
  ],
)
def test_a_chunk_takes_a_small_share_of_an_accelerator(memory, vocab_size, tensor, tokens, monkeypatch):
  monkeypatch.setattr(head_lib, "platform_of", lambda mesh: "tpu")
  monkeypatch.setattr(head_lib, "device_memory", lambda mesh: memory)
  mesh = mesh_lib.make_mesh(tensor=tensor)
  assert chunk_tokens(vocab_size, mesh) == tokens
  assert tokens == 128 or 4 * tokens * vocab_size / tensor <= (memory or 16 * GIB) / 16


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 8e-3)])
def test_logits_have_the_gradient_of_a_plain_product(rng, dtype, tolerance):
  """The weight stays in float32, and so does the sum of its gradient over the tokens."""
  x, weight, ct = (jnp.float32(rng.standard_normal(shape)) for shape in ((3, 50, WIDTH), (WIDTH, VOCAB), (3, 50, VOCAB)))
  x = x.astype(dtype)
  logits, back = jax.vjp(matmul_in_float32, x, weight)
  expected, plain = jax.vjp(lambda x, weight: x.astype(jnp.float32) @ weight, x, weight)
  assert logits.dtype == jnp.float32 and [y.dtype.name for y in back(ct)] == [dtype, "float32"]
  for y, z in zip((logits, *back(ct)), (expected, *plain(ct)), strict=True):
    assert jnp.max(jnp.abs(y.astype(jnp.float32) - z.astype(jnp.float32))) < tolerance * jnp.max(jnp.abs(z))


def test_the_gradient_of_a_head_is_not_rounded_in_each_chunk(rng):
  """The products read bfloat16; the sum over the chunks is that of their float32 gradients."""
  head = {"w": jnp.float32(rng.standard_normal((WIDTH, VOCAB)))}
  hidden = jnp.asarray(rng.standard_normal((BATCH, LENGTH, WIDTH)), jnp.bfloat16)
  targets, counted = jnp.int32(rng.integers(VOCAB, size=(BATCH, LENGTH))), jnp.ones((BATCH, LENGTH), bool)
  unembed = lambda head, x: matmul_in_float32(x, head["w"])

  def loss(head, chunk):
    options = dict(unembed=unembed, filter_logits=make_filter(), chunk=chunk)
    return jnp.sum(token_logprobs(head, hidden, targets, counted, **options)[0])

  by_token, whole = (jax.grad(loss)(head, chunk)["w"] for chunk in (1, BATCH * LENGTH))
  # Rounded in each of 96 chunks, the sums would differ by some thousandths of their terms.
  np.testing.assert_allclose(by_token, whole, atol=1e-4)
