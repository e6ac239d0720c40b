"""Lecture 5: training of a small transformer with any objective in seconds.

The bed comes from the ratio lab.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.ablations.plots import BLUE, GREEN, GREY, ORANGE, PINK, letter
from experiments.ablations.ratio_lab import bed as beds
from experiments.notebooks.pictures import Picture, picture
from jaxrl_llm import objectives
from jaxrl_llm.learner.train_step import init_state, make_optimizer, make_train_step
from jaxrl_llm.types import Objective

SIZES = beds.Sizes(num_layers=1, d_model=32, num_prompts=16, num_minibatches=4, warm_steps=40, eval_rows=128)
NUM_TOKENS = 24
RATE = 2e-3


def largest_difference(one: Objective, other: Objective, *, moved: float = 0.0, seed: int = 0) -> float:
  """Computes the largest difference between two objectives' gradients in log π on a random batch.

  The difference is relative to the largest gradient of the second objective.

  Args:
    one: First objective.
    other: Second objective.
    moved: Standard deviation of log π − log π_old, in nats; 0 is on-policy.
    seed: Seed of the batch.
  """
  rng = np.random.default_rng(seed)
  shape = (16, 12)
  old = jnp.asarray(np.log(rng.uniform(0.05, 0.95, shape)))
  log_ratio = moved * jnp.asarray(rng.standard_normal(shape))
  advantages = jnp.asarray(rng.standard_normal(shape[0]))
  mask = jnp.asarray(np.arange(shape[1]) < rng.integers(1, shape[1], shape[0])[:, None])

  def gradient(objective: Objective) -> np.ndarray:
    loss = lambda logprobs: objectives.value(objective, logprobs, old, advantages, mask)[0]
    return np.asarray(jax.grad(loss)(old + log_ratio))

  gradients = [gradient(objective) for objective in (one, other)]
  return float(np.max(np.abs(gradients[0] - gradients[1])) / np.max(np.abs(gradients[1])))


def train(chosen: Mapping[str, Objective], *, rollouts: int = 12, seed: int = 0) -> dict[str, list[dict[str, float]]]:
  """Trains the same warm policy with each objective, on the same prompts and keys.

  Args:
    chosen: Objectives by label.
    rollouts: Number of rollout batches, each with four updates.
    seed: Seed of the language, the prompts and the keys.

  Returns:
    One row per rollout batch, by label. `reward` is the mean share of tokens in the rewarded half
    of the vocabulary (chance is about 0.5). `entropy` and the mean, `largest` and `smallest`
    coefficient C (`coefficient`) belong to the last update of the batch.
  """
  bed = beds.make_bed(SIZES)
  language = beds.make_language(SIZES.vocab_size, np.random.default_rng([seed, 0]))
  start = beds.warm_params(bed, language, seed)
  return {label: _trained(bed, language, start, objective, rollouts, seed) for label, objective in chosen.items()}


def _trained(
  bed: beds.Bed, language: beds.Language, params: Any, objective: Objective, rollouts: int, seed: int
) -> list[dict[str, float]]:
  """Trains the warm policy with one objective and returns its rows."""
  optimizer, schedule = make_optimizer(learning_rate=RATE, warmup_steps=4, weight_decay=0.0, b1=0.9, b2=0.99, max_grad_norm=1.0)
  step = jax.jit(make_train_step(bed.outputs, objective, optimizer, learning_rate=schedule))
  state, rows = init_state(params, optimizer), []
  for index in range(rollouts):
    batch = beds.rollout(bed, language, state.params, NUM_TOKENS, jax.random.fold_in(jax.random.key(seed), index))
    reward = float(np.mean(language.target[batch.tokens[:, beds.PROMPT_TOKENS :]]))
    for piece in range(SIZES.num_minibatches):
      state, metrics = step(state, beds.minibatch(batch, piece, SIZES.num_minibatches))
    row = {"reward": reward, "entropy": float(metrics["actor/entropy"]), "coefficient": float(metrics["gate/mean"])}
    rows.append(row | {"largest": float(metrics["gate/max"]), "smallest": float(metrics["gate/min"])})
  return rows


def draw(histories: Mapping[str, list[dict[str, float]]]) -> Picture:
  """Draws the rewards, entropies and coefficients of several trainings."""
  alt = f"Reward, entropy and range of the coefficient C against the rollout batch, for {' and '.join(histories)}."
  return picture(_draw, histories, height=2.3, alt=alt)


def _draw(figure: Any, histories: Mapping[str, list[dict[str, float]]]) -> None:
  """Draws one panel each for reward, entropy and coefficient."""
  reward, entropy, spread = figure.subplots(1, 3)
  for (label, rows), color in zip(histories.items(), (BLUE, ORANGE, GREEN, PINK, GREY), strict=False):
    steps = range(1, len(rows) + 1)
    reward.plot(steps, [row["reward"] for row in rows], color=color, marker="o", label=label)
    entropy.plot(steps, [row["entropy"] for row in rows], color=color, marker="o")
    spread.fill_between(steps, *([row[end] for row in rows] for end in ("smallest", "largest")), color=color, alpha=0.25, linewidth=0)
    spread.plot(steps, [row["coefficient"] for row in rows], color=color)
  for axes, label, title in ((reward, "a", "reward"), (entropy, "b", "entropy (nats)"), (spread, "c", "C in the last update")):
    axes.set_xlabel("rollout batch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    letter(axes, label, title)
  handles, labels = reward.get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def refusal(name: str, **settings: Any) -> str:
  """Returns the error message of `objectives.make` for settings that it refuses."""
  try:
    objectives.make(name, **settings)
  except ValueError as error:
    return str(error)
  return "no refusal"
