"""Tests of the project. They need no device and no pytest: `python -m unittest` runs them."""

import json
import runpy
import unittest
from pathlib import Path
from types import SimpleNamespace

import problems
import rewards

from jaxrl_llm.config.check import config_problems

FOLDER = Path(__file__).resolve().parent


class ProjectTest(unittest.TestCase):
  """The task, the reward and the config fit together."""

  def test_the_answers_are_right(self):
    """Checks the answers by other means than the generator."""
    for row in problems.problems(count=100):
      self.assertEqual(row["answer"], max(map(int, row["question"])))

  def test_the_file_is_that_of_the_generator(self):
    """Checks that the file was written after the last change of the generator."""
    lines = (FOLDER / "problems.jsonl").read_text(encoding="utf-8").splitlines()
    # Not assertEqual, which would spend minutes on the difference of two long lists.
    same = [json.loads(line) for line in lines] == problems.problems()
    self.assertTrue(same, "run `python problems.py`")

  def test_brief_prefers_a_digit_alone(self):
    """Checks the reward on two responses."""
    response = lambda num_tokens, stopped: SimpleNamespace(text="7", num_tokens=num_tokens, stopped=stopped)
    self.assertEqual(rewards.brief(response(2, True), {}), 1.0)
    self.assertEqual(rewards.brief(response(4, False), {}), 0.0)

  def test_the_config_has_no_problem(self):
    """Checks the config as a run does before it starts."""
    get_config = runpy.run_path(str(FOLDER / "configs" / "my_project.py"))["get_config"]
    for argument in ("", "tiny"):
      self.assertEqual(list(config_problems(get_config(argument))), [])


if __name__ == "__main__":
  unittest.main()
