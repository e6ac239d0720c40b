"""Products of numbers that are too large to multiply in one's head, with a calculator at hand: a task for conversations with a tool.

A transcript, with the end token shown as `$`; what the calculator says is underlined:

    487*36                prompt
    <<487*36=17532>>      a call, and its result
             -------
    #17532$               the answer

The demonstrations come from a teacher who is not sure of the tool: half of them call it rightly, a quarter copy a digit wrongly into the
call and believe its result, and a quarter guess without a call and are wrong. A policy that imitates the teacher perfectly is right about
half of the time, and reinforcement learning can teach it to ask, and to ask the right thing.
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


def render_prompt(question: str) -> str:
  """The text a policy is given: the problem on a line of its own."""
  return f"{question}\n"


def product(question: str) -> int:
  """The right answer.

  Example:
    >>> product("487*36")
    17532
  """
  left, right = question.split("*")
  return int(left) * int(right)


def shown(question: str, seed: int) -> str:
  """What the teacher shows in the try that `seed` says, the calculator's replies included, without the end token.

  Example:
    >>> [shown("487*36", seed) for seed in (0, 2, 8)]
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
  """One digit, not a leading one, is another."""
  places = [i for i in range(1, len(text)) if text[i].isdigit() and text[i - 1].isdigit()]
  i = places[int(len(places) * uniform("place", text, seed))]
  others = [digit for digit in "0123456789" if digit != text[i]]
  return text[:i] + others[int(len(others) * uniform("digit", text, seed))] + text[i + 1 :]


def problems(level: int) -> list[str]:
  """The distinct problems of a level, in a fixed order."""
  left, right = (range(10 ** (digits - 1), 10**digits) for digits in DIGITS[level])
  size = len(left) * len(right)
  # Spread evenly over all pairs, by the golden ratio, and each pair at most once: the step shares no factor with their number.
  step = next(x for x in range(int(size * 0.618), size) if np.gcd(x, size) == 1)
  chosen = [(i * step) % size for i in range(min(_PROBLEMS_PER_LEVEL, size))]
  return [f"{left[i // len(right)]}*{right[i % len(right)]}" for i in chosen]


class Products(GeneratedProblems):
  """The dataset."""

  VERSION = tfds.core.Version("1.0.0")  # Raise it with any change to what is generated, or old copies stay in use.

  def _rows(self):
    return ({"question": text, "answer": str(product(text)), "level": level} for level in LEVELS for text in problems(level))

  def _demonstrations(self, row):
    return {f"{row['question']} {seed}": shown(row["question"], seed) for seed in range(DEMONSTRATIONS_PER_PROBLEM)}
