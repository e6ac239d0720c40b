"""Losses and gradients of adapters, however the rows of a call are divided."""

import jax
import numpy as np
import pytest

from jaxrl_llm.models import Lora, make_model, preset
from jaxrl_llm.serve.refusals import Refusal
from jaxrl_llm.serve.tinker import data as data_lib
from jaxrl_llm.serve.tinker import learner
from jaxrl_llm.serve.tinker.data import Datum
from jaxrl_llm.serve.tinker.losses import make_loss


@pytest.fixture(scope="module")
def adapters():
  model = make_model(preset("nano", vocab_size=264))
  return learner.Learner(model, model.init(jax.random.key(7)), Lora(rank=4, alpha=32.0))


@pytest.mark.slow
def test_small_programs_add_up_to_a_large_one(adapters, monkeypatch):
  rng, loss, data = np.random.default_rng(0), make_loss("gspo", {}), []
  for count in (20, 31, 9, 30, 17):
    tokens = rng.integers(0, 264, (2, count)).astype(np.int32)
    data.append(
      Datum(
        tokens[0],
        tokens[1][:, None],
        {x: rng.normal(-1, 0.3, (count, 1)).astype(np.float32) for x in loss.reads},
      )
    )
  trained = adapters.begin(3)
  whole = adapters.compute(trained.weights, data, loss, forward_only=False)
  monkeypatch.setattr(data_lib, "_COMMON_ROW", 32)
  for budget in (128, 16):  # Programs of two rows, and rows that are longer than a budget.
    monkeypatch.setattr(learner, "_TOKENS_AT_ONCE", budget)
    parts = adapters.compute(trained.weights, data, loss, forward_only=False)
    assert parts.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-5)
    for of_whole, of_parts, datum in zip(whole.logprobs, parts.logprobs, data, strict=True):
      assert of_whole.shape == (len(datum.tokens), 1)
      np.testing.assert_allclose(of_whole, of_parts, atol=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (whole.gradients, parts.gradients)), strict=True):
      np.testing.assert_allclose(one, other, atol=1e-4 * float(np.abs(one).max() + 1e-6))


@pytest.mark.parametrize("unit", [1, 64])
def test_each_datum_begins_at_a_multiple_of_the_unit(unit):
  """On a CPU its numbers then do not depend on the others of its row."""
  rng, loss = np.random.default_rng(0), make_loss("cross_entropy", {})
  data = [Datum(x := rng.integers(0, 264, n), x[:, None], {"weights": np.ones((n, 1), np.float32)}) for n in (70, 30, 140, 64)]
  packed = data_lib.pack(data, loss, budget=2048, shards=1, unit=unit)
  assert len({row for row, _ in packed.places}) < len(data)
  for datum, (row, start) in zip(data, packed.places, strict=True):
    assert start % unit == 0
    here = slice(start, start + len(datum.tokens))
    np.testing.assert_array_equal(packed.rows.tokens[row, here], datum.tokens)
    assert packed.rows.positions[row, here].tolist() == list(range(len(datum.tokens)))
  assert np.sum(packed.rows.segments > 0) == sum(len(datum.tokens) for datum in data)


def test_a_gradient_that_is_not_finite_changes_nothing(adapters):
  trained = adapters.begin(3)
  broken = jax.tree.map(lambda x: x * np.nan, trained.weights)
  with pytest.raises(Refusal, match="not finite"):
    adapters.step(trained, broken, learner.Adam())


def test_adapters_that_adapt_nothing_are_refused():
  model = make_model(preset("nano", vocab_size=264))  # Its head is the embedding.
  with pytest.raises(ValueError, match="match no linear map"):
    learner.Learner(model, model.init(jax.random.key(7)), Lora(rank=4, alpha=32.0, targets=("head",)))
