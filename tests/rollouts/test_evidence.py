"""From a graded batch to advantages: what is compared, what is learned from, what is not read."""

import dataclasses
import functools
import itertools
from functools import partial

import numpy as np
import pytest

from jaxrl_llm.advantages.estimators import ESTIMATORS, make_credit
from jaxrl_llm.objectives.corrected import mismatch_weights, read_terms
from jaxrl_llm.objectives.gspo import gspo
from jaxrl_llm.objectives.penalties import kl_estimate
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rewards.at_random import RANDOM, random_terms, with_draws
from jaxrl_llm.rewards.outcome import weigh
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import dynamic_sampling, trajectories
from jaxrl_llm.text_types import Completion, Turn
from jaxrl_llm.types import Rollouts

SLOTS, PROMPT = 6, 2
SETTINGS = {"rloo_n": {"min_valid": 2}, "gtpo": {"right_above": 0.6}}
NEEDED = ("values", "old_entropy", "old_score_norm")


@dataclasses.dataclass
class Case:
  """A batch of four responses to each of two prompts, and the learner's outputs of its tokens."""

  lengths: tuple[int, ...] = (3, 5, 6, 2, 6, 4, 1, 6)
  truncated: tuple[int, ...] = (2, 7)
  broken: tuple[int, ...] = ()
  failed: tuple[int, ...] = ()
  seed: int = 0

  def terms(self):
    """Makes two rewards with weights, the first divided among steps, and a penalty for length."""
    steps = lambda completion, example: [(0, float(completion.num_tokens % 2)), (completion.num_tokens - 1, example["value"])]
    return [WeightedReward("a", None, 1.0, steps=steps), WeightedReward("b", None, 0.25), WeightedReward("long", None, shapes=True)]

  def batch(self, parts=None, terms=None):
    rng, number = np.random.default_rng(self.seed), len(self.lengths)
    mask = np.arange(SLOTS) < np.array(self.lengths)[:, None]
    logprobs = np.where(mask, -rng.random(mask.shape), 0).astype(np.float32)
    for row in self.broken:
      logprobs[row, 0] = np.nan
    stopped = ~np.isin(np.arange(number), self.truncated)
    prompts = np.ones((number, PROMPT), np.int32)
    rollouts = Rollouts(prompts, prompts > 0, np.ones(mask.shape, np.int32), mask, logprobs, stopped)
    own = {"a": rng.random(number), "b": rng.integers(0, 2, number), "long": -0.1 * (np.array(self.lengths) == SLOTS)}
    parts = {name: np.float32(part) for name, part in (parts or own).items()}
    graded = weigh(terms or self.terms(), parts, dict.fromkeys(self.failed, ("raised", "no reward")))
    texts = [Completion("x", (1,) * n, n, bool(s)) for n, s in zip(self.lengths, stopped, strict=True)]
    return batch_lib.Batch(rollouts, texts, [{"value": float(i % 3) / 2} for i in range(number)], graded, 4, graded.valid)

  def outputs(self, *names):
    """Makes the learner's outputs for whole sequences, junk at the prompt."""
    rng = np.random.default_rng(self.seed + 1)
    drawn = {name: [rng.random(PROMPT + n).astype(np.float32) for n in self.lengths] for name in ("old_logprobs", "ref_logprobs", *NEEDED)}
    return {name: drawn[name] for name in names}


# One compiles once for all tests.
credit_function = functools.cache(make_credit)


def credit_of(name, case, *, filters=False, whiten=False, kl=None, batch=None):
  """Returns the credit of a batch, with everything that the estimator reads, and the batch."""
  estimator = ESTIMATORS[name]
  batch = case.batch() if batch is None else batch
  batch = batch._replace(counted=batch_lib.counted(batch, skips_truncated=filters, whole_groups=estimator.whole_groups))
  in_reward = dict(kl=partial(kl_estimate, estimator="k1"), kl_coef=0.3, **case.outputs("ref_logprobs", *kl)) if kl is not None else {}
  learned = case.outputs(*(field for field in NEEDED if field in estimator.needs))
  reads = dict(by_steps="step_rewards" in estimator.needs, by_states="step_states" in estimator.needs)
  evidence = trajectories.evidence(batch, rewards=case.terms(), **reads, **in_reward, **learned)
  return credit_function(name, 4, whiten=whiten, **SETTINGS.get(name, {}))(evidence), batch


def same_for_the_others(one, other, left_out):
  """Asserts that two credits give every sequence but some the same advantages, and those none."""
  others = [row for row in range(8) if row not in left_out]
  for a, b in zip(one[:2], other[:2], strict=True):
    if a is not None:
      np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])
      assert not np.any(np.asarray(b)[list(left_out)])
  assert (one.role_baselines is None) or np.array_equal(one.role_baselines, other.role_baselines)


LEARNER, SAMPLER = ("old_logprobs",), ()
WITH_KL = [name for name, estimator in ESTIMATORS.items() if estimator.takes_kl]


@pytest.mark.parametrize("whiten", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
  ("name", "kl"), [*((name, None) for name in ESTIMATORS), *itertools.product(WITH_KL, [LEARNER, SAMPLER])]
)
def test_the_overlong_filter_moves_no_advantage_of_other_responses(name, kl, whiten):
  case = Case()
  plain, _ = credit_of(name, case, whiten=whiten, kl=kl)
  filtered, batch = credit_of(name, case, whiten=whiten, kl=kl, filters=True)
  assert np.flatnonzero(~batch.counted).tolist() == [2, 7] and np.any(plain.advantages[2]) and np.any(plain.advantages[7])
  same_for_the_others(plain, filtered, case.truncated)


@pytest.mark.parametrize(("name", "kl"), [*((name, None) for name in ESTIMATORS), *((name, LEARNER) for name in WITH_KL)])
def test_a_non_finite_log_probability_of_the_sampler_moves_no_other_advantage(name, kl):
  plain, broken = (credit_of(name, Case(broken=rows), kl=kl, whiten=True) for rows in ((), (1,)))
  same_for_the_others(plain[0], broken[0], [1])
  assert np.all(np.isfinite(broken[0].advantages))


@pytest.mark.parametrize("name", WITH_KL)
def test_a_penalty_that_is_not_known_leaves_its_response_without_a_reward(name):
  """Without a log-probability there is no penalty, and a reward without its penalty is too high."""
  unknown, failed = (credit_of(name, case, kl=SAMPLER)[0] for case in (Case(broken=(1,)), Case(failed=(1,))))
  np.testing.assert_array_equal(unknown.advantages, failed.advantages)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_response_without_a_reward_is_in_no_statistic(name):
  parts = {"a": np.float32([0.1, 99, 0.7, 1, 0, 0.2, 0.5, 1]), "b": np.float32([0, 1, 1, 0, 1, 0, 0, 1]), "long": np.zeros(8, np.float32)}
  low = parts | {"a": np.where(parts["a"] == 99, -99, parts["a"]), "b": np.where(parts["a"] == 99, 0, parts["b"])}
  case, other = Case(failed=(1,)), Case(failed=(1,))
  of_others = case.terms()[0].steps
  steps = lambda completion, example: [(1, 7.0)] if completion.num_tokens == 5 else of_others(completion, example)
  other.terms = lambda: [case.terms()[0]._replace(steps=steps), *case.terms()[1:]]
  one, two = (credit_of(name, x, batch=x.batch(own), whiten=True)[0] for x, own in ((case, parts), (other, low)))
  np.testing.assert_array_equal(one.advantages, two.advantages)
  assert not np.any(one.advantages[1])


def test_tokens_are_weighed_by_their_mismatch_whether_learned_from_or_not():
  case = Case(broken=(1,))
  batch = case.batch()
  batch = batch._replace(counted=batch_lib.counted(batch, skips_truncated=True, whole_groups=False))
  weights, old = mismatch_weights(read_terms(gspo(), ["tis:cap=1.1"])), case.outputs("old_logprobs")
  evidence = trajectories.evidence(batch, rewards=case.terms(), **old, mismatch_weights=weights)
  of_learner = np.stack([np.pad(x[PROMPT:], (0, SLOTS - len(x) + PROMPT)) for x in old["old_logprobs"]])
  k = np.minimum(np.exp(of_learner - np.where(evidence.written > 0, batch.rollouts.logprobs, 0)), 1.1)
  np.testing.assert_allclose(evidence.importance * evidence.written, k * evidence.written, rtol=1e-6)
  assert np.flatnonzero(~evidence.valid).tolist() == [1] and np.any(evidence.written[2] > 0) and not np.any(evidence.mask[2])
  assert 0.1 < np.mean(k == np.float32(1.1)) < 0.9


# ---------------------------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------------------------


def two_rewards(parts, weights, **settings):
  terms = [WeightedReward(name, None, weight) for name, weight in zip("ab", weights, strict=True)]
  batch = Case(lengths=(2,) * 4, truncated=()).batch(dict(zip("ab", parts, strict=True)), terms)
  return np.asarray(make_credit("per_reward", 4, **settings)(trajectories.evidence(batch, rewards=terms)).advantages)[:, 0]


@pytest.mark.parametrize(
  ("parts", "weights", "expected"),
  [
    ([[1, 0, 1, 0], [0, 1, 0, 1]], (1, 0.1), [0.8660, -0.8660, 0.8660, -0.8660]),
    ([[1, 0, 0, 0], [1, 1, 0, 0]], (1, 0.05), [1.4988, -0.4435, -0.5276, -0.5276]),
    ([[1, 0, 0, 0], [1, 1, 0, 0]], (1, 20), [0.9139, 0.8168, -0.8653, -0.8653]),
    ([[1, 0, 0, 0], [1, 1, 0, 0]], (1, 0), [1.5, -0.5, -0.5, -0.5]),
    ([[1, 0, 0, 0], [1, 1, 0, 0]], (0, -3), [-0.8660, -0.8660, 0.8660, 0.8660]),
    ([[0.001, 0, 0, 0], [500, 500, 0, 0]], (1, 1), [1.3321, 0.2061, -0.7691, -0.7691]),
  ],
)
def test_the_weights_of_rewards_apply_after_each_is_normalised(parts, weights, expected):
  np.testing.assert_allclose(two_rewards(parts, weights), expected, atol=1e-3 if parts[0][0] == 0.001 else 1e-4)


@pytest.mark.parametrize("weights", [(1, 0.1), (0.5, 4), (2, -1)])
def test_without_a_deviation_the_weights_are_those_of_the_total(weights):
  parts = np.float64([[1, 0, 0, 0], [1, 1, 0, 0]])
  total = weights @ (parts - parts.mean(axis=1, keepdims=True))
  np.testing.assert_allclose(two_rewards(parts, weights, normalize_std=False), total / np.sqrt(np.sum(total**2) / 3), rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------------------------------------------------


def steps_by_end(batch, terms, row):
  evidence = trajectories.evidence(batch, rewards=terms, by_steps=True)
  return {int(end): float(evidence.step_rewards[row, end]) for end in np.flatnonzero(evidence.step_ends[row])}


def test_all_of_the_reward_that_is_not_of_steps_reaches_the_last_step():
  case = Case()
  batch, terms = case.batch(), case.terms()
  for row, example in enumerate(batch.examples):
    rest = 0.25 * batch.graded.parts["b"][row] + batch.graded.parts["long"][row]
    first, last = float(batch.completions[row].num_tokens % 2), example["value"]
    expected = {0: first, case.lengths[row] - 1: last + rest} if case.lengths[row] > 1 else {0: first + last + rest}
    assert steps_by_end(batch, terms, row) == pytest.approx(expected)
  halved = [term._replace(weight=0.5) if term.steps else term for term in terms]
  assert steps_by_end(batch, halved, 1)[0] == 0.5
  assert steps_by_end(batch, [term._replace(steps=None) for term in terms], 1) == {4: pytest.approx(float(batch.graded.totals[1]))}


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_the_turns_of_a_conversation_are_its_steps_whatever_their_weight(weight):
  turns = (Turn("", "", 0.5, 1), Turn("", "", 2.0, 3))
  tool = WeightedReward("a", None, weight, steps=lambda talk, example: [(turn.end, turn.reward) for turn in talk.turns])
  terms = [tool, WeightedReward("b", None), WeightedReward("long", None, shapes=True)]
  batch = Case().batch(terms=terms)
  batch = batch._replace(completions=[talk._replace(turns=turns) for talk in batch.completions])
  rest = float(batch.graded.parts["b"][1] + batch.graded.parts["long"][1])
  assert steps_by_end(batch, terms, 1) == pytest.approx({1: 0.5 * weight, 3: 2.0 * weight + rest})
  assert steps_by_end(batch, terms[1:], 1) == pytest.approx({1: 0, 3: rest})


def test_steps_of_a_prompt_that_begin_in_the_same_state_have_the_same_number():
  """By the environment's key if it has one, else by the tokens so far; never across prompts."""
  case = Case(lengths=(6,) * 8, truncated=())
  batch = case.batch()
  tokens = np.array(batch.rollouts.tokens)
  # The reply is what tells the third response from the first.
  tokens[[1, 5], 0], tokens[2, 2] = 2, 3
  written = batch.rollouts.mask & (np.arange(SLOTS) != 2)
  named = {3: "a", 7: "a", 6: "b"}
  talks = [(Turn("", "", 0.0, 1), Turn("", "", 1.0, 5, named.get(row))) for row in range(8)]
  completions = [talk._replace(turns=turns) for talk, turns in zip(batch.completions, talks, strict=True)]
  batch = batch._replace(rollouts=batch.rollouts._replace(tokens=tokens, written=written), completions=completions)
  made = trajectories.evidence(batch, rewards=case.terms(), by_steps=True, by_states=True)
  ends, states = made.step_ends, made.step_states
  # The first reward divides itself among a response's steps as well, at tokens 0 and 5.
  of = {end: states[:, end].tolist() for end in (0, 1, 5)}
  assert ends[:, [0, 1, 5]].all() and ends.sum() == 24
  assert of[0] == [of[0][0]] * 4 + [of[0][4]] * 4 and of[0][0] != of[0][4]
  alike = lambda column, group: [column[group].index(x) for x in column[group]]
  assert alike(of[1], slice(0, 4)) == [0, 1, 0, 0] and alike(of[5], slice(0, 4)) == [0, 1, 2, 3]
  assert alike(of[5], slice(4, 8)) == [0, 1, 2, 3] and of[5][3] != of[5][7]
  assert states[ends].min() >= 0 and len(set(states[ends])) == states[ends].max() + 1


# ---------------------------------------------------------------------------------------------------------------------------------------
# The control with random rewards
# ---------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_estimator_reads_the_true_rewards_beside_random_ones(name):
  """Other true rewards, steps, turns and failures leave the evidence as it is."""
  rng, draws, seen = np.random.default_rng(5), np.float32([1, 0, 0, 1, 1, 0, 0, 0]), []
  for order in (np.arange(8), rng.permutation(8)):
    case = Case()
    true = {part: x[order] for part, x in case.batch().graded.parts.items()}
    steps = lambda completion, example, order=order: [(0, float(order[completion.num_tokens]))]
    turns = [(Turn("", "", float(order[i]), 0),) if i % 2 else () for i in range(8)]
    terms = random_terms([term._replace(steps=steps if term.steps else None) for term in case.terms()])
    true = {RANDOM: np.zeros(8, np.float32)} | {part: np.where(order == 3, np.nan, x) for part, x in true.items()}
    batch = case.batch(true, terms)
    batch = batch._replace(completions=[talk._replace(turns=own) for talk, own in zip(batch.completions, turns, strict=True)])
    batch = batch._replace(graded=with_draws(terms, batch.graded, draws))
    case.terms = lambda terms=terms: terms
    seen.append(credit_of(name, case, batch=batch))
    assert batch.graded.totals.tolist() == batch.graded.verdicts.tolist() == draws.tolist() and batch.graded.valid.all()
  np.testing.assert_array_equal(seen[0][0].advantages, seen[1][0].advantages)


@pytest.mark.parametrize("name", [name for name, estimator in ESTIMATORS.items() if estimator.compares_groups])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_random_rewards_give_no_advantage(name, reward):
  case = Case()
  terms = random_terms(case.terms())
  batch = case.batch({RANDOM: np.zeros(8)} | case.batch().graded.parts, terms)
  case.terms = lambda: terms
  batch = batch._replace(graded=with_draws(terms, batch.graded, np.full(8, reward)))
  assert not np.any(credit_of(name, case, batch=batch)[0].advantages)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Groups with a signal
# ---------------------------------------------------------------------------------------------------------------------------------------


def signal(name, batch, terms, *, shaped=False, filters=False, **settings):
  estimator = ESTIMATORS[name]
  batch = batch._replace(counted=batch_lib.counted(batch, skips_truncated=filters, whole_groups=estimator.whole_groups))
  compare = credit_function(name, batch.group_size, **settings) if estimator.compares_groups else None
  options = dict(rewards=terms, by_steps="step_rewards" in estimator.needs, by_states="step_states" in estimator.needs)
  return dynamic_sampling.with_signal(batch, compare, shaped=shaped, **options).tolist()


COMPARING = [name for name, estimator in ESTIMATORS.items() if estimator.compares_groups and name != "steps"]


def test_rewards_whose_sum_is_constant_are_a_signal_for_an_estimator_of_each():
  terms = [WeightedReward(name, None) for name in "abc"]
  batch = Case().batch(dict(a=[1, 0, 0, 0] * 2, b=[0, 1, 0, 0] * 2, c=[0, 0, 1, 1] * 2), terms)
  assert signal("per_reward", batch, terms) == [True, True] and signal("group", batch, terms) == [False, False]


def test_steps_that_differ_are_a_signal_though_the_verdicts_are_equal():
  case = Case()
  batch = case.batch(dict(a=np.ones(8), b=np.ones(8), long=np.zeros(8)))
  assert signal("steps", batch, case.terms()) == [True, True] and signal("group", batch, case.terms()) == [False, False]


@pytest.mark.parametrize("name", [*COMPARING, "steps"])
def test_a_penalty_for_length_makes_no_group_of_equal_verdicts_mixed(name):
  terms = [WeightedReward("a", None), WeightedReward("long", None, 0.5, shapes=True)]
  for verdict in (0.0, 1.0):
    batch = Case().batch(dict(a=np.full(8, verdict), long=np.linspace(0, 1, 8)), terms)
    assert signal(name, batch, terms) == [False, False]
    assert signal(name, batch, terms, shaped=True) == [True, True]


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("rewards", [[0, 1, 1, 1], [0, 1e-20, 0, 0], [0.95, 0.95, 0.95, 0]])
def test_any_difference_is_a_signal_and_equal_rewards_are_none(name, rewards):
  terms = [WeightedReward("a", None)]
  batch = Case().batch(dict(a=[*rewards, 0.1, 0.1, 0.1, 0.1]), terms)
  # The best of any two is the same if only one response is worse.
  assert signal(name, batch, terms) == [name != "pass_at_k" or rewards[1] < rewards[0] or rewards[2] == 0, False]


def test_unknown_rewards_are_not_compared():
  terms, case = [WeightedReward("a", None)], Case(failed=(0, 4, 5))
  batch = case.batch(dict(a=[1, 0, 0, 1, 1, 0, 1, 1]), terms)
  assert signal("group", batch, terms) == [True, False]  # 0 0 1, and 1 1
  # Without a comparison of groups, a signal is a difference of rewards.
  assert signal("returns", batch, terms) == [True, False]
  assert signal("pass_at_k", batch, terms) == signal("rloo_n", batch, terms, min_valid=4) == [False, False]
  known = batch._replace(advantages=np.zeros((8, SLOTS)), signal=np.array(signal("group", batch, terms, shaped=True)))
  assert batch_lib.metrics(known)["group/frac_reward_zero_std"] == 0.5


def test_a_group_that_a_filter_leaves_out_has_no_signal():
  terms, case = [WeightedReward("a", None)], Case(truncated=(0, 1, 2, 3, 4))
  batch = case.batch(dict(a=[1, 0, 0, 1, 1, 0, 0, 0]), terms)
  assert signal("group", batch, terms) == [True, True] and signal("group", batch, terms, filters=True) == [False, True]
