"""Lengths in tokens."""

import math

import numpy as np
import pytest

from jaxrl_llm.rewards import RewardSpec, WeightedReward, cosine_length, length_by_pass_rate, length_target, soft_overlong, weighted
from jaxrl_llm.rewards.outcome import grade, with_group_terms
from jaxrl_llm.text_types import Completion, Turn


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


def conversation(num_written, ends):
  return Completion("", (), num_written, True, tuple(Turn("", "", 0.0, end) for end in ends))


TALKS = [conversation(5, ()), conversation(4, (1, 6)), conversation(9, (3, 5, 20)), conversation(1, (0,))]


def test_lengths_by_pass_rate_are_those_of_a_loop():
  verdicts = [1.0, 0.25, 0.0, 0.7]
  expected = []
  for talk in TALKS:
    replies = max([turn.end + 1 for turn in talk.turns], default=talk.num_tokens) - talk.num_tokens
    share = talk.num_tokens / 9 + 0.4 * replies / (21 - 9) + 0.3 * len(talk.turns) / 3
    expected.append(sum(verdicts) / 4 * share)
  given = length_by_pass_rate(context=0.4, turns=0.3).of_group(np.array(verdicts), TALKS)
  np.testing.assert_allclose(given, expected, rtol=1e-12)
  # Responses without replies or turns have no share of them.
  assert length_by_pass_rate(0.4, 0.3).of_group(np.ones(2), TALKS[:1] * 2).tolist() == [1, 1]


@pytest.mark.parametrize("verdict", [0.0, -1.0])
def test_a_prompt_that_is_never_solved_has_no_pressure_on_its_length(verdict):
  assert length_by_pass_rate().of_group(np.full(4, verdict), TALKS).tolist() == [0] * 4


@pytest.mark.parametrize("settings", [{"context": -0.1}, {"turns": -1.0}, {"turns": math.nan}])
def test_weights_of_lengths_are_not_negative(settings):
  with pytest.raises(ValueError, match="^length_by_pass_rate: found context="):
    length_by_pass_rate(**settings)


def test_a_term_of_a_group_reads_the_other_terms_of_its_group_alone():
  """A response without a reward is not in its group, and terms that only shape are not read."""
  right = lambda completion, example: {1: 1.0, 2: 0.0, 4: None}.get(completion.num_tokens, 0.5)
  terms = [
    WeightedReward("right", right, 2.0), WeightedReward("shape", lambda *of: 9.0, shapes=True),
    weighted("length_by_pass_rate", RewardSpec("length_by_pass_rate"), -0.25),
  ]  # fmt: skip
  completions = [conversation(n, ()) for n in (1, 2, 4, 8, 1, 16)]

  def totals(completions, group_size):
    return with_group_terms(terms, grade(terms, completions, [{}] * len(completions)), completions, group_size)

  graded = totals(completions, 3)
  np.testing.assert_allclose(graded.parts["length_by_pass_rate"], [0.5, 1.0, 0.0, 2 / 3, 1 / 12, 4 / 3], rtol=1e-6)
  np.testing.assert_allclose(graded.totals, [11 - 0.125, 9 - 0.25, 0, 10 - 1 / 6, 11 - 1 / 48, 10 - 1 / 3], rtol=1e-6)
  assert graded.verdicts.tolist() == [2, 0, 0, 1, 2, 1] and graded.failed.tolist() == [None, None, "wrong_type", None, None, None]
  order = [4, 3, 5, 1, 2, 0]
  np.testing.assert_array_equal(totals([completions[i] for i in order], 3).totals, graded.totals[order])
