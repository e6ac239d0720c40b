"""Pictures of estimators of advantages for lecture 1, by calls of the package."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.ablations.plots import BLUE, GREEN, GREY, ORANGE, PINK, SKY, letter
from experiments.notebooks.pictures import Picture, picture
from jaxrl_llm.advantages.estimators import Evidence, make_credit

_COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, GREY)


def by_success(names: Sequence[str], *, group_size: int = 16) -> Picture:
  """Draws the advantages of right and of wrong responses against the success rate of their prompt.

  The batch has one prompt of each number of right responses, from none to all.

  Args:
    names: Estimators, keys of `ESTIMATORS`.
    group_size: Number of responses per prompt.
  """
  right = np.arange(group_size) < np.arange(group_size + 1)[:, None]
  rewards = jnp.asarray(right.ravel(), jnp.float32)
  evidence = Evidence(rewards, rewards[None], jnp.ones((rewards.size, 1)))
  # The first response of each prompt but the first is right, the last of each but the last wrong.
  lines = {name: np.asarray(make_credit(name, group_size)(evidence).advantages).reshape(right.shape)[:, [0, -1]] for name in names}
  alt = "Advantages of right and of wrong responses against the success rate of their prompt: " + ", ".join(names)
  return picture(_by_success, lines, height=2.9, alt=alt)


def _by_success(figure: Any, lines: Mapping[str, np.ndarray]) -> None:
  """Draws one panel for right and one for wrong responses."""
  panels = figure.subplots(1, 2)
  for number, (name, advantages) in enumerate(lines.items()):
    rate = np.linspace(0, 1, len(advantages))
    # Earlier curves are thicker, so that curves that coincide stay visible.
    style = dict(color=_COLORS[number % len(_COLORS)], linewidth=1.2 + 0.5 * (len(lines) - 1 - number), label=name)
    for axes, column, shown in zip(panels, advantages.T, (slice(1, None), slice(0, -1)), strict=True):
      axes.plot(100 * rate[shown], column[shown], **style)
  for axes, name, title, limits in zip(panels, "ab", ("a right response", "a wrong response"), ((-0.3, 5), (-4, 0.24)), strict=True):
    axes.axhline(0, color=GREY, linewidth=0.7, linestyle=":")
    axes.set_xlabel("success rate of the prompt (%)")
    axes.set_ylim(*limits)
    letter(axes, name, title)
  panels[0].set_ylabel("advantage")
  panels[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))


def by_entropy(*, prompts: int = 32, group_size: int = 8, tokens: int = 16, seed: int = 0, **settings: Any) -> Picture:
  """Draws GTPO's advantages of tokens against their entropy, half of the responses being right.

  Args:
    prompts: Number of prompts.
    group_size: Number of responses per prompt.
    tokens: Number of tokens per response.
    seed: Seed of the entropies, which are exponential with a mean of 0.5 nats.
    **settings: Settings of GTPO that differ from the defaults.
  """
  rng, shape = np.random.default_rng(seed), (prompts * group_size, tokens)
  entropy = rng.exponential(0.5, shape).astype(np.float32)
  right = np.arange(shape[0]) % 2 == 0
  rewards = jnp.asarray(right, jnp.float32)
  evidence = Evidence(rewards, rewards[None], jnp.ones(shape), old_entropy=jnp.asarray(entropy))
  advantages = np.asarray(make_credit("gtpo", group_size, **settings)(evidence).advantages)
  alt = "GTPO's advantages of tokens against their entropy: they rise for right responses, and are most negative for certain wrong tokens."
  return picture(_by_entropy, entropy, advantages, right, height=2.3, alt=alt)


def _by_entropy(figure: Any, entropy: np.ndarray, advantages: np.ndarray, right: np.ndarray) -> None:
  """Draws one point per token, and one panel per outcome."""
  panels = figure.subplots(1, 2, sharex=True, sharey=True)
  for axes, name, chosen, color, title in zip(
    panels, "ab", (right, ~right), (BLUE, ORANGE), ("tokens of right responses", "tokens of wrong responses"), strict=True
  ):
    axes.plot(entropy[chosen].ravel(), advantages[chosen].ravel(), ".", color=color, markersize=2)
    axes.axhline(0, color=GREY, linewidth=0.7, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlim(1e-3, 5)
    axes.set_xlabel("entropy at the token (nats)")
    letter(axes, name, title)
  panels[0].set_ylabel("advantage")
