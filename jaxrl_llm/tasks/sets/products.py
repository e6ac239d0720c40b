"""Products of numbers that are too large for mental arithmetic, with a calculator at hand.

This is a task for conversations with a tool. A transcript, with the end token shown as `$` and the
calculator's reply underlined:

    487*36                the prompt
    <<487*36=17532>>      a call and its result
             -------
    #17532$               the answer

The demonstrations come from a teacher who has not mastered the tool. Half of them call it
correctly, a quarter copy a digit wrongly into the call and trust the result, and a quarter guess
without a call and are wrong. A policy that imitates the teacher perfectly is right about half of
the time. Reinforcement learning can teach it to call the tool, and to call it correctly.
"""

import numpy as np
import tensorflow_datasets as tfds

from jaxrl_llm.tasks.files.storage import GeneratedProblems, uniform

LEVELS = (1, 2, 3)
DIGITS = {1: (2, 2), 2: (3, 2), 3: (3, 3)}
"""Digits of the two factors at each level."""

CALL_RATE, MISCOPY_RATE = 0.5, 0.25  # The rest are guesses.
DEMONSTRATIONS_PER_PROBLEM = 2
_PROBLEMS_PER_LEVEL = 3000


def product(question: str) -> int:
  """Returns the right answer to a problem.

  Example:
    >>> product("487*36")
    17532
  """
  left, right = question.split("*")
  return int(left) * int(right)


def demonstration(question: str, seed: int) -> str:
  """Returns one of the teacher's responses to a problem.

  Args:
    question: Problem to solve.
    seed: Number of the teacher's attempt at this problem.

  Returns:
    The response, with the calculator's replies but without the end token.

  Example:
    >>> [demonstration("487*36", seed) for seed in (0, 2, 8)]
    ['<<487*36=17532>>\\n#17532', '#17552', '<<487*34=16558>>\\n#16558']
  """
  kind = uniform("kind", question, seed)
  if kind < CALL_RATE:
    return _called(question)
  if kind < CALL_RATE + MISCOPY_RATE:
    return _called(_slip(question, seed))
  return f"#{_slip(str(product(question)), seed)}"


def _called(question: str) -> str:
  return f"<<{question}={product(question)}>>\n#{product(question)}"


def _slip(text: str, seed: int) -> str:
  """Replaces one digit, never a leading one, with another digit."""
  places = [i for i in range(1, len(text)) if text[i].isdigit() and text[i - 1].isdigit()]
  i = places[int(len(places) * uniform("place", text, seed))]
  others = [digit for digit in "0123456789" if digit != text[i]]
  return text[:i] + others[int(len(others) * uniform("digit", text, seed))] + text[i + 1 :]


def questions_of(level: int) -> list[str]:
  """Returns the distinct problems of a level, in a fixed order."""
  left, right = (range(10 ** (digits - 1), 10**digits) for digits in DIGITS[level])
  size = len(left) * len(right)
  # A step by the golden ratio spreads the choice evenly over all pairs. It shares no factor with
  # their number, so no pair is chosen twice.
  step = next(x for x in range(int(size * 0.618), size) if np.gcd(x, size) == 1)
  chosen = [(i * step) % size for i in range(min(_PROBLEMS_PER_LEVEL, size))]
  return [f"{left[i // len(right)]}*{right[i % len(right)]}" for i in chosen]


class Products(GeneratedProblems):
  """Dataset of products."""

  # Increase with any change to the generated problems; otherwise old copies stay in use.
  VERSION = tfds.core.Version("1.0.0")
  LEVELS = LEVELS

  def _rows(self):
    return (
      {"question": text, "answer": str(product(text)), "level": level}
      for level in LEVELS
      for text in questions_of(level)
    )

  def _demonstrations(self, row):
    return {
      f"{row['question']} {seed}": demonstration(row["question"], seed) for seed in range(DEMONSTRATIONS_PER_PROBLEM)
    }
