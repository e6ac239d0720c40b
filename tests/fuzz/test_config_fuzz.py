"""Thousands of random mistakes in every config: each is legal, or refused in clear lines."""

import contextlib
import io
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings

from jaxrl_llm.config import fields
from tests.fuzz import mutations

# Words by which every kind of message says what was found or expected.
SAYS_WHAT = re.compile(
  "found|expected|unknown field|is a section|is not a multiple|is below|takes |known: |do not split|can need|is above|nothing to train"
)
# A full garbage collection would count against the time of one config.
pytestmark = pytest.mark.usefixtures("little_garbage")
LIMIT_S = 2.0  # Processor time of one config; about 10 ms is usual.


def check(lines: list[str], mutation) -> None:
  """Checks a refusal's lines: short, distinct, with the field and what was found or expected."""
  for line in lines:
    assert isinstance(line, str) and line == line.strip() and len(line.splitlines()) == 1, (mutation, line)
    assert len(line) < 700, (mutation, line)
    assert "config." in line or line.startswith("config"), (mutation, line)
    assert SAYS_WHAT.search(line), (mutation, line)
  assert len(set(lines)) == len(lines), (mutation, lines)


def num_valid(name: str, count: int, refusal, values) -> int:
  """Tries `count` mutations of a config and returns how many of them are valid."""
  config, valid = mutations.load(name), 0

  @settings(max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
  @given(mutation=mutations.edits(sorted(fields.flatten(config)), values))
  def attempt(mutation):
    nonlocal valid
    begun = time.process_time()
    # Hides the line about dropped hyper-parameters.
    with contextlib.redirect_stdout(io.StringIO()):
      _, lines = refusal(config, mutation)
    assert time.process_time() - begun < LIMIT_S, mutation
    check(lines, mutation)
    valid += not lines

  attempt()
  return valid


WAYS = {
  "python": (mutations.refusal_in_python, mutations.VALUES),
  "command line": (mutations.refusal_on_the_command_line, mutations.TEXTS),
}


@pytest.mark.parametrize(("count", "least", "most"), [(8, 0, 7), pytest.param(400, 5, 359, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", mutations.CONFIGS)
def test_mistakes_are_refused_in_lines(name, way, count, least, most):
  assert least <= num_valid(name, count, *WAYS[way]) <= most


def test_a_mistake_made_twice_is_reported_once():
  mutation = [mutations.Edit("set", "eval.metrics", "none")] * 2
  _, lines = mutations.refusal_on_the_command_line(mutations.load("grpo"), mutation)
  assert len(lines) == 1 and lines[0].startswith("config.eval.metrics: found 'none'"), lines
