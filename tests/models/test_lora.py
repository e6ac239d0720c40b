"""Tests of adapters: fresh ones change nothing, only they are trained, and merging is exact."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.learner.train_step import init_state, make_train_step, policy_outputs
from jaxrl_llm.models import Lora, make_critic, make_model, merge, preset, reference, trainable
from jaxrl_llm.models.lora import is_adapter
from jaxrl_llm.types import TrainBatch
from tests.marks import few

ALL = Lora(rank=3, alpha=6.0, targets=("attention/.*", "mlp/.*", "head"))
DENSE = preset("nano", vocab_size=264)._replace(qkv_bias=True, tie_embeddings=False, lora=ALL)
SPARSE = preset("nano-moe", vocab_size=264)._replace(lora=ALL)


@functools.cache
def build(name):
  """Makes a model whose adapters have an effect, its params, rows, and its compiled logits."""
  model = make_model({"dense": DENSE, "sparse": SPARSE}[name])
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  params = jax.tree.map(lambda p: jnp.asarray(0.2 * rng.standard_normal(p.shape), jnp.float32), shapes)
  tokens = jnp.asarray(rng.integers(264, size=(2, 9)), jnp.int32)
  rows = (tokens, jnp.tile(jnp.arange(9), (2, 1)), jnp.ones((2, 9), jnp.int32))
  return model, params, rows, jax.jit(model.logits)


def leaves(tree):
  return {"/".join(key.key for key in path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("name", few(["dense", "sparse"], 0))
def test_merged_weights_are_the_same_model(name):
  model, params, rows, logits = build(name)
  plain, merged = merge(model, params)
  assert jax.tree.structure(merged) == jax.tree.structure(jax.eval_shape(plain.init, jax.random.key(0)))
  np.testing.assert_allclose(jax.jit(plain.logits)(merged, *rows), logits(params, *rows), atol=2e-4)
  # Otherwise the adapters would have no effect.
  assert not np.allclose(logits(reference(params), *rows), logits(params, *rows), atol=0.1)


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_fresh_adapters_add_nothing(name):
  model, _, rows, logits = build(name)
  params = model.init(jax.random.key(1))
  bare = make_model(model.config._replace(lora=None))
  base = {k: x for k, x in leaves(params).items() if "_lora_" not in k}
  assert sorted(base) == sorted(leaves(jax.eval_shape(bare.init, jax.random.key(0))))
  _, merged = merge(model, params)
  assert np.array_equal(logits(params, *rows), logits(reference(params), *rows))
  assert all(np.array_equal(x, leaves(merged)[k]) for k, x in base.items())


def test_the_reference_shares_the_memory_of_the_base():
  _, params, _, _ = build("dense")
  base = leaves(reference(params))
  for name, x in leaves(params).items():
    assert np.all(base[name] == 0) if "_lora_" in name else base[name] is x


def test_targets_select_the_weights_with_adapters():
  model = make_model(DENSE._replace(lora=Lora(2, 4.0, ("attention/[qv]", "mlp/down"))))
  names = {name for name in leaves(jax.eval_shape(model.init, jax.random.key(0))) if name.endswith("_lora_a")}
  assert names == {"layers/attention/q_lora_a", "layers/attention/v_lora_a", "layers/mlp/down_lora_a"}


def test_targets_that_match_nothing_are_refused():
  model = make_model(DENSE._replace(lora=Lora(2, 4.0, ("attn/.*",))))
  with pytest.raises(ValueError, match=re.escape("model.lora_targets: found ('attn/.*',), which match no linear map")):
    trainable(model.config, model.logical_axes)


@pytest.mark.parametrize("rows_at_once", few([None, 1], 1))
def test_an_update_trains_the_adapters_and_nothing_else(rows_at_once):
  model, params, (tokens, positions, segments), _ = build("dense")
  trained = trainable(model.config, model.logical_axes)
  optimizer = optax.adamw(1e-2)
  state = init_state(params, optimizer, trainable=trained)
  moments = sum(x.size for x in jax.tree.leaves(state.opt_state))
  # Two moments per weight, and counters.
  assert moments < 2 * sum(x.size for k, x in leaves(params).items() if "_lora_" in k) + 10
  mask = jnp.ones((2, 9)).at[:, 0].set(0)
  batch = TrainBatch(tokens, positions, segments, mask, mask, mask)
  step = make_train_step(
    functools.partial(policy_outputs, model.logprobs, make_filter()),
    objectives.make("sft"),
    optimizer,
    learning_rate=lambda _: 1e-2,
    rows_at_once=rows_at_once,
    trainable=trained,
  )
  jitted = jax.jit(step)
  new, first = jitted(state, batch)
  for name, x in leaves(new.params).items():
    assert np.array_equal(x, leaves(params)[name]) == ("_lora_" not in name), name
  for _ in range(10):
    new, last = jitted(new, batch)
  assert last["actor/loss"] < 0.9 * first["actor/loss"]


def test_a_critic_copies_the_merged_trunk():
  model, params, _, _ = build("dense")
  trunk = make_critic(model.config).from_policy(params)["trunk"]
  merged = merge(model, params)[1]
  assert all(np.array_equal(x, leaves(merged)[name]) for name, x in leaves(trunk).items())
  assert not any(is_adapter(path) for path, _ in jax.tree_util.tree_leaves_with_path(trunk))
