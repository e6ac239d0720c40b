"""Rollouts of responses of realistic lengths: decoding steps, and the columns that they read."""

from typing import NamedTuple

import numpy as np

SPREAD = 0.8
"""Standard deviation of the logarithm of a response's length."""

BETWEEN = 0.5
"""Part of its variance that lies between prompts; the rest is within their groups."""

_EVERY = 16
"""Steps between two looks at the rows."""


class Rollouts(NamedTuple):
  """What a rollout batch asks of the sampler.

  Attributes:
    tokens: Number of tokens of all responses.
    steps: Number of decoding steps.
    busy: Fraction of the rows that decode, the mean over the steps.
    columns: Number of columns that a row reads, the mean over rows and steps: all of the cache that
      is allocated.
    held: Number of columns in the blocks that hold tokens of a row, the mean over the rows of the
      fullest shard and over the steps.
  """

  tokens: int
  steps: int
  busy: float
  columns: float
  held: float


def draw(rng: np.random.Generator, mean: float, *, num_prompts: int, group_size: int, budget: int) -> np.ndarray:
  """Draws the lengths of responses, [n G]: log-normal, cut at the budget.

  Args:
    rng: Source of randomness.
    mean: Mean length in tokens before the cut.
    num_prompts: Number of prompts (n).
    group_size: Number of responses per prompt (G).
    budget: Largest length.
  """
  of_prompts = rng.normal(0, SPREAD * BETWEEN**0.5, (num_prompts, 1))
  of_responses = rng.normal(0, SPREAD * (1 - BETWEEN) ** 0.5, (num_prompts, group_size))
  lengths = np.exp(np.log(mean) - SPREAD**2 / 2 + of_prompts + of_responses)
  return np.clip(np.ceil(lengths), 1, budget).astype(int)


def simulate(lengths: np.ndarray, *, slots: int, shards: int, blocks: tuple[int, ...], block_columns: int) -> Rollouts:
  """Runs the sampler's queues on given lengths, one per shard of the rows, with their exchanges.

  Args:
    lengths: Lengths of the responses of each prompt, [n G].
    slots: Number of rows that decode, over all shards.
    shards: Number of shards of prompts and rows; divides both.
    blocks: Sizes by which the cache grows.
    block_columns: Number of columns that are read at a time.

  Example:
    >>> simulate(np.array([[3, 1], [2, 2]]), slots=2, shards=1, blocks=(4,), block_columns=1)
    Rollouts(tokens=8, steps=5, busy=1.0, columns=4.0, held=1.0)
  """
  of_shards = lengths.reshape(shards, -1, lengths.shape[1])
  queues = [[(place, length) for place, group in enumerate(shard) for length in group] for shard in of_shards]
  undone = np.full(of_shards.shape[:2], lengths.shape[1])
  rows = slots // shards
  places, left, drawn = (np.zeros((shards, rows), int) for _ in range(3))
  sizes = np.cumsum(blocks)
  steps, busy, columns, held, looks = 0, 0.0, 0.0, 0.0, 0

  def refill() -> None:
    for shard, row in zip(*np.nonzero(left == 0)):
      if queues[shard]:
        (places[shard, row], left[shard, row]), drawn[shard, row] = queues[shard].pop(0), 0

  while True:
    refill()
    while _exchange(queues, undone, idle=(left == 0).sum(axis=1)):
      refill()
    active = left > 0
    if not active.any():
      return Rollouts(int(lengths.sum()), steps, *(round(float(x) / looks, 3) for x in (busy, columns, held)))
    if looks * _EVERY <= steps:
      seen = np.where(active, drawn + block_columns, 0)
      busy, looks = busy + active.mean(), looks + 1
      columns += sizes[np.searchsorted(sizes, (drawn * active).max() + 1)]
      held += seen.sum(axis=1).max() / rows
    # To the next response that ends, or to the next look.
    run = min(left[active].min(), looks * _EVERY - steps)
    left, drawn, steps = np.where(active, left - run, 0), drawn + run * active, steps + int(run)
    shard, row = np.nonzero(active & (left == 0))
    np.subtract.at(undone, (shard, places[shard, row]), 1)


def _exchange(queues: list[list[tuple[int, int]]], undone: np.ndarray, *, idle: np.ndarray) -> bool:
  """Moves samples between shards as `jaxrl_llm.decoding.sampler.exchange` does, if it is possible.

  Args:
    queues: Place and length of each waiting response of each shard.
    undone: Number of responses of each place that wait or run, [shards places].
    idle: Number of idle rows of each shard.

  Returns:
    Whether anything moved.
  """
  free = (undone == 0) & (idle > 0)[:, None]
  giver, taker = int(np.argmax([len(queue) for queue in queues])), int(np.argmax(np.where(free.any(axis=1), idle, 0)))
  if not queues[giver] or not free[taker].any():
    return False
  source, target = queues[giver][-1][0], int(np.argmax(free[taker]))
  queues[taker] = [(target, length) for place, length in queues[giver] if place == source]
  queues[giver] = [entry for entry in queues[giver] if entry[0] != source]
  undone[giver, source] -= len(queues[taker])
  undone[taker, target] = len(queues[taker])
  return True
