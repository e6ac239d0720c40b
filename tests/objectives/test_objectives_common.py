"""Common: every registry entry through one list of promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives import OBJECTIVES, make, value
from jaxrl_llm.segments import reduce_metrics
from jaxrl_llm.types import PolicyOutputs, TrainBatch

# With every penalty on, so that each input an objective can read is read.
EVERYTHING_ON = {name: {} if name == "sft" else {"kl_coef": 0.1, "entropy_coef": 0.01} for name in OBJECTIVES}
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def run(name, batch, **changes):
  """Loss, metrics, and the gradients in logprobs and values."""
  batch = dict(batch)
  objective = make(name, **(EVERYTHING_ON[name] | changes))
  logprobs, values = batch.pop("logprobs"), batch.pop("values")
  (loss, metrics), grads = jax.value_and_grad(
    lambda x, v: value(objective, x, values=v, **batch), argnums=(0, 1), has_aux=True
  )(jnp.asarray(logprobs), jnp.asarray(values))
  return loss, metrics, [np.asarray(g) for g in grads]


def assert_same(a, b, rtol=0.0):
  np.testing.assert_allclose(a[0], b[0], rtol=rtol)
  assert a[1].keys() == b[1].keys()
  for key in a[1]:
    np.testing.assert_allclose(a[1][key], b[1][key], rtol=rtol, atol=rtol, err_msg=key)


@every_objective
def test_what_stands_off_the_mask_changes_nothing(make_batch, name):
  batch = make_batch()
  mask = batch["mask"]
  clean = run(name, batch)
  junk = np.resize([1e4, -np.inf, np.nan, np.inf, -1e4], mask.shape)
  dirty = run(name, {k: x if k == "mask" else np.where(mask > 0, x, junk) for k, x in batch.items()})
  assert_same(dirty, clean)
  for found, expected in zip(dirty[2], clean[2], strict=True):
    np.testing.assert_array_equal(found, expected)
    assert np.all(np.isfinite(found)) and np.all(found[mask == 0] == 0)


@every_objective
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "advantages", "ref_logprobs", "entropy", "values"])
def test_a_nan_under_the_mask_reaches_the_loss(make_batch, name, field):
  reads = {"sft": ("logprobs",), "ppo": ("values",)}.get(name, ())
  reads = reads if name == "sft" else (*reads, "logprobs", "old_logprobs", "advantages", "ref_logprobs", "entropy")
  batch = make_batch()
  batch[field][1, 1] = np.nan
  loss, metrics = value(make(name, **EVERYTHING_ON[name]), **batch)
  assert np.isnan(loss) == np.isnan(metrics["actor/loss"]) == (field in reads)
  if field in ("logprobs", "old_logprobs") and field in reads:
    assert np.isnan(metrics["actor/nll_loss" if name == "sft" else "actor/pg_loss"])


@every_objective
def test_compiles_once_and_agrees_with_a_loop_over_uncompiled_calls(make_batch, name):
  objective = make(name, **EVERYTHING_ON[name])
  compiled = jax.jit(jax.vmap(lambda batch: value(objective, **batch)))
  for seeds in ((0, 1), (2, 3)):
    batches = [make_batch(seed) for seed in seeds]
    losses, metrics = compiled({key: np.stack([b[key] for b in batches]) for key in batches[0]})
    for i, batch in enumerate(batches):
      assert_same((losses[i], {key: x[i] for key, x in metrics.items()}), value(objective, **batch), rtol=2e-5)
  assert compiled._cache_size() == 1


@every_objective
def test_bfloat16_is_raised_to_float32(make_batch, name):
  batch = {key: jnp.asarray(x, jnp.bfloat16) for key, x in make_batch().items()}
  exact = {key: x.astype(jnp.float32) for key, x in batch.items()}
  loss, metrics, grads = run(name, batch)
  assert loss.dtype == jnp.float32 and np.isfinite(loss)
  assert_same((loss, metrics), run(name, exact)[:2])
  assert all(g.dtype == jnp.bfloat16 and np.all(np.isfinite(g.astype(np.float32))) for g in grads)


@every_objective
def test_mask_of_any_type_and_one_advantage_a_row(make_batch, name):
  batch = make_batch(level="sequence")
  objective = make(name, **EVERYTHING_ON[name])
  expected = value(objective, **batch)
  wide = np.broadcast_to(batch["advantages"][:, None], batch["mask"].shape)
  for dtype in (bool, np.int32):
    assert_same(value(objective, **(batch | {"mask": batch["mask"].astype(dtype), "advantages": wide})), expected)


@every_objective
def test_extreme_log_ratios_stay_finite_without_gradient(make_batch, name):
  batch = make_batch(lengths=(6, 3, 1, 1))
  shift = 1e3 * np.resize([1.0, -1.0, -1.0], batch["mask"].shape)
  batch["old_logprobs"][:3] = (batch["logprobs"] - shift)[:3]
  batch["ref_logprobs"][:2] = (batch["logprobs"] + shift)[:2]
  loss, metrics, grads = run(name, batch)
  assert np.isfinite(loss) and all(np.all(np.isfinite(x)) for x in (*metrics.values(), *grads))
  if name != "sft":
    # The bound of ±20 ends the gradient of the policy term (rows 0 to 2) and of the penalty (rows 0 and 1).
    assert np.all(grads[0][:2] == 0) and np.any(grads[0][2] != 0)


@every_objective
def test_an_empty_mask_gives_zero(make_batch, name):
  batch = make_batch()
  loss, metrics, grads = run(name, batch | {"mask": np.zeros_like(batch["mask"])})
  assert loss == 0 and all(np.all(x == 0) for x in (*metrics.values(), *grads))


@every_objective
def test_padding_packing_order_and_empty_rows_change_nothing(make_batch, name, x64):
  lengths = (5, 0, 1, 6)
  batch = make_batch(lengths=lengths, num_tokens=6)
  expected = run(name, batch)
  assert_same(run(name, {key: np.pad(x, ((0, 0), (3, 7))) for key, x in batch.items()}), expected, rtol=1e-12)

  # The same three responses in two of three rows, last first, each behind a prompt token (mask 0), padding between and behind;
  # of the row without counted tokens nothing is left.
  places = {3: (0, 1), 0: (2, 1), 2: (2, 8)}
  packed, segments = {key: np.full((3, 16), 7.0) for key in batch}, np.zeros((3, 16), int)
  packed["mask"][:] = 0
  for number, (row, (b, t)) in enumerate(places.items(), start=1):
    segments[b, t - 1 : t + lengths[row]] = number
    for key in batch:
      packed[key][b, t : t + lengths[row]] = batch[key][row, : lengths[row]]
  found = run(name, packed | {"segments": segments})
  assert_same(found, expected, rtol=1e-12)
  for found_grad, grad in zip(found[2], expected[2], strict=True):
    for row, (b, t) in places.items():
      np.testing.assert_allclose(found_grad[b, t : t + lengths[row]], grad[row, : lengths[row]], rtol=1e-12, atol=1e-16)


@every_objective
def test_micro_batches_add_up_to_the_batch(make_batch, name, x64):
  batch = make_batch(lengths=(5, 3, 1, 0))  # 8 tokens of 2 sequences, then 1 of 1: a mean of means would show.
  expected = run(name, batch)
  objective = make(name, **EVERYTHING_ON[name])
  shape = batch["mask"].shape
  ids = jnp.ones(shape, int)
  outputs = PolicyOutputs(**{k: jnp.asarray(batch[k]) for k in ("logprobs", "entropy", "values")})
  fields = ("mask", "advantages", "old_logprobs", "ref_logprobs", "returns", "old_values")
  train_batch = TrainBatch(tokens=ids, positions=ids, segments=ids, **{k: jnp.asarray(batch[k]) for k in fields})
  weights = objective.weigh(train_batch.mask, train_batch.segments)

  loss, grads, token_metrics = 0.0, [], []
  for start in (0, 2):

    def piece(x, start=start):
      return x[start : start + 2]

    def micro_loss(logprobs, piece=piece):
      micro_outputs = jax.tree.map(piece, outputs)._replace(logprobs=logprobs)
      losses, metrics = objective.token_loss(micro_outputs, jax.tree.map(piece, train_batch))
      return jnp.sum(piece(weights) * losses), metrics

    (micro, metrics), grad = jax.value_and_grad(micro_loss, has_aux=True)(piece(outputs.logprobs))
    loss += micro
    grads.append(grad)
    token_metrics.append(metrics)
  np.testing.assert_allclose(loss, expected[0], rtol=1e-12)
  np.testing.assert_allclose(np.concatenate(grads), expected[2][0], rtol=1e-12, atol=1e-16)
  metrics = reduce_metrics(jax.tree.map(lambda *x: jnp.concatenate(x), *token_metrics), train_batch.mask, weights)
  assert_same((loss, metrics | {"actor/loss": loss}), expected[:2], rtol=1e-12)


@every_objective
def test_double_precision_is_kept(make_batch, name, x64):
  loss, metrics, grads = run(name, make_batch())
  assert loss.dtype == np.float64 and all(g.dtype == np.float64 for g in grads)
  assert all(x.dtype == np.float64 for x in metrics.values())


@every_objective
def test_needs_are_exactly_what_it_fails_without(make_batch, name):
  objective, batch = make(name, **EVERYTHING_ON[name]), make_batch()
  assert objective.needs == (set() if name == "sft" else {"old_logprobs", "ref_logprobs", "entropy"})
  for field in ("ref_logprobs", "entropy"):
    without = {key: x for key, x in batch.items() if key != field}
    if field in objective.needs:
      with pytest.raises(ValueError, match=rf"^{field}: found None, expected an array \[B, T\], because \w+_coef is"):
        value(objective, **without)
    else:
      assert np.isfinite(value(objective, **without)[0])


def test_a_critic_is_optional_and_never_half_given(make_batch):
  batch = make_batch()
  critic = ("values", "returns", "old_values")
  bare = {key: x for key, x in batch.items() if key not in critic}
  loss, metrics = value(make("ppo"), **bare)
  assert np.isfinite(loss) and "critic/vf_loss" not in metrics
  # Without old values the present ones are the old ones: the clip is there and cannot bind.
  first_update = {k: x for k, x in batch.items() if k != "old_values"}
  clipped, unclipped = (
    jax.grad(lambda v, s=settings: value(make("ppo", **s), **first_update | {"values": v})[0])(batch["values"])
    for settings in ({}, {"value_clip": None})
  )
  np.testing.assert_allclose(clipped, unclipped, rtol=1e-6)
  assert np.any(np.asarray(unclipped) != 0)
  for missing, message in (("values", "returns are given"), ("returns", "values are given")):
    with pytest.raises(ValueError, match=f"^{missing}: found None.*{message}"):
      value(make("ppo"), **{key: x for key, x in batch.items() if key != missing})


@pytest.mark.parametrize("field", ["old_logprobs", "advantages", "mask", "segments", "ref_logprobs", "entropy", "values"])
@pytest.mark.parametrize("shape", [(4, 5), (6,), (4, 6, 1), ()])
def test_a_wrong_shape_is_named(make_batch, field, shape):
  with pytest.raises(ValueError) as error:
    value(make("ppo"), **(make_batch() | {field: np.ones(shape, int)}))
  message = str(error.value)
  assert message.startswith(f"{field}: found shape {shape}, expected [B, T] = (4, 6)") and "\n" not in message


def test_wrong_types_and_ranks_are_named(make_batch):
  batch = make_batch()
  with pytest.raises(ValueError, match=r"^logprobs: found shape \(6,\), expected \[B, T\]"):
    value(make("sapo"), **(batch | {"logprobs": np.zeros(6)}))
  with pytest.raises(ValueError, match="^segments: found float"):
    value(make("sapo"), **batch, segments=np.ones((4, 6)))
  with pytest.raises(ValueError, match="found complex"):
    value(make("sapo"), **(batch | {"advantages": np.ones((4, 6), complex)}))
