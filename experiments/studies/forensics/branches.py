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


def continued(
  sizes: claims.Sizes, at: rules.Collapse, steps: int, draws: Sequence[int], known: Sequence[tuple[str, int]]
) -> Iterator[dict[str, Any]]:
  """Repeats a run up to its alarm, and continues it without and with each remedy.

  Args:
    sizes: Sizes of the model.
    at: Collapse.
    steps: RL steps of a whole run.
    draws: Numbers of the draws.
    known: Remedy and draw of the continuations that are recorded.

  Yields:
    A row for each continuation that is not known. Remedy "original" is the run as it was, with its
    own draws; its `warned` is the step at which its alarm begins now.
  """
  arm, own = ARMS[at.arm], ("original", 0)
  plan = [own, *((remedy, draw) for remedy in rules.REMEDIES for draw in draws)]
  todo = [pair for pair in plan if pair not in known]
  if not todo:
    return
  point, head = bed.advance(bed.start(sizes, at.seed), sizes, at.seed, arm, steps, until=at.step)
  for remedy, draw in todo:
    objective, settings = rules.CHANGED[arm.objective].get(remedy, (arm.objective, arm.settings))
    edit = {"edit": without_the_loner(sizes, objective, settings)} if remedy == "drop" else {}
    slower = rules.SLOWER if remedy == "rate" else 1
    now = arm._replace(objective=objective, settings=settings)
    _, tail = bed.advance(point, sizes, at.seed, now, steps, draws=draw, slower=slower, **edit)
    run = at._asdict() | {name: head[name] + tail[name] for name in head}
    again = rules.warning(run) if (remedy, draw) == own else None
    row = at._asdict() | {"remedy": remedy, "draw": draw, "warned": again and again.step}
    yield row | {"accuracy": run["accuracy"]}


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
