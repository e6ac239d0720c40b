"""Properties that every registered objective must have; new ones are covered automatically."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.advantages import group_advantages
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner.train_step import init_state, make_train_step
from jaxrl_llm.objectives import OBJECTIVES, make, value
from jaxrl_llm.objectives.corrected import corrected
from jaxrl_llm.objectives.corrections import CORRECTIONS, m2po, tis, top_entropy
from jaxrl_llm.run.steps.learn import shares_of_weight
from jaxrl_llm.types import PolicyOutputs, TrainBatch
from tests.marks import few, typical
from tests.objectives.batches import as_batch, with_junk

every_objective = pytest.mark.parametrize("name", typical(OBJECTIVES))

# These read no advantages: their gradient is that of the likelihood.
SUPERVISED = ("sft",)

# These differentiate the product of a response's ratios at each token, so the weights add up.
SUM_OVER_RESPONSE = ("rloo",)

# These leave out tokens that they select, even on-policy.
DETACHING = ("clip_cov",)

DIFFERENTIATED = ("logprobs", "entropy", "values")
SCORES = ("old_logprobs", "sampler_logprobs", "ref_logprobs", "entropy")

# Response slots of each row, counted or not. A hole in the mask is another speaker's turn. One row
# has no counted token.
LENGTHS = (5, 3, 1, 7, 4, 6)
HOLES = ((3, 2), (3, 3), (5, 0), *((4, t) for t in range(4)))
EMPTY_ROW = 4


@pytest.fixture
def batch(make_batch):
  """Six responses in eight rows of sixteen slots. All tests share the shape and so the program."""
  arrays = make_batch(lengths=(*LENGTHS, 0, 0), num_tokens=16)
  for hole in HOLES:
    arrays["mask"][hole] = 0
  return arrays | {"segments": np.ones((8, 16), int)}


def policies_meet(batch):
  """Makes all policies equal, as on-policy, with one advantage per response."""
  scores = dict.fromkeys(("old_logprobs", "sampler_logprobs", "ref_logprobs"), batch["logprobs"])
  return batch | scores | {"advantages": np.repeat(batch["advantages"][:, :1], 16, axis=1)}


def selected(name, batch):
  """Returns 1 at the tokens that an objective selects in a whole batch."""
  return np.asarray(make(name).prepare(as_batch(batch)[1]).selected)


def assert_same(actual, expected, rtol=0.0):
  np.testing.assert_allclose(actual.loss, expected.loss, rtol=rtol)
  assert actual.metrics.keys() == expected.metrics.keys()
  for key in expected.metrics:
    np.testing.assert_allclose(actual.metrics[key], expected.metrics[key], rtol=rtol, atol=rtol, err_msg=key)


def all_finite(evaluation):
  return all(np.all(np.isfinite(x)) for x in jax.tree.leaves(evaluation))


# On-policy.


@every_objective
def test_on_policy_the_gradient_is_reinforce(x64, batch, evaluate, everything_on, name):
  """−w·A at each token, whatever the ratio and the gate; the KL penalty's gradient is 0 there."""
  met = policies_meet(batch)
  weights = np.asarray(make(name).weigh(jnp.asarray(met["mask"]), jnp.asarray(met["segments"])))
  if name in SUM_OVER_RESPONSE:
    weights = met["mask"] * weights.sum(axis=1, keepdims=True)
  expected = -weights * (1.0 if name in SUPERVISED else met["advantages"])
  if name in DETACHING:
    expected = expected * (1 - selected(name, met))
  actual = evaluate(name, met, **everything_on(name))
  np.testing.assert_allclose(actual.grads["logprobs"], expected, rtol=1e-13, atol=1e-17)
  assert np.any(expected != 0)
  assert all(x == 0 for key, x in actual.metrics.items() if "clipfrac" in key and key.startswith("actor"))


@every_objective
def test_without_advantages_there_is_no_gradient(x64, batch, evaluate, everything_on, name):
  """For groups of one and groups of equal rewards, the gradient is exactly 0 even off-policy."""
  groups = np.concatenate([group_advantages(np.array([3.0, -1.0, 0.1, 1e9]), 1), group_advantages(np.full(4, 0.1), 4)])
  assert np.all(groups == 0)
  unanimous = {"ref_logprobs": batch["logprobs"], "advantages": np.repeat(groups[:, None], 16, axis=1)}
  actual = evaluate(name, batch | unanimous, **everything_on(name))
  assert all_finite(actual) and np.all(actual.grads["logprobs"] == 0) == (
    name not in SUPERVISED and not make(name).teaches_without_advantage
  )


@every_objective
def test_responses_without_an_advantage_count_only_in_the_denominators(x64, batch, evaluate, penalties_off, name):
  """An update without them has the same gradient if the weights count them."""
  none = [1, 3]  # Two of the six counted responses, with three and seven tokens.
  batch["advantages"][none] = 0
  whole = evaluate(name, batch, wanted=(), **penalties_off(name)).grads["logprobs"]
  taken = np.ones(8, bool)
  taken[none] = False
  rest = evaluate(name, batch | {"mask": batch["mask"] * taken[:, None]}, wanted=(), **penalties_off(name)).grads["logprobs"]
  shares = np.ones(8)
  shares[taken] = shares_of_weight(make(name), batch["mask"], taken, group_size=2)
  assert np.all(shares[: len(LENGTHS)][taken[: len(LENGTHS)] & (batch["mask"][: len(LENGTHS)].sum(axis=1) > 0)] < 1)
  same = np.allclose(shares[:, None] * rest, whole, rtol=1e-12, atol=0)
  objective = make(name)
  # A selection of tokens may or may not be the same without them.
  assert objective.prepare is not None or same == (objective.correctable and not objective.teaches_without_advantage)


# The mask.


@every_objective
def test_values_outside_the_mask_change_nothing(batch, evaluate, everything_on, name):
  mask = batch["mask"]
  clean = evaluate(name, batch, **everything_on(name))
  dirty = evaluate(name, with_junk(batch), **everything_on(name))
  assert_same(dirty, clean)
  for field, grad in dirty.grads.items():
    np.testing.assert_array_equal(grad, clean.grads[field])
    assert np.all(np.isfinite(grad)) and np.all(grad[mask == 0] == 0)


def fields_read(name, settings):
  objective = make(name, **settings)
  if name in SUPERVISED:
    return {"logprobs"}
  critic = {"values", "returns", "old_values"} if objective.value_loss is not None else set()
  return {"logprobs", "advantages"} | objective.needs | critic


@every_objective
def test_a_nan_under_the_mask_reaches_the_loss(batch, evaluate, everything_on, name):
  settings = everything_on(name)
  for field in sorted(batch.keys() - {"mask", "segments"}):
    spoilt = batch[field].copy()
    spoilt[1, 1] = np.nan
    actual = evaluate(name, batch | {field: spoilt}, **settings)
    read = field in fields_read(name, settings)
    if name not in SUPERVISED and (read or field == "old_values"):
      np.testing.assert_allclose(actual.metrics["actor/nan_tokens"], 1 / batch["mask"].sum(), rtol=1e-6, err_msg=field)
    assert np.isnan(actual.loss) == np.isnan(actual.metrics["actor/loss"]) == read, field
    if read:
      assert any(np.isnan(x) for key, x in actual.metrics.items() if key.endswith("_loss")), field


@every_objective
def test_an_impossible_token_is_bounded_or_reported(batch, evaluate, everything_on, name):
  """At a log-probability of −∞ the loss and its gradient are finite, or the loss itself is not."""
  settings = everything_on(name)
  fields = ("logprobs", "old_logprobs", "sampler_logprobs", "ref_logprobs")
  for impossible in [(field,) for field in fields] + [("logprobs", "old_logprobs"), fields]:
    spoilt = {field: batch[field].copy() for field in impossible}
    for x in spoilt.values():
      x[1, 1] = -np.inf
    actual = evaluate(name, batch | spoilt, **settings)
    assert all_finite(actual.grads) or not np.isfinite(actual.loss), impossible
    # −∞ − (−∞) cannot be bounded.
    assert not np.isfinite(actual.loss) or impossible != fields
    # The gradients of other responses stay finite.
    others = np.arange(8) != 1
    assert all(np.all(np.isfinite(grad[others])) for grad in actual.grads.values()), impossible


@every_objective
def test_an_empty_mask_gives_zero(batch, evaluate, everything_on, name):
  actual = evaluate(name, batch | {"mask": np.zeros_like(batch["mask"])}, **everything_on(name))
  assert all(np.all(x == 0) for x in jax.tree.leaves(actual))


@every_objective
def test_a_response_without_counted_tokens_does_not_count(x64, batch, evaluate, everything_on, name):
  """It adds nothing and does not enter 1/N: with padding in its place, every bit is the same."""
  expected = evaluate(name, batch, **everything_on(name))
  gone = batch["segments"].copy()
  gone[EMPTY_ROW] = 0
  moved = batch["advantages"].copy()
  moved[EMPTY_ROW] = 1e3
  actual = evaluate(name, batch | {"segments": gone, "advantages": moved}, **everything_on(name))
  assert_same(actual, expected)
  weights = make(name).weigh(jnp.asarray(batch["mask"]), jnp.asarray(batch["segments"]))
  without = [row for row in range(8) if row != EMPTY_ROW]
  fewer = make(name).weigh(jnp.asarray(batch["mask"][without]), jnp.asarray(batch["segments"][without]))
  np.testing.assert_array_equal(np.asarray(weights)[without], fewer)


# Numbers.


@every_objective
def test_extreme_log_ratios_stay_finite(batch, evaluate, everything_on, name):
  shift = 1e3 * np.resize([1.0, -1.0, -1.0], batch["mask"].shape)
  extreme = {key: batch[key].copy() for key in ("old_logprobs", "sampler_logprobs", "ref_logprobs")}
  extreme["old_logprobs"][:4] = (batch["logprobs"] - shift)[:4]
  extreme["sampler_logprobs"][1:5] = (batch["logprobs"] + shift)[1:5]
  extreme["ref_logprobs"][:2] = (batch["logprobs"] + shift)[:2]
  actual = evaluate(name, batch | extreme, **everything_on(name))
  assert actual.loss.dtype == np.float32 and all_finite(actual)


@every_objective
def test_bfloat16_is_raised_to_float32(batch, evaluate, everything_on, name):
  settings = everything_on(name)
  whole = ("mask", "segments")
  rounded = {key: x if key in whole else jnp.asarray(x, jnp.bfloat16) for key, x in batch.items()}
  actual = evaluate(name, rounded, wanted=(), **settings)
  expected = evaluate(name, {key: np.asarray(x, np.float32) if key != "segments" else x for key, x in rounded.items()}, **settings)
  assert actual.loss.dtype == np.float32 and all_finite(actual)
  np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-6)
  for field, grad in actual.grads.items():
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(grad.astype(np.float32), expected.grads[field], rtol=1e-2, atol=1e-6)


@every_objective
def test_double_precision_is_kept(x64, batch, evaluate, everything_on, name):
  actual = evaluate(name, batch, **everything_on(name))
  assert {x.dtype for x in jax.tree.leaves(actual)} == {np.dtype(np.float64)}


@every_objective
def test_compiles_once(batch, make_batch, evaluate, everything_on, num_programs, name):
  """New values, lengths and packings need no new program."""
  settings = everything_on(name)
  evaluate(name, batch, **settings)
  before = num_programs(name, **settings)
  others = make_batch(seed=1, lengths=(9, 1, 1, 7, 4, 16, 0, 2), num_tokens=16)
  evaluate(name, others | {"segments": np.tile(np.repeat(np.arange(4), 4), (8, 1))}, **settings)
  assert num_programs(name, **settings) == before


# Layouts. Each token has its own number, and the policy is a table of scores by number, so that the
# gradient of any layout can be read by number.

# Row of the batch -> row and first slot in the layout, in the order of the sequences' numbers.
LAYOUTS = {
  "padded on the left": ((8, 16), {row: (row, 9) for row in range(6)}),
  "packed, last first": ((8, 16), {5: (0, 1), 3: (0, 8), 2: (2, 3), 1: (2, 5), 0: (2, 9)}),
  "packed, wide": ((4, 24), {0: (0, 2), 1: (0, 8), 2: (0, 12), 3: (1, 1), 5: (3, 16), 4: (2, 4)}),
  "packed, many rows": ((16, 16), {5: (0, 1), 3: (0, 8), 2: (12, 3), 1: (12, 5), 0: (12, 9)}),
  "one a row, many rows": ((16, 9), {5: (0, 1), 4: (3, 1), 3: (4, 2), 2: (5, 8), 1: (10, 3), 0: (15, 1)}),
}


def lay_out(batch, layout):
  """Lays out the batch's responses among sevens, each behind an uncounted prompt token."""
  shape, places = LAYOUTS[layout]
  laid_out = {
    key: np.full(shape, 0 if key in ("mask", "tokens", "segments", "replies") else 7, x.dtype) for key, x in batch.items()
  }
  for number, (row, (b, t)) in enumerate(places.items(), start=1):
    end = t + LENGTHS[row]
    assert t >= 1 and end <= shape[1] and not np.any(laid_out["segments"][b, t - 1 : end])
    for key in batch:
      laid_out[key][b, t:end] = batch[key][row, : LENGTHS[row]]
    laid_out["segments"][b, t - 1 : end] = number
  return laid_out


def numbered(batch):
  return batch | {"tokens": np.arange(1, 8 * 16 + 1).reshape(8, 16)}


@every_objective
@pytest.mark.parametrize("layout", ["padded on the left", "packed, last first"])
def test_padding_packing_order_and_empty_rows_change_nothing(x64, batch, evaluate, everything_on, name, layout):
  laid_out = lay_out(numbered(batch), layout)
  tokens = laid_out.pop("tokens")
  expected = evaluate(name, batch, **everything_on(name))
  actual = evaluate(name, laid_out, **everything_on(name))
  assert_same(actual, expected, rtol=1e-12)
  for field, grad in actual.grads.items():
    by_number = np.zeros(8 * 16 + 1)
    by_number[tokens] = grad
    np.testing.assert_allclose(by_number[1:].reshape(8, 16), expected.grads[field], rtol=1e-12, atol=1e-16)


# This optimizer stores the gradient in place of moments and moves nothing.
KEEP_GRADIENT = optax.GradientTransformation(
  init=lambda params: jax.tree.map(jnp.zeros_like, params),
  update=lambda grads, state, params: (jax.tree.map(jnp.zeros_like, grads), grads),
)


def table_outputs(params, batch):
  return PolicyOutputs(**{field: table.astype(batch.advantages.dtype)[batch.tokens] for field, table in params.items()})


def update(objective, batch, layout, *, rows_at_once, num_devices, outputs=table_outputs, **options):
  """Runs one update of `make_train_step` and returns its gradients by token number and metrics."""
  laid_out = lay_out(numbered(batch), layout)
  tables = {field: np.zeros(8 * 16 + 1, np.float32) for field in DIFFERENTIATED}
  for field, table in tables.items():
    table[1:] = batch[field].ravel()
    del laid_out[field]
  state, train_batch = init_state(tables, KEEP_GRADIENT), TrainBatch(positions=laid_out["tokens"], **laid_out)
  if num_devices > 1:
    mesh = mesh_lib.make_mesh(data=num_devices)
    state = jax.device_put(state, mesh_lib.replicated(mesh))
    train_batch = mesh_lib.place_rows(mesh, train_batch)
    assert len(train_batch.mask.sharding.device_set) == num_devices
  step = make_train_step(outputs, objective, KEEP_GRADIENT, learning_rate=lambda _: 1.0, rows_at_once=rows_at_once, **options)
  state, metrics = jax.device_get(jax.jit(step)(state, train_batch))
  assert metrics["train/skipped"] == 0
  return {field: grad[1:].reshape(8, 16) for field, grad in state.opt_state.items()}, metrics


def only_metrics(objective, wanted):
  """Returns the objective with only the selected metrics, so that no other is compiled."""

  def token_loss(outputs, batch):
    loss, metrics = objective.token_loss(outputs, batch)
    return loss, {metric: x for metric, x in metrics.items() if wanted(metric)}

  return objective._replace(token_loss=token_loss)


def assert_same_update(actual, expected, metrics):
  grads, actual_metrics = actual
  for key in metrics:
    np.testing.assert_allclose(actual_metrics[key], expected.metrics[key], rtol=1e-12, atol=1e-12, err_msg=key)
  for field, grad in grads.items():
    # The train step accumulates gradients in float32, which rounds each token's once.
    np.testing.assert_allclose(grad, expected.grads[field], rtol=1.2e-7, atol=1e-37, err_msg=field)


def in_single_precision(batch):
  """Rounds the scores to float32, so that the tables of the policy lose nothing."""
  return batch | {field: batch[field].astype(np.float32).astype(float) for field in DIFFERENTIATED}


# Two micro-batches, on devices of which most have no counted token.
SPLIT = dict(layout="packed, many rows", rows_at_once=8, num_devices=8)


@every_objective
def test_micro_batches_of_packed_rows_on_devices_change_nothing(x64, batch, evaluate, everything_on, name):
  batch = in_single_precision(batch)
  expected = evaluate(name, batch, **everything_on(name))
  # A quantile reads the same array as the mean, and its sort takes a third of the compilation. The
  # statistics of the ratios are the same code in all objectives; `test_splits` covers them.
  wanted = lambda metric: not metric.endswith("/p99") and not metric.startswith("ratio/")
  objective = only_metrics(make(name, **everything_on(name)), wanted)
  assert_same_update(update(objective, batch, **SPLIT), expected, filter(wanted, expected.metrics))


# Means over the samples of a prompt, which lie in any rows.

PROMPTS = np.repeat([4, 4, 1, 4, 9, 1, 0, 0], 16).reshape(8, 16)
OF_PROMPTS = {"weights": "prompt_mean", "clip_low": 0.1}


def test_a_mean_over_prompts_is_the_mean_of_their_own_losses(x64, batch, evaluate):
  of_each = [evaluate("dapo", batch | {"mask": batch["mask"] * (prompt == PROMPTS)}, clip_low=0.1) for prompt in (1, 4)]
  actual = evaluate("dapo", batch | {"groups": PROMPTS}, **OF_PROMPTS)
  np.testing.assert_allclose(actual.loss, np.mean([x.loss for x in of_each]), rtol=1e-12)
  whole = evaluate("dapo", batch, clip_low=0.1)
  assert abs(whole.loss - actual.loss) > 1e-3 and whole.metrics["ratio/mean"] == actual.metrics["ratio/mean"]
  with pytest.raises(ValueError, match=r"^groups: found None, expected an array \[B, T\], because weights is 'prompt_mean'"):
    evaluate("dapo", batch, **OF_PROMPTS)
  with pytest.raises(ValueError, match="^groups: found float"):
    evaluate("dapo", batch | {"groups": 1.0 * PROMPTS}, **OF_PROMPTS)


@pytest.mark.parametrize(
  ("layout", "rows_at_once", "num_devices"),
  [("one a row, many rows", 8, 8), ("packed, wide", 1, 1), ("packed, last first", 2, 1), ("padded on the left", None, 8)],
)
def test_a_mean_over_prompts_knows_no_rows_micro_batches_or_devices(x64, batch, evaluate, layout, rows_at_once, num_devices):
  """The samples of the prompts lie in several rows, micro-batches and devices."""
  batch = in_single_precision(batch)
  expected = evaluate("dapo", batch | {"groups": PROMPTS}, **OF_PROMPTS)
  objective = only_metrics(make("dapo", **OF_PROMPTS), lambda metric: metric == "actor/pg_loss")
  actual = update(objective, batch | {"groups": PROMPTS}, layout, rows_at_once=rows_at_once, num_devices=num_devices)
  assert_same_update(actual, expected, ["actor/loss", "actor/pg_loss"])


def test_shares_of_a_prompts_samples(x64, batch, evaluate):
  """One sample of a prompt has no advantage, so its other samples have a share of their own."""
  none = [1, 5]
  batch["advantages"][none] = 0
  consecutive = np.repeat([1, 1, 2, 2, 3, 3, 4, 4], 16).reshape(8, 16)
  whole = evaluate("dapo", batch | {"groups": consecutive}, wanted=(), **OF_PROMPTS).grads["logprobs"]
  taken = np.ones(8, bool)
  taken[none] = False
  shares = np.ones(8)
  shares[taken] = shares_of_weight(make("dapo", **OF_PROMPTS), batch["mask"], taken, group_size=2)
  rest = {"mask": batch["mask"] * taken[:, None], "groups": consecutive}
  rest = evaluate("dapo", batch | rest, wanted=(), **OF_PROMPTS).grads["logprobs"]
  np.testing.assert_allclose(shares[:, None] * rest, whole, rtol=1e-12, atol=0)
  assert shares[0] != shares[2] and np.any(whole != 0)


# An environment's replies.


def outputs_under_the_mask(params, batch):
  """Returns zeros outside the mask, as the model does."""
  return jax.tree.map(lambda x: jnp.where(batch.mask > 0, x, 0), table_outputs(params, batch))


def test_replies_are_imitated_by_a_mean_of_their_own(x64, batch):
  """The holes of the mask are replies, most of them to a response without a counted token."""
  batch = in_single_precision(batch)
  replies = np.zeros((8, 16))
  for hole in HOLES:
    replies[hole] = 1
  objective = only_metrics(make("dapo"), lambda metric: metric == "actor/pg_loss")
  run = functools.partial(update, objective, outputs=outputs_under_the_mask)
  plain, before = run(batch, "padded on the left", rows_at_once=None, num_devices=1)
  batch |= {"replies": replies}
  surprise = -np.mean(batch["logprobs"][replies > 0])
  for layout, rows_at_once, num_devices in (("packed, wide", 1, 1), ("one a row, many rows", 8, 8)):
    grads, metrics = run(batch, layout, rows_at_once=rows_at_once, num_devices=num_devices, echo_coef=0.1)
    np.testing.assert_allclose(grads["logprobs"], plain["logprobs"] - 0.1 * replies / len(HOLES), rtol=1.2e-7, atol=1e-9)
    assert metrics["actor/pg_loss"] == pytest.approx(before["actor/pg_loss"], rel=1e-12)
    assert metrics["actor/loss"] == pytest.approx(before["actor/loss"] + 0.1 * surprise, rel=1e-12)
    assert metrics["echo/nll"] == pytest.approx(surprise, rel=1e-12) and metrics["echo/num_tokens"] == len(HOLES)


# Tokens selected by a statistic over the whole batch.


def test_the_tokens_of_largest_entropy_are_those_of_the_whole_batch(x64, batch):
  batch = in_single_precision(batch)
  counted, entropy = batch["mask"] > 0, np.where(batch["mask"] > 0, batch["entropy"][::-1] + 0.01 * batch["advantages"], np.nan)
  kept = counted & (entropy >= np.quantile(entropy[counted], 0.7))
  batch |= {"old_entropy": entropy}
  objective = top_entropy(make("dapo"), share=0.3)
  assert objective.needs == {"old_logprobs", "old_entropy"}
  objective = only_metrics(objective, lambda metric: metric == "actor/kept_fraction")
  one = dict(rows_at_once=None, num_devices=1)
  plain = update(only_metrics(make("dapo"), lambda metric: False), batch, "padded on the left", **one)[0]["logprobs"]
  for layout, rows_at_once in (("packed, wide", 1), ("padded on the left", None)):
    grads, metrics = update(objective, batch, layout, **(one | {"rows_at_once": rows_at_once}))
    np.testing.assert_allclose(grads["logprobs"], np.where(kept, plain, 0), rtol=1.2e-7, atol=1e-37)
    assert metrics["actor/kept_fraction"] == pytest.approx(kept.sum() / counted.sum()) == pytest.approx(0.3, abs=0.05)
  missing = TrainBatch(*3 * [jnp.ones((1, 1), int)], *3 * [jnp.ones((1, 1))])
  with pytest.raises(ValueError, match=r"^old_entropy: found None, expected an array \[B, T\], because top_entropy"):
    objective.prepare(missing)
  with pytest.raises(ValueError, match="^objective: found one that ignores"):
    top_entropy(make("sft"))


def test_selections_chain_and_follow_a_bypass(batch):
  batch["sampler_logprobs"] -= np.cos(np.arange(128.0)).reshape(8, 16)
  _, whole = as_batch(batch | {"old_entropy": batch["entropy"]})
  both = corrected(make("kl_cov", cov_share=0.2), ["top_entropy:share=0.5", "bypass"])
  assert both.needs == {"sampler_logprobs", "old_entropy"}
  prepared, sampled = both.prepare(whole), whole._replace(old_logprobs=whole.sampler_logprobs)
  np.testing.assert_array_equal(prepared.selected, make("kl_cov", cov_share=0.2).prepare(sampled).selected)
  assert np.any(prepared.selected != make("kl_cov", cov_share=0.2).prepare(whole).selected)
  assert prepared.old_entropy is None and np.array_equal(prepared.old_logprobs, whole.old_logprobs)
  assert np.sum(prepared.importance * whole.mask) == pytest.approx(np.sum(whole.mask) / 2, abs=1)
  outputs = PolicyOutputs(jnp.asarray(batch["logprobs"], jnp.float32))
  np.testing.assert_array_equal(both.token_loss(outputs, prepared)[0], both.token_loss(outputs, whole)[0])


@pytest.mark.parametrize(
  ("name", "settings"),
  [("clip_cov", {"cov_share": 0.3, "cov_low": 0.1}), ("kl_cov", {"cov_share": 0.3})],
)
def test_the_selection_is_that_of_the_whole_batch(x64, batch, evaluate, name, settings):
  """Micro-batches of one row that selected for themselves would select at least one token each."""
  batch, num_tokens = in_single_precision(batch), int(np.sum(batch["mask"]))
  expected = evaluate(name, batch, **settings)
  assert expected.metrics["actor/selected_fraction"] == int(0.3 * num_tokens) / num_tokens
  objective = only_metrics(make(name, **settings), lambda metric: metric == "actor/selected_fraction")
  for layout, rows_at_once in (("packed, wide", 1), ("one a row, many rows", 2)):
    actual = update(objective, batch, layout, rows_at_once=rows_at_once, num_devices=1)
    assert_same_update(actual, expected, ["actor/loss", "actor/selected_fraction"])
  apart = update(objective._replace(prepare=None), batch, "packed, wide", rows_at_once=1, num_devices=1)
  assert apart[1]["actor/selected_fraction"] != expected.metrics["actor/selected_fraction"], "the test would not see it"


# Corrections. Those of the mismatch and those that select tokens, alone and around a selection.

SETTINGS_OF_CORRECTIONS = {
  "top_entropy": {"share": 0.5},
  "m2po": {"threshold": 0.01},
  "off_policy_mask": {"delta": 0.0},
  "geometric_rejection": {"low": 0.95, "high": 1.02},
  "rejection": {"limit": 0.02, "estimator": "k2", "over": "sequence_max"},
  "tis": {"cap": 1.05, "floor": 0.95, "level": "sequence"},
  "mis": {"cap": 1.1},
  "icepop": {"low": 0.9, "high": 1.1},
  "kpop": {"bound": 2e-3},
  "sequence_tv": {"low": 0.0, "high": 0.07},
  "bypass": {},
}


@pytest.mark.parametrize("name", few(CORRECTIONS, "m2po", "rejection", "kpop", "sequence_tv", rest="slow"))
def test_splits_change_no_correction(x64, batch, evaluate, name):
  """Each of them around one that selects tokens, in micro-batches of packed rows on devices."""
  batch = in_single_precision(batch | {"old_entropy": batch["entropy"][::-1]})
  batch["old_entropy"] = np.where(batch["mask"] > 0, batch["old_entropy"], 0.0)
  del batch["ref_logprobs"]
  inner = make("dapo") if name in ("m2po", "bypass") else m2po(make("dapo"), threshold=0.02)
  objective = CORRECTIONS[name](inner, **SETTINGS_OF_CORRECTIONS[name])
  metrics = lambda metric: metric.startswith(("rollout_corr/", "off_policy/", "actor/kept")) and not metric.endswith("/p99")
  objective = only_metrics(objective, metrics)
  whole = dict(layout="padded on the left", rows_at_once=None, num_devices=1)
  expected, expected_metrics = update(objective, batch, **whole)
  grads, actual_metrics = update(objective, batch, **SPLIT)
  np.testing.assert_allclose(grads["logprobs"], expected["logprobs"], rtol=2.4e-7, atol=1e-37)
  for key in filter(metrics, expected_metrics):
    np.testing.assert_allclose(actual_metrics[key], expected_metrics[key], rtol=1e-12, atol=1e-12, err_msg=key)
  untouched = evaluate("dapo", batch, wanted=()).grads["logprobs"]
  assert np.any(np.abs(expected["logprobs"] - untouched) > 1e-6) and np.any(expected["logprobs"] != 0)


def test_every_correction_has_settings_here():
  assert set(SETTINGS_OF_CORRECTIONS) == set(CORRECTIONS)


def test_m2po_selects_in_the_whole_batch(x64, batch):
  """A micro-batch that selected for itself would keep other tokens."""
  objective = only_metrics(m2po(make("dapo"), threshold=0.004), lambda metric: metric in ("actor/kept_fraction", "rollout_corr/m2_kept"))
  one_at_a_time = dict(layout="packed, wide", rows_at_once=1, num_devices=1)
  batch = in_single_precision(batch)
  whole, apart = (update(each, batch, **one_at_a_time)[1] for each in (objective, objective._replace(prepare=None)))
  log_k = (batch["old_logprobs"] - batch["sampler_logprobs"])[batch["mask"] > 0]
  ordered = np.sort(np.square(log_k))
  means = np.cumsum(ordered) / np.arange(1, len(ordered) + 1)
  assert whole["actor/kept_fraction"] == pytest.approx(np.mean(means < 0.004)) != apart["actor/kept_fraction"]
  assert whole["rollout_corr/m2_kept"] == pytest.approx(means[means < 0.004][-1], rel=1e-6)


def test_m2po_chains_with_other_selections(batch):
  outputs, whole = as_batch(batch | {"old_entropy": batch["entropy"]})
  alone, cov = m2po(make("dapo"), threshold=0.01), make("kl_cov", cov_share=0.2)
  keep = alone.prepare(whole).importance
  for chained in (m2po(cov, threshold=0.01), m2po(top_entropy(make("dapo"), share=0.5), threshold=0.01)):
    prepared = chained.prepare(whole)
    inner = (cov if "old_entropy" not in chained.needs else top_entropy(make("dapo"), share=0.5)).prepare(whole)
    np.testing.assert_array_equal(prepared.importance, keep if inner.importance is None else keep * inner.importance)
    np.testing.assert_array_equal(prepared.selected, 1 - keep if inner.selected is None else inner.selected)
    # Neither a weight from outside nor a second call selects again.
    for wrapped in (chained, tis(chained, cap=1.1)):
      np.testing.assert_array_equal(wrapped.token_loss(outputs, prepared)[0], wrapped.token_loss(outputs, whole)[0])


# Inputs that an objective needs. Tracing needs only shapes.


def traced(objective, batch):
  """Returns the names of the metrics."""
  return jax.eval_shape(objective.token_loss, *as_batch(batch))[1].keys()


@every_objective
def test_needs_are_exactly_the_fields_it_fails_without(batch, everything_on, penalties_off, name):
  objective, bare = make(name, **everything_on(name)), make(name, **penalties_off(name))
  assert objective.needs <= set(SCORES)
  assert bare.needs == objective.needs - {"ref_logprobs", "entropy"}
  # A batch always has old log-probabilities; the next test checks whether they are read.
  traced(bare, {key: x for key, x in batch.items() if key not in SCORES or key in bare.needs or key == "old_logprobs"})
  for field in objective.needs - {"old_logprobs"}:
    with pytest.raises(ValueError, match=rf"^{field}: found None, expected an array \[B, T\], because \w+"):
      traced(objective, {key: x for key, x in batch.items() if key != field})


@every_objective
def test_only_needed_scores_are_read(batch, evaluate, everything_on, name):
  settings = everything_on(name)
  needs = make(name, **settings).needs
  actual = evaluate(name, batch, **settings)
  for field in SCORES:
    changed = evaluate(name, batch | {field: batch[field] + 0.3 * np.cos(np.arange(128.0)).reshape(8, 16)}, **settings)
    assert (changed.loss == actual.loss) == (field not in needs), field
    for key, grad in actual.grads.items():
      assert field in needs or np.array_equal(changed.grads[key], grad)


@every_objective
def test_a_critic_is_optional_but_never_partial(batch, name):
  critic = ("values", "returns", "old_values")
  objective, bare = make(name), {key: x for key, x in batch.items() if key not in critic}
  metrics = traced(objective, bare | {key: batch[key] for key in ("values", "returns")})
  assert ("critic/vf_loss" in metrics) == (objective.value_loss is not None)
  if objective.value_loss is not None:
    assert "critic/vf_loss" not in traced(objective, bare)
  for missing, message in (("values", "returns are given"), ("returns", "values are given")):
    with pytest.raises(ValueError, match=f"^{missing}: found None.*{message}"):
      value(objective, **{key: x for key, x in batch.items() if key != missing})


def test_without_old_values_the_critic_is_not_clipped(batch, evaluate):
  # The present values are the old ones, as at the first update, so the clip cannot bind.
  first_update = {key: x for key, x in batch.items() if key != "old_values"}
  clipped, unclipped = (evaluate("ppo", first_update, value_clip=clip).grads["values"] for clip in (0.2, None))
  np.testing.assert_allclose(clipped, unclipped, rtol=1e-6)
  assert np.any(unclipped != 0)


@pytest.mark.parametrize("shape", [(8, 15), (16,), (8, 16, 1), ()])
def test_a_wrong_shape_is_named(batch, shape):
  for field in sorted(batch.keys() - {"logprobs"}):
    with pytest.raises(ValueError) as error:
      value(make("ppo"), **(batch | {field: np.ones(shape, int)}))
    message = str(error.value)
    assert message.startswith(f"{field}: found shape {shape}, expected [B, T] = (8, 16)") and "\n" not in message


def test_wrong_types_and_ranks_are_named(make_batch):
  batch = make_batch()
  with pytest.raises(ValueError, match=r"^logprobs: found shape \(6,\), expected \[B, T\]"):
    value(make("sapo"), **(batch | {"logprobs": np.zeros(6)}))
  with pytest.raises(ValueError, match="^segments: found float"):
    value(make("sapo"), **batch, segments=np.ones((4, 6)))
  with pytest.raises(ValueError, match="found complex"):
    value(make("sapo"), **(batch | {"advantages": np.ones((4, 6), complex)}))


def test_masks_of_any_type_and_one_advantage_per_row(x64, batch, evaluate):
  expected = evaluate("gspo", policies_meet(batch), wanted=())
  narrow = policies_meet(batch) | {"advantages": batch["advantages"][:, 0]}
  for mask in (batch["mask"] > 0, batch["mask"].astype(np.int32), 0.5 * batch["mask"]):
    assert_same(evaluate("gspo", narrow | {"mask": mask}, wanted=()), expected)
