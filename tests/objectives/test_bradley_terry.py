"""Bradley-Terry on packed pairs, against float64 loops over unpacked pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives.bradley_terry import bradley_terry
from jaxrl_llm.run.jobs.reward_model.rows import Pair, of_pairs, pack_pairs
from jaxrl_llm.types import PolicyOutputs

PAIRS = [Pair([1] * c, [2] * r, margin) for c, r, margin in ((2, 3, 0.0), (1, 4, 0.5), (3, 1, -0.25), (5, 5, 2.0), (2, 2, 0.0))]


def packed():
  return pack_pairs(PAIRS, row_tokens=12, row_buckets=(4,))


def exact(batch):
  """Places a batch on the device, in float64."""
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64 if x.dtype.kind == "f" else x.dtype), batch)


def scores_of_ends(values, batch, layout):
  """Returns r_c and r_r of each pair, read at the last tokens by the lengths alone."""
  rows = zip(PAIRS, layout.rows, layout.slots, strict=True)
  ends = [(row, slots[len(pair.chosen) - 1], slots[-1]) for pair, row, slots in rows]
  return np.array([[values[row, c], values[row, r]] for row, c, r in ends])


def golden(values, batch, layout, center_coef):
  total = 0.0
  for pair, (c, r) in zip(PAIRS, scores_of_ends(values, batch, layout), strict=True):
    total += -np.log(1 / (1 + np.exp(-(c - r - pair.margin)))) + center_coef * (c + r) ** 2
  return total / len(PAIRS)


def loss_of(objective, batch):
  def loss(values):
    outputs = PolicyOutputs(jnp.zeros_like(values), values=values)
    losses, metrics = objective.token_loss(outputs, batch)
    return jnp.sum(objective.weigh(batch.mask, batch.segments) * losses), metrics

  return loss


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("center_coef", [0.0, 0.03])
def test_the_loss_is_that_of_the_definition(center_coef):
  batch, layout = packed()
  batch = exact(batch)
  values = 0.3 * np.random.default_rng(0).standard_normal(batch.tokens.shape)
  loss, metrics = loss_of(bradley_terry(center_coef=center_coef), batch)(jnp.asarray(values))
  np.testing.assert_allclose(loss, golden(values, batch, layout, center_coef), rtol=1e-12)
  chosen, rejected = scores_of_ends(values, batch, layout).T
  np.testing.assert_allclose(of_pairs(np.asarray(metrics["reward_model/margin"]), PAIRS, layout), chosen - rejected, rtol=1e-6)
  np.testing.assert_array_equal(of_pairs(np.asarray(metrics["reward_model/accuracy"]), PAIRS, layout), chosen > rejected)


@pytest.mark.usefixtures("x64")
def test_the_gradient_raises_the_chosen_and_lowers_the_rejected_only_at_their_ends():
  batch, layout = packed()
  batch = exact(batch)
  values = np.random.default_rng(1).standard_normal(batch.tokens.shape)
  gradient = np.asarray(jax.grad(lambda x: loss_of(bradley_terry(), batch)(x)[0])(jnp.asarray(values)))
  of_chosen, of_rejected = scores_of_ends(gradient, batch, layout).T
  assert np.all(of_chosen < 0) and np.all(of_rejected > 0)
  assert np.count_nonzero(gradient) == 2 * len(PAIRS)
  chosen, rejected = scores_of_ends(values, batch, layout).T
  margins = np.array([pair.margin for pair in PAIRS])
  np.testing.assert_allclose(of_chosen, -1 / (1 + np.exp(chosen - rejected - margins)) / len(PAIRS), rtol=1e-10)


def test_far_apart_scores_neither_overflow_nor_vanish():
  batch, _ = pack_pairs([Pair([1], [2])], row_tokens=2, row_buckets=(1,))
  batch = jax.tree.map(jnp.asarray, batch)
  for values, expected in ((jnp.array([[-1e4, 1e4]]), 2e4), (jnp.array([[1e4, -1e4]]), 0.0)):
    loss, gradient = jax.value_and_grad(lambda x: loss_of(bradley_terry(), batch)(x)[0])(values)
    assert float(loss) == expected and np.all(np.isfinite(gradient))


def test_a_pair_lies_whole_in_one_row_whatever_the_shards():
  for shards in (1, 2, 4):
    batch, layout = pack_pairs(PAIRS, row_tokens=12, row_buckets=(4,), num_shards=shards)
    for pair, row, slots in zip(PAIRS, layout.rows, layout.slots, strict=True):
      assert batch.tokens[row, slots].tolist() == [*pair.chosen, *pair.rejected]
      chosen, rejected = batch.segments[row, slots[0]], batch.segments[row, slots[-1]]
      assert chosen % 2 == 1 and rejected == chosen + 1
    assert batch.mask.sum() == len(PAIRS)


def test_settings_are_checked():
  with pytest.raises(ValueError, match="center_coef: found -1, expected a finite number >= 0"):
    bradley_terry(center_coef=-1)
  with pytest.raises(ValueError, match="unknown hyper-parameter 'centre_coef' .did you mean 'center_coef'"):
    bradley_terry(centre_coef=1.0)
