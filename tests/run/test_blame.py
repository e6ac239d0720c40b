"""Updates taken apart: parts add up to the whole, and a group with wrong rewards is named first."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objectives
from jaxrl_llm.decoding.sampler import make_filter
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.train_step import make_losses, policy_outputs
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.run.jobs.blame.shares import decompose
from jaxrl_llm.run.jobs.blame.table import ORDERS
from jaxrl_llm.segments import token_weights

VOCAB, LENGTH, SEEDS = 16, 6, 20
FEW = 3, 20
"""Groups, and responses of each, of which a row does not hold all."""

MANY = 16, 16
"""Those among which wrong rewards stand out; of fewer or smaller groups, docs/runs.md has rates."""


@functools.cache
def policy():
  """Returns a small decoder, its outputs and its loss."""
  model = make_model(preset("nano", vocab_size=VOCAB))
  outputs_fn = functools.partial(policy_outputs, model.logprobs, make_filter(), learns_entropy=False)
  return model, outputs_fn, make_losses(outputs_fn, objectives.make("sapo"), rows_at_once=1)


def problem(seed, size=FEW, flipped=None):
  """Returns weights, a batch, and the places of each group's responses.

  The policy knows two ways to answer, with mostly even and with mostly odd tokens. The first is
  right, whatever the prompt. In the flipped group the other one is rewarded.
  """
  rng, sequences, (groups, samples) = np.random.default_rng(seed), [], size
  for group in range(groups):
    prompt = rng.integers(VOCAB, size=2)
    is_right = rng.permutation(np.arange(samples) % 2)
    is_even = (rng.random((samples, LENGTH)) < 0.8) == is_right[:, None]
    responses = 2 * rng.integers(VOCAB // 2, size=(samples, LENGTH)) + ~is_even
    rewards = 1.0 - is_right if group == flipped else 1.0 * is_right
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    for response, advantage in zip(responses, advantages, strict=True):
      mask = np.float32([0] * 2 + [1] * LENGTH)
      sequence = packing.Trajectory(np.int32([*prompt, *response]), mask, mask * np.float32(advantage), mask * np.float32(-np.log(VOCAB)))
      sequences.append(sequence._replace(num_prompt=2))
  layout = packing.arrange(sequences, row_tokens=100, row_buckets=(16,), share_prompts=True)
  places = [(row, own[0]) for row, own in zip(layout.rows, layout.segments, strict=True)]
  parts = [places[i : i + samples] for i in range(0, len(places), samples)]
  return jax.jit(policy()[0].init)(jax.random.key(seed)), packing.pack(sequences, layout), parts


def taken_apart(seed, *args):
  params, batch, parts = problem(seed, *args)
  return decompose(policy()[2], params, batch, parts, at_once=1)


def test_parts_are_the_gradients_of_parts_of_the_loss():
  params, batch, parts = problem(0)
  shares, batch = taken_apart(0), jax.tree.map(jnp.asarray, batch)
  objective, outputs_fn = objectives.make("sapo"), policy()[1]
  weights = token_weights(objective, batch.mask, batch.segments)

  def loss(params, chosen):
    losses, _ = objective.token_loss(outputs_fn(params, batch), batch)
    return jnp.sum(jnp.where(chosen & (weights > 0), weights * losses, 0))

  of = jax.jit(jax.value_and_grad(loss))
  flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(np.float64)
  whole_loss, whole = of(params, np.ones(batch.mask.shape, bool))
  whole = flat(whole)
  for i, part in enumerate(parts):
    chosen = np.zeros(batch.mask.shape, bool)
    for row, segment in part:
      chosen[row] |= batch.segments[row] == segment
    part_loss, own = of(params, chosen)
    own = flat(own)
    np.testing.assert_allclose(shares.losses[i], part_loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(shares.products[i], own @ whole, rtol=1e-4, atol=1e-6 * (whole @ whole))
    np.testing.assert_allclose(shares.squares[i], own @ own, rtol=1e-4)
    others = whole - own
    np.testing.assert_allclose(shares.agreement[i], own @ others / np.sqrt((own @ own) * (others @ others)), atol=1e-4)
  np.testing.assert_allclose(shares.total, whole @ whole, rtol=1e-4)
  np.testing.assert_allclose([np.sum(shares.losses), np.sum(shares.tokens)], whole_loss, rtol=1e-5, atol=1e-6)


def test_shares_add_up_to_one():
  """By group and by response."""
  params, batch, parts = problem(1)
  for own in (parts, [[place] for part in parts for place in part]):
    shares = decompose(policy()[2], params, batch, own, at_once=1)
    assert abs(np.sum(shares.shares) - 1) < 1e-6
    assert abs(np.sum(shares.losses) - np.sum(shares.tokens, dtype=np.float64)) < 1e-6
    assert np.all(shares.squares > 0)


def test_shares_of_a_gradient_beyond_float32():
  """One whose square is infinite in float32, as after a reward of 1e26."""
  params, batch, parts = problem(1)
  large = batch._replace(advantages=batch.advantages * np.float32(2.0**80))
  own, scaled = (decompose(policy()[2], params, x, parts, at_once=1) for x in (batch, large))
  np.testing.assert_allclose(scaled.shares, own.shares, rtol=1e-6)
  np.testing.assert_allclose(scaled.total, own.total * 2.0**160, rtol=1e-6)


def test_a_group_with_wrong_rewards_is_named_first():
  """By the cosine of its gradient with the sum of the others', in every seed."""
  planted = [seed % MANY[0] for seed in range(SEEDS)]
  first = lambda seed, *bad: int(np.argmin(ORDERS["against"](taken_apart(seed, MANY, *bad))))
  assert [first(seed, bad) for seed, bad in enumerate(planted)] == planted
  assert [first(seed) for seed in range(3)] != planted[:3], "it names the same groups without wrong rewards"
