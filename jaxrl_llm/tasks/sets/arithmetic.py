"""Multi-step arithmetic with written workings, from a teacher who makes mistakes.

The task is small enough for a laptop. A transcript, with the end token shown as `$`:

    7+8-5       the prompt: one-digit terms, + and -, read from left to right
    7+8=15      the response: one line per step
    15-5=10
    #10$        the answer

Only the left operand of a step can be negative, so no sign is ambiguous.

A problem of level n takes n steps (n + 1 terms). The demonstrations come from a teacher who gets
each step wrong with probability 1/3 and continues from the wrong value. A model that imitates the
teacher perfectly is right about (2/3)^n of the time: it knows the form, and reinforcement learning
has something left to teach.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds

from jaxrl_llm.tasks.files.storage import GeneratedProblems, uniform

LEVELS = (1, 2, 3)
ERROR_RATE = 1 / 3  # Probability that the teacher gets a step wrong.
# Independent workings, so that no single wrong one can be memorised as the answer.
DEMONSTRATIONS_PER_PROBLEM = 4
_HINTED_PER_PROBLEM = 2
# Levels 1 and 2 have 200 and 4000 problems in all. Level 3 has 80000, and a fixed sample is kept.
_PROBLEMS_PER_LEVEL = 4000


def evaluate(question: str) -> int:
  """Returns the value of a problem.

  Example:
    >>> evaluate("7+8-5")
    10
  """
  return sum(_terms(question))


def working(question: str, *, error_rate: float = 0.0, seed: int = 0) -> str:
  """Returns a teacher's steps and answer for a problem.

  Args:
    question: Problem to solve.
    error_rate: Probability that a step is wrong, independently of the other steps. A wrong result
      is off by 1, 2 or 10 or has the wrong sign, and the next step starts from it.
    seed: Number of the teacher's attempt at this problem.

  Returns:
    The response, without the end token.

  Example:
    >>> working("7+8-5")
    '7+8=15\\n15-5=10\\n#10'
    >>> working("7+8-5", error_rate=1.0)
    '7+8=-15\\n-15-5=-18\\n#-18'
  """
  value, *terms = _terms(question)
  lines = []
  for step, term in enumerate(terms):
    result = value + term
    if uniform("wrong", question, seed, step) < error_rate:
      slips = sorted({result - 10, result - 2, result - 1, result + 1, result + 2, result + 10, -result} - {result})
      result = slips[int(len(slips) * uniform("slip", question, seed, step))]
    lines.append(f"{value}{'-' if _is_minus(question, step) else '+'}{abs(term)}={result}")
    value = result
  return "\n".join([*lines, f"#{value}"])


def step_rewards(row: Mapping[str, Any], token_ids: Sequence[int]) -> list[tuple[int, float]]:
  """Judges each line of a working independently, as a process reward.

  A line is right if it is in the right place, takes the next term of the problem and computes
  correctly from the result that the working has reached, right or wrong. The last line is right if
  it repeats that result. So a slip costs its own line and none of the lines after it.

  Args:
    row: Row of the task.
    token_ids: Ids of the response.

  Returns:
    Index of each line's last token (the newline, or the last token of the response), with 1.0 if
    the line is right, else 0.0.

  Example:
    >>> step_rewards({"question": "7+8-5"}, list(b"7+8=14\\n14-5=9\\n#9"))
    [(6, 0.0), (13, 1.0), (15, 1.0)]
  """
  question = row["question"]
  value, *terms = _terms(question)
  ends = [i for i, token in enumerate(token_ids) if token == ord("\n")]
  if len(token_ids) and (not ends or ends[-1] != len(token_ids) - 1):
    ends.append(len(token_ids) - 1)
  rewards, start = [], 0
  for step, end in enumerate(ends):
    ids = token_ids[start : end + 1]
    if end == len(token_ids) - 1 and ids[-1] >= 256:
      # The stop token is left out. Any other id that is not a byte makes its line wrong: if it were
      # left out, "1", a pad token and "5" would read as 15.
      ids = ids[:-1]
    line = bytes(token if 0 <= token < 256 else 0xFF for token in ids).decode("utf-8", "replace").removesuffix("\n")
    start = end + 1
    if step < len(terms):
      expected = f"{value}{'-' if _is_minus(question, step) else '+'}{abs(terms[step])}="
      head, _, result = line.partition("=")
      reached = int(result) if re.fullmatch(r"-?[0-9]{1,9}", result) else None
      rewards.append((end, float(f"{head}=" == expected and result == str(value + terms[step]))))
      value = value + terms[step] if reached is None else reached
    else:
      rewards.append((end, float(step == len(terms) and line == f"#{value}")))
  return rewards


def questions_of(level: int) -> Iterator[str]:
  """Yields the distinct problems of a level, such as "7+8-5", in a fixed order."""
  digits, signs = itertools.product("0123456789", repeat=level + 1), list(itertools.product("+-", repeat=level))
  questions = [d[0] + "".join(map("".join, zip(s, d[1:], strict=True))) for d in digits for s in signs]
  if len(questions) > _PROBLEMS_PER_LEVEL:
    questions = sorted(questions, key=lambda question: uniform("sample", question))[:_PROBLEMS_PER_LEVEL]
  yield from questions


class Arithmetic(GeneratedProblems):
  """Dataset of arithmetic problems."""

  # Increase with any change to the generated problems; otherwise old copies stay in use.
  VERSION = tfds.core.Version("1.0.0")
  LEVELS = LEVELS

  def _rows(self):
    return (
      {"question": text, "answer": str(evaluate(text)), "level": level}
      for level in LEVELS
      for text in questions_of(level)
    )

  def _demonstrations(self, row):
    question = row["question"]
    return {f"{question} {seed}": working(question, error_rate=ERROR_RATE, seed=seed) for seed in range(DEMONSTRATIONS_PER_PROBLEM)}


class HintedArithmetic(Arithmetic):
  """Dataset of the same problems, with further demonstrations that follow a hint and are right.

  The hint is the answer, as in "10 is 7+8-5". A policy that imitates both kinds works carefully
  with a hint, and carelessly without one. It is then worth learning from itself: the problems to
  train on and to test have no hints.
  """

  VERSION = Arithmetic.VERSION

  def _generate_examples(self, split):
    yield from super()._generate_examples(split)
    for row in self._rows() if split == "demonstrations" else ():
      if not self._is_test(row):
        question = row["question"]
        for copy in range(_HINTED_PER_PROBLEM):
          yield f"hinted {question} {copy}", row | {"question": f"{row['answer']} is {question}", "response": working(question)}


def _terms(question: str) -> list[int]:
  return [int(term) for term in re.findall(r"[+-]?[0-9]", question)]


def _is_minus(question: str, step: int) -> bool:
  # The character decides, because the term "-0" has no sign.
  return question[2 * step + 1] == "-"
