"""Bed of the study: tabular softmax bandits with one rare right arm, and exact gradients.

Gradients are sums over all arms; nothing is sampled. A response is one token, so the ratios of
token and sequence are the same number. The loss of an objective is computed at every arm and
weighted by the frequency of that arm in the rollout batch.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.ablations.objective_shapes.coefficients import policy_term
from jaxrl_llm.types import Objective, PolicyOutputs, TrainBatch

RARE = 0  # Index of the rare arm.
RARE_PROBABILITY = 0.003
GROUP_SIZE = 16

METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
  "ppo": ("ppo", {"clip_low": 0.2, "clip_high": 0.2}),
  "clip_higher": ("dapo", {"clip_low": 0.2, "clip_high": 0.28}),
  "gspo": ("gspo", {}),
  "gmpo": ("gmpo", {}),
  "minirl": ("minirl", {}),
  "cispo": ("cispo", {}),
  "cispo_tight": ("cispo", {"clip_high": 0.2}),
  "sapo": ("sapo", {}),
  "dppo_tv": ("dppo_tv", {}),
  "dppo_kl": ("dppo_kl", {}),
  "cppo": ("cppo", {}),
  "vespo": ("vespo", {}),
  "maspo": ("maspo", {}),
  "minpro": ("minpro", {}),
  "unclipped": ("custom", {"gate": "none"}),
}
"""Objective and settings of each method, by name.

Settings that are not listed have their paper's values.
"""

OPTIMIZERS: Mapping[str, Callable[[float], optax.GradientTransformation]] = {"sgd": optax.sgd, "adam": optax.adam}


class Bandits(NamedTuple):
  """P bandits with V arms each.

  Attributes:
    old: Logarithms of π_old, [P, V].
    share: Frequency of each arm in the rollout batch, [P, V]; a row sums to 1.
    advantages: Advantages (R − mean R)/std R in that batch, [P, V].
    right: Reward R of each arm, 0 or 1, [P, V].
  """

  old: np.ndarray
  share: np.ndarray
  advantages: np.ndarray
  right: np.ndarray


def make_bandits(seed: int, *, count: int, arms: int, drawn: str = "once") -> Bandits:
  """Draws bandits with a rare right arm of probability 0.003.

  The probabilities of the other arms, and which of them are right, are random.

  Args:
    seed: Seed of the bandits.
    count: Number of bandits (P).
    arms: Number of arms of each bandit (V).
    drawn: Rollout batch. "once" is the expectation over the groups of 16 in which the rare arm was
      drawn once, "expected" the expectation over all groups.

  Example:
    >>> bandits = make_bandits(0, count=2, arms=8)
    >>> np.exp(bandits.old[:, RARE]).round(6).tolist(), bandits.share[:, RARE].tolist(), bool((bandits.advantages[:, RARE] > 0).all())
    ([0.003, 0.003], [0.0625, 0.0625], True)
  """
  rng, old, right = np.random.default_rng(seed), [], []
  while len(old) < count:
    common = rng.dirichlet(np.full(arms - 1, 0.5))
    good = np.concatenate([[1], rng.integers(2, size=arms - 1)])
    # Otherwise almost nothing is left to learn, or almost nothing is right.
    if common.min() > 1e-6 and 0.2 < common @ good[1:] < 0.8:
      old.append(np.log([RARE_PROBABILITY, *((1 - RARE_PROBABILITY) * common)]))
      right.append(good)
  old, right = np.array(old), np.array(right, float)
  share = np.exp(old)
  if drawn == "once":
    share[:, 1:] *= (1 - 1 / GROUP_SIZE) / share[:, 1:].sum(axis=1, keepdims=True)
    share[:, RARE] = 1 / GROUP_SIZE
  mean = (share * right).sum(axis=1, keepdims=True)
  advantages = (right - mean) / np.sqrt(mean * (1 - mean))
  return Bandits(old, share, advantages, right)


def objective_of(method: str) -> Objective:
  """Makes the objective of a method, without a KL penalty."""
  name, settings = METHODS[method]
  return policy_term(name, **settings)


def follow(bandits: Bandits, method: str, *, optimizer: str, learning_rate: float, updates: int) -> dict[str, np.ndarray]:
  """Follows the updates of the logits on one rollout batch, each with the exact gradient.

  Args:
    bandits: Bandits at their start, where π = π_old.
    method: Key of `METHODS`.
    optimizer: Key of `OPTIMIZERS`.
    learning_rate: Learning rate of the optimizer.
    updates: Number of updates.

  Returns:
    `rare`, the probability of the rare arm, `reward`, the expected reward, and `entropy` in nats,
    each after 0 to `updates` updates, [updates + 1, P]; and `cut`, [updates, P], whether the loss
    of the rare arm had no gradient at an update.
  """
  run = _compiled(method, optimizer, updates)
  given = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(float)), bandits)
  return {name: np.asarray(x) for name, x in run(given, learning_rate).items()}


@functools.cache
def _compiled(method: str, optimizer: str, updates: int) -> Callable[[Bandits, float], dict[str, jax.Array]]:
  """Compiles the updates of `follow`, once for each method, optimizer and number of updates."""
  objective = objective_of(method)

  def losses(log_pi: jax.Array, bandits: Bandits) -> jax.Array:
    """Computes the loss of each arm, [P, V], from a batch of one-token sequences."""
    column = lambda x: jnp.reshape(x, (-1, 1))
    ones, old = jnp.ones_like(column(log_pi)), column(bandits.old)
    whole = jnp.ones(ones.shape, jnp.int32)
    batch = TrainBatch(whole, whole - 1, whole, ones, column(bandits.advantages), old, sampler_logprobs=old)
    return jnp.reshape(objective.token_loss(PolicyOutputs(column(log_pi)), batch)[0], log_pi.shape)

  def loss(logits: jax.Array, bandits: Bandits) -> jax.Array:
    return jnp.sum(bandits.share * losses(jax.nn.log_softmax(logits), bandits))

  @jax.jit
  def run(bandits: Bandits, learning_rate: float) -> dict[str, jax.Array]:
    transform = OPTIMIZERS[optimizer](learning_rate)

    def look(logits: jax.Array) -> dict[str, jax.Array]:
      log_pi = jax.nn.log_softmax(logits)
      pi = jnp.exp(log_pi)
      return {"rare": pi[:, RARE], "reward": jnp.sum(pi * bandits.right, axis=1), "entropy": -jnp.sum(pi * log_pi, axis=1)}

    def update(carry: tuple, _: None) -> tuple[tuple, dict[str, jax.Array]]:
      logits, state = carry
      of_token = jax.grad(lambda log_pi: jnp.sum(losses(log_pi, bandits)))(jax.nn.log_softmax(logits))
      changes, state = transform.update(jax.grad(loss)(logits, bandits), state)
      logits = optax.apply_updates(logits, changes)
      return (logits, state), look(logits) | {"cut": of_token[:, RARE] == 0}

    start = bandits.old
    _, trajectory = jax.lax.scan(update, (start, transform.init(start)), None, length=updates)
    first = look(start)
    return {name: jnp.concatenate([first[name][None], x]) if name in first else x for name, x in trajectory.items()}

  return run
