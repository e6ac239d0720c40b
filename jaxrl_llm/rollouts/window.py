"""The window of a run with a lag: which groups a step may learn from before older ones.

In strict order, step t learns from the groups that were begun for it, however long their last
response takes. With a window of W groups it learns from the first that finish among W consecutive
ones, of which the first is the oldest that no step has learned from. For 2 groups a step and W = 3:

  groups:   0 ──┤   1 ────────┤   2 ─┤   3 ──┤   4 ─┤   5 ──┤
  step 0:   0 and 2, since 1 is late; 4 must wait, because 1 is not taken yet
  step 1:   1 and 3

So at most W - 1 younger groups overtake one, which costs it up to s = ⌈(W - 1) / P⌉ steps, with P
groups a step. Batches are begun s steps later than in strict order, η - s steps ahead, so that no
token is older than η steps with any window. Whatever takes what has finished first prefers short
responses; `Lengths` measures by how much.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Float, Int


def window_size(fraction: float, *, staleness: int, num_prompts: int) -> int:
  """Returns the number of groups in the window, W = max(1, ⌊f·(η + 1)·P⌋).

  Args:
    fraction: Fraction f of the groups of η + 1 steps.
    staleness: Largest lag η, in RL steps.
    num_prompts: Number of groups of a step (P).

  Example:
    >>> [window_size(f, staleness=2, num_prompts=8) for f in (0.0, 0.125, 0.3, 1.0)]
    [1, 3, 7, 24]
  """
  # A product of decimals can fall short of the whole number that is meant.
  return max(1, math.floor(fraction * (staleness + 1) * num_prompts + 1e-9))


def steps_ahead(window: int, *, staleness: int, num_prompts: int) -> int:
  """Returns by how many steps batches are begun ahead, so that a group overtaken is not too old.

  Example:
    >>> [steps_ahead(window, staleness=4, num_prompts=8) for window in (1, 2, 9, 10)]
    [4, 3, 3, 2]
  """
  return staleness + (1 - window) // num_prompts


def choose(waiting: Sequence[int], finished: Collection[int], *, window: int, count: int) -> tuple[list[int], list[int]]:
  """Chooses the oldest finished groups within the window, which moves with the oldest one left.

  Args:
    waiting: Numbers of the groups that no step has learned from, oldest first.
    finished: Those of them that have finished.
    window: Number of consecutive groups to choose from (W).
    count: Number of groups to choose.

  Returns:
    The numbers that are chosen, oldest first, and those to wait for if they are fewer than `count`.

  Example:
    >>> choose([0, 1, 2, 3, 4], {0, 2, 3}, window=3, count=2)
    ([0, 2], [])
    >>> choose([0, 1, 2, 3, 4], {0, 2, 3}, window=1, count=2)
    ([0], [1])
  """
  chosen, awaited = [], []
  for number in waiting:
    # All before it are chosen or awaited, so the oldest that is left begins the window.
    if len(chosen) == count or (awaited and number >= awaited[0] + window):
      break
    (chosen if number in finished else awaited).append(number)
  return chosen, awaited if len(chosen) < count else []


def ks_distance(one: Sequence[int] | Int[np.ndarray, " n"], other: Sequence[int] | Int[np.ndarray, " m"]) -> float:
  """Returns Kolmogorov and Smirnov's distance of two samples, max |F₁ - F₂|.

  Example:
    >>> ks_distance([1, 2, 3, 4], [3, 4, 5, 6])
    0.5
  """
  grid = np.union1d(one, other)
  shares: list[Float[np.ndarray, " g"]] = [np.searchsorted(np.sort(x), grid, "right") / len(x) for x in (one, other)]
  return float(np.max(np.abs(shares[0] - shares[1])))


class Lengths:
  """Lengths of the responses that steps learn from, and of those that strict order gives them.

  A step's own groups are those of strict order. Their lengths are known once all of them have been
  taken, at the latest when nothing is open any more.

  Args:
    step: First RL step.
  """

  def __init__(self, step: int):
    self._next, self._of_groups, self._taken = step, dict[int, Int[np.ndarray, " G"]](), dict[int, Sequence[int]]()

  def note(self, step: int, numbers: Sequence[int], lengths: Int[np.ndarray, " N"]) -> dict[str, float]:
    """Adds a step, and returns the metrics of the window.

    `rollout/window_overtaken` counts the groups that wait although a younger one was taken.
    `rollout/window_ks` is the distance between the lengths of what a step learned from and those of
    its own groups, 0 in strict order. It is that of the steps whose own groups have all been taken
    since the step before, in the mean, and missing if there are none.

    Args:
      step: RL step.
      numbers: Numbers of the groups that it learns from, oldest first.
      lengths: Numbers of tokens of their responses.

    Example:
      >>> bias = Lengths(0)
      >>> bias.note(0, [0, 2], np.array([3, 1]))
      {'rollout/window_overtaken': 1.0}
      >>> bias.note(1, [1, 3], np.array([9, 1]))
      {'rollout/window_overtaken': 0.0, 'rollout/window_ks': 0.5}
    """
    count, distances = len(numbers), []
    self._of_groups |= dict(zip(numbers, lengths.reshape(count, -1), strict=True))
    self._taken[step] = numbers
    late = [number for number in range(self._next * count, numbers[-1]) if number not in self._of_groups]
    while (own := set(range(self._next * count, (self._next + 1) * count))) <= self._of_groups.keys():
      both = [np.concatenate([self._of_groups[number] for number in groups]) for groups in (self._taken[self._next], own)]
      distances.append(ks_distance(*both))
      self._next += 1
    if self._next > step:  # Nothing older is open, and nothing younger was taken.
      self._of_groups, self._taken = {}, {}
    return {"rollout/window_overtaken": float(len(late))} | ({"rollout/window_ks": float(np.mean(distances))} if distances else {})
