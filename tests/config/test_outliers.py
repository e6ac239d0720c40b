"""Texts that are left out if sizes follow from the data: a rare tail, never a part of the task."""

import pytest

from jaxrl_llm.config.fields import base
from jaxrl_llm.config.outliers import NO_LIMITS, SizeLimits, describe_limits, find_limits
from jaxrl_llm.config.sizes import Bounds, Lengths

BOUNDS = Bounds(d_model=64)  # A row of 128 slots is cheap.
BUDGET = 32


def limits_of(lengths, **changes):
  config = base()
  config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
  assert config.rollout.max_new_tokens == BUDGET
  return find_limits(config, lengths, BOUNDS)


@pytest.mark.parametrize(
  ("train", "test", "expected"),
  [
    ([20] * 130 + [100_000], [], 4 * (20 + BUDGET) - BUDGET),
    ([20] * 100, [20] * 30 + [100_000], 4 * (20 + BUDGET) - BUDGET),  # A test problem alone.
    ([20] * 19 + [1000], [], 4 * (20 + BUDGET) - BUDGET),  # One of twenty is 5 %.
    ([20] * 18 + [1000], [], None),
    ([20] * 95 + [1000] * 5, [], 4 * (20 + BUDGET) - BUDGET),
    ([20] * 94 + [1000] * 6, [], None),
    ([20] * 50 + [5000] * 50, [], None),  # Two kinds of problems.
    ([20] * 990, [9000] * 10, None),  # A test of its own kind, 1 % of all.
    ([20] * 960, [30] * 30 + [9000] * 10, 4 * (30 + BUDGET) - BUDGET),
    ([20] * 99 + [4 * (20 + BUDGET) - BUDGET], [], None),
    ([2] * 99 + [96], [], None),  # Cheap, though 4 times the room.
    ([2] * 99 + [150], [], 4 * (2 + BUDGET) - BUDGET),
    ([20 + n for n in range(300)], [], None),
    ([1000] * 50, [], None),  # One system message in all.
    ([], [], None),
  ],
)
def test_prompts(train, test, expected):
  limits = limits_of(Lengths(train, test))
  assert limits == NO_LIMITS._replace(prompt=expected)
  if expected is not None:
    everything = [*train, *test]
    assert 0 < sum(n > expected for n in everything) <= 0.05 * len(everything)
  assert limits_of(Lengths(train, test), rollout__prompt_buckets=(64,)) == NO_LIMITS


@pytest.mark.parametrize(
  ("demonstrations", "steps", "expected"),
  [
    ([40] * 99 + [9000], 10, 20 + BUDGET),
    ([40] * 95 + [60] * 5, 10, 20 + BUDGET),
    ([40] * 94 + [60] * 6, 10, None),  # The budget is too small, which another check says.
    ([40] * 99 + [9000], 0, 4 * 40),  # Shown as solved problems.
    ([40] * 99 + [120], 0, None),
    ([40] * 99, 10, None),
  ],
)
def test_demonstrations(demonstrations, steps, expected):
  lengths = Lengths([20] * len(demonstrations), demonstrations=demonstrations, demonstrated=[20] * len(demonstrations))
  assert limits_of(lengths, warm_start__num_steps=steps) == NO_LIMITS._replace(demonstration=expected)


@pytest.mark.parametrize(
  ("counts", "expected"), [([1] * 40 + [60], 4), ([1] * 40 + [4], None), ([2] * 30 + [9] * 10, None), ([3] * 19 + [13], 12)]
)
def test_pictures(counts, expected):
  lengths = Lengths([20] * len(counts), pictures=[(20, count, 8) for count in counts])
  assert limits_of(lengths) == NO_LIMITS._replace(pictures=expected)
  assert limits_of(lengths, rollout__prompt_images=64) == NO_LIMITS


def test_each_line_says_how_many_why_and_how_to_keep_them():
  pictures = [(20, 1, 8), (9000, 60, 100)]
  lengths = Lengths([20] * 60 + [7000], [20] * 9 + [9000], [40] * 60 + [7010, 7010], pictures, demonstrated=[20] * 61 + [7000])
  lines = describe_limits(SizeLimits(176, 52, 4), lengths)
  assert lines[0] == (
    "  2 problem(s) with prompts above 176 tokens are left out, which need more than 4 times the room of 95% of the problems; "
    "to keep them: --config.rollout.prompt_buckets='(9000,)'"
  )
  assert "more than 4 picture(s)" in lines[1] and "--config.rollout.prompt_images=60" in lines[1]
  assert "1 demonstration(s) above 52 tokens" in lines[2] and describe_limits(NO_LIMITS, lengths) == []
