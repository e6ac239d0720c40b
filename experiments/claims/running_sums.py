"""Running sums modulo 10: problems, the workings of an unreliable teacher, and the grader.

A prompt consists of 4 to 8 digits (by default), dots up to the largest number of digits, and "=".
The response consists of the running sums modulo 10 and the end token:

    3 7 5 9 . . . . =        0 5 4 $        (3 + 7 = 10, 0 + 5 = 5, 5 + 9 = 14)

A response is right if it ends and its last digit is the sum of all digits. The teacher gets each
sum wrong with probability `ERROR_RATE`, and continues from the wrong one. The length of its
response follows from the prompt. All prompts have one length, so a batch is a rectangle.
"""

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.types import TrainBatch

DOT, EQUALS, END, PAD, VOCAB_SIZE = 10, 11, 12, 13, 16
MOST_DIGITS, FEWEST_DIGITS = 8, 4
ERROR_RATE = 0.2


def response_tokens(most_digits: int) -> int:
  """Returns the budget of a response, in tokens.

  It exceeds the teacher's longest response, which has one token per digit, by two tokens.
  """
  return most_digits + 2


PROMPT_TOKENS, RESPONSE_TOKENS = MOST_DIGITS + 1, response_tokens(MOST_DIGITS)


def split_of(digits: Sequence[int]) -> str:
  """Assigns a problem to "test" or "train" by its digits alone.

  Example:
    >>> split_of([3, 7, 5, 7])
    'test'
  """
  return "test" if sum((i + 1) * digit for i, digit in enumerate(digits)) % 10 == 0 else "train"


def problems(
  split: str, count: int, rng: np.random.Generator, *, digits: tuple[int, int] = (FEWEST_DIGITS, MOST_DIGITS)
) -> np.ndarray:
  """Draws problems of a split; `split_of` decides which belong to it.

  Args:
    split: "train" or "test".
    count: Number of problems.
    rng: Source of the digits.
    digits: Fewest and most digits of a problem.

  Returns:
    Digits followed by dots, [count, most].
  """
  fewest, most = digits
  kept = np.empty((0, most), np.int32)
  while len(kept) < count:
    drawn = rng.integers(10, size=(12 * count, most))
    drawn[np.arange(most) >= rng.integers(fewest, most + 1, size=(len(drawn), 1))] = DOT
    checks = (np.where(drawn == DOT, 0, drawn) * np.arange(1, most + 1)).sum(axis=1) % 10
    kept = np.concatenate([kept, drawn[(checks == 0) == (split == "test")]])
  return kept[:count].astype(np.int32)


def prompts_of(problems: np.ndarray) -> np.ndarray:
  """Appends "=" to problems, which makes them prompts, [n, most + 1]."""
  return np.pad(problems, ((0, 0), (0, 1)), constant_values=EQUALS)


def workings(problems: np.ndarray, *, error_rate: float, rng: np.random.Generator) -> np.ndarray:
  """Writes the responses of the teacher, [n, most + 2], padded.

  Example:
    >>> dots = [DOT] * 4
    >>> workings(np.array([[3, 7, 5, 9, *dots]]), error_rate=0.0, rng=np.random.default_rng(0))[0].tolist()
    [0, 5, 4, 12, 13, 13, 13, 13, 13, 13]
  """
  count, most = problems.shape
  responses = np.full((count, response_tokens(most)), PAD, np.int32)
  value, rows = problems[:, 0].copy(), np.arange(count)
  lengths = (problems != DOT).sum(axis=1)
  for step in range(1, most):
    there = step < lengths
    wrong = (rng.random(count) < error_rate) * rng.integers(1, 10, size=count)
    value = np.where(there, (value + problems[:, step] + wrong) % 10, value)
    responses[there, step - 1] = value[there]
  responses[rows, lengths - 1] = END
  return responses


def graded(problems: np.ndarray, tokens: np.ndarray, mask: np.ndarray, stopped: np.ndarray) -> np.ndarray:
  """Grades responses: 1 for each right one and 0 for the others, [N].

  A right response has ended, and the token before its end is the sum of all digits modulo 10.
  """
  answers = np.where(problems == DOT, 0, problems).sum(axis=1) % 10
  lengths = mask.sum(axis=1)
  last = tokens[np.arange(len(tokens)), np.maximum(lengths - 2, 0)]
  return ((last == np.repeat(answers, len(tokens) // len(problems))) & stopped & (lengths >= 2)).astype(np.float32)


def rectangle(prompts: np.ndarray, responses: np.ndarray, mask: np.ndarray) -> TrainBatch:
  """Builds a batch with one sequence per row.

  Its old log-probabilities are 0. Its advantages are 1 on the response.
  """
  tokens = np.concatenate([prompts, responses], axis=1)
  before = ((0, 0), (prompts.shape[1], 0))
  counted = np.pad(mask, before).astype(np.float32)
  return TrainBatch(
    tokens=tokens,
    positions=np.ascontiguousarray(np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)),
    segments=np.pad(mask, before, constant_values=True).astype(np.int32),
    mask=counted,
    advantages=counted,
    old_logprobs=np.zeros(tokens.shape, np.float32),
  )
