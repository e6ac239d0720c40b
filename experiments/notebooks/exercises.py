"""Solutions to the exercises of lecture 0, one function each.

`tests/experiments/test_exercises.py` compares them with the package's functions and with scalar
loops. Put your own in their place to have them checked.
"""

import math

import numpy as np
from jaxtyping import Bool, Float


def exercise_1(rewards: Float[np.ndarray, " N"], group_size: int) -> float:
  """Computes the share of groups that teach.

  A group of equal rewards has advantages of exactly 0, so its part of the gradient is exactly 0.

  Example:
    >>> exercise_1(np.array([1.0, 0.0, 1.0, 1.0]), 2)
    0.5
  """
  groups = rewards.reshape(-1, group_size)
  return float(np.mean(groups.min(axis=1) < groups.max(axis=1)))


def exercise_2(rewards: Float[np.ndarray, " N"], group_size: int) -> Float[np.ndarray, " N"]:
  """Subtracts from each reward the mean of the others of its group (RLOO).

  The baseline does not depend on the response, given the prompt, because the others were drawn
  independently. So E[b·∇log π] = E[b]·E[∇log π] = 0, and the estimate is unbiased.

  Example:
    >>> exercise_2(np.array([3.0, 0.0, 0.0]), 3).tolist()
    [3.0, -1.5, -1.5]
  """
  groups = rewards.reshape(-1, group_size)
  others = (groups.sum(axis=1, keepdims=True) - groups) / (group_size - 1)
  return (groups - others).reshape(-1)


def exercise_3(group_size: int) -> float:
  """Computes the factor by which a mean with the own reward shrinks the expected gradient.

  R_i − mean R = (G − 1)/G·(R_i − mean of the others), so the factor is (G − 1)/G. It is the same
  for every prompt, and acts like a slightly smaller learning rate.

  Example:
    >>> exercise_3(8)
    0.875
  """
  return (group_size - 1) / group_size


def exercise_4(move: float, clip_high: float) -> int:
  """Returns the number of the first update, from 1, in which a token with A > 0 has no gradient.

  Update k reads the log-ratio (k − 1)·move. It is 0 in the first update, because the policy has not
  moved yet, and 1 lies inside every band.

  Args:
    move: Rise of the token's log-ratio in each update, in nats.
    clip_high: Width of the band above 1.

  Example:
    >>> exercise_4(0.05, 0.2)
    5
  """
  return math.floor(math.log1p(clip_high) / move) + 2


def exercise_5(
  ratios: Float[np.ndarray, " N"], advantages: Float[np.ndarray, " N"], clip_low: float, clip_high: float
) -> Bool[np.ndarray, " N"]:
  """Returns which tokens have no gradient.

  The minimum keeps the gradient of a token that has moved against its advantage, so that it can
  come back.

  Example:
    >>> exercise_5(np.array([1.5, 1.5, 0.5, 0.5]), np.array([1.0, -1.0, 1.0, -1.0]), 0.2, 0.2).tolist()
    [True, False, False, True]
  """
  too_likely = (advantages > 0) & (ratios > 1 + clip_high)
  too_rare = (advantages < 0) & (ratios < 1 - clip_low)
  return too_likely | too_rare | (advantages == 0)


def exercise_6(num_tokens: int, clip_high: float) -> float:
  """Returns the ratio of one token, the others being 1, from which on GSPO clips a response.

  s = r^(1/T) > 1 + clip_high, so r > (1 + clip_high)^T: the longer the response, the further one
  token may move.

  Example:
    >>> round(exercise_6(4, 0.1), 4)
    1.4641
  """
  return (1 + clip_high) ** num_tokens


def exercise_7(tau: float) -> list[float]:
  """Returns the positive ratios at which SAPO's gate has the weight 1/2, in ascending order.

  sech²(τ(r − 1)/2) = 1/2 if r = 1 ± (2/τ)·arcosh √2 = 1 ± 1.763/τ. The lower one is a ratio only if
  τ > 1.763.

  Example:
    >>> [round(ratio, 3) for ratio in exercise_7(1.0)]
    [2.763]
  """
  distance = 2 * math.acosh(math.sqrt(2)) / tau
  return [ratio for ratio in (1 - distance, 1 + distance) if ratio > 0]
