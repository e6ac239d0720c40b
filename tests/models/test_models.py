"""Tests of the decoder: logits against a float64 NumPy loop, the cache, packing and padding."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import make_model, preset
from tests.marks import few
from tests.programs import equations

NANO = preset("nano", vocab_size=264)
# Fast to compile; the programs run only for milliseconds.
FAST = {"xla_backend_optimization_level": 0}
OPTIONS = {
  "nano": {},
  "qkv_bias": {"qkv_bias": True},
  "untied": {"tie_embeddings": False},
  "no_qk_norm": {"qk_norm": False},
  "all_heads_share": {"num_kv_heads": 1},
  "no_head_shares": {"num_kv_heads": 4, "qkv_bias": True, "tie_embeddings": False},
}


@functools.cache
def build(option="nano"):
  """Makes the model, params and compiled logits that all tests of an option share."""
  model = make_model(NANO._replace(**OPTIONS[option]))
  return model, draw_params(model), jax.jit(model.logits)


def draw_params(model):
  """Draws params so that none has its neutral value.

  Fresh scales are 1 and fresh biases are 0, which could hide an error.
  """
  rng = np.random.default_rng(0)
  draw = lambda path, p: jnp.asarray((path[-1].key == "scale") + 0.2 * rng.standard_normal(p.shape), jnp.float32)
  return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0)))


def padded(sequences, width, pad=7):
  """Returns tokens, positions and segments with one sequence per row, padded on the right."""
  tokens, positions, segments = (np.zeros((len(sequences), width), np.int32) for _ in range(3))
  tokens += pad
  for row, sequence in enumerate(sequences):
    slots = slice(0, len(sequence))
    tokens[row, slots], positions[row, slots], segments[row, slots] = sequence, np.arange(len(sequence)), 1
  return jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segments)


def draw_sequences(lengths, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(NANO.vocab_size, size=length).astype(np.int32) for length in lengths]


# The oracle computes one sequence, one head and one position at a time, in float64.


def oracle_norm(x, scale, eps):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def oracle_rope(x, theta):
  """Rotates the pair (i, i + C/2) of position p by p·theta^(-2i/C)."""
  out, width = np.empty_like(x), x.shape[-1]
  for position in range(len(x)):
    for i in range(width // 2):
      angle = position * theta ** (-2 * i / width)
      a, b = x[position, i], x[position, i + width // 2]
      out[position, i] = a * np.cos(angle) - b * np.sin(angle)
      out[position, i + width // 2] = a * np.sin(angle) + b * np.cos(angle)
  return out


def oracle_attention(config, p, x):
  """Computes each query head by itself, with its own copy of the keys and values."""
  out = np.zeros_like(x)
  for head in range(config.num_heads):
    shared = head // (config.num_heads // config.num_kv_heads)
    q, k, v = x @ p["q"][:, head], x @ p["k"][:, shared], x @ p["v"][:, shared]
    if config.qkv_bias:
      q, k, v = q + p["q_bias"][head], k + p["k_bias"][shared], v + p["v_bias"][shared]
    if config.qk_norm:
      q, k = oracle_norm(q, p["q_norm"]["scale"], config.norm_eps), oracle_norm(k, p["k_norm"]["scale"], config.norm_eps)
    q, k = oracle_rope(q, config.rope_theta), oracle_rope(k, config.rope_theta)
    for t in range(len(x)):
      scores = k[: t + 1] @ q[t] / np.sqrt(config.head_dim)
      weights = np.exp(scores - scores.max())
      out[t] += (weights / weights.sum()) @ v[: t + 1] @ p["o"][head]
  return out


def oracle_logits(config, params, tokens):
  params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
  x = params["embedding"][tokens]
  for layer in range(config.num_layers):
    p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
    x = x + oracle_attention(config, p["attention"], oracle_norm(x, p["attention_norm"]["scale"], config.norm_eps))
    y = oracle_norm(x, p["mlp_norm"]["scale"], config.norm_eps)
    gate = y @ p["mlp"]["gate"]
    x = x + (gate / (1 + np.exp(-gate)) * (y @ p["mlp"]["up"])) @ p["mlp"]["down"]
  x = oracle_norm(x, params["final_norm"]["scale"], config.norm_eps)
  return x @ (params["embedding"].T if config.tie_embeddings else params["head"])


@pytest.mark.parametrize("option", OPTIONS)
def test_logits_match_a_float64_loop(option):
  model, params, logits_fn = build(option)
  sequences = draw_sequences([9, 5, 8])
  logits = logits_fn(params, *padded(sequences, 9))
  assert logits.dtype == jnp.float32
  for row, sequence in enumerate(sequences):
    expected = oracle_logits(model.config, params, sequence)
    assert expected.std() > 1  # Otherwise the tolerance would say nothing.
    np.testing.assert_allclose(logits[row, : len(sequence)], expected, atol=1e-4)


@pytest.mark.parametrize(
  ("option", "in_prompt", "blocks"), few([("nano", 3, (3,)), ("qkv_bias", 0, (2, 4)), ("no_head_shares", 4, (1, 2))], 0, 1)
)
def test_decoding_through_the_cache_is_the_full_forward(option, in_prompt, blocks):
  """Two rows for each of three prompts decode tokens one at a time.

  The prompts have up to `in_prompt` cached tokens, padded on the left.
  """
  model, params, logits_fn = build(option)
  cached = [in_prompt, max(in_prompt - 2, 0), 0]
  steps = sum(blocks)
  sequences = draw_sequences([length + steps for length in cached for _ in range(2)])
  for row in range(0, 6, 2):
    sequences[row + 1][: cached[row // 2]] = sequences[row][: cached[row // 2]]
  full = logits_fn(params, *padded(sequences, in_prompt + steps))

  cache, seen = None, None
  if in_prompt:
    tokens, seen = np.full((3, in_prompt), 99, np.int32), np.zeros((3, in_prompt), bool)
    for row, length in enumerate(cached):
      tokens[row, in_prompt - length :], seen[row, in_prompt - length :] = sequences[2 * row][:length], True
    cache, routes = model.prefill(params, jnp.asarray(tokens), jnp.asarray(seen), dtype="float32")
    assert routes is None and cache.prompts[0].k.shape == (3, model.config.num_kv_heads, model.config.head_dim, in_prompt)
  for size in blocks:
    cache = model.grow(cache, 6, size, dtype="float32")
  weights, decode = model.decoding_weights(params), jax.jit(model.decode, compiler_options=FAST)
  starts = np.repeat(cached, 2)
  for t in range(steps):
    tokens = jnp.asarray([sequence[start + t] for sequence, start in zip(sequences, starts, strict=True)])
    logits, cache, _ = decode(
      weights, tokens, jnp.asarray(starts + t), cache, column=jnp.int32(t),
      ages=jnp.where(jnp.arange(steps) <= t, t - jnp.arange(steps), steps), lengths=jnp.full((6,), t + 1),
      prompts_seen=None if seen is None else jnp.asarray(seen),
    )  # fmt: skip
    for row, start in enumerate(starts):
      np.testing.assert_allclose(logits[row], full[row, start + t], atol=1e-5, rtol=1e-5)


def compiled_step(num_layers, **options):
  """Returns the text of the compiled program of a decoding step."""
  model = make_model(NANO._replace(num_layers=num_layers))
  weights = jax.eval_shape(model.decoding_weights, jax.eval_shape(model.init, jax.random.key(0)))
  cache = jax.eval_shape(lambda: model.grow(None, 4, 8, dtype="float32"))
  rows, column, ages = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4,), (), (8,)))
  step = lambda weights, tokens, positions, cache, column, ages, lengths: model.decode(
    weights, tokens, positions, cache, column=column, ages=ages, lengths=lengths, prompts_seen=None
  )
  return jax.jit(step, **options).lower(weights, rows, rows, cache, column, ages, rows).compile().as_text()


def test_a_decoding_step_computes_sines_once():
  """Not for every head of every layer, which XLA does on CPUs if it may."""
  assert [compiled_step(4).count(f" {name}(") for name in ("sine", "cosine")] == [1, 1]


def test_no_operation_of_a_decoding_step_reads_all_layers():
  """XLA fuses sums into their readers, so a norm could add up the outputs of all earlier layers."""

  def most_operands(num_layers):
    text = compiled_step(num_layers, compiler_options=FAST)
    fusions = [line.split(" fusion(")[1].split(")")[0] for line in text.splitlines() if " fusion(" in line]
    assert len(fusions) > num_layers
    return max(operands.count("%") for operands in fusions)

  assert most_operands(8) == most_operands(2)


def test_a_later_token_changes_nothing_earlier():
  _, params, logits_fn = build()
  tokens, positions, segments = padded(draw_sequences([9, 9, 9]), 9)
  before = np.asarray(logits_fn(params, tokens, positions, segments))
  changed = [0, 3, 8]
  after = np.asarray(logits_fn(params, tokens.at[jnp.arange(3), jnp.array(changed)].add(-1), positions, segments))
  for row, slot in enumerate(changed):
    np.testing.assert_array_equal(after[row, :slot], before[row, :slot])
    assert np.all(np.abs(after[row, slot:] - before[row, slot:]).max(axis=-1) > 1e-3)


def test_padding_changes_nothing():
  _, params, logits_fn = build()
  sequences = [*draw_sequences([6, 3]), np.zeros(0, np.int32)]  # The last row is all padding.
  narrow, wide, other = (logits_fn(params, *padded(sequences, width, pad)) for width, pad in ((6, 7), (9, 7), (9, 200)))
  for row, sequence in enumerate(sequences):
    real = slice(0, len(sequence))
    np.testing.assert_allclose(wide[row, real], narrow[row, real], atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(wide[row, real], other[row, real])
  assert np.all(np.isfinite(wide))


def loss_of(model):
  def loss(params, tokens, positions, segments):
    scores = jax.nn.log_softmax(model.logits(params, tokens, positions, segments))
    return -jnp.mean(scores[..., 3] * (segments > 0))

  return loss


def test_a_bfloat16_model_keeps_params_gradients_and_logits_in_float32():
  (_, params, logits_fn), half = build(), make_model(NANO._replace(dtype="bfloat16"))
  batch = padded(draw_sequences([8]), 8)
  assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(jax.eval_shape(half.init, jax.random.key(0))))
  reference, logits = logits_fn(params, *batch), jax.jit(half.logits)(params, *batch)
  assert logits.dtype == jnp.float32
  error = np.abs(np.asarray(logits - reference)) / np.std(reference)
  assert 1e-3 < error.max() < 0.1  # The lower bound shows that it did compute in bfloat16.
  assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(jax.eval_shape(jax.grad(loss_of(half)), params, *batch)))

  tokens, positions, segments = batch
  cache, _ = jax.jit(half.prefill, static_argnames="dtype")(params, tokens[:, :-1], segments[:, :-1] > 0, dtype="bfloat16")
  cache = half.grow(cache, 1, 1, dtype="bfloat16")
  weights, view = half.decoding_weights(params), dict(
    column=jnp.int32(0), ages=jnp.zeros((1,), jnp.int32), lengths=jnp.ones((1,), jnp.int32), prompts_seen=segments[:, :-1] > 0
  )
  decoded, cache, _ = jax.jit(half.decode)(weights, tokens[:, -1], positions[:, -1], cache, **view)
  assert decoded.dtype == jnp.float32 and cache.blocks[0][0].v.dtype == jnp.bfloat16
  np.testing.assert_allclose(decoded[0], logits[0, -1], atol=0.1 * np.std(reference))


def test_programs_for_whole_rows_do_not_grow_with_depth():
  batch, sizes = padded(draw_sequences([4]), 4), {}
  for num_layers in (1, 3, 12):
    model = make_model(NANO._replace(num_layers=num_layers))
    params = jax.eval_shape(model.init, jax.random.key(0))
    sizes[num_layers] = sum(1 for _ in equations(jax.make_jaxpr(jax.grad(loss_of(model)))(params, *batch).jaxpr))
  assert sizes[1] > 50, "this test counts the wrong thing"
  assert sizes[1] == sizes[3] == sizes[12]


@pytest.mark.parametrize("option", OPTIONS)
def test_logical_axes_name_every_dimension(option):
  config = NANO._replace(**OPTIONS[option], num_layers=3)
  model = make_model(config)
  sizes = {
    "layers": config.num_layers,
    "vocab": config.vocab_size,
    "embed": config.d_model,
    "heads": config.num_heads,
    "kv_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "mlp": config.d_ff,
  }
  params = jax.eval_shape(model.init, jax.random.key(0))
  named = jax.tree.map(lambda axes: tuple(sizes[axis] for axis in axes), model.logical_axes, is_leaf=lambda x: isinstance(x, tuple))
  assert named == jax.tree.map(lambda p: p.shape, params)
  assert model.num_params == sum(p.size for p in jax.tree.leaves(params))
  assert ("head" in params) != config.tie_embeddings and ("q_bias" in params["layers"]["attention"]) == config.qkv_bias


def test_init_follows_its_key_and_no_two_layers_are_alike():
  model = make_model(NANO)
  init = jax.jit(model.init)
  # This kind of key compiles twice as fast.
  first, again, other = (init(jax.random.key(seed, impl="rbg")) for seed in (0, 0, 1))
  chex.assert_trees_all_equal(first, again)
  for name in ("q", "k", "v", "o"):
    weight = first["layers"]["attention"][name]
    assert np.abs(weight[0] - weight[1]).max() > 0.01
    assert np.abs(weight - other["layers"]["attention"][name]).max() > 0.01
  # N(0, 1/D), truncated at two deviations, has 0.88 of the deviation.
  np.testing.assert_allclose(np.std(first["embedding"]), 0.88 * NANO.d_model**-0.5, rtol=0.03)


def test_heads_that_cannot_share_keys_are_refused():
  with pytest.raises(ValueError, match="num_heads=4 must be a multiple of num_kv_heads=3"):
    make_model(NANO._replace(num_kv_heads=3))
