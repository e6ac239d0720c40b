"""Tests of the critic: the policy's trunk with a value head, and the values before each token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.learner.packing import Trajectory
from jaxrl_llm.learner.train_step import critic_outputs, init_state, make_train_step
from jaxrl_llm.models import make_critic, make_model, preset
from jaxrl_llm.objectives.base import critic_objective
from tests.batches import pack_rows
from tests.marks import few

CONFIG = preset("nano", vocab_size=264)


@functools.cache
def critic():
  """Makes the critic, and params without zeros."""
  made = make_critic(CONFIG)
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(made.init, jax.random.key(0))
  return made, jax.tree.map(lambda p: jnp.asarray(0.3 * rng.standard_normal(p.shape), jnp.float32), shapes)


def batch_of(*lengths):
  rng = np.random.default_rng(1)
  sequences = []
  for length in lengths:
    mask = (np.arange(length) > 1).astype(np.float32)
    ids = rng.integers(264, size=length).astype(np.int32)
    sequences.append(Trajectory(ids, mask, mask * 0, mask * 0))
  return jax.tree.map(jnp.asarray, pack_rows(sequences, row_tokens=16, row_buckets=(2,))), sequences


def test_the_trunk_comes_from_the_policy_and_its_values_are_zero():
  policy = make_model(CONFIG)
  weights = policy.init(jax.random.key(1))
  made, _ = critic()
  params = made.from_policy(weights)
  assert params["trunk"].keys() == weights.keys() and not np.any(params["value_head"]) and params["value_bias"] == 0
  assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b) and a is not b, params["trunk"], weights))
  assert jax.tree.structure(params) == jax.tree.structure(jax.eval_shape(made.init, jax.random.key(0)))
  assert made.num_params == policy.num_params + CONFIG.d_model + 1
  assert not np.array_equal(made.init(jax.random.key(2))["trunk"]["embedding"], weights["embedding"])


def test_the_trunk_of_an_untied_policy_has_no_output_head():
  config = CONFIG._replace(tie_embeddings=False)
  params = make_critic(config).from_policy(make_model(config).init(jax.random.key(0)))
  assert "head" not in params["trunk"]


def test_the_value_is_a_readout_of_the_trunks_final_state():
  """With an identity as head, the policy's logits are the final states, which the critic reads."""
  made, params = critic()
  untied = make_model(CONFIG._replace(tie_embeddings=False, vocab_size=264))
  tokens = jnp.arange(12).reshape(1, 12) * 7 % 264
  positions, segments = jnp.arange(12)[None], jnp.ones((1, 12), jnp.int32)
  width = CONFIG.d_model
  states = untied.logits(params["trunk"] | {"head": jnp.eye(width, 264)}, tokens, positions, segments)[..., :width]
  expected = np.asarray(states, np.float64) @ np.asarray(params["value_head"]) + float(params["value_bias"])
  np.testing.assert_allclose(made.values(params, tokens, positions, segments), expected, rtol=1e-5, atol=1e-5)


def test_values_are_of_the_state_before_each_token():
  made, params = critic()
  made = made._replace(values=jax.jit(made.values))
  batch, sequences = batch_of(7, 5, 9)
  outputs = critic_outputs(made.values, params, batch)
  assert not np.any(outputs.logprobs)
  for row, segment, length in ((0, 1, 9), (0, 2, 7), (1, 1, 5)):
    here = np.asarray(batch.segments[row]) == segment
    (ids,) = [s.tokens for s in sequences if len(s.tokens) == length]
    alone = made.values(params, jnp.asarray(ids)[None], jnp.arange(length)[None], jnp.ones((1, length), jnp.int32))
    # There is no state before the first token.
    expected = np.concatenate([[0], np.asarray(alone)[0, :-1]])
    np.testing.assert_allclose(np.asarray(outputs.values)[row, here], expected, atol=1e-5)
    assert np.ptp(expected) > 0.1


def test_the_value_of_a_state_does_not_depend_on_later_tokens():
  made, params = critic()
  batch, _ = batch_of(9)
  changed = batch._replace(tokens=batch.tokens.at[0, 5].add(1))
  before, after = (np.asarray(critic_outputs(made.values, params, b).values)[0] for b in (batch, changed))
  np.testing.assert_array_equal(before[:6], after[:6])
  assert np.all(before[6:9] != after[6:9])


@pytest.mark.parametrize("clip", few([None, 0.2], 1))
def test_updates_fit_the_returns(clip):
  made, params = critic()
  batch, _ = batch_of(9, 7, 5)
  targets = jnp.where(batch.mask > 0, jnp.sin(batch.tokens.astype(jnp.float32)), jnp.nan)
  old = critic_outputs(made.values, params, batch).values
  batch = batch._replace(sampler_logprobs=None, returns=targets, old_values=old)
  objective = critic_objective(objectives.make("ppo", value_clip=clip))
  assert objective.needs == {"values", "returns", "old_values"}
  optimizer = optax.adam(1e-2)
  settings = dict(learning_rate=lambda _: 1e-2, name="critic")
  step = jax.jit(make_train_step(functools.partial(critic_outputs, made.values), objective, optimizer, **settings))
  state, losses = init_state(params, optimizer), []
  for _ in range(40):
    state, metrics = step(state, batch)
    losses.append(float(metrics["critic/loss"]))
  error = np.asarray(old - targets)[np.asarray(batch.mask) > 0]
  np.testing.assert_allclose(losses[0], 0.5 * np.mean(error**2), rtol=1e-4)
  assert metrics["critic/skipped"] == 0 and not any(name.startswith("actor/") for name in metrics)
  # With the clip, a value gains nothing by leaving the band around its old value; without it, the
  # fit goes on.
  assert losses[-1] < 0.2 * losses[0] if clip is None else metrics["critic/vf_clipfrac"] > 0.5


def test_an_objective_without_a_critic_is_refused():
  with pytest.raises(ValueError, match="^value_loss: found None, expected an objective with a critic, such as ppo"):
    critic_objective(objectives.make("gspo"))
