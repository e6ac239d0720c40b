"""Lengths in tokens."""

import math

import pytest

from jaxrl_llm.rewards import cosine_length, length_target
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


def test_impossible_settings():
  for settings in ((0, 1), (1, 0), (-1, 1)):
    with pytest.raises(ValueError, match="length_target: found .*expected two positive numbers"):
      length_target(*settings)
  for settings in ((1.0, 1.0, 5), (1.0, 0.0, 0)):
    with pytest.raises(ValueError, match="cosine_length: found .*expected different rewards and max_tokens above 0"):
      cosine_length(*settings)
