"""Lecture 0: a bandit, and a language model of 36 numbers that trains in a second."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from experiments.ablations.plots import BLUE, GREEN, GREY, ORANGE, PINK, letter
from experiments.notebooks.pictures import Picture, Table, picture
from jaxrl_llm.types import Metrics, Objective

NUM_IDS = 6
"""Size of the vocabulary. Each id is also a prompt."""

NUM_TOKENS = 4
"""Number of tokens of a response."""

GROUP_SIZE = 8
"""Number of responses to each prompt in a rollout batch."""

PROMPTS = jnp.repeat(jnp.arange(NUM_IDS), GROUP_SIZE)
"""First token of each row of a rollout batch, one prompt after the other, [N]."""

RATE = 16.0
"""Learning rate of plain gradient descent on the table of logits."""

_COLORS = (GREY, ORANGE, BLUE, GREEN, PINK)

Loss = Callable[[Float[Array, "V V"]], tuple[Float[Array, ""], Metrics]]
Rollout = Callable[[Float[Array, "V V"], Key[Array, ""], Objective], tuple[Loss, Float[Array, " N"]]]


class History(NamedTuple):
  """What a training left, of S seeds, R rollout batches and K updates of each.

  Attributes:
    rewards: Mean reward of each batch when it was drawn, [S, R].
    metrics: Metrics of the objective in each update, [S, R, K].
    dead: Share of prompts whose responses in the last batch are all wrong, [S].
  """

  rewards: np.ndarray
  metrics: dict[str, np.ndarray]
  dead: np.ndarray


def draw(table: Float[Array, "V V"], key: Key[Array, ""]) -> Int[Array, "N T"]:
  """Draws a response to each of `PROMPTS`, token by token.

  Args:
    table: Logits of the next token, one row for each last token.
    key: Random key.

  Returns:
    The prompt and the tokens of each response.

  Example:
    >>> draw(jnp.zeros((NUM_IDS, NUM_IDS)), jax.random.key(0)).shape
    (48, 5)
  """

  def step(last: Array, key: Array) -> tuple[Array, Array]:
    token = jax.random.categorical(key, table[last])
    return token, token

  _, response = jax.lax.scan(step, PROMPTS, jax.random.split(key, NUM_TOKENS))
  return jnp.concatenate([PROMPTS[:, None], response.T], axis=1)


def is_ascending(tokens: Int[Array, "N T"]) -> Float[Array, " N"]:
  """Verifies responses: 1 if no token is smaller than the one before it, else 0.

  Example:
    >>> is_ascending(jnp.array([[2, 2, 4, 5, 5], [2, 3, 1, 4, 5]])).tolist()
    [1.0, 0.0]
  """
  return jnp.all(tokens[:, 1:] >= tokens[:, :-1], axis=1).astype(jnp.float32)


def baselines(
  loss: Callable[[Array, Array, Array], Array], pays: Sequence[float], *, draws: int = 8, repeats: int = 20_000, seed: int = 0
) -> Picture:
  """Draws the mean and the spread of estimates of a bandit's gradient against the baseline.

  The estimates are of the last arm's logit, under a policy that pulls all arms alike.

  Args:
    loss: Function of logits, arms and advantages, whose gradient is the estimate.
    pays: Probability that an arm pays, by arm.
    draws: Number of pulls per estimate.
    repeats: Number of estimates.
    seed: Seed of arms and rewards.
  """
  pays = jnp.asarray(pays)
  logits = jnp.zeros(len(pays))
  arms = jax.random.randint(jax.random.key(seed), (repeats, draws), 0, len(pays))
  rewards = jax.random.bernoulli(jax.random.key(seed + 1), pays[arms]).astype(jnp.float32)
  values = jnp.linspace(-1.0, 2.0, 31)
  # The same pulls for all baselines, so that the curves are smooth.
  gradient = jax.vmap(lambda arms, rewards, value: -jax.grad(loss)(logits, arms, rewards - value)[-1], (0, 0, None))
  estimates = np.asarray(jax.jit(jax.vmap(gradient, (None, None, 0)))(arms, rewards, values))
  exact = float(jax.grad(lambda logits: jax.nn.softmax(logits) @ pays)(logits)[-1])
  alt = "Mean and spread of estimates of a bandit's gradient against the baseline. The mean stays, the spread has a minimum."
  return picture(_baselines, np.asarray(values), estimates, exact, float(jnp.mean(pays)), height=2.2, alt=alt)


def _baselines(figure: Any, values: np.ndarray, estimates: np.ndarray, exact: float, expected_reward: float) -> None:
  mean, spread = figure.subplots(1, 2)
  mean.axhline(exact, color=GREY, linewidth=4, alpha=0.5, label="exact")
  mean.plot(values, estimates.mean(axis=1), color=BLUE, label="mean of estimates")
  mean.set_ylim(0, 2 * exact)
  mean.legend()
  spread.plot(values, estimates.std(axis=1), color=BLUE)
  spread.axvline(expected_reward, color=GREY, linestyle=":")
  spread.set_ylim(0, None)
  for axes, label, title in ((mean, "a", "mean estimate"), (spread, "b", "standard deviation")):
    axes.set_xlabel("baseline")
    letter(axes, label, title)


def train(
  rollout: Rollout,
  chosen: Mapping[str, Objective],
  *,
  num_updates: int,
  rollouts: int = 30,
  seeds: int = 8,
) -> dict[str, History]:
  """Trains a table of zeros with each objective, on the same keys.

  Args:
    rollout: Function of a table, a key and an objective that draws a rollout batch. Returns the
      batch's loss as a function of the table, and its rewards.
    chosen: Objectives by label.
    num_updates: Number of updates of each rollout batch.
    rollouts: Number of rollout batches.
    seeds: Number of independent trainings.
  """

  def one(objective: Objective, seed: Array) -> tuple[Array, Metrics]:
    def batch(table: Array, index: Array) -> tuple[Array, tuple[Array, Metrics]]:
      loss, rewards = rollout(table, jax.random.fold_in(jax.random.key(seed), index), objective)

      def update(table: Array, _: None) -> tuple[Array, Metrics]:
        gradient, metrics = jax.grad(loss, has_aux=True)(table)
        return table - RATE * gradient, metrics

      table, metrics = jax.lax.scan(update, table, None, length=num_updates)
      return table, (rewards, metrics)

    return jax.lax.scan(batch, jnp.zeros((NUM_IDS, NUM_IDS)), jnp.arange(rollouts))[1]

  histories = {}
  for label, objective in chosen.items():
    rewards, metrics = jax.jit(jax.vmap(lambda seed, objective=objective: one(objective, seed)))(jnp.arange(seeds))
    of_prompts = np.asarray(rewards[:, -1]).reshape(seeds, NUM_IDS, GROUP_SIZE)
    dead = np.mean(of_prompts.max(axis=2) == 0, axis=1)
    histories[label] = History(np.asarray(rewards.mean(axis=2)), {name: np.asarray(x) for name, x in metrics.items()}, dead)
  return histories


def learning(panels: Mapping[str, Mapping[str, History]]) -> Picture:
  """Draws rewards against the rollout batch, one panel per training: each seed, and their mean."""
  names = "; ".join(f"{title}: {', '.join(histories)}" for title, histories in panels.items())
  return picture(_learning, panels, height=2.6, alt=f"Mean reward against the rollout batch. {names}.")


def _learning(figure: Any, panels: Mapping[str, Mapping[str, History]]) -> None:
  all_axes = figure.subplots(1, len(panels), sharey=True)
  for axes, label, (title, histories) in zip(all_axes, "abc", panels.items(), strict=False):
    for number, ((name, history), color) in enumerate(zip(histories.items(), _COLORS, strict=False)):
      steps = np.arange(history.rewards.shape[1])
      # Earlier curves are thicker, so that curves that coincide stay visible.
      width = 1.2 + 1.3 * (len(histories) - 1 - number)
      axes.plot(steps, history.rewards.mean(axis=0), color=color, linewidth=width, label=name, zorder=3)
      axes.plot(steps, history.rewards.T, color=color, linewidth=0.4, alpha=0.4)
    axes.set_xlabel("rollout batch")
    axes.set_ylim(0, 1.02)
    letter(axes, label, title)
  all_axes[0].set_ylabel("mean reward")
  handles, labels = all_axes[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def drift(histories: Mapping[str, History], *, batch: int) -> Picture:
  """Draws ratios and silent tokens against the number of the update of one rollout batch.

  Args:
    histories: Trainings by label.
    batch: Index of the rollout batch.
  """
  alt = f"Largest token ratio and share of clipped tokens against the update, for {', '.join(histories)}."
  return picture(_drift, histories, batch, height=2.5, alt=alt)


def _drift(figure: Any, histories: Mapping[str, History], batch: int) -> None:
  largest, clipped = figure.subplots(1, 2)
  for (name, history), color in zip(histories.items(), _COLORS, strict=False):
    of_updates = {metric: values[:, batch] for metric, values in history.metrics.items()}
    updates = np.arange(1, of_updates["ratio/max"].shape[1] + 1)
    largest.plot(updates, np.median(of_updates["ratio/max"], axis=0), color=color, label=name)
    silent = of_updates.get("actor/pg_clipfrac", np.zeros((1, len(updates))))
    clipped.plot(updates, 100 * silent.mean(axis=0), color=color)
  largest.set_ylim(1, None)
  for axes, label, title in ((largest, "a", "largest token ratio"), (clipped, "b", "clipped tokens (%)")):
    axes.set_xlabel("update of the batch")
    letter(axes, label, title)
  handles, labels = largest.get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def ends(histories: Mapping[str, History], *, batch: int) -> Table:
  """Tabulates how fast each training began and how it ended, over seeds.

  Args:
    histories: Trainings by label.
    batch: Index of the rollout batch whose reward shows the beginning.
  """
  rows = []
  for name, history in histories.items():
    early, last = history.rewards[:, batch], history.rewards[:, -1]
    stuck = int(np.sum(history.dead > 0))
    rows.append([name, f"{early.mean():.2f}", f"{last.mean():.2f}", f"{last.min():.2f}", f"{stuck} of {len(last)}"])
  return Table(["objective", f"reward of batch {batch}", "of the last", "worst seed", "seeds with a dead prompt"], rows)
