"""Moments of the gradients of single responses against loops over them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.learner import gradient_noise
from jaxrl_llm.learner.gradient_noise import Projection, bias, cotangents, joined, make_moments, noise, stacked, units_of
from jaxrl_llm.learner.train_step import init_state, make_train_step, policy_outputs
from jaxrl_llm.models import make_model
from jaxrl_llm.segments import token_weights
from jaxrl_llm.types import PolicyOutputs, TrainBatch
from jaxrl_llm.workdir.metrics import read_rows
from tests.learner.test_splits import GRADIENT, MODELS, laid_out
from tests.marks import few
from tests.runs import VARIED, column, run_here, tiny_config

LOSSES = (
  ("reinforce", {}),
  ("grpo", {"kl_coef": 0.0, "entropy_coef": 0.01}),
  ("gspo", {"clip_low": 0.05, "clip_high": 0.08}),
  ("sapo", {}),
  ("vespo", {}),
  ("kl_cov", {}),
)
VOCAB, WIDTH = 11, 5


def bigrams(params, batch):
  """Predicts each token from the one before it, in the precision of the params."""
  hidden = jnp.tanh(params["embed"][batch.tokens] @ params["mix"])
  before = jnp.pad(hidden, ((0, 0), (1, 0), (0, 0)))[:, :-1]
  logits = jax.nn.log_softmax(before @ params["head"])
  logprobs = jnp.take_along_axis(logits, batch.tokens[..., None], axis=-1)[..., 0]
  entropy = -jnp.sum(jnp.exp(logits) * logits, axis=-1)
  return PolicyOutputs(*(jnp.where(batch.mask > 0, x, 0) for x in (logprobs, entropy)))


def bigram_problem(seed=0, rows=4, slots=14, in_groups=False):
  """Returns weights, and a batch with two responses in each row, of which some are empty.

  In groups, the first responses of all rows are of one prompt, and so are the second ones.
  """
  rng = np.random.default_rng(seed)
  params = {"embed": (VOCAB, WIDTH), "mix": (WIDTH, WIDTH), "head": (WIDTH, VOCAB)}
  params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in params.items()}
  segments = np.repeat([[1] * (slots // 2) + [2] * (slots - slots // 2)], rows, axis=0)
  mask = (rng.random((rows, slots)) < 0.7).astype(float)
  mask[:, 0] = mask[0, slots // 2 :] = 0
  batch = TrainBatch(
    tokens=rng.integers(VOCAB, size=(rows, slots)),
    positions=np.zeros((rows, slots), int),
    segments=segments,
    mask=mask,
    advantages=mask * np.where(segments == 1, rng.normal(size=(rows, 1)), rng.normal(size=(rows, 1))),
    old_logprobs=np.zeros((rows, slots)),
  )
  batch = jax.tree.map(jnp.asarray, batch)
  own = bigrams(params, batch)
  shifted = mask * rng.normal(scale=0.2, size=mask.shape)
  groups = {"groups": jnp.where(batch.segments == 1, 7, 3)} if in_groups else {}
  return params, batch._replace(old_logprobs=own.logprobs + shifted, old_entropy=own.entropy, **groups)


def gradients_of_all(outputs_fn, objective, params, batch):
  """Differentiates each response's part of the loss, times the number of responses."""
  units = units_of(batch)
  batch = batch if objective.prepare is None else objective.prepare(batch)
  weights = token_weights(objective, batch.mask, batch.segments, batch.groups)

  @jax.jit
  def gradient_of_one(row, segment):
    chosen = (jnp.arange(len(batch.tokens))[:, None] == row) & (batch.segments == segment) & (weights > 0)

    def loss(params):
      losses, _ = objective.token_loss(outputs_fn(params, batch), batch)
      return len(units) * jnp.sum(jnp.where(chosen, weights * losses, 0))

    return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(jax.grad(loss)(params))])

  return np.stack([gradient_of_one(row, segment) for row, segment, _ in units])


@functools.partial(jax.jit, static_argnums=0)
def of_losses(outputs_fn, params, batch):
  outputs = outputs_fn(params, batch)
  return stacked([cotangents(objectives.make(name, **settings), outputs, batch) for name, settings in LOSSES])


def between_prompts(ours, groups):
  """Averages the products of gradients of different prompts, pair by pair."""
  pairs = [own @ other for own, i in zip(ours, groups, strict=True) for other, j in zip(ours, groups, strict=True) if i != j]
  return np.mean(pairs)


@pytest.mark.parametrize("in_groups", [False, True], ids=["independent", "in groups"])
@pytest.mark.parametrize("at_once", few([1, 3], 1))
def test_moments_equal_a_loop_over_single_responses(x64, at_once, in_groups):
  params, batch = bigram_problem(in_groups=in_groups)
  units = units_of(batch)
  assert len(units) == 7 and batch.old_logprobs.dtype == jnp.float64 and len(set(units[:, 2])) == (2 if in_groups else 7)
  moments = make_moments(bigrams, at_once=at_once)(params, batch, of_losses(bigrams, params, batch), units)
  _, other = bigram_problem(seed=1)
  fresh = make_moments(bigrams)(params, other, of_losses(bigrams, params, other), units_of(other))
  for k, (name, settings) in enumerate(LOSSES):
    objective = objectives.make(name, **settings)
    ours, theirs = (gradients_of_all(bigrams, objective, params, x) for x in (batch, other))
    np.testing.assert_allclose(moments.totals[k], ours.sum(axis=0), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(moments.squares[k], np.sum(ours**2), rtol=1e-8)
    signal, result = between_prompts(ours, units[:, 2]), noise(moments, k)
    np.testing.assert_allclose(result[:2] + result[3:4], (len(ours), np.sum(ours**2) / len(ours) - signal, signal), rtol=1e-8)
    if in_groups:
      sums = [ours[units[:, 2] == group] for group in (3, 7)]
      of_groups = sum(np.sum(own.sum(axis=0) ** 2) - len(own) ** 2 * signal for own in sums) / len(ours)
      np.testing.assert_allclose(result.in_groups, of_groups, rtol=1e-8)
    else:
      # NumPy's own variances, summed over the weights.
      np.testing.assert_allclose((result.noise, result.in_groups), np.sum(np.var(ours, axis=0, ddof=1)), rtol=1e-8)
    of_other = between_prompts(theirs, units_of(other)[:, 2])
    product, compared = np.mean(ours @ theirs.T), bias(moments, k, fresh, k)
    if signal > 0 and of_other > 0:
      expected = product / math.sqrt(signal * of_other), math.sqrt(signal / of_other), (signal + of_other - 2 * product) / of_other
      np.testing.assert_allclose(compared, expected, rtol=1e-8)
    else:
      assert all(map(math.isnan, compared))


@pytest.mark.parametrize(
  ("shape", "layout"),
  few([(shape, layout) for shape in ("dense", "sparse") for layout in ("padded", "packed", "shared")], 0, 1, 2, 5),
)
def test_the_mean_gradient_is_that_of_the_update(shape, layout):
  model = make_model(MODELS[shape])
  params = model.init(jax.random.key(0))
  batch = jax.tree.map(jnp.asarray, laid_out(layout))
  outputs_fn = functools.partial(policy_outputs, model.logprobs, make_filter())
  objective = objectives.make("gspo", clip_low=0.05, clip_high=0.08, kl_coef=0.1, entropy_coef=0.01)
  step = make_train_step(outputs_fn, objective, GRADIENT, learning_rate=lambda count: 0.0)
  state, metrics = jax.jit(step)(init_state(params, GRADIENT), batch)
  own = jax.jit(lambda params, batch: stacked([cotangents(objective, outputs_fn(params, batch), batch)]))(params, batch)
  moments = make_moments(outputs_fn, at_once=3)(params, batch, own, units_of(batch))
  gradient = np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.opt_state)])
  assert moments.count == 32
  np.testing.assert_allclose(moments.totals[0] / 32, gradient, atol=1e-5 * float(metrics["actor/grad_norm"]))


def test_responses_have_the_same_moments_in_every_layout():
  model = make_model(MODELS["dense"])
  params = model.init(jax.random.key(0))
  outputs_fn = functools.partial(policy_outputs, model.logprobs, make_filter())
  moments, results = make_moments(outputs_fn, at_once=4), []
  of_loss = jax.jit(lambda params, batch: stacked([cotangents(objectives.make("sapo"), outputs_fn(params, batch), batch)]))
  for layout in ("padded", "shared"):
    batch = jax.tree.map(jnp.asarray, laid_out(layout))
    results.append(moments(params, batch, of_loss(params, batch), units_of(batch)))
  np.testing.assert_allclose(results[0].squares, results[1].squares, rtol=1e-4)
  assert abs(noise(results[0], 0).ratio / noise(results[1], 0).ratio - 1) < 1e-3


@pytest.mark.exhaustive
def test_projections_keep_their_stated_error():
  """Squared lengths and products of projections, over seeds, for vectors that are not random."""
  rng = np.random.default_rng(0)
  tree = {"a": jnp.asarray(np.float32(rng.standard_t(3, size=(7, 311)))), "b": jnp.asarray(np.float32(np.arange(1000) % 64 == 0))}
  exact = sum(float(jnp.sum(x**2)) for x in tree.values())
  within = 0
  for seed in range(100):
    projection = Projection(dims=64, seed=seed)
    square = float(jnp.sum(jax.jit(lambda tree, p=projection: p.apply(p.signs(tree), tree))(tree) ** 2))
    within += abs(square / exact - 1) <= projection.error
  assert within >= 95
  # The bound is not so wide that it says nothing: a tenth of it fails.
  squares = [float(jnp.sum(p.apply(p.signs(tree), tree) ** 2)) for p in (Projection(64, seed) for seed in range(40))]
  assert np.std(np.array(squares) / exact) > Projection(64).error / 10 and abs(np.mean(squares) / exact - 1) < Projection(64).error / 3


def test_projected_moments_estimate_the_exact_ones(x64):
  params, batch = bigram_problem(rows=6)
  own, units = of_losses(bigrams, params, batch), units_of(batch)
  exact = make_moments(bigrams, at_once=2)(params, batch, own, units)
  projected = make_moments(bigrams, at_once=2, projection=Projection(dims=32, seed=3))(params, batch, own, units)
  np.testing.assert_allclose(projected.squares, exact.squares, rtol=1e-12)
  assert projected.totals.shape == (len(LOSSES), 32)
  lengths = np.sum(projected.totals**2, axis=1) / np.sum(exact.totals**2, axis=1)
  assert np.all(np.abs(lengths - 1) <= Projection(32).error)


def test_moments_of_parts_add_up(x64):
  params, batch = bigram_problem(rows=8)
  objective = objectives.make("grpo", kl_coef=0.0)

  def moments(rows):
    part = jax.tree.map(lambda x: x[rows], batch)
    return make_moments(bigrams)(params, part, stacked([cotangents(objective, bigrams(params, part), part)]), units_of(part))

  # Parts of equal size, so that GRPO weighs a response the same in each.
  parts = [moments(slice(1, 4)), moments(slice(4, 7))]
  whole = moments(slice(1, 7))
  np.testing.assert_allclose(noise(joined(parts), 0), noise(whole, 0), rtol=1e-10)


def test_multipliers_are_the_ratios_of_responses(x64):
  _, batch = bigram_problem()
  outputs = PolicyOutputs(batch.old_logprobs + 0.1 * batch.mask, batch.old_entropy)
  units = units_of(batch)
  plain = cotangents(objectives.make("custom", ratio="none", gate="none", weights="sequence_mean"), outputs, batch).logprobs
  grpo = cotangents(objectives.make("grpo", kl_coef=0.0), outputs, batch).logprobs
  gspo = cotangents(objectives.make("gspo", clip_low=0.2, clip_high=0.05), outputs, batch).logprobs
  np.testing.assert_allclose(gradient_noise.multipliers(grpo, plain, units, batch), np.exp(0.1), rtol=1e-12)
  positive = [float(np.max(np.where(batch.segments[row] == segment, batch.advantages[row], -9))) > 0 for row, segment, _ in units]
  expected = [0.0 if is_positive else np.exp(0.1) for is_positive in positive]
  np.testing.assert_allclose(gradient_noise.multipliers(gspo, plain, units, batch), expected, rtol=1e-12)
  none = batch._replace(advantages=0 * batch.advantages)
  assert np.all(np.isnan(gradient_noise.multipliers(grpo, 0 * plain, units, none)))


RUN = VARIED | {
  "num_steps": 3, "warm_start.num_steps": 4, "eval.every": 3, "log.tensorboard": False, "learner.learning_rate": 3e-3,
  "learner.warmup_steps": 1,
}  # fmt: skip


@pytest.mark.slow
def test_a_run_measures_its_updates_and_is_not_changed(tmp_path):
  run_here(tiny_config("gspo", RUN), tmp_path / "without")
  run_here(tiny_config("gspo", RUN | {"log.gradient_noise_every": 2}), tmp_path / "with")
  assert column(tmp_path / "with", "actor/loss") == column(tmp_path / "without", "actor/loss")
  assert column(tmp_path / "with", "perf/recompiles") == [0, 0, 0]
  first, between, last = (row for row in read_rows(tmp_path / "with" / "metrics.jsonl") if row["phase"] == "rl")
  for row in (first, last):
    assert row["gradient/noise"] > 0 and 0 < row["gradient/effective"] < 1
    # GSPO's clip leaves out responses whose ratio has left its band.
    assert 0 < row["gradient/inflation"] < 1 and row["actor/pg_clipfrac"] > 0
    # The gradient of a batch is as long as signal and noise make it.
    assert row["actor/grad_norm"] ** 2 < 3 * (abs(row["gradient/signal"]) + row["gradient/noise"])
  assert not any(name.startswith("gradient/") for name in between)


def test_gradients_of_responses_are_measured_on_one_device(tmp_path):
  with pytest.raises(ValueError, match=r"config.log.gradient_noise_every: found 1 with 2 devices, expected 0: gradients of single"):
    run_here(tiny_config("gspo", RUN | {"log.gradient_noise_every": 1, "mesh.fsdp": 2}), tmp_path, devices=2)
