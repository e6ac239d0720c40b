"""The gate weight: how much each token's gradient counts, on one scale for all objectives."""

import functools

import jax
import numpy as np
import pytest

from jaxrl_llm.objectives import OBJECTIVES, make
from jaxrl_llm.objectives.corrected import corrected
from jaxrl_llm.objectives.gate_weight import gate_weight
from tests.marks import typical
from tests.objectives.batches import as_batch

POLICY = [name for name in OBJECTIVES if name != "sft"]

REQUIRED = {"dr_grpo": {"max_tokens": 6}, "custom": {"ratio": "token", "gate": "none", "weights": "token_mean"}}


def weights_of(objective, arrays):
  """Computes the gate weights of a batch from `make_batch`."""
  return np.asarray(jax.jit(functools.partial(gate_weight, objective))(*as_batch(arrays)))


@pytest.mark.parametrize("name", typical(POLICY))
def test_on_policy_every_token_counts_as_much_as_in_reinforce(name, make_batch):
  arrays = make_batch(level="sequence")
  arrays["advantages"] = np.broadcast_to(np.reshape(arrays["advantages"], (-1, 1)), arrays["mask"].shape)
  arrays |= {"old_logprobs": arrays["logprobs"], "sampler_logprobs": arrays["logprobs"]}
  weights = weights_of(make(name, **REQUIRED.get(name, {})), arrays)
  assert np.array_equal(np.isfinite(weights), arrays["mask"] > 0)
  np.testing.assert_allclose(weights[arrays["mask"] > 0], 1, rtol=1e-5)


def test_a_hard_clip_by_hand(make_batch):
  arrays = make_batch(lengths=(4,), num_tokens=4) | {"old_logprobs": np.zeros((1, 4)), "advantages": np.array([[1.0, 1, -1, -1]])}
  arrays |= {"logprobs": np.log([[1.5, 0.5, 1.5, 0.5]]), "sampler_logprobs": np.zeros((1, 4))}
  # The weight is 0 outside the clip on the side that the advantage pushes to, elsewhere the ratio.
  np.testing.assert_allclose(weights_of(make("grpo", kl_coef=0.5), arrays), [[0, 0.5, 1.5, 0]], rtol=1e-5, atol=1e-6)


def test_a_sequence_counts_as_a_whole(make_batch):
  arrays = make_batch(lengths=(2, 2), num_tokens=2) | {"old_logprobs": np.zeros((2, 2)), "advantages": np.ones((2, 2))}
  arrays |= {"logprobs": np.array([[0.3, -0.1], [1e-4, 2e-4]]), "sampler_logprobs": np.zeros((2, 2))}
  np.testing.assert_allclose(weights_of(make("gspo"), arrays), [[0, 0], [np.exp(1.5e-4)] * 2], rtol=1e-5)


def test_a_token_dropped_by_a_correction_has_no_gradient(make_batch):
  arrays = make_batch(lengths=(3,), num_tokens=3) | {"advantages": np.ones((1, 3))}
  arrays |= {"old_logprobs": arrays["logprobs"], "sampler_logprobs": arrays["logprobs"] - np.log([[1.0, 1.5, 9.0]])}
  np.testing.assert_allclose(weights_of(corrected(make("dapo"), ["tis:cap=2.0"]), arrays), [[1, 1.5, 2]], rtol=1e-5)
  np.testing.assert_allclose(weights_of(corrected(make("dapo"), ["icepop:low=0.5&high=2.0"]), arrays), [[1, 1.5, 0]], rtol=1e-5)


def test_without_an_advantage_there_is_no_weight(make_batch):
  arrays = make_batch() | {"sampler_logprobs": make_batch()["old_logprobs"]}
  assert np.isnan(weights_of(make("grpo"), arrays | {"advantages": 0 * arrays["advantages"]})).all()
  assert np.isnan(weights_of(make("sft"), arrays)).all()
