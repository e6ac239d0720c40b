"""Per-problem statistics of repeated samples: avg@n, unbiased pass@k and maj@n.

Arrays hold n problems with s samples each.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from jaxtyping import Float, Int


def avg_at_n(correct: Float[np.ndarray, "n s"], n: int | None = None) -> Float[np.ndarray, " n"]:
  """Returns avg@n: the mean reward of each problem's first n samples.

  The result is NaN for a problem without a known reward.

  Args:
    correct: Reward of each sample: 1 if it is right, or any number from 0 to 1. Unknown rewards are
      NaN and are left out.
    n: Number of samples that count; None for all.

  Raises:
    ValueError: If there are fewer than n samples.

  Example:
    >>> avg_at_n(np.array([[1., 0.], [1., np.nan]])).tolist()
    [0.5, 1.0]
  """
  correct = _first("avg@n", correct, n)
  known = ~np.isnan(correct)
  counts = known.sum(axis=1)
  return np.where(counts > 0, np.where(known, correct, 0).sum(axis=1) / np.maximum(counts, 1), np.nan)


def pass_at_k(correct: Float[np.ndarray, "n s"], k: int, n: int | None = None) -> Float[np.ndarray, " n"]:
  """Estimates pass@k without bias: the probability that at least one of k samples is right.

  1 − C(m−c, k) / C(m, k) = 1 − Π_{i=m−c+1..m} (1 − k/i),  with c of m samples right

  Args:
    correct: 1 if a sample is right, else 0. Unknown samples are NaN and are not counted in m.
    k: Number of samples that may be tried.
    n: Number of samples that count, from the first; None for all.

  Returns:
    The estimates: exactly 0 if no sample is right, and exactly 1 if fewer than k are wrong. NaN for
    a problem with fewer than k known samples.

  Raises:
    ValueError: If k is not in 1 to n, samples are fewer than n, or a reward is neither 0 nor 1.

  Example:
    >>> pass_at_k(np.array([[1., 0., 0., 0.], [0., 0., 0., 0.]]), 2).tolist()
    [0.5, 0.0]

  References:
    Evaluating Large Language Models Trained on Code, arXiv:2107.03374, 2021.

  Note:
    The product stays between 0 and 1 at any size, whereas the binomials of a thousand samples
    overflow float64.
  """
  correct = _first("pass@k", correct, n)
  if not 1 <= k <= correct.shape[1]:
    raise ValueError(f"pass@k: found k={k}, expected 1 to {correct.shape[1]}, the samples of each problem")
  known = ~np.isnan(correct)
  if not np.isin(correct[known], (0, 1)).all():
    raise ValueError("pass@k: found rewards that are neither 0 nor 1, expected right or wrong; avg@n takes any")
  samples, rights = known.sum(axis=1), np.where(known, correct, 0).sum(axis=1)
  i = np.arange(1, correct.shape[1] + 1)
  counted = (i > (samples - rights)[:, None]) & (i <= samples[:, None])
  estimates = 1 - np.prod(np.where(counted, 1 - np.minimum(k, i) / i, 1.0), axis=1)
  return np.where(samples >= k, estimates, np.nan)


def maj_at_n(
  answers: Sequence[Sequence[str | None]],
  correct: Float[np.ndarray, "n s"],
  n: int | None = None,
  *,
  key: Callable[[str], Hashable] = str.strip,
) -> Float[np.ndarray, " n"]:
  """Returns maj@n: whether the most frequent answer of each problem's first n samples is right.

  Answers with the same key count as one answer. In a tie, each of the most frequent answers is
  equally likely to win. The expected reward is then the mean of theirs, and the order of the
  samples has no effect. A sample without an answer does not vote. A problem without votes gets 0,
  or NaN if any of its rewards is unknown.

  Args:
    answers: Answer extracted from each sample; None if there is none.
    correct: 1 if a sample is right, else 0. Unknown samples are NaN and do not vote. If samples
      with the same answer differ, their mean counts.
    n: Number of samples that count; None for all.
    key: Function that maps equal answers to the same key. By default the spelling counts, without
      surrounding spaces.

  Raises:
    ValueError: If there are fewer than n samples, or the numbers of answers and rewards differ.

  Example:
    >>> maj_at_n([["4", "4 ", "5"], ["1", "2", None]], np.array([[1., 1., 0.], [0., 1., 0.]])).tolist()
    [1.0, 0.5]

  References:
    Self-Consistency Improves Chain of Thought Reasoning in Language Models, arXiv:2203.11171, 2022.

  Note:
    lighteval breaks a tie in favour of the answer that came first.
  """
  if len(answers) != len(correct) or any(len(row) != correct.shape[1] for row in answers):
    n, s = correct.shape
    raise ValueError(f"maj@n: found the answers of {len(answers)} problems, expected those of {n} x {s} samples, one for each reward")
  correct = _first("maj@n", correct, n)
  return np.array([_vote(list(row)[: correct.shape[1]], rewards, key) for row, rewards in zip(answers, correct, strict=True)], np.float64)


def _vote(answers: list[str | None], rewards: Float[np.ndarray, " s"], key: Callable[[str], Hashable]) -> float:
  voters = [(key(answer), reward) for answer, reward in zip(answers, rewards, strict=True) if answer is not None and not np.isnan(reward)]
  votes = Counter(answer for answer, _ in voters)
  if not votes:
    return float("nan") if np.isnan(rewards).any() else 0.0
  most = max(votes.values())
  winners = [answer for answer, count in votes.items() if count == most]
  return float(np.mean([np.mean([reward for answer, reward in voters if answer == winner]) for winner in winners]))


def by_level(values: Float[np.ndarray, " n"], levels: Sequence[Hashable] | Int[np.ndarray, " n"]) -> dict[Hashable, tuple[float, int]]:
  """Returns the mean and the number of problems at each difficulty, in order of difficulty.

  NaN values are left out.

  Example:
    >>> by_level(np.array([1., 0., 1.]), ["hard", "easy", "hard"])
    {'easy': (0.0, 1), 'hard': (1.0, 2)}
  """
  levels = [level.item() if isinstance(level, np.generic) else level for level in levels]
  if len(levels) != len(values):
    raise ValueError(f"by_level: found {len(levels)} levels, expected {len(values)}, one for each problem")
  results = {}
  for level in sorted(set(levels), key=lambda level: (isinstance(level, str), level)):
    own = np.array([value for value, other in zip(values, levels, strict=True) if other == level and not np.isnan(value)])
    results[level] = (float(own.mean()) if len(own) else float("nan"), len(own))
  return results


def _first(metric: str, correct: Float[np.ndarray, "n s"], n: int | None) -> Float[np.ndarray, "n m"]:
  if n is not None and not 1 <= n <= correct.shape[1]:
    raise ValueError(f"{metric}: found n={n}, expected 1 to {correct.shape[1]}, the samples of each problem")
  return correct[:, :n]
