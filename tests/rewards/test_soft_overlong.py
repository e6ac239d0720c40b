"""DAPO's soft overlong punishment, in tokens."""

import numpy as np
import pytest

from jaxrl_llm.rewards.soft_overlong import soft_overlong
from jaxrl_llm.text_types import Completion


def penalty(num_tokens, max_tokens=20480, buffer_tokens=4096, text=""):
  return soft_overlong(max_tokens, buffer_tokens)(Completion(text=text, token_ids=(), num_tokens=num_tokens, stopped=True), {})


@pytest.mark.parametrize("num_tokens, expected", [(0, 0), (16384, 0), (18432, -0.5), (20480, -1), (20481, -1), (10**6, -1)])
def test_golden(num_tokens, expected):
  assert penalty(num_tokens) == expected


def test_shape():
  lengths = np.arange(0, 60)
  values = np.array([penalty(int(n), max_tokens=40, buffer_tokens=16) for n in lengths])
  assert values.min() == -1 and values.max() == 0
  slopes = np.diff(values)
  assert (slopes <= 0).all()
  # This is the whole ramp, so the penalty is continuous at both knots.
  np.testing.assert_allclose(slopes[24:40], -1 / 16)
  assert (slopes[:24] == 0).all() and (slopes[40:] == 0).all()


def test_the_whole_length_may_be_ramp():
  assert penalty(5, max_tokens=10, buffer_tokens=10) == -0.5


def test_characters_do_not_count():
  assert penalty(5, max_tokens=40, buffer_tokens=16, text="x" * 1000) == 0


@pytest.mark.parametrize("max_tokens, buffer_tokens", [(40, 0), (40, -1), (40, 41), (0, 0), (-5, 3)])
def test_impossible_ramps(max_tokens, buffer_tokens):
  with pytest.raises(ValueError, match="soft_overlong: found .*expected 0 < buffer_tokens <= max_tokens"):
    soft_overlong(max_tokens, buffer_tokens)
