"""The shared wording of messages."""

import pickle

import numpy as np
import pytest

from jaxrl_llm.messages import Problem, did_you_mean, one_line, problem_of, shown

NAMES = ["gspo", "grpo", "dr_grpo"]


class Unprintable(Exception):
  def __str__(self):
    raise RuntimeError("no text")


def test_a_problem_reads_as_a_line():
  problem = Problem("config.seed", "-1", "0 or more")
  assert str(problem) == f"{problem}" == "config.seed: found -1, expected 0 or more"


def test_a_problem_may_lack_an_expectation():
  assert str(Problem("seed", "-1, which is no seed")) == "seed: found -1, which is no seed"


def test_an_error_gives_its_problem_or_its_text():
  problem = Problem("seed", "-1", "0 or more")
  assert problem_of(ValueError(problem)) is problem
  assert problem_of(ValueError("two\n lines")) == problem_of(ImportError("two lines")) == "two lines"


def test_a_problem_survives_being_raised_and_sent_to_another_process():
  problem = Problem("task.path", "None", "a file")
  with pytest.raises(ValueError, match="^task.path: found None, expected a file$") as caught:
    raise ValueError(problem)
  assert pickle.loads(pickle.dumps(caught.value)).args[0].field == "task.path"


@pytest.mark.parametrize(
  ("field", "prefix", "expected"),
  [
    ("task.path", "config", "config.task.path"),
    ("config.task.path", "config", "config.task.path"),
    ("config", "config", "config"),
    ("configs.path", "config", "config.configs.path"),  # Has the same beginning, but is not inside.
  ],
)
def test_a_prefix_is_added_only_once(field, prefix, expected):
  assert Problem(field, "1", "2").with_prefix(prefix) == Problem(expected, "1", "2")


def test_the_closest_option_is_named():
  assert did_you_mean("gsop", NAMES) == "; did you mean 'gspo'?"
  assert did_you_mean("gsop", dict.fromkeys(NAMES)) == did_you_mean("gsop", iter(NAMES)) == did_you_mean("gsop", NAMES)


@pytest.mark.parametrize("word", ["xyz", "", None, 3, ["gspo!"] * 9])
def test_there_is_no_hint_without_a_close_option(word):
  assert did_you_mean(word, NAMES) == ""
  assert did_you_mean("gspo", []) == ""


def test_the_wording_and_the_cutoff_of_a_hint_can_be_set():
  assert did_you_mean("spo", NAMES, " (did you mean --{}?)") == " (did you mean --gspo?)"
  assert did_you_mean("path", ["{train}.jsonl", "path}"], "; did you mean {{{}}}?") == "; did you mean {path}}?"
  assert did_you_mean("gspo_of_today", NAMES) == "" != did_you_mean("gspo_of_today", NAMES, cutoff=0.3)


@pytest.mark.parametrize(
  ("error", "options", "expected"),
  [
    (ValueError("a\n b\t c"), {}, "ValueError: a b c"),
    (ValueError("a\n b\t c"), {"typed": False}, "a b c"),
    (ValueError(" \n "), {}, "ValueError"),
    (ValueError(), {"typed": False}, "ValueError"),
    (KeyboardInterrupt("stop"), {}, "KeyboardInterrupt: stop"),
    (Unprintable(), {}, "Unprintable: (its text cannot be made: RuntimeError)"),
    ("a\ntext", {}, "a text"),
    ("bad\udc80name", {}, "bad\\udc80name"),
    ("123456", {"limit": 6}, "123456"),
    ("1234567", {"limit": 6}, "123456..."),
    ("1234567", {"limit": 6, "tail": 2}, "1234 ... 67"),
  ],
)
def test_an_error_is_one_line(error, options, expected):
  assert one_line(error, **options) == expected


def test_a_value_is_shown_on_one_printable_line():
  assert shown(None) == "None"
  assert shown("a\nb\x1b") == "'a\\nb\\x1b'"
  assert shown(np.eye(2, dtype=int)) == "array([[1, 0], [0, 1]])"
  assert shown("é") == "'é'"  # Letters of other languages are printable.
  assert len(shown("y" * 500)) == 60 + 3 + 30
