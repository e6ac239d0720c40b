"""Continuations of a run from its alarm."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from experiments.claims import bed as claims
from experiments.studies.alarms import bed
from experiments.studies.alarms.rules import ARMS
from experiments.studies.forensics import rules
from jaxrl_llm import objectives
from jaxrl_llm.learner.train_step import make_losses
from jaxrl_llm.models.params import partition
from jaxrl_llm.run.jobs.blame.shares import Shares
from jaxrl_llm.types import Params, TrainBatch, TrainState


def repeated(sizes: claims.Sizes, arm: str, seed: int, steps: int) -> dict[str, Any]:
  """Repeats a run as it was. Returns its row, with "original" as the remedy and its own alarm."""
  run = {"arm": arm, "seed": seed} | bed.train(sizes, seed, ARMS[arm], steps)
  at = rules.warning(run) or rules.Collapse(arm, seed, None, None, None)
  return at._asdict() | {"remedy": "original", "draw": 0, "accuracy": run["accuracy"]}


def continued(
  sizes: claims.Sizes, at: rules.Collapse, steps: int, todo: Sequence[tuple[str, int]]
) -> Iterator[dict[str, Any]]:
  """Repeats a run up to its alarm, and yields a row for each way to continue it.

  Args:
    sizes: Sizes of the model.
    at: Collapse with its alarm.
    steps: RL steps of a whole run.
    todo: Remedy and number of the draws of each continuation.
  """
  arm = ARMS[at.arm]
  point, head = bed.advance(bed.start(sizes, at.seed), sizes, at.seed, arm, steps, until=at.step)
  for remedy, draw in todo:
    objective, settings = rules.CHANGED[arm.objective].get(remedy, (arm.objective, arm.settings))
    edit = {"edit": without_the_loner(sizes, objective, settings)} if remedy == "drop" else {}
    slower = rules.SLOWER if remedy == "rate" else 1
    now = arm._replace(objective=objective, settings=settings)
    _, tail = bed.advance(point, sizes, at.seed, now, steps, draws=draw, slower=slower, **edit)
    accuracy = head["accuracy"] + tail["accuracy"]
    yield at._asdict() | {"remedy": remedy, "draw": draw, "accuracy": accuracy}


@functools.cache
def without_the_loner(
  sizes: claims.Sizes, objective: str, settings: tuple
) -> Callable[[TrainState, TrainBatch], TrainBatch]:
  """Makes a function that leaves out the group which agrees least with the sum of the others."""
  shares = make_shares(sizes, objective, settings)

  def edit(state: TrainState, batch: TrainBatch) -> TrainBatch:
    agreement, kept = shares(state.params, batch).agreement, np.ones(batch.mask.shape, np.float32)
    if np.isfinite(agreement).any():
      kept.reshape(len(agreement), -1)[np.nanargmin(agreement)] = 0
    return batch._replace(kept=kept)

  return edit


def make_shares(
  sizes: claims.Sizes, objective: str, settings: tuple
) -> Callable[[Params, TrainBatch], Shares]:
  """Makes a function that takes an update's gradient apart over its groups, all at once."""
  losses = make_losses(claims.make_bed(sizes).score, objectives.make(objective, **dict(settings)))

  @jax.jit
  def of_groups(params: Params, batch: TrainBatch):
    batch, _, weights = losses.weigh(batch)
    rows = jax.tree.map(lambda x: x.reshape(-1, sizes.group_size, *x.shape[1:]), (batch, weights))
    trained, frozen = partition(params, None)

    def of_group(rows):
      (loss, _), gradient = losses.gradients(trained, frozen, *rows)
      return loss, ravel_pytree(gradient)[0]

    each, gradients = jax.vmap(of_group)(rows)
    whole = gradients.sum(axis=0)
    return each, gradients @ whole, jnp.square(gradients).sum(axis=1), whole @ whole

  def shares(params: Params, batch: TrainBatch) -> Shares:
    each, products, squares, total = (np.asarray(x, np.float64) for x in of_groups(params, batch))
    return Shares(each, products, squares, float(total), tokens=np.empty((0, 0)))

  return shares
