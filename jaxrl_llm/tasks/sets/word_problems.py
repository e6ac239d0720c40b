"""Grade-school word problems, generated offline by reasoning-gym's `gsm_symbolic`.

The generator fills templates of GSM8K with fresh names and numbers.

    question    A cup of tea is 7 ounces of tea. James drinks 6 cups of tea. If tea has 3 calories
                per ounce how many calories did he consume?
    response    He drank 7*6=42 ounces of tea.
                So he drank 42*3=126 calories of tea
                #### 126

There are 85 templates, each with a solution of its own number of steps. A problem's level is that
number, counted as the lines of the solution that compute something: 2, 3, 4, or 5 for five or more.
Level 1 has the two-step problems that are easy to read and to compute: at most 60 words, no
percentages in the problem, and only whole numbers up to 50 in problem and solution. Train and test
share the templates and differ in names and numbers.

References:
  GSM-Symbolic: Understanding the limitations of mathematical reasoning in large language models,
  arXiv:2410.05229, 2024.
"""

import collections
import re
from typing import Any

import tensorflow_datasets as tfds

from jaxrl_llm.messages import MissingPackageError
from jaxrl_llm.tasks.files.storage import GeneratedProblems

LEVELS = (1, 2, 3, 4, 5)
NUM_PROBLEMS = 16_000  # Each level keeps its first `MAX_PER_LEVEL`; level 1 is rare.
MAX_PER_LEVEL = 1000
SEED = 0
_SMALL, _SHORT = 50, 60  # Largest number and most words of a problem of level 1.
# Ends every question of the generator; the prompt has its own.
_GENERATOR_REQUEST = " Give the result as your final answer. Do not include units."


def level_of(question: str, solution: str) -> int:
  """Returns the level of a problem with a written-out solution.

  The level is the number of lines with an equation, 5 for five or more, and 1 for two easy ones.

  Example:
    >>> solution = "He drank 7*6=42 ounces.\\nSo he drank 42*3=126 calories.\\n#### 126"
    >>> level_of("James drinks 6 cups of 7 ounces ...", solution)
    2
  """
  steps = min(sum("=" in line for line in solution.split("\n")), LEVELS[-1])
  numbers = re.findall(r"[0-9][0-9.,]*", f"{question} {solution}")
  easy = len(question.split()) <= _SHORT and "%" not in question
  easy = easy and all(number.rstrip(".,").isdigit() and int(number.rstrip(".,")) <= _SMALL for number in numbers)
  return 1 if steps == 2 and easy else steps


def generate_rows() -> dict[str, dict[str, Any]]:
  """Generates all problems, as rows by question; `response` is the generator's own solution.

  Raises:
    MissingPackageError: If the package reasoning-gym is missing.
    ValueError: If reasoning-gym's problems have another form. One line.
  """
  try:
    import reasoning_gym
  except ImportError as error:
    raise MissingPackageError("task gsm_symbolic needs the package reasoning-gym: pip install 'jaxrl_llm[tasks]'") from error
  rows, counts = {}, collections.Counter()
  for problem in reasoning_gym.create_dataset("gsm_symbolic", size=NUM_PROBLEMS, seed=SEED):
    question, request, rest = problem["question"].partition(_GENERATOR_REQUEST)
    answer = problem["answer"]
    steps, mark, _ = problem["metadata"]["answer_cot"].rpartition("\n####")
    # Some solutions end with another spelling of the answer, such as "36.0".
    response = f"{steps.rstrip()}\n#### {answer}"
    level = level_of(question, response)
    if not request or rest or not mark or level not in LEVELS or not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", answer):
      raise ValueError(f"task gsm_symbolic: found a problem of another form in reasoning-gym ({question[:60]!r}), expected release 0.1.25")
    if question not in rows and counts[level] < MAX_PER_LEVEL:
      rows[question] = {"question": question, "answer": answer, "level": level, "response": response}
      counts[level] += 1
  return rows


class GsmSymbolic(GeneratedProblems):
  """Dataset of word problems."""

  # Increase with any change to the generated problems; otherwise old copies stay in use.
  VERSION = tfds.core.Version("1.0.0")
  LEVELS = LEVELS
  TEMPLATE = "{question}\nAnswer with a number after ####."

  def _rows(self):
    return generate_rows().values()
