"""Short exercises for small pretrained models, which solve some of them untouched: numbers to compare, add and multiply.

With problems of the same kind in front (`task.shots`), a model of 135M weights knows what is asked, is right now and then, and answers in
a few tokens: reinforcement learning has a signal from the first step, and a step is cheap.

    task      level              question                      response
    largest   how many numbers   Largest of 23, 71, 46, 58:    71
    sums      how many terms     47 + 38 =                     85
                                 47 + 38 + 25 =                47 + 38 = 85, 85 + 25 = 110
    tally     how many digits    47 + 8 + 5 =                  47 + 8 = 55, 55 + 5 = 60
    times                        37 * 6 =                      222

A sum of three or more terms is shown with its steps, and so is a tally. No problem is a reordering of another.
"""

import itertools
from collections.abc import Iterator, Sequence

import tensorflow_datasets as tfds

from jaxrl_llm.tasks.files.storage import GeneratedProblems, Row, uniform

_PROBLEMS_PER_LEVEL = 4000


def render_prompt(question: str) -> str:
  """The text a policy is given: the problem, to be continued on its line."""
  return question


def steps(terms: Sequence[int]) -> str:
  """The working of a sum, which ends with its value.

  Example:
    >>> steps([47, 38]), steps([47, 38, 25])
    ('85', '47 + 38 = 85, 85 + 25 = 110')
  """
  if len(terms) == 2:
    return str(sum(terms))
  values = list(itertools.accumulate(terms))
  return ", ".join(f"{value} + {term} = {result}" for value, term, result in zip(values, terms[1:], values[1:], strict=False))


def draws(name: str, count: int, *, distinct: bool) -> Iterator[tuple[int, ...]]:
  """Two-digit numbers, `count` at a time, of which no two draws are reorderings of each other."""
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
  """The largest of some two-digit numbers."""

  VERSION = tfds.core.Version("1.0.0")  # Raise it with any change to what is generated, or old copies stay in use.
  LEVELS = (3, 4, 5, 6)

  def _rows(self) -> Iterator[Row]:
    for level in self.LEVELS:
      for numbers in draws("largest", level, distinct=True):
        answer = str(max(numbers))
        yield {"question": f"Largest of {', '.join(map(str, numbers))}:", "answer": answer, "level": level, "response": f" {answer}"}


class Sums(GeneratedProblems):
  """The sum of some two-digit numbers."""

  VERSION = tfds.core.Version("1.0.0")
  LEVELS = (2, 3, 4)

  def _rows(self) -> Iterator[Row]:
    for level in self.LEVELS:
      for terms in draws("sums", level, distinct=False):
        yield {"question": f"{' + '.join(map(str, terms))} =", "answer": str(sum(terms)), "level": level, "response": f" {steps(terms)}"}


class Tally(GeneratedProblems):
  """A number of two digits, and some of one digit that are added to it."""

  VERSION = tfds.core.Version("1.0.0")
  LEVELS = (2, 3, 4)

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
  """The product of a number of two digits and one of one digit."""

  VERSION = tfds.core.Version("1.0.0")
  LEVELS = (1,)

  def _rows(self) -> Iterator[Row]:
    for left, right in itertools.product(range(10, 100), range(2, 10)):
      yield {"question": f"{left} * {right} =", "answer": str(left * right), "level": 1, "response": f" {left * right}"}
