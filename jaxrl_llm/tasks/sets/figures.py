"""Small drawn figures with questions that only the picture answers, for a policy that can see.

A picture has 48 x 48 pixels on white: coloured dots, or three bars named A, B and C from the left.
A tower with patches of 8 x 8, merged by twos, sees nine tokens.

    level  question                        figure           response
    1      How many dots?                  1 to 9 dots      #4
           Column of the dot?  Row ...     a dot            #2
           Height of bar B?                three bars       #7
    2      Bar A above bar C?              three bars       A=9,C=4
                                                            #5
    3      Height of the tallest bar?      three bars       #9
           How many red dots?              two colours      #3

The answers to each question are equally frequent in training and held out, so that a policy that
does not look is right as often as by chance. No picture occurs twice. Each tenth problem of
a question and an answer is held out. The demonstrations come from a teacher who misreads each
number by one, up or down, with probability 0.55. With one number to read, the teacher is right 45 %
of the time.

Figures are drawn with NumPy, which draws the same pixels everywhere; a library's lines and circles
may change between versions. Pillow is needed only to read the pictures.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import UInt8

from jaxrl_llm.pretrained import png
from jaxrl_llm.pretrained.image_prompts import MARK
from jaxrl_llm.tasks.files.storage import GeneratedProblems, Row, uniform

LEVELS = (1, 2, 3)
SIDE, CELL = 48, 8
"""Sides of a picture and of the square that holds a dot, in pixels."""
ERROR_RATE = 0.55  # Probability that the teacher misreads a number.
DEMONSTRATIONS_PER_PROBLEM = 2
PROBLEMS_PER_ANSWER = 100  # For each question; every tenth is held out.

_COLOURS = {
  "red": (220, 30, 30), "green": (20, 150, 40), "blue": (30, 60, 220), "black": (0, 0, 0), "purple": (140, 30, 160), "brown": (130, 80, 30)
}  # fmt: skip
_CELLS = SIDE // CELL
_DOT = 4
_HIGHEST, _UNIT = 9, 5  # Units of a bar's height, and pixels of a unit.
_BARS = "ABC"


class DrawnFigure(NamedTuple):
  """A figure.

  Attributes:
    picture: Pixels.
    readings: Numbers that an answer is read from, by name; "" if the answer is the only one.
  """

  picture: UInt8[np.ndarray, "48 48 3"]
  readings: dict[str, int]


Pick = Callable[[int], int]
"""Function from a count n to a random number below n, another one at each call."""


class Question(NamedTuple):
  """A question with its possible answers.

  Attributes:
    level: Difficulty.
    text: Text of the question.
    answers: Answers, equally frequent.
    draw: Function from an answer and a source of random numbers to a figure with that answer.
  """

  level: int
  text: str
  answers: range
  draw: Callable[[int, Pick], DrawnFigure]


def response(readings: dict[str, int]) -> str:
  """Returns the response that follows from what was read.

  Example:
    >>> response({"": 4}), response({"A": 9, "C": 4})
    ('#4', 'A=9,C=4\\n#5')
  """
  if "" in readings:
    return f"#{readings['']}"
  first, second = readings.values()
  return ",".join(f"{name}={value}" for name, value in readings.items()) + f"\n#{first - second}"


def misread(readings: dict[str, int], *key: object, error_rate: float = ERROR_RATE) -> dict[str, int]:
  """Returns what a careless teacher reads: each number is wrong with probability `error_rate`.

  Args:
    readings: Numbers to read.
    *key: Parts of the key that decides the mistakes.
    error_rate: Probability that a number is wrong; it is then one too low or one too high.

  Example:
    >>> misread({"": 4}, "a problem", error_rate=0.0), misread({"": 4}, "a problem", error_rate=1.0)
    ({'': 4}, {'': 3})
  """

  def read(name: str, value: int) -> int:
    if uniform("wrong", name, *key) >= error_rate:
      return value
    return value - 1 if uniform("slip", name, *key) < 0.5 else value + 1

  return {name: read(name, value) for name, value in readings.items()}


def _dots(pick: Pick, cells: list[int], colours: list[str]) -> UInt8[np.ndarray, "48 48 3"]:
  """Draws a square dot somewhere in each of some cells, which are numbered row by row."""
  picture = np.full((SIDE, SIDE, 3), 255, np.uint8)
  for cell, colour in zip(cells, colours, strict=True):
    row, column = (CELL * place + pick(CELL - _DOT + 1) for place in divmod(cell, _CELLS))
    picture[row : row + _DOT, column : column + _DOT] = _COLOURS[colour]
  return picture


def _some_cells(pick: Pick, count: int) -> list[int]:
  cells = list(range(_CELLS**2))
  return [cells.pop(pick(len(cells))) for _ in range(count)]


def _bars(pick: Pick, heights: dict[str, int]) -> UInt8[np.ndarray, "48 48 3"]:
  picture = np.full((SIDE, SIDE, 3), 255, np.uint8)
  shift, names = pick(5), list(_COLOURS)
  for i, height in enumerate(heights[name] for name in _BARS):
    left = SIDE // len(_BARS) * i + shift
    picture[SIDE - _UNIT * height :, left : left + 11] = _COLOURS[names[pick(len(names))]]
  return picture


def _count(answer: int, pick: Pick) -> DrawnFigure:
  colour = list(_COLOURS)[pick(len(_COLOURS))]
  return DrawnFigure(_dots(pick, _some_cells(pick, answer), [colour] * answer), {"": answer})


def _place(answer: int, pick: Pick, *, is_row: bool) -> DrawnFigure:
  other = pick(_CELLS)
  row, column = (answer - 1, other) if is_row else (other, answer - 1)
  return DrawnFigure(_dots(pick, [_CELLS * row + column], [list(_COLOURS)[pick(len(_COLOURS))]]), {"": answer})


def _height(answer: int, pick: Pick, *, bar: str) -> DrawnFigure:
  heights = {name: answer if name == bar else 1 + pick(_HIGHEST) for name in _BARS}
  return DrawnFigure(_bars(pick, heights), {"": answer})


def _difference(answer: int, pick: Pick, *, high: str, low: str) -> DrawnFigure:
  lower = 1 + pick(_HIGHEST - answer)
  heights = {name: 1 + pick(_HIGHEST) for name in _BARS} | {low: lower, high: lower + answer}
  return DrawnFigure(_bars(pick, heights), {high: lower + answer, low: lower})


def _tallest(answer: int, pick: Pick) -> DrawnFigure:
  heights = {name: 1 + pick(answer) for name in _BARS} | {_BARS[pick(len(_BARS))]: answer}
  return DrawnFigure(_bars(pick, heights), {"": answer})


def _of_a_colour(answer: int, pick: Pick, *, colour: str) -> DrawnFigure:
  distractors = pick(10)
  others = [name for name in _COLOURS if name != colour]
  colours = [colour] * answer + [others[pick(len(others))]] * distractors
  return DrawnFigure(_dots(pick, _some_cells(pick, len(colours)), colours), {"": answer})


_NINE = range(1, 10)
QUESTIONS = (
  Question(1, "How many dots?", _NINE, _count),
  Question(1, "Column of the dot?", range(1, _CELLS + 1), functools.partial(_place, is_row=False)),
  Question(1, "Row of the dot?", range(1, _CELLS + 1), functools.partial(_place, is_row=True)),
  *(Question(1, f"Height of bar {bar}?", _NINE, functools.partial(_height, bar=bar)) for bar in _BARS),
  *(
    Question(2, f"Bar {high} above bar {low}?", range(1, _HIGHEST), functools.partial(_difference, high=high, low=low))
    for high in _BARS for low in _BARS if high != low
  ),
  Question(3, "Height of the tallest bar?", _NINE[1:], _tallest),
  *(Question(3, f"How many {colour} dots?", _NINE, functools.partial(_of_a_colour, colour=colour)) for colour in ("red", "green", "blue")),
)  # fmt: skip
"""All questions."""


def _picks(*key: object) -> Pick:
  calls = iter(range(10**6))
  return lambda count: int(count * uniform("figure", *key, next(calls)))


@functools.cache
def _problems(per_answer: int) -> tuple[tuple[Row, dict[str, int]], ...]:
  """Returns all problems with their readings; no picture occurs twice."""
  seen: set[bytes] = set()
  problems = []
  for question in QUESTIONS:
    for answer in question.answers:
      number = attempt = 0
      while number < per_answer:
        drawn = question.draw(answer, _picks(question.text, answer, attempt))
        attempt += 1
        if (pixels := drawn.picture.tobytes()) not in seen:
          seen.add(pixels)
          row = {"question": question.text, "answer": str(answer), "level": question.level, "response": response(drawn.readings)}
          problems.append((row | {"id": f"{question.text} {answer} {number}", "images": (png.encode(drawn.picture),)}, drawn.readings))
          number += 1
  return tuple(problems)


class Figures(GeneratedProblems):
  """Dataset of drawn figures."""

  # Increase with any change to the generated problems; otherwise old copies stay in use.
  VERSION = tfds.core.Version("1.0.0")
  LEVELS = LEVELS
  TEMPLATE = f"{MARK}{{question}}\n"
  columns = (*GeneratedProblems.columns, "id", "images")

  def _rows(self) -> Iterator[Row]:
    return (row for row, _ in _problems(PROBLEMS_PER_ANSWER))

  def _name(self, row: Row) -> str:
    return row["id"]

  def _is_test(self, row: Row) -> bool:
    return row["id"].endswith("0")

  def _demonstrations(self, row: Row) -> dict[str, str]:
    readings = _readings(PROBLEMS_PER_ANSWER)[row["id"]]
    seeds = range(DEMONSTRATIONS_PER_PROBLEM)
    return {f"{row['id']} {seed}": response(misread(readings, row["id"], seed)) for seed in seeds}


class BlankFigures(Figures):
  """Dataset of the same problems with white pictures, a control in which looking does not help."""

  VERSION = Figures.VERSION

  def _rows(self) -> Iterator[Row]:
    return map(blank, super()._rows())


@functools.cache
def _readings(per_answer: int) -> dict[str, dict[str, int]]:
  return {row["id"]: readings for row, readings in _problems(per_answer)}


def blank(row: Row) -> Row:
  """Returns a problem with white pictures, the control that shows whether a policy looks.

  Example:
    >>> blank({"question": "How many dots?", "images": (b"a file",)})["images"][0][:4]
    b'\\x89PNG'
  """
  white = png.encode(np.full((SIDE, SIDE, 3), 255, np.uint8))
  return row | {"images": (white,) * len(row["images"])}
