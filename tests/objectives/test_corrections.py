"""Corrections as wrappers: weights against the peers', composition, and exactness under splits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives import make
from jaxrl_llm.objectives.base import policy_objective
from jaxrl_llm.objectives.corrected import corrected, mismatch_weights, read_terms
from jaxrl_llm.objectives.corrections import (
  bypass,
  geometric_rejection,
  icepop,
  kpop,
  m2po,
  mis,
  off_policy_mask,
  rejection,
  sequence_tv,
  tis,
)
from jaxrl_llm.objectives.dapo import dapo
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.gspo import gspo
from jaxrl_llm.objectives.interpolation import interpolated
from jaxrl_llm.objectives.ppo import ppo
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.sft import sft
from jaxrl_llm.segments import reduce_metrics, token_mean
from jaxrl_llm.types import Objective
from tests.marks import few
from tests.objectives.batches import as_batch, with_junk

NAMES = ("ppo", "grpo", "dapo", "gspo", "gspo_token", "sapo")

# Three responses of 4, 3 and 2 tokens. The tests contain the results of verl 0.9.1 and TRL 1.16.0
# on them.
MASK = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]], float)
OLD = np.array([[-1.0, -2.0, -0.5, -3.0], [-0.7, -1.1, -2.5, 9.0], [-1.5, -0.2, 9.0, 9.0]])
SAMPLER = np.array([[-1.1, -3.0, -0.4, -2.8], [-0.7, -1.2, -4.5, 9.0], [-0.6, -0.3, 9.0, 9.0]])
CURRENT = np.array([[-1.3, -2.4, -0.9, -2.9], [-0.9, -1.6, -2.4, 9.0], [-1.6, -0.1, 9.0, 9.0]])
ADVANTAGES = np.array([[-1.0], [2.0], [-0.5]]) * np.ones((3, 4))

SPY = Objective(token_mean, lambda outputs, batch: (batch.importance, {}), frozenset({"old_logprobs"}), correctable=True)
"""An objective whose loss is the weight that reaches it."""

WRAPPERS = {
  "tis": functools.partial(tis, cap=1.1),
  "tis_sequence": functools.partial(tis, cap=1.2, level="sequence"),
  "tis_floor": functools.partial(tis, cap=1.1, floor=0.9),
  "mis": functools.partial(mis, cap=1.1),
  "mis_sequence": functools.partial(mis, cap=1.3, level="sequence"),
  "icepop": functools.partial(icepop, low=0.8, high=1.3),
  "geometric_rejection": functools.partial(geometric_rejection, low=0.95, high=1.04),
  "rejection_token": functools.partial(rejection, limit=0.1, estimator="k1", over="token"),
  "rejection_sum": functools.partial(rejection, limit=0.2, estimator="k1", over="sequence_sum"),
  "rejection_mean": functools.partial(rejection, limit=0.01),
  "rejection_max": functools.partial(rejection, limit=0.01, estimator="k2", over="sequence_max"),
  "kpop": functools.partial(kpop, bound=5e-3),
  "sequence_tv": functools.partial(sequence_tv, low=0.0, high=0.1),
  "m2po": functools.partial(m2po, threshold=0.01),
  "off_policy_mask": functools.partial(off_policy_mask, delta=0.0),
  "off_policy_mask_sampler": functools.partial(off_policy_mask, delta=0.0, anchor="sampler"),
}
COMPOSITES = {
  # Every correction of the mismatch and the mask of stale tokens at once.
  "all": lambda objective: tis(
    mis(
      icepop(geometric_rejection(off_policy_mask(objective, delta=0.1), low=0.8, high=1.15), low=0.7, high=1.5), cap=1.6, level="sequence"
    ),
    cap=1.1,
  ),
  "bypass": lambda objective: bypass(off_policy_mask(objective, delta=0.05)),
}
every_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)


def small(**changes):
  arrays = {"logprobs": CURRENT, "mask": MASK, "advantages": ADVANTAGES, "old_logprobs": OLD, "sampler_logprobs": SAMPLER}
  return as_batch(arrays | changes)


def mismatched(arrays, spread=0.15):
  gap = spread * np.random.default_rng(5).standard_normal(arrays["mask"].shape)
  return arrays | {"sampler_logprobs": arrays["old_logprobs"] + gap}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _weights(wrap, with_metrics, outputs, batch):
  weights, metrics = wrap(SPY).token_loss(outputs, batch)
  return weights, reduce_metrics(metrics, batch.mask, token_mean(batch.mask, batch.segments)) if with_metrics else {}


def weights_of(wrap, outputs, batch):
  """Returns the weight of each token, 0 outside the mask."""
  weights, _ = jax.device_get(_weights(wrap, False, outputs._replace(entropy=None, values=None), batch))
  return np.where(batch.mask > 0, weights, 0)


def metrics_of(wrap, outputs, batch):
  """Returns the reduced metrics."""
  return jax.device_get(_weights(wrap, True, outputs._replace(entropy=None, values=None), batch))[1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate(objective, with_metrics, outputs, batch, weights):
  # The sampler's log-probabilities may only affect weights.
  def loss_fn(outputs, sampler_logprobs):
    losses, metrics = objective.token_loss(outputs, batch._replace(sampler_logprobs=sampler_logprobs))
    return jnp.sum(weights * losses), metrics if with_metrics else {}

  return jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(outputs, batch.sampler_logprobs)


def evaluate(objective, outputs, batch, weights=None, *, with_metrics=False):
  """Computes the loss, the gradients and, on request, the token metrics.

  The gradients are those in the outputs and in the sampler's log-probabilities.
  """
  if weights is None:
    weights = objective.weigh(batch.mask, batch.segments)
  (loss, metrics), grads = jax.device_get(_evaluate(objective, with_metrics, outputs, batch, weights))
  return loss, metrics, *grads


def assert_same_outcome(actual, expected):
  """Asserts that loss and gradients agree to a rounding or two.

  A factor of exactly 1 changes no bit, but its program may be compiled in another order.
  """
  same = functools.partial(np.testing.assert_allclose, rtol=4 * np.finfo(actual[0].dtype).eps, atol=0)
  same(actual[0], expected[0])
  jax.tree.map(same, actual[2], expected[2])


# What the peers compute ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("wrap", "expected"),
  [
    # verl's token TIS, TRL's token_truncate.
    (
      functools.partial(tis, cap=2.0),
      [
        [1.105170918075648, 2.0, 0.90483741803596, 0.818730753077982],
        [1.0, 1.105170918075648, 2.0, 0],
        [0.406569659740599, 1.105170918075648, 0, 0],
      ],
    ),
    # verl's sequence TIS, TRL's sequence_truncate.
    (
      functools.partial(tis, cap=2.0, level="sequence"),
      [[2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 0], [0.449328964117222, 0.449328964117222, 0, 0]],
    ),
    # TRL's token_mask.
    (
      functools.partial(mis, cap=2.0),
      [
        [1.105170918075648, 0, 0.90483741803596, 0.818730753077982],
        [1.0, 1.105170918075648, 0, 0],
        [0.406569659740599, 1.105170918075648, 0, 0],
      ],
    ),
    # TRL's sequence_mask.
    (functools.partial(mis, cap=2.0, level="sequence"), [[0] * 4, [0] * 4, [0.449328964117222, 0.449328964117222, 0, 0]]),
    # verl's "0.5_5.0".
    (
      icepop,
      [
        [1.105170918075648, 2.718281828459045, 0.90483741803596, 0.818730753077982],
        [1.0, 1.105170918075648, 0, 0],
        [0, 1.105170918075648, 0, 0],
      ],
    ),
    # verl's rejection by seq_mean_k1; the two agree if high is 1/low.
    (functools.partial(geometric_rejection, low=0.8, high=1.25), [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]),
    (functools.partial(geometric_rejection, low=0.5, high=2.0), [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]]),
    # TRL's off-policy mask, from old_per_token_logps and from sampling_per_token_logps.
    (functools.partial(off_policy_mask, delta=0.2), [[0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]),
    (functools.partial(off_policy_mask, delta=0.2, anchor="sampler"), [[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]),
  ],
)
def test_weights_are_those_of_the_peers(x64, wrap, expected):
  np.testing.assert_allclose(weights_of(wrap, *small()), expected, rtol=1e-13)


@pytest.mark.parametrize(
  ("wrap", "expected"),
  [
    (
      tis,
      {
        "rollout_is_mean": 1.160627841497245,
        "rollout_is/min": 0.406569659740599,
        "rollout_is/max": 2.0,
        "rollout_is/ess": 0.846699306790612,
        "rollout_is_ratio_fraction_high": 2 / 9,
        "rollout_is_ratio_fraction_low": 1 / 9,
        "rollout_is_oob_ratio": 2 / 9,
        "rollout_is_oob_seq_ratio": 2 / 3,
      },
    ),
    (
      icepop,
      {
        "rollout_is_mean": 0.973040304896614,
        "rollout_is/min": 0.0,
        "rollout_is/max": 2.718281828459045,
        "rollout_is/ess": 0.629232667430699,
        "rollout_is_ratio_fraction_high": 1 / 9,
        "rollout_is_ratio_fraction_low": 1 / 9,
        "rollout_is_oob_ratio": 2 / 9,
        "rollout_is_oob_seq_ratio": 2 / 3,
      },
    ),
    (
      functools.partial(tis, level="sequence"),
      # The means are ours, over sequences: (2 + 2 + 0.4493...)/3.
      {
        "rollout_is_mean": 1.483109654705741,
        "rollout_is/min": 0.449328964117222,
        "rollout_is_ratio_fraction_high": 2 / 3,
        "rollout_is_ratio_fraction_low": 1 / 3,
        "rollout_is_oob_ratio": 7 / 9,
        "rollout_is_oob_seq_ratio": 2 / 3,
      },
    ),
    (
      functools.partial(geometric_rejection, low=0.8, high=1.25),
      {
        "rollout_rs_masked_fraction": 5 / 9,
        "rollout_rs_seq_masked_fraction": 2 / 3,
        "rollout_rs/min": np.exp(-0.4),
        "rollout_rs/max": np.exp(0.7),
        "rollout_rs/mean": (np.exp(0.2) + np.exp(0.7) + np.exp(-0.4)) / 3,
      },
    ),
  ],
)
def test_metrics_are_those_of_verl(x64, wrap, expected):
  metrics = metrics_of(wrap, *small())
  for name, x in expected.items():
    # verl adds 1e-8 to its denominators.
    np.testing.assert_allclose(metrics[f"rollout_corr/{name}"], x, rtol=3e-8, err_msg=name)


def test_metrics_of_the_off_policy_mask(x64):
  metrics = metrics_of(functools.partial(off_policy_mask, delta=0.2), *small())
  expected = {"masked_fraction": 4 / 9, "seq_masked_fraction": 1 / 3, "kl/mean": (0.25 + 0.2 + 0.0) / 3, "kl/max": 0.25}
  for name, x in expected.items():
    np.testing.assert_allclose(metrics[f"off_policy/{name}"], x, rtol=1e-12, err_msg=name)


# What the weights are -----------------------------------------------------------------------------


def test_a_weight_on_the_bound_is_kept(x64):
  outputs, batch = small(old_logprobs=np.zeros_like(OLD), sampler_logprobs=np.zeros_like(OLD))
  for wrap in (functools.partial(mis, cap=1.0), functools.partial(icepop, low=1.0, high=1.0)):
    np.testing.assert_array_equal(weights_of(wrap, outputs, batch), MASK)


def test_a_floor_is_a_clip_from_below(x64):
  outputs, batch = small()
  clipped = weights_of(functools.partial(tis, cap=1.1, floor=0.9), outputs, batch)
  np.testing.assert_array_equal(clipped, MASK * np.maximum(weights_of(functools.partial(tis, cap=1.1), outputs, batch), 0.9))
  np.testing.assert_array_equal(weights_of(functools.partial(tis, floor=0.0), outputs, batch), weights_of(tis, outputs, batch))
  metrics = metrics_of(functools.partial(tis, cap=1.1, floor=0.9), outputs, batch)
  k = np.exp(OLD - SAMPLER)[MASK > 0]
  assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == np.mean(k < 0.9) > 0
  assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(np.mean((k < 0.9) | (k > 1.1)))


def test_rejection_by_the_mean_of_k1_is_that_of_the_geometric_mean(x64, make_batch):
  outputs, batch = as_batch(mismatched(make_batch(lengths=(6, 4, 2, 1))))
  limit = 0.06
  by_ratio = weights_of(functools.partial(geometric_rejection, low=np.exp(-limit), high=np.exp(limit)), outputs, batch)
  by_mean = weights_of(functools.partial(rejection, limit=limit, estimator="k1"), outputs, batch)
  np.testing.assert_array_equal(by_mean, by_ratio)
  assert 0 < by_mean.sum() < np.sum(batch.mask)


def test_rejection_of_a_sequence_by_its_maximum_drops_those_with_a_dropped_token(x64, make_batch):
  arrays = mismatched(make_batch(lengths=(6, 4, 2, 1)))
  for estimator, sign in (("k1", 1), ("k1", -1), ("k2", 1), ("k3", 1)):
    gap = sign * (arrays["sampler_logprobs"] - arrays["old_logprobs"])
    outputs, batch = as_batch(arrays | {"sampler_logprobs": arrays["old_logprobs"] + gap})
    settings = {"limit": {"k1": 0.2}.get(estimator, 0.02), "estimator": estimator}
    tokens = weights_of(functools.partial(rejection, over="token", **settings), outputs, batch)
    sequences = weights_of(functools.partial(rejection, over="sequence_max", **settings), outputs, batch)
    mask = np.asarray(batch.mask)
    np.testing.assert_array_equal(sequences, mask * np.all(tokens == mask, axis=1, keepdims=True))
    assert 0 < sequences.sum() < tokens.sum() < mask.sum()


def test_kpop_without_a_bound_is_mis_without_a_cap(x64, make_batch):
  outputs, batch = as_batch(mismatched(make_batch()))
  np.testing.assert_array_equal(
    weights_of(functools.partial(kpop, bound=np.inf), outputs, batch), weights_of(functools.partial(mis, cap=np.inf), outputs, batch)
  )


def test_kpop_keeps_a_rare_token_of_a_large_ratio(x64):
  """k is 10 for both tokens; only the second has lost much probability."""
  arrays = {"logprobs": np.log([[1e-3, 0.9]]), "mask": np.ones((1, 2)), "advantages": np.ones((1, 2))}
  outputs, batch = as_batch(arrays | {"old_logprobs": np.log([[1e-3, 0.9]]), "sampler_logprobs": np.log([[1e-4, 0.09]])})
  np.testing.assert_allclose(weights_of(functools.partial(kpop, bound=0.5), outputs, batch), [[10, 0]])
  np.testing.assert_array_equal(weights_of(icepop, outputs, batch), [[0, 0]])


def test_sequence_tv_inside_its_band_is_tis(x64, make_batch):
  outputs, batch = as_batch(mismatched(make_batch()))
  inside = weights_of(functools.partial(sequence_tv, low=0.0, high=np.inf, cap=1.1), outputs, batch)
  np.testing.assert_array_equal(inside, weights_of(functools.partial(tis, cap=1.1), outputs, batch))


def test_m2po_keeps_the_tokens_below_its_threshold_on_average(x64, make_batch):
  outputs, batch = as_batch(mismatched(make_batch(lengths=(6, 6, 6, 6))))
  squares, kept = np.square(np.asarray(batch.old_logprobs - batch.sampler_logprobs)), []
  for threshold in (1e-12, 1e-3, 1e-2, 1.0):
    wrap = functools.partial(m2po, threshold=threshold)
    keep, metrics = weights_of(wrap, outputs, batch) > 0, metrics_of(wrap, outputs, batch)
    kept.append(keep.sum())
    assert not np.any(keep) or (np.mean(squares[keep]) < threshold and squares[keep].max() < squares[~keep].min(initial=np.inf))
    # One token more would be too much.
    assert np.all(keep) or np.mean([*squares[keep], squares[~keep].min()]) >= threshold
    np.testing.assert_allclose(metrics["rollout_corr/m2"], squares.mean(), rtol=1e-12)
    np.testing.assert_allclose(metrics["rollout_corr/m2_kept"], squares[keep].mean() if np.any(keep) else 0, rtol=1e-12)
    assert metrics["actor/kept_fraction"] == keep.mean()
  assert kept[0] == 0 < kept[1] < kept[2] < kept[3] == 24


@pytest.mark.parametrize("replace", [bypass, interpolated])
def test_m2po_refuses_an_old_policy_that_is_replaced(replace):
  """It would select nothing, without a word."""
  _, batch = small()
  with pytest.raises(ValueError, match="which a replaced old policy leaves unknown$"):
    replace(m2po(dapo())).prepare(batch)


def test_m2po_keeps_or_drops_equal_tokens_together(x64):
  arrays = {"logprobs": np.zeros((1, 5)), "mask": np.ones((1, 5)), "advantages": np.ones((1, 5)), "old_logprobs": np.zeros((1, 5))}
  outputs, batch = as_batch(arrays | {"sampler_logprobs": np.array([[0.1, -0.3, 0.3, 0.3, -0.2]])})
  # The mean of 0.01, 0.04 and one 0.09 is below the threshold, and that of all is not.
  np.testing.assert_array_equal(weights_of(functools.partial(m2po, threshold=0.05), outputs, batch), [[1, 0, 0, 0, 1]])


@pytest.mark.parametrize("anchor", ["old", "sampler"])
def test_the_off_policy_mask_drops_negative_advantages_of_sequences_left_behind(x64, make_batch, anchor):
  arrays = mismatched(make_batch(lengths=(6, 6, 6, 6), spread=0.8), spread=0.8)
  outputs, batch = as_batch(arrays)
  s = np.exp(np.mean(arrays["logprobs"] - arrays["old_logprobs" if anchor == "old" else "sampler_logprobs"], axis=1, keepdims=True))
  fractions = []
  for delta in (0.0, 0.2, 5.0):
    keep = weights_of(functools.partial(off_policy_mask, delta=delta, anchor=anchor), outputs, batch)
    np.testing.assert_array_equal(keep == 0, (arrays["advantages"] < 0) & (s < np.exp(-delta)))
    fractions.append(np.mean(keep == 0))
  assert fractions[0] > fractions[-1] == 0 and np.all(np.diff(fractions) <= 0)


@pytest.mark.parametrize("name", few(NAMES, 0, 1))
def test_without_a_mismatch_its_corrections_are_no_ops(make_batch, name):
  outputs, batch = as_batch(make_batch())
  batch, outputs = batch._replace(sampler_logprobs=batch.old_logprobs), outputs._replace(values=None, entropy=None)
  objective = make(name)
  plain = lambda inner: tis(tis(mis(icepop(geometric_rejection(inner))), level="sequence"), floor=1.0, cap=1.0)
  nothing = lambda inner: plain(rejection(kpop(sequence_tv(m2po(inner, threshold=1e-9), low=0.0, high=0.0), bound=0.0), limit=0.0))
  assert np.all(weights_of(nothing, outputs, batch) == (batch.mask > 0)), "weights of exactly 1"
  wrapped = nothing(objective)
  assert_same_outcome(evaluate(wrapped, outputs, batch), evaluate(objective, outputs, batch))


DAPO = dapo()


@pytest.mark.slow
@every_wrapper
def test_weights_scale_the_gradient_and_carry_none(x64, make_batch, wrapper):
  outputs, batch = as_batch(mismatched(make_batch()))
  outputs = outputs._replace(values=None, entropy=None)
  weights = weights_of(WRAPPERS[wrapper], outputs, batch)
  assert len(set(weights[batch.mask > 0])) > 1, "the batch must tell tokens apart"
  plain, weighted = evaluate(DAPO, outputs, batch), evaluate(WRAPPERS[wrapper](DAPO), outputs, batch)
  # Dropped tokens stay in the denominators, so kept tokens have their old gradient, up to the last
  # bit of the weight.
  np.testing.assert_allclose(weighted[2].logprobs, weights * plain[2].logprobs, rtol=1e-14)
  np.testing.assert_array_equal(weighted[3], 0)


def test_weights_have_no_gradient_whatever_the_objective_does_with_them(x64):
  outputs, batch = small()

  def total(sampler_logprobs, old_logprobs):
    changed = batch._replace(sampler_logprobs=sampler_logprobs, old_logprobs=old_logprobs)
    return jnp.sum(tis(SPY, cap=5.0).token_loss(outputs, changed)[0])

  for gradient in jax.grad(total, argnums=(0, 1))(batch.sampler_logprobs, batch.old_logprobs):
    np.testing.assert_array_equal(gradient, 0)


@every_wrapper
def test_the_rest_of_an_objective_is_kept(wrapper):
  objective = ppo(kl_coef=0.1, entropy_coef=0.01)
  wrapped = WRAPPERS[wrapper](objective)
  assert wrapped.weigh is objective.weigh and wrapped.value_loss is objective.value_loss
  added = {"off_policy_mask": {"old_logprobs"}, "off_policy_mask_sampler": {"sampler_logprobs"}}
  assert wrapped.needs == objective.needs | added.get(wrapper, {"old_logprobs", "sampler_logprobs"})


def test_penalties_and_the_critic_are_not_weighed(x64, make_batch):
  outputs, batch = as_batch(mismatched(make_batch()))
  objective = ppo(kl_coef=0.1, entropy_coef=0.01)
  wrapped = WRAPPERS["tis"](objective)
  plain, weighted = (evaluate(o, outputs, batch, with_metrics=True) for o in (objective, wrapped))
  for field in ("entropy", "values"):
    np.testing.assert_array_equal(getattr(weighted[2], field), getattr(plain[2], field))
  for metric in ("actor/kl_loss", "actor/entropy_loss", "critic/vf_loss", "actor/ref_kl"):
    np.testing.assert_array_equal(weighted[1][metric], plain[1][metric])
  assert np.any(weighted[1]["actor/pg_loss"] != plain[1]["actor/pg_loss"])
  # Weights that a batch already has are kept.
  double = batch._replace(importance=jnp.full_like(batch.mask, 2.0))
  doubled = evaluate(wrapped, outputs, double, with_metrics=True)
  np.testing.assert_allclose(doubled[1]["actor/pg_loss"], 2 * weighted[1]["actor/pg_loss"], rtol=1e-14)


def test_weights_multiply(x64, make_batch):
  outputs, batch = as_batch(mismatched(make_batch()))
  wraps = [WRAPPERS[name] for name in ("tis", "geometric_rejection", "off_policy_mask")]
  one_by_one = [weights_of(wrap, outputs, batch) for wrap in wraps]
  nested = lambda objective: wraps[0](wraps[1](wraps[2](objective)))
  np.testing.assert_array_equal(weights_of(nested, outputs, batch), np.prod(one_by_one, axis=0))
  metrics = metrics_of(nested, outputs, batch)
  assert metrics.keys() >= {"rollout_corr/rollout_is_mean", "rollout_corr/rollout_rs_masked_fraction", "off_policy/masked_fraction"}
  backwards = weights_of(lambda objective: wraps[2](wraps[1](wraps[0](objective))), outputs, batch)
  np.testing.assert_array_equal(backwards, np.prod(one_by_one, axis=0))


def test_bypass_is_the_objective_anchored_at_the_sampler(make_batch):
  outputs, batch = as_batch(mismatched(make_batch()))
  outputs, objective = outputs._replace(values=None, entropy=None), make("gspo", clip_low=0.2, clip_high=0.2)
  wrapped = bypass(off_policy_mask(objective, delta=0.0))
  assert wrapped.needs == {"sampler_logprobs"}
  expected = evaluate(off_policy_mask(objective, delta=0.0), outputs, batch._replace(old_logprobs=batch.sampler_logprobs))
  # The log-probabilities under the old policy were not computed.
  actual = evaluate(wrapped, outputs, batch._replace(old_logprobs=jnp.full_like(batch.mask, jnp.nan)))
  assert_same_outcome(actual, expected)
  same = policy_objective(ratio=token_ratio, gate=hard_clip(0.2, 0.2), weigh=token_mean, anchor="sampler")
  assert_same_outcome(evaluate(bypass(make("dapo", clip_high=0.2)), outputs, batch), evaluate(same, outputs, batch))


# What must never happen ---------------------------------------------------------------------------


@every_wrapper
def test_values_outside_the_mask_change_no_weight(x64, make_batch, wrapper):
  arrays = mismatched(make_batch())
  clean = [f(WRAPPERS[wrapper], *as_batch(arrays)) for f in (weights_of, metrics_of)]
  actual = [f(WRAPPERS[wrapper], *as_batch(with_junk(arrays))) for f in (weights_of, metrics_of)]
  np.testing.assert_array_equal(actual[0], clean[0])
  assert actual[1] == clean[1] and all(np.isfinite(x) for x in clean[1].values())


@every_wrapper
def test_extreme_mismatch_stays_finite(make_batch, wrapper):
  arrays = make_batch(lengths=(6, 3, 1, 1))
  shift = 1e3 * np.resize([1.0, -1.0, -1.0], arrays["mask"].shape)
  arrays["sampler_logprobs"] = arrays["old_logprobs"] + shift
  arrays["logprobs"][1] -= 1e3
  weights, metrics = (f(WRAPPERS[wrapper], *as_batch(arrays)) for f in (weights_of, metrics_of))
  assert weights.dtype == np.float32 and np.all(np.isfinite(weights)) and all(np.isfinite(x) for x in metrics.values())


@every_wrapper
def test_a_nan_under_the_mask_is_never_dropped(x64, make_batch, wrapper):
  """Not even if the inner objective does not read the field that is NaN."""
  arrays = mismatched(make_batch())
  reads = WRAPPERS[wrapper](SPY._replace(needs=frozenset())).needs | ({"logprobs"} if "off_policy" in wrapper else set())
  for field in ("sampler_logprobs", "old_logprobs", "logprobs"):
    broken = arrays | {field: np.where((np.arange(4)[:, None] == 1) & (np.arange(6) == 1), np.nan, arrays[field])}
    weights, metrics = (f(WRAPPERS[wrapper], *as_batch(broken)) for f in (weights_of, metrics_of))
    assert np.isnan(weights[1, 1]) == (field in reads) and not np.any(np.isnan(weights[[0, 2, 3]]))
    assert all(np.isfinite(x) for x in metrics.values())


def test_junk_outside_the_mask_is_ignored_and_a_nan_under_it_reaches_the_loss(x64, make_batch):
  arrays = mismatched(make_batch())
  wrapped = COMPOSITES["all"](make("sapo"))
  run = lambda x: evaluate(wrapped, *as_batch({k: v for k, v in x.items() if k not in ("values", "entropy")}))
  clean = run(arrays)
  dirty = run(with_junk(arrays))
  assert_same_outcome(dirty, clean)
  assert np.isfinite(clean[0]) and np.all(dirty[2].logprobs[arrays["mask"] == 0] == 0)
  for field in ("logprobs", "old_logprobs", "sampler_logprobs", "advantages"):
    broken = arrays[field].copy()
    broken[1, 1] = np.nan
    assert np.isnan(run(arrays | {field: broken})[0])


@pytest.mark.parametrize(
  ("wrapper", "reason"),
  [
    *((name, "the mismatch of learner and sampler is corrected") for name in WRAPPERS if not name.startswith(("off_policy", "m2po"))),
    ("m2po", "m2po selects by the mismatch of learner and sampler, which a replaced old policy leaves unknown"),
    ("off_policy_mask_sampler", "off_policy_mask compares the current policy with it"),
    ("bypass", "bypass uses the sampler's policy as the old one"),
  ],
)
def test_a_missing_sampler_is_named(wrapper, reason):
  outputs, batch = small()
  with pytest.raises(ValueError, match=rf"^sampler_logprobs: found None, expected an array \[B, T\], because {reason}$"):
    (WRAPPERS | {"bypass": bypass})[wrapper](SPY).token_loss(outputs, batch._replace(sampler_logprobs=None))


def test_bfloat16_is_raised_to_float32(make_batch):
  arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in mismatched(make_batch()).items()}
  exact = {name: x.astype(jnp.float32) for name, x in arrays.items()}
  actual, expected = (weights_of(WRAPPERS["tis_sequence"], *as_batch(x)) for x in (arrays, exact))
  np.testing.assert_array_equal(actual, expected)
  assert actual.dtype == np.float32


@pytest.mark.parametrize(("name", "composite"), few([*((name, "all") for name in NAMES), ("gspo_token", "bypass")], 0))
def test_packing_and_micro_batches_change_nothing(x64, make_batch, name, composite):
  lengths = (5, 3, 1, 6)
  arrays = mismatched(make_batch(lengths=lengths))
  arrays = {key: x for key, x in arrays.items() if key not in ("entropy", "values", "returns", "old_values")}
  settings = {"gspo": {"clip_low": 0.2, "clip_high": 0.2}, "grpo": {"kl_coef": 0.0}}.get(name.removesuffix("_token"), {})
  wrapped = COMPOSITES[composite](make(name, **settings))
  outputs, batch = as_batch(arrays)
  # The metrics do not depend on the wrapped objective.
  with_metrics = name == "gspo_token"
  expected = evaluate(wrapped, outputs, batch, with_metrics=with_metrics)
  assert 0.2 < np.mean(expected[2].logprobs[arrays["mask"] > 0] != 0) < 0.9, "some tokens dropped, some kept"

  # The same four responses in two rows, last first, each behind a prompt token, with padding in
  # between; then one row at a time.
  places = {3: (0, 1), 1: (0, 9), 0: (1, 1), 2: (1, 8)}
  packed, segments = {key: np.full((2, 14), 7.0) for key in arrays}, np.zeros((2, 14), np.int32)
  packed["mask"][:] = 0
  for number, (row, (b, t)) in enumerate(places.items(), start=1):
    segments[b, t - 1 : t + lengths[row]] = number
    for key in arrays:
      packed[key][b, t : t + lengths[row]] = arrays[key][row, : lengths[row]]
  packed_outputs, packed_batch = as_batch(packed | {"segments": segments})
  weights = wrapped.weigh(packed_batch.mask, packed_batch.segments)
  pieces = []
  for row in (slice(0, 1), slice(1, 2)):
    piece = jax.tree.map(lambda x, row=row: x[row], (packed_outputs, packed_batch, weights))
    pieces.append(evaluate(wrapped, *piece, with_metrics=with_metrics))
  np.testing.assert_allclose(sum(piece[0] for piece in pieces), expected[0], rtol=1e-12)
  grads = np.concatenate([piece[2].logprobs for piece in pieces])
  for row, (b, t) in places.items():
    np.testing.assert_allclose(grads[b, t : t + lengths[row]], expected[2].logprobs[row, : lengths[row]], rtol=1e-11, atol=1e-16)
  if with_metrics:
    metrics = jax.tree.map(lambda *x: jnp.concatenate(x), *(piece[1] for piece in pieces))
    reduced = reduce_metrics(metrics, packed_batch.mask, weights)
    reference = reduce_metrics(jax.tree.map(jnp.asarray, expected[1]), batch.mask, wrapped.weigh(batch.mask, batch.segments))
    assert (
      any(key.startswith(("rollout_corr/", "off_policy/")) for key in reference) and reduced.keys() == reference.keys()
    )
    for key in reference:
      np.testing.assert_allclose(reduced[key], reference[key], rtol=1e-11, atol=1e-12, err_msg=key)


# The settings of a config -------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("terms", "wrap"),
  [
    (["tis:cap=1.1"], WRAPPERS["tis"]),
    (["tis:cap=1.2&level=sequence"], WRAPPERS["tis_sequence"]),
    (["mis:cap=1.1"], WRAPPERS["mis"]),
    (["mis:level=sequence&cap=1.3"], WRAPPERS["mis_sequence"]),
    (["icepop:low=0.8&high=1.3"], WRAPPERS["icepop"]),
    (["geometric_rejection:low=0.95&high=1.04"], WRAPPERS["geometric_rejection"]),
    (["off_policy_mask:delta=0.0"], WRAPPERS["off_policy_mask"]),
    (["off_policy_mask:delta=0&anchor=sampler"], WRAPPERS["off_policy_mask_sampler"]),
    (
      ["tis:cap=1.1", "geometric_rejection:low=0.95&high=1.04", "off_policy_mask:delta=0.0"],
      lambda o: WRAPPERS["tis"](WRAPPERS["geometric_rejection"](WRAPPERS["off_policy_mask"](o))),
    ),
    (["bypass", "off_policy_mask:delta=0.0"], lambda o: bypass(WRAPPERS["off_policy_mask"](o))),
  ],
)
def test_corrected_applies_the_terms_in_the_order_of_the_table(x64, make_batch, terms, wrap):
  outputs, batch = as_batch(mismatched(make_batch()))
  actual, expected = corrected(SPY, terms), wrap(SPY)
  assert actual.needs == expected.needs
  if "bypass" in terms:
    assert actual.needs == {"sampler_logprobs"}
  (a, a_metrics), (b, b_metrics) = (objective.token_loss(outputs, batch) for objective in (actual, expected))
  np.testing.assert_array_equal(a, b)
  assert a_metrics.keys() == b_metrics.keys()


def test_corrected_without_terms_is_the_objective():
  for objective in (gspo(), sft()):
    assert corrected(objective) is objective
  assert corrected(gspo(), ["bypass"]).needs == {"sampler_logprobs"}


@pytest.mark.parametrize(
  ("terms", "message"),
  [
    (["tiss:cap=2"], "found 'tiss', expected one of .*MODULE:FUNCTION; did you mean 'tis'?"),
    (["tis:capp=2"], "tis:capp=2: capp: found 2, expected None, because .*did you mean 'cap'?"),
    (["tis", "tis:cap=3"], "found 'tis' twice, expected each correction once"),
    (["top_entropy:share=0.0"], "top_entropy:share=0.0: share: found 0.0, expected a number > 0 and < 1"),
    (["off_policy_mask"], "found 'off_policy_mask', expected a value of delta, as in off_policy_mask:delta=..."),
    (["tis:cap=0.9"], r"tis:cap=0\.9: cap: found 0\.9, expected a number >= 1"),
    (["mis:cap=True"], "mis:cap=True: cap: found True, expected a number >= 1"),
    (["tis:cap=nan"], "tis:cap=nan: cap: found 'nan'"),
    (["tis:level=geometric"], "tis:level=geometric: level: found 'geometric', expected one of 'token', 'sequence'"),
    (["icepop:low=5.0&high=0.5"], "icepop:low=5.0&high=0.5: low: found 5.0, expected a number from 0 to 1"),
    (["geometric_rejection:low=1.0&high=1.0"], "geometric_rejection:.*: low: found 1.0, expected less than high"),
    (["off_policy_mask:delta=-0.1"], r".*delta: found -0\.1, expected a finite number of nats per token >= 0"),
    (["off_policy_mask:delta=0.1&anchor=new"], ".*anchor: found 'new', expected one of 'old', 'sampler'"),
    (["bypass:on=1"], ".*on: found 1, expected None, because correction bypass does not read it and takes no settings"),
    (["tis", "mis:cap=3.0"], "found 'tis' and 'mis:cap=3.0', expected at most one of them"),
    (["mis:cap=3.0", "icepop"], "found 'mis:cap=3.0' and 'icepop', expected at most one of them"),
    (["tis", "bypass"], "found 'tis', expected no such term, because bypass uses the sampler's policy"),
    (["geometric_rejection", "bypass"], "found 'geometric_rejection', expected no such term, because bypass"),
  ],
)
def test_illegal_terms_are_named(terms, message):
  with pytest.raises(ValueError, match=rf"^{message}"):
    corrected(gspo(), terms)


def test_all_problems_come_in_one_line():
  with pytest.raises(ValueError) as error:
    corrected(gspo(), ["tis:cap=0", "icepop:low=2&high=0", "off_policy_mask:delta=-1"])
  message = str(error.value)
  assert message.count("; ") == 3 and message.count("expected") == 4 and "\n" not in message
  with pytest.raises(ValueError) as error:
    corrected(gspo(), ["mis", "tis", "geometric_rejection", "bypass"])
  assert all(f"'{name}'" in str(error.value) for name in ("tis", "mis", "geometric_rejection"))


@pytest.mark.parametrize("term", ["tis", "mis", "icepop", "geometric_rejection", "off_policy_mask:delta=0.1", "top_entropy", "bypass"])
def test_an_objective_without_a_policy_term_is_refused(term):
  reason = "because the objective has no policy term that a weight could correct"
  with pytest.raises(ValueError, match=rf"^found '{term}', expected no such term, {reason}$"):
    corrected(sft(), [term])


def test_an_objective_that_would_ignore_the_weight_is_refused():
  own = Objective(token_mean, lambda outputs, batch: (-outputs.logprobs, {}), frozenset({"old_logprobs"}))
  for wrap in WRAPPERS.values():
    with pytest.raises(ValueError, match=r"^objective: found one that ignores TrainBatch.importance"):
      wrap(own)


def test_reinforce_reads_the_old_policy_only_to_correct_the_mismatch():
  assert make("reinforce").needs == set() and corrected(make("reinforce"), ["tis"]).needs == {"old_logprobs", "sampler_logprobs"}


def test_a_mismatch_is_never_counted_twice():
  anchored = policy_objective(ratio=token_ratio, gate=hard_clip(0.2, 0.2), weigh=token_mean, anchor="sampler")
  for objective in (anchored, tis(gspo(), cap=5.0)):
    for term in ("tis", "mis", "icepop"):
      with pytest.raises(ValueError, match="because the objective itself corrects the mismatch, which would count twice"):
        corrected(objective, [term])
    assert corrected(objective, ["geometric_rejection"]).needs == {"old_logprobs", "sampler_logprobs"}
  with pytest.raises(ValueError, match="found 'bypass', expected no such term, because the objective never reads the old policy"):
    corrected(anchored, ["bypass"])
  assert corrected(anchored, ["off_policy_mask:delta=0.1", "bypass"]).needs == {"sampler_logprobs"}


@pytest.mark.parametrize("term", ["tis:cap=1.5", "mis:cap=1.5", "icepop:low=0.5&high=2.0", "tis:cap=2.0&level=sequence"])
def test_the_weights_of_a_correction_are_those_that_reach_the_objective(x64, make_batch, term):
  outputs, batch = as_batch(make_batch(spread=1.0))
  seen = Objective(token_mean, lambda outputs, batch: (batch.importance, {}), correctable=True)
  expected, _ = corrected(seen, [term]).token_loss(outputs, batch)
  own = mismatch_weights(read_terms(gspo(), [term, "off_policy_mask:delta=0.1"]))(batch.old_logprobs, batch.sampler_logprobs, batch.mask)
  np.testing.assert_allclose(np.where(batch.mask > 0, own, 0), np.where(batch.mask > 0, expected, 0))
  assert len(np.unique(own)) > 1


def test_only_a_correction_that_weighs_the_mismatch_has_weights():
  assert mismatch_weights([]) is mismatch_weights(read_terms(gspo(), ["geometric_rejection", "off_policy_mask:delta=0.1"])) is None
