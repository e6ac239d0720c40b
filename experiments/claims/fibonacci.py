"""Fibonacci numbers modulo 10: problems, the workings of an unreliable teacher, and the grader.

A prompt consists of two digits and "=". The response consists of the sums of the last two digits,
modulo 10, and has as many tokens as the bed says, without an end token:

    3 7 =        0 7 7 4 1 5        (3 + 7 = 10, 7 + 0 = 7, 0 + 7 = 7, ...)

A response is right if its last digit is. The teacher gets each sum wrong with a probability of the
bed, and continues from the wrong one. Every token follows from the two before it, so that the task
is learned as fast for long responses as for short ones, and length is all that differs.
"""

import numpy as np

from experiments.claims.running_sums import EQUALS, split_of

PROMPT_DIGITS = 2


def problems(split: str, count: int, rng: np.random.Generator, *, digits: tuple[int, int]) -> np.ndarray:
  """Draws problems of a split; `running_sums.split_of` decides which belong to it.

  Args:
    split: "train" or "test".
    count: Number of problems.
    rng: Source of the first digits.
    digits: Fewest and most tokens of a response; both are the same.

  Returns:
    The two digits and the right response, [count, 2 + most].

  Raises:
    ValueError: If the fewest and most tokens differ.

  Example:
    >>> problems("test", 1, np.random.default_rng(0), digits=(6, 6)).tolist()
    [[8, 1, 9, 0, 9, 9, 8, 7]]
  """
  fewest, most = digits
  if fewest != most:
    raise ValueError(f"digits: found {digits}, expected two equal numbers; Fibonacci responses have one length")
  starts = np.array([pair for pair in np.ndindex(10, 10) if any(pair) and split_of(pair) == split], np.int32)
  chosen = starts[rng.integers(len(starts), size=count)]
  return np.concatenate([chosen, workings(chosen, tokens=most, error_rate=0.0, rng=rng)], axis=1)


def prompts_of(problems: np.ndarray) -> np.ndarray:
  """Returns the prompts of problems, [n, 3]."""
  return np.pad(problems[:, :PROMPT_DIGITS], ((0, 0), (0, 1)), constant_values=EQUALS)


def workings(problems: np.ndarray, *, error_rate: float, rng: np.random.Generator, tokens: int = 0) -> np.ndarray:
  """Writes the responses of the teacher, [n, tokens].

  Args:
    problems: Problems, of which the first two digits are read.
    error_rate: Probability that the teacher gets a sum wrong.
    rng: Source of the errors.
    tokens: Number of tokens of a response; 0 for that of the right one.

  Example:
    >>> workings(np.array([[3, 7]]), tokens=6, error_rate=0.0, rng=np.random.default_rng(0)).tolist()
    [[0, 7, 7, 4, 1, 5]]
  """
  count, tokens = len(problems), tokens or problems.shape[1] - PROMPT_DIGITS
  wrong = (rng.random((tokens, count)) < error_rate) * rng.integers(1, 10, size=(tokens, count))
  sums = [problems[:, 0], problems[:, 1]]
  for of_token in wrong:
    sums.append((sums[-2] + sums[-1] + of_token) % 10)
  return np.stack(sums[PROMPT_DIGITS:], axis=1).astype(np.int32)


def graded(problems: np.ndarray, tokens: np.ndarray, mask: np.ndarray, stopped: np.ndarray) -> np.ndarray:
  """Grades responses: 1 for each right one and 0 for the others, [N]; none of them stops."""
  del mask, stopped
  return (tokens[:, -1] == np.repeat(problems[:, -1], len(tokens) // len(problems))).astype(np.float32)
