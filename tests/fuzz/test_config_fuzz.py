"""Thousands of random mistakes in every config: each gives a config without a problem, or lines that say which field, what and why."""

import contextlib
import io
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings

from jaxrl_llm.config import fields
from tests.fuzz import mutations

# What was found or expected, in the words of every kind of message.
SAYS_WHAT = re.compile(
  "found|expected|unknown field|is a section|is not a multiple|is below|takes |known: |do not split|can need|is above|nothing to train"
)
pytestmark = pytest.mark.usefixtures("little_garbage")  # A full collection would be counted against some config.
LIMIT_S = 2.0  # Of processor time, for one config; some 10 ms is usual.


def check(lines: list[str], mutation) -> None:
  """Lines of a refusal: short, one each, with the field, and what was found or expected."""
  for line in lines:
    assert isinstance(line, str) and line == line.strip() and len(line.splitlines()) == 1, (mutation, line)
    assert len(line) < 700, (mutation, line)
    assert "config." in line or line.startswith("config"), (mutation, line)
    assert SAYS_WHAT.search(line), (mutation, line)
  assert len(set(lines)) == len(lines), (mutation, lines)


def refuses_or_takes(name: str, count: int, refusal, values) -> int:
  """Tries `count` mutations of a config; gives how many of them are valid."""
  config, valid = mutations.load(name), 0

  @settings(max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
  @given(mutation=mutations.edits(sorted(fields.flatten(config)), values))
  def attempt(mutation):
    nonlocal valid
    begun = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):  # What another objective drops is said there.
      _, lines = refusal(config, mutation)
    assert time.process_time() - begun < LIMIT_S, mutation
    check(lines, mutation)
    valid += not lines

  attempt()
  return valid


ROADS = {
  "python": (mutations.refusal_in_python, mutations.VALUES),
  "command line": (mutations.refusal_on_the_command_line, mutations.TEXTS),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", mutations.CONFIGS)
def test_mistakes_are_refused_in_lines(name, road):
  assert refuses_or_takes(name, 15, *ROADS[road]) < 15


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", mutations.CONFIGS)
def test_thousands_of_mistakes_are_refused_in_lines(name, road):
  assert 4 < refuses_or_takes(name, 400, *ROADS[road]) < 360


def test_a_mistake_made_twice_is_said_once():
  mutation = [mutations.Edit("set", "eval.metrics", "none")] * 2
  _, lines = mutations.refusal_on_the_command_line(mutations.load("grpo"), mutation)
  assert len(lines) == 1 and lines[0].startswith("config.eval.metrics: found 'none'"), lines
