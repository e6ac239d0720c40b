"""Lengths in tokens."""

import math

import numpy as np
import pytest

from jaxrl_llm.rewards import cosine_length, length_target, soft_overlong
from jaxrl_llm.text_types import Completion


def of_length(fn, num_tokens):
  # Characters do not count.
  return fn(Completion(text="x" * 999, token_ids=(), num_tokens=num_tokens, stopped=True), {})


@pytest.mark.parametrize("num_tokens, expected", [(0, 0), (50, 0), (75, 0.5), (100, 1), (110, 0.8), (150, 0), (10**6, 0)])
def test_target(num_tokens, expected):
  assert of_length(length_target(100, 50), num_tokens) == pytest.approx(expected)


def test_cosine():
  curve = [of_length(cosine_length(1.0, 0.5, 100), n) for n in range(0, 121)]
  assert curve[0] == 1 and curve[50] == pytest.approx(0.75) and curve[100:] == pytest.approx([0.5] * 21)
  assert all(a >= b for a, b in zip(curve, curve[1:], strict=False))
  # The curve for wrong answers, where longer is better.
  assert of_length(cosine_length(-1.0, 0.0, 100), 25) == pytest.approx(-(1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize("num_tokens, expected", [(0, 0), (16384, 0), (18432, -0.5), (20480, -1), (20481, -1), (10**6, -1)])
def test_soft_overlong(num_tokens, expected):
  assert of_length(soft_overlong(20480, 4096), num_tokens) == expected


def test_the_ramp_of_soft_overlong():
  values = np.array([of_length(soft_overlong(40, 16), n) for n in range(60)])
  assert values.min() == -1 and values.max() == 0
  slopes = np.diff(values)
  # This is the whole ramp, so the penalty is continuous at both knots.
  np.testing.assert_allclose(slopes[24:40], -1 / 16)
  assert (slopes[:24] == 0).all() and (slopes[40:] == 0).all()
  assert of_length(soft_overlong(10, 10), 5) == -0.5, "the whole length may be ramp"


@pytest.mark.parametrize("make, settings, message", [
  *((length_target, settings, "two positive numbers") for settings in ((0, 1), (1, 0), (-1, 1))),
  *((cosine_length, settings, "different rewards and max_tokens above 0") for settings in ((1.0, 1.0, 5), (1.0, 0.0, 0))),
  *((soft_overlong, settings, "0 < buffer_tokens <= max_tokens") for settings in ((40, 0), (40, -1), (40, 41), (0, 0), (-5, 3))),
])  # fmt: skip
def test_impossible_settings(make, settings, message):
  with pytest.raises(ValueError, match=f"{make.__name__}: found .*expected {message}"):
    make(*settings)
