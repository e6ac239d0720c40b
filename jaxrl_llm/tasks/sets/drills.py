"""Short exercises for small pretrained models: numbers to compare, add and multiply.

Such models solve some of the exercises without training. With solved problems of the same kind in
front (`task.shots`), a model of 135M weights recognises the exercise, is sometimes right, and
answers in a few tokens. So reinforcement learning has a signal from the first step, and a step is
cheap.

    task      level              question                      response
    largest   how many numbers   Largest of 23, 71, 46, 58:    71
    sums      how many terms     47 + 38 =                     85
                                 47 + 38 + 25 =                47 + 38 = 85, 85 + 25 = 110
    tally     how many digits    47 + 8 + 5 =                  47 + 8 = 55, 55 + 5 = 60
    times                        37 * 6 =                      222

A response continues the line of its question. Those to tallies and to sums of three or more terms
show the steps. No problem is a reordering of another.
"""

import itertools
from collections.abc import Iterator, Sequence

import tensorflow_datasets as tfds

from jaxrl_llm.tasks.files.storage import GeneratedProblems, Row, uniform

_PROBLEMS_PER_LEVEL = 4000


def steps(terms: Sequence[int]) -> str:
  """Returns the working of a sum, which ends with its value.

  Example:
    >>> steps([47, 38]), steps([47, 38, 25])
    ('85', '47 + 38 = 85, 85 + 25 = 110')
  """
  if len(terms) == 2:
    return str(sum(terms))
  values = list(itertools.accumulate(terms))
  return ", ".join(f"{value} + {term} = {result}" for value, term, result in zip(values, terms[1:], values[1:], strict=False))


def draws(name: str, count: int, *, distinct: bool) -> Iterator[tuple[int, ...]]:
  """Yields tuples of `count` two-digit numbers, none of them a reordering of another.

  If `distinct`, all numbers of a tuple differ.
  """
  seen: set[tuple[int, ...]] = set()
  for index in itertools.count():
    if len(seen) == _PROBLEMS_PER_LEVEL:
      return
    numbers = tuple(10 + int(90 * uniform(name, count, index, place)) for place in range(count))
    key = tuple(sorted(numbers))
    if key not in seen and (not distinct or len(set(numbers)) == count):
      seen.add(key)
      yield numbers


class Largest(GeneratedProblems):
  """Problems that ask for the largest of some two-digit numbers."""

  # Increase with any change to the generated problems; otherwise old copies stay in use.
  VERSION = tfds.core.Version("1.0.0")
  LEVELS = (3, 4, 5, 6)
  TEMPLATE = "{question}"

  def _rows(self) -> Iterator[Row]:
    for level in self.LEVELS:
      for numbers in draws("largest", level, distinct=True):
        answer = str(max(numbers))
        yield {"question": f"Largest of {', '.join(map(str, numbers))}:", "answer": answer, "level": level, "response": f" {answer}"}


class Sums(GeneratedProblems):
  """Sums of two-digit numbers."""

  VERSION = tfds.core.Version("1.0.0")
  LEVELS = (2, 3, 4)
  TEMPLATE = "{question}"

  def _rows(self) -> Iterator[Row]:
    for level in self.LEVELS:
      for terms in draws("sums", level, distinct=False):
        yield {"question": f"{' + '.join(map(str, terms))} =", "answer": str(sum(terms)), "level": level, "response": f" {steps(terms)}"}


class Tally(GeneratedProblems):
  """Sums of a two-digit number and several one-digit numbers."""

  VERSION = tfds.core.Version("1.0.0")
  LEVELS = (2, 3, 4)
  TEMPLATE = "{question}"

  def _rows(self) -> Iterator[Row]:
    for level in self.LEVELS:
      seen: set[tuple[int, ...]] = set()
      for index in itertools.count():
        if len(seen) == _PROBLEMS_PER_LEVEL // 2:
          break
        draw = lambda place, low, high: low + int((high - low) * uniform("tally", level, index, place))  # noqa: B023 (used at once)
        terms = (draw(0, 10, 100), *(draw(place, 2, 10) for place in range(1, level + 1)))
        key = (terms[0], *sorted(terms[1:]))
        if key not in seen:
          seen.add(key)
          yield {
            "question": f"{' + '.join(map(str, terms))} =", "answer": str(sum(terms)), "level": level, "response": f" {steps(terms)}"
          }  # fmt: skip


class Times(GeneratedProblems):
  """Products of a two-digit number and a one-digit number."""

  VERSION = tfds.core.Version("1.0.0")
  LEVELS = (1,)
  TEMPLATE = "{question}"

  def _rows(self) -> Iterator[Row]:
    for left, right in itertools.product(range(10, 100), range(2, 10)):
      yield {"question": f"{left} * {right} =", "answer": str(left * right), "level": 1, "response": f" {left * right}"}
