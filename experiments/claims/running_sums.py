"""Running sums modulo 10: problems, what an unreliable teacher writes, and who is right.

A prompt is 4 to 8 digits, filled up to 8 with dots, and "="; the response is the running sums modulo 10 and the end token:

    3 7 5 9 . . . . =        0 5 4 $        (3 + 7 = 10, 0 + 5 = 5, 5 + 9 = 14)

A response is right if it ends and its last digit is the sum of all. The teacher gets each sum wrong with probability `ERROR_RATE`, and
carries on from it. The length of a response follows from its prompt. All prompts have one length, so a batch is a plain rectangle.
"""

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.types import TrainBatch

DOT, EQUALS, END, PAD, VOCAB_SIZE = 10, 11, 12, 13, 16
MOST_DIGITS, FEWEST_DIGITS = 8, 4
PROMPT_TOKENS, RESPONSE_TOKENS = MOST_DIGITS + 1, 10
"""The teacher's longest response has 8 tokens."""
ERROR_RATE = 0.2


def split_of(digits: Sequence[int]) -> str:
  """Which split owns a problem: "test" or "train", decided by its digits alone.

  Example:
    >>> split_of([3, 7, 5, 7])
    'test'
  """
  return "test" if sum((i + 1) * digit for i, digit in enumerate(digits)) % 10 == 0 else "train"


def problems(split: str, count: int, rng: np.random.Generator) -> np.ndarray:
  """Problems of a split by `split_of`, [count, MOST_DIGITS] with dots behind the digits."""
  found = np.empty((0, MOST_DIGITS), np.int32)
  while len(found) < count:
    drawn = rng.integers(10, size=(12 * count, MOST_DIGITS))
    drawn[np.arange(MOST_DIGITS) >= rng.integers(FEWEST_DIGITS, MOST_DIGITS + 1, size=(len(drawn), 1))] = DOT
    checks = (np.where(drawn == DOT, 0, drawn) * np.arange(1, MOST_DIGITS + 1)).sum(axis=1) % 10
    found = np.concatenate([found, drawn[(checks == 0) == (split == "test")]])
  return found[:count].astype(np.int32)


def prompts_of(problems: np.ndarray) -> np.ndarray:
  """The prompts of problems, [n, PROMPT_TOKENS]."""
  return np.pad(problems, ((0, 0), (0, 1)), constant_values=EQUALS)


def workings(problems: np.ndarray, *, error_rate: float, rng: np.random.Generator) -> np.ndarray:
  """What a teacher writes, [n, RESPONSE_TOKENS], padded.

  Example:
    >>> dots = [DOT] * 4
    >>> workings(np.array([[3, 7, 5, 9, *dots]]), error_rate=0.0, rng=np.random.default_rng(0))[0].tolist()
    [0, 5, 4, 12, 13, 13, 13, 13, 13, 13]
  """
  count, responses = len(problems), np.full((len(problems), RESPONSE_TOKENS), PAD, np.int32)
  value, rows = problems[:, 0].copy(), np.arange(count)
  lengths = (problems != DOT).sum(axis=1)
  for step in range(1, MOST_DIGITS):
    there = step < lengths
    wrong = (rng.random(count) < error_rate) * rng.integers(1, 10, size=count)
    value = np.where(there, (value + problems[:, step] + wrong) % 10, value)
    responses[there, step - 1] = value[there]
  responses[rows, lengths - 1] = END
  return responses


def graded(problems: np.ndarray, tokens: np.ndarray, mask: np.ndarray, stopped: np.ndarray) -> np.ndarray:
  """1 where a response is right, [N]: it has ended, and the token before its end is the sum of all digits modulo 10."""
  answers = np.where(problems == DOT, 0, problems).sum(axis=1) % 10
  lengths = mask.sum(axis=1)
  last = tokens[np.arange(len(tokens)), np.maximum(lengths - 2, 0)]
  return ((last == np.repeat(answers, len(tokens) // len(problems))) & stopped & (lengths >= 2)).astype(np.float32)


def rectangle(prompts: np.ndarray, responses: np.ndarray, mask: np.ndarray) -> TrainBatch:
  """A batch of one sequence a row, with zeros for old log-probabilities and ones for advantages."""
  tokens = np.concatenate([prompts, responses], axis=1)
  counted = np.pad(mask, ((0, 0), (PROMPT_TOKENS, 0))).astype(np.float32)
  return TrainBatch(
    tokens=tokens,
    positions=np.ascontiguousarray(np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)),
    segments=np.pad(mask, ((0, 0), (PROMPT_TOKENS, 0)), constant_values=True).astype(np.int32),
    mask=counted,
    advantages=counted,
    old_logprobs=np.zeros(tokens.shape, np.float32),
  )
