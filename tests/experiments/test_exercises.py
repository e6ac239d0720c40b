"""Solutions to the exercises of lecture 0, against the package and against scalar loops."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.notebooks import execution, exercises
from jaxrl_llm import objectives
from jaxrl_llm.advantages import group_advantages, leave_one_out_advantages

GRPO = objectives.make("grpo", kl_coef=0.0)


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


SHAPE = (40, 3)
"""Shape of all batches, so that each operation is compiled once."""


def gradient(objective, ratios, advantages):
  """Returns the descent direction in log π of ratios, [B, T] or one per row, for `SHAPE`."""
  ratios = np.broadcast_to(np.reshape(ratios, (SHAPE[0], -1)), SHAPE)
  old = jnp.full(SHAPE, -1.0)
  loss = lambda logprobs: objectives.value(objective, logprobs, old, jnp.asarray(advantages), jnp.ones_like(old))[0]
  return -np.asarray(jax.grad(loss)(old + np.log(ratios)))


def expected_gradient(advantages_of, group_size):
  """Returns the expected gradient of a bandit's logits, over all groups that it can draw."""
  rewards, policy = np.array([0.1, 0.7, 0.4]), np.array([0.5, 0.2, 0.3])
  total = np.zeros(3)
  for arms in itertools.product(range(3), repeat=group_size):
    probability = math.prod(policy[arm] for arm in arms)
    advantages = advantages_of(rewards[list(arms)], group_size)
    for arm, advantage in zip(arms, advantages, strict=True):
      total += probability * advantage * (np.eye(3)[arm] - policy) / group_size
  return total, policy * (rewards - policy @ rewards)


def test_every_exercise_has_a_solution():
  (prose,) = [cell.source for cell in execution.read_source("00_grpo_in_one_page").cells if "## Exercises" in cell.source]
  numbers = re.findall(r"^(\d)\. ", prose.partition("## Exercises")[2], re.MULTILINE)
  assert [f"exercise_{number}" for number in numbers] == [name for name in dir(exercises) if name.startswith("exercise_")]


def test_exercise_1_a_group_of_equal_rewards_has_no_gradient():
  rewards = np.random.default_rng(0).integers(0, 2, 40).astype(float)
  gradients = gradient(GRPO, np.full(40, 1.1), group_advantages(rewards, 4)).reshape(10, -1)
  assert 0 < exercises.exercise_1(rewards, 4) == np.mean(np.any(gradients != 0, axis=1)) < 1


def test_exercise_2_is_the_packages_estimator_and_unbiased():
  rewards = np.random.default_rng(0).standard_normal(12)
  np.testing.assert_allclose(exercises.exercise_2(rewards, 4), leave_one_out_advantages(rewards, 4), atol=1e-12)
  np.testing.assert_allclose(*expected_gradient(exercises.exercise_2, 3), atol=1e-12)


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_exercise_3_the_own_reward_shrinks_the_gradient(group_size):
  # Without the package's function, which would be called 243 times.
  estimate, exact = expected_gradient(lambda rewards, _: rewards - rewards.mean(), group_size)
  np.testing.assert_allclose(estimate, exercises.exercise_3(group_size) * exact, atol=1e-12)


@pytest.mark.parametrize(("move", "clip_high"), [(0.05, 0.2), (0.01, 0.28), (0.5, 0.2)])
def test_exercise_4_the_first_update_that_is_clipped(move, clip_high):
  ratios = np.exp(move * np.arange(40))
  silent = gradient(objectives.make("grpo", kl_coef=0.0, clip_high=clip_high), ratios, np.ones(40))[:, 0] == 0
  assert exercises.exercise_4(move, clip_high) == 1 + silent.tolist().index(True) > 1


def test_exercise_5_the_tokens_that_are_clipped():
  rng = np.random.default_rng(0)
  ratios, advantages = np.exp(0.5 * rng.standard_normal(40)), rng.integers(-1, 2, 40).astype(float)
  silent = gradient(objectives.make("grpo", kl_coef=0.0, clip_low=0.1, clip_high=0.3), ratios, advantages)[:, 0] == 0
  assert exercises.exercise_5(ratios, advantages, 0.1, 0.3).tolist() == silent.tolist() and 0 < silent.mean() < 1


def test_exercise_6_gspo_clips_from_here_on():
  ratios = np.ones(SHAPE)
  ratios[:, 0] = exercises.exercise_6(SHAPE[1], 0.1) * np.where(np.arange(40) < 20, 1 - 1e-9, 1 + 1e-9)
  clipped = np.all(gradient(objectives.make("gspo", clip_low=0.1, clip_high=0.1), ratios, np.ones(40)) == 0, axis=1)
  assert clipped.tolist() == [False] * 20 + [True] * 20


@pytest.mark.parametrize(("tau", "count"), [(1.0, 1), (3.0, 2)])
def test_exercise_7_the_gate_has_half_its_weight(tau, count):
  solutions = exercises.exercise_7(tau)
  assert len(solutions) == count
  ratios = np.resize([*solutions, 1.0], 40)
  # The gradient is C·A = r·w·A, with the same share of the batch for each response.
  weights = gradient(objectives.make("sapo", tau_pos=tau, tau_neg=tau), ratios, np.ones(40))[:, 0] / ratios
  np.testing.assert_allclose(weights[:count] / weights[count], 0.5, atol=1e-9)
