"""The update but for its splits: outputs by hand, refusals, the optimizer, and further losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.learner.packing import Trajectory
from jaxrl_llm.learner.train_step import init_state, make_optimizer, make_train_step, sampler_gap
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.types import PolicyOutputs
from tests.batches import bigram_outputs, pack_rows
from tests.marks import few

VOCAB = 6
# Lengths differ on purpose, so that a mean within any part of the batch would be wrong.
LENGTHS = ((3, 9), (2, 1), (4, 12), (1, 2), (3, 5), (2, 7), (2, 3), (5, 10))


def trajectories(rng):
  """Makes sequences of `LENGTHS` with random advantages and sampler log-probabilities."""
  sequences = []
  for prompt, response in LENGTHS:
    mask = np.concatenate([np.zeros(prompt), np.ones(response)]).astype(np.float32)
    # A token of another speaker inside the longer responses.
    if response > 4:
      mask[prompt + 2] = 0
    logprobs = np.float32(-np.log(VOCAB) + 0.3 * rng.standard_normal(len(mask)))
    advantages = np.full(len(mask), rng.standard_normal(), np.float32)
    tokens = rng.integers(VOCAB, size=len(mask)).astype(np.int32)
    sequences.append(Trajectory(tokens, mask, advantages * mask, logprobs * mask))
  return sequences


def on_device(batch):
  return jax.tree.map(jnp.asarray, batch)


def test_outputs_match_a_loop_over_tokens(rng):
  table = rng.standard_normal((VOCAB, VOCAB)).astype(np.float32)
  batch = pack_rows(trajectories(rng), row_tokens=24, row_buckets=(4,))
  assert np.max(batch.segments) > 1 and np.any(batch.segments == 0)
  outputs = jax.jit(functools.partial(bigram_outputs, temperature=0.7))({"table": jnp.asarray(table)}, on_device(batch))
  expected_logprobs, expected_entropy = np.zeros((2, *batch.tokens.shape))
  num_scored = 0
  for row in range(4):
    for segment in range(1, np.max(batch.segments) + 1):
      slots = np.flatnonzero(batch.segments[row] == segment)
      for before, slot in zip(slots[:-1], slots[1:], strict=True):
        if not batch.mask[row, slot]:
          continue
        logits = table[batch.tokens[row, before]].astype(np.float64) / 0.7
        probs = np.exp(logits) / np.exp(logits).sum()
        expected_logprobs[row, slot] = np.log(probs[batch.tokens[row, slot]])
        expected_entropy[row, slot] = -np.sum(probs * np.log(probs))
        num_scored += 1
  assert num_scored == np.sum(batch.mask) < sum(map(sum, LENGTHS)) - len(LENGTHS)
  np.testing.assert_allclose(outputs.logprobs, expected_logprobs, atol=1e-5)
  np.testing.assert_allclose(outputs.entropy, expected_entropy, atol=1e-5)
  # Tokens that do not count have exactly 0.
  rest = batch.mask == 0
  assert np.all(np.asarray(outputs.logprobs)[rest] == 0) and np.all(np.asarray(outputs.entropy)[rest] == 0)


def test_outputs_keep_the_drawn_token_where_the_policy_would_filter_it():
  table = np.float32([[5, 0, 0], [5, 0, 0], [5, 0, 0]])
  batch = on_device(pack_rows([Trajectory(np.array([0, 2], np.int32), *3 * [np.ones(2, np.float32)])], row_tokens=2, row_buckets=(1,)))
  outputs = bigram_outputs({"table": jnp.asarray(table)}, batch, top_k=1)
  np.testing.assert_allclose(outputs.logprobs[0, 1], np.log(1 / (1 + np.exp(5))), rtol=1e-5)


# A policy of a few numbers, for the rest of an update.


def adamw(**changes):
  """Makes an optimizer without weight decay, and its schedule."""
  return make_optimizer(**(dict(learning_rate=0.1, warmup_steps=0, weight_decay=0.0, b1=0.9, b2=0.9, max_grad_norm=1.0) | changes))


@functools.cache
def tiny_setting(**changes):
  optimizer, schedule = adamw(**(dict(warmup_steps=3, b2=0.95) | changes))
  rng = np.random.default_rng(0)
  params = {"table": jnp.asarray(rng.standard_normal((VOCAB, VOCAB)), jnp.float32), "unused": jnp.ones(2)}
  batch = on_device(pack_rows(trajectories(rng), row_tokens=24, row_buckets=(4,)))
  step = make_train_step(bigram_outputs, objectives.make("dapo"), optimizer, learning_rate=schedule, rows_at_once=2)
  return init_state(params, optimizer), batch, jax.jit(step)


def bitwise_equal(a, b):
  # Here NaN equals NaN, and 0 differs from -0.
  bits = lambda x: np.frombuffer(np.asarray(x).tobytes(), np.uint8)
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(bits(x), bits(y)), a, b)


DAPO = objectives.make("dapo")
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
# Moments that begin in bfloat16 and become float32 in the first update.
GROWING = optax.GradientTransformation(lambda params: ADAM.init(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)), ADAM.update)
MISFITS = {
  "a loss for each sequence": (
    {"objective": DAPO._replace(token_loss=lambda *args: ((of := DAPO.token_loss(*args))[0].sum(axis=1, keepdims=True), of[1]))},
    "one number per token",
  ),
  "advantages of sequences": ({"advantages": lambda x: x[:, :1]}, "must begin with the axes of its mask"),
  "rows that do not divide": ({"rows_at_once": 3}, "micro-batches do not divide the rows"),
  "moments of another type": ({"optimizer": GROWING}, "would compile again"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_wrong_inputs_are_refused_while_the_step_is_traced(name):
  changes, message = MISFITS[name]
  state, batch, _ = tiny_setting()
  change = changes.get("advantages", lambda x: x)
  objective, optimizer, at_once = (changes.get(*setting) for setting in (("objective", DAPO), ("optimizer", SGD), ("rows_at_once", 2)))
  step = make_train_step(bigram_outputs, objective, optimizer, learning_rate=lambda _: 0.1, rows_at_once=at_once)
  with pytest.raises(ValueError, match=f"actor: .*{message}"):
    jax.eval_shape(step, init_state(state.params, optimizer), batch._replace(advantages=change(batch.advantages)))


def spoil(field, value):
  def spoiled(batch):
    row, slot = (x[0] for x in np.nonzero(batch.mask))
    return batch._replace(**{field: getattr(batch, field).at[row, slot].set(value)})

  return spoiled


@pytest.mark.parametrize(
  ("field", "value"), [("advantages", np.nan), ("advantages", np.inf), ("advantages", -np.inf), ("old_logprobs", np.nan)]
)
def test_a_non_finite_update_changes_only_the_counters(field, value):
  state, batch, step = tiny_setting()
  state, _ = step(state, batch)  # A first step gives moments that are not zero.
  refused, metrics = step(state, spoil(field, value)(batch))
  bitwise_equal((refused.params, refused.opt_state), (state.params, state.opt_state))
  assert (int(refused.step), int(refused.skipped)) == (2, 1) and metrics["train/skipped"] == 1
  assert not (np.isfinite(metrics["actor/loss"]) and np.isfinite(metrics["actor/grad_norm"]))

  # The next good step is the same as without the refused one.
  (after, metrics), (never, expected) = step(refused, batch), step(state, batch)
  bitwise_equal((after.params, after.opt_state), (never.params, never.opt_state))
  bitwise_equal(metrics, expected)
  assert (int(after.step), int(after.skipped)) == (3, 1)
  assert np.any(after.params["table"] != state.params["table"])


def test_non_finite_params_are_never_trained():
  state, batch, step = tiny_setting()
  broken = state._replace(params=state.params | {"table": state.params["table"].at[0, 0].set(jnp.nan)})
  refused, metrics = step(broken, batch)
  bitwise_equal((refused.params, refused.opt_state), (broken.params, broken.opt_state))
  assert metrics["train/skipped"] == 1 and int(refused.skipped) == 1


def test_a_finite_loss_with_a_non_finite_gradient_is_refused():
  """√x at 0 has the value 0 and an infinite slope.

  The other parameter has a finite gradient, but does not change either.
  """
  state, batch, _ = tiny_setting()
  optimizer = optax.adam(0.1)

  def outputs_fn(params, batch):
    return PolicyOutputs(bigram_outputs(params, batch).logprobs + jnp.sqrt(params["unused"][0]))

  step = jax.jit(make_train_step(outputs_fn, objectives.make("sft"), optimizer, learning_rate=lambda _: 0.1))
  state = init_state(state.params | {"unused": jnp.zeros(2)}, optimizer)
  refused, metrics = step(state, batch)
  assert np.isfinite(metrics["actor/loss"]) and not np.isfinite(metrics["actor/grad_norm"])
  bitwise_equal((refused.params, refused.opt_state), (state.params, state.opt_state))


def test_junk_outside_the_mask_skips_no_update():
  state, batch, step = tiny_setting()
  off = batch.mask == 0
  junk = {name: jnp.where(off, jnp.nan, getattr(batch, name)) for name in ("advantages", "old_logprobs", "sampler_logprobs")}
  bitwise_equal(step(state, batch._replace(**junk)), step(state, batch))


def test_the_learning_rate_climbs_is_reported_and_ignores_refused_updates():
  state, batch, step = tiny_setting()
  rates, moved = [], []
  for bad in (False, True, False, False, False):
    before = state.params["table"]
    state, metrics = step(state, spoil("advantages", np.nan)(batch) if bad else batch)
    rates.append(float(metrics["actor/lr"]))
    moved.append(float(np.abs(state.params["table"] - before).max()))
  np.testing.assert_allclose(rates, [0.1 / 3, 0.2 / 3, 0.2 / 3, 0.1, 0.1], rtol=1e-5)
  # Adam's first step moves a parameter by the rate itself, so the metric is the optimizer's rate.
  np.testing.assert_allclose(moved[0], rates[0], rtol=1e-3)
  assert moved[1] == 0


@pytest.mark.parametrize(
  ("warmup_steps", "decay_steps", "expected"),
  [
    (0, 0, [1, 1, 1]),
    (1, 0, [1, 1, 1]),
    (2, 0, [0.5, 1, 1]),
    (4, 0, [0.25, 0.5, 0.75, 1, 1]),
    (0, 4, [1, 0.75, 0.5, 0.25, 0, 0]),
    (2, 4, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
  ],
)
def test_warm_up_and_linear_decay(warmup_steps, decay_steps, expected):
  _, schedule = adamw(learning_rate=2.0, warmup_steps=warmup_steps, decay_steps=decay_steps)
  np.testing.assert_allclose([schedule(step) for step in range(len(expected))], 2 * np.array(expected), atol=1e-6)


def test_weight_decay_spares_norms_and_biases():
  model = make_model(preset("nano", vocab_size=264)._replace(qkv_bias=True, tie_embeddings=False))
  params = jax.tree.map(lambda p: np.full(p.shape, 2, np.float32), jax.eval_shape(model.init, jax.random.key(0)))
  optimizer, _ = adamw(weight_decay=0.5)
  updates, _ = jax.jit(lambda params: optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params))(params)
  decayed = {jax.tree_util.keystr(path, simple=True, separator="/"): u for path, u in jax.tree_util.tree_leaves_with_path(updates)}
  spared = {name for name, u in decayed.items() if np.all(u == 0)}
  for name, u in decayed.items():
    assert name in spared or np.allclose(u, -0.1 * 0.5 * 2)
  attention = {f"layers/attention/{name}" for name in ("q_bias", "k_bias", "v_bias", "q_norm/scale", "k_norm/scale")}
  assert spared == attention | {"layers/attention_norm/scale", "layers/mlp_norm/scale", "final_norm/scale"}


def test_gradients_are_clipped_by_their_global_norm():
  optimizer, _ = adamw(max_grad_norm=5.0)
  params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
  for factor, expected in ((100.0, [0.3, 0.4]), (0.5, [0.15, 0.2])):  # The norms are 500 and 2.5.
    _, state = optimizer.update({"a": jnp.array([3.0]) * factor, "b": jnp.array([4.0]) * factor}, optimizer.init(params), params)
    moments = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose([moments["a"][0], moments["b"][0]], expected, rtol=1e-5)


def test_updates_descend():
  state, batch, step = tiny_setting(learning_rate=0.02)
  losses = []
  for _ in range(6):
    state, metrics = step(state, batch)
    losses.append(float(metrics["actor/loss"]))
  assert losses[-1] < losses[0]


def test_sampler_gap_by_hand():
  mask = jnp.array([[0.0, 1.0, 1.0]])
  gap = sampler_gap(jnp.array([[0.0, -1.0, -2.0]]), jnp.array([[9.0, -1.5, -1.75]]))
  counted = {name: np.asarray(x)[np.asarray(mask) > 0] for name, x in gap.items()}
  np.testing.assert_allclose(counted["rollout_corr/logprob_abs_diff/mean"], [0.5, 0.25])
  np.testing.assert_allclose(counted["rollout_corr/kl"], [-0.5, 0.25])
  np.testing.assert_allclose(counted["rollout_corr/k3_kl"], [np.exp(0.5) - 1.5, np.exp(-0.25) - 0.75], rtol=1e-5)
  assert counted["rollout_corr/bits_equal"].tolist() == [0, 0]


def test_bits_are_equal_or_not_by_the_last_one():
  next_one = float(np.nextafter(np.float32(-2.0), np.float32(0)))
  gap = sampler_gap(jnp.array([[-1.0, -2.0, jnp.nan]]), jnp.array([[-1.0, next_one, jnp.nan]]))
  assert gap["rollout_corr/bits_equal"].tolist() == [[1, 0, 0]]


def test_the_sampler_gap_is_a_metric_if_a_sampler_drew_the_tokens():
  state, batch, step = tiny_setting()
  logprobs = bigram_outputs(state.params, batch).logprobs
  row, slot = (x[0] for x in np.nonzero(batch.mask))
  off_by = jnp.zeros_like(logprobs).at[row, slot].set(0.5)
  _, metrics = step(state, batch._replace(sampler_logprobs=logprobs - off_by))
  np.testing.assert_allclose(metrics["rollout_corr/logprob_abs_diff/max"], 0.5, rtol=1e-5)
  np.testing.assert_allclose(metrics["rollout_corr/logprob_abs_diff/mean"], 0.5 / np.sum(batch.mask), rtol=1e-5)
  np.testing.assert_allclose(metrics["rollout_corr/kl"], -0.5 / np.sum(batch.mask), rtol=1e-5)
  _, metrics = step(state, batch._replace(sampler_logprobs=None))
  assert not [name for name in metrics if name.startswith("rollout_corr")]


@pytest.mark.parametrize("rows_at_once", [None, 2])
@pytest.mark.parametrize(
  "weights", few(["sequence_sum", "sequence_mean", "token_mean", "constant"], "sequence_sum", rest="slow", by_hand=(1, 3))
)
def test_router_losses_are_means_over_tokens_whatever_weighs_the_policy(weights, rows_at_once):
  """Response lengths do not multiply them, and their coefficients keep their meaning."""
  state, batch, _ = tiny_setting()
  coefs, counted = {"balance": 0.1, "z": 0.01}, np.asarray(batch.mask) > 0

  def outputs_fn(params, batch):
    at_tokens = params["table"][batch.tokens, 0]
    return bigram_outputs(params, batch)._replace(router_losses={"balance": 1 + at_tokens**2, "z": at_tokens})

  objective = objectives.make("grpo", kl_coef=0.0, weights=weights, max_tokens=40 if weights == "constant" else None)
  options = dict(learning_rate=lambda _: 1.0, rows_at_once=rows_at_once)
  step = lambda fn, **more: jax.jit(make_train_step(fn, objective, SGD, **options, **more))(init_state(state.params, SGD), batch)
  (_, metrics), (_, plain) = step(outputs_fn, router_coefs=coefs), step(bigram_outputs)
  at_tokens = np.asarray(state.params["table"])[np.asarray(batch.tokens), 0][counted]
  means = {"balance": np.mean(1 + at_tokens**2), "z": np.mean(at_tokens)}
  for name, mean in means.items():
    np.testing.assert_allclose(metrics[f"moe/{name}_loss"], mean, rtol=1e-5)
  np.testing.assert_allclose(metrics["actor/loss"], plain["actor/loss"] + sum(coefs[name] * x for name, x in means.items()), rtol=1e-5)


def test_the_state_is_donated():
  state, batch, _ = tiny_setting()
  optimizer, schedule = adamw(weight_decay=0.1)
  step = make_train_step(bigram_outputs, objectives.make("dapo"), optimizer, learning_rate=schedule)
  state = init_state(state.params, optimizer)
  new, _ = jax.jit(step, donate_argnums=0)(state, batch)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((new, batch)))
