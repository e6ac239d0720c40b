"""Rewards arrive as they were returned, and a faulty function is named."""

import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import WeightedReward, score
from jaxrl_llm.text_types import Completion

COMPLETIONS = [Completion(text=f"#{i}", token_ids=(i,), num_tokens=i, stopped=True) for i in range(3)]
EXAMPLES = [{"answer": "0"}, {"answer": "5"}, {"answer": "2"}]


def test_each_completion_meets_its_own_example():
  total, parts = score([WeightedReward("final_answer", rewards.make("final_answer"))], COMPLETIONS, EXAMPLES)
  assert total.tolist() == parts["final_answer"].tolist() == [1, 0, 1]
  assert total.dtype == parts["final_answer"].dtype == np.float32


def test_weights_and_unweighted_parts():
  terms = [
    WeightedReward("answer", rewards.make("final_answer"), 2.0),
    WeightedReward("overlong", rewards.make("soft_overlong", max_tokens=2, buffer_tokens=2), 0.5),
  ]
  total, parts = score(terms, COMPLETIONS, EXAMPLES)
  assert parts["answer"].tolist() == [1, 0, 1] and parts["overlong"].tolist() == [0, -0.5, -1]
  assert total.tolist() == [2, -0.25, 1.5]


@pytest.mark.parametrize("value", [
  0.7, -0.7, 1, 0, True, np.float32(0.7), np.float64(0.7), np.int64(3), np.array(0.7), np.bool_(True), 1e-30,
])
def test_numbers_survive(value):
  total, parts = score([WeightedReward("fn", lambda completion, example: value)], COMPLETIONS, EXAMPLES)
  assert total.tolist() == parts["fn"].tolist() == [np.float32(value)] * 3


class Hostile:
  def __array__(self, *args, **kwargs):
    raise RuntimeError("no")

  def __repr__(self):
    raise RuntimeError("no")


@pytest.mark.parametrize("value", [
  None, "1.0", b"1", "x" * 100_000, math.nan, math.inf, -math.inf, 1e300, [1.0], (1.0,), [], np.array([1.0]), np.ones((2, 2)),
  {"reward": 1.0}, 1 + 2j, object(), 10**400, [[1], [1, 2]], Hostile(), lambda: 1.0,
], ids=lambda value: type(value).__name__)
def test_anything_but_one_finite_number_is_refused(value):
  def length_bonus(completion, example):
    return value if completion.num_tokens == 1 else 0.0

  with pytest.raises(ValueError) as caught:
    score([WeightedReward("length_bonus", length_bonus)], COMPLETIONS, EXAMPLES)
  message = str(caught.value)
  assert message.startswith("reward 'length_bonus', completion 1 ('#1'): it returned ")
  assert f"of type {type(value).__name__}, expected one finite number" in message
  assert "\n" not in message and len(message) < 500


def test_a_function_that_raises_is_named_and_the_cause_kept():
  def broken(completion, example):
    raise KeyError("gold\nanswer" * 1000)

  with pytest.raises(ValueError, match="^reward 'broken', completion 0 .*it raised KeyError.*expected one finite number$") as caught:
    score([WeightedReward("broken", broken)], [Completion(text="line\n" * 10_000, token_ids=(), num_tokens=1, stopped=True)], EXAMPLES[:1])
  assert isinstance(caught.value.__cause__, KeyError)
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_an_interrupt_is_not_a_faulty_reward():
  def interrupted(completion, example):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    score([WeightedReward("interrupted", interrupted)], COMPLETIONS, EXAMPLES)


@pytest.mark.parametrize("completions, examples", [(COMPLETIONS, EXAMPLES[:1]), (COMPLETIONS[:1], EXAMPLES), (COMPLETIONS, [])])
def test_nothing_is_broadcast(completions, examples):
  with pytest.raises(ValueError, match="expected as many of each"):
    score([WeightedReward("one", lambda completion, example: 1.0)], completions, examples)


def test_no_completions():
  total, parts = score([WeightedReward("one", lambda completion, example: 1.0)], [], [])
  assert total.shape == parts["one"].shape == (0,) and total.dtype == np.float32


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_terms_need_distinct_names(names):
  with pytest.raises(ValueError, match="expected one or more distinct names"):
    score([WeightedReward(name, lambda completion, example: 1.0) for name in names], COMPLETIONS, EXAMPLES)


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_is_finite(weight):
  with pytest.raises(ValueError, match="reward 'a': found weight"):
    score([WeightedReward("a", lambda completion, example: 1.0, weight)], COMPLETIONS, EXAMPLES)


SETTINGS = {
  "cosine_length": {"shortest": 1.0, "longest": 0.0, "max_tokens": 4},
  "imported": {"path": "jaxrl_llm.rewards:final_answer"},
  "length_target": {"target_tokens": 4, "tolerance_tokens": 2},
  "pattern": {"regex": "{answer}"},
  "soft_overlong": {"max_tokens": 4, "buffer_tokens": 2},
}
EVERY_FIELD = {"answer": "B1", "entry": {"answer": "1", "metadata": {"source_dataset": "chain_sum"}}}


@pytest.mark.parametrize("name", rewards.REWARDS)
def test_every_reward(name):
  """Each can be called, sent to another process as its spec, and built there to the same verdicts."""
  spec = pickle.loads(pickle.dumps(rewards.RewardSpec(name, SETTINGS.get(name, {}))))
  answer = "B" if name == "choice" else "1"
  examples = [EVERY_FIELD | {"answer": answer}] * 3
  total, _ = score([WeightedReward(name, rewards.make(name, **SETTINGS.get(name, {})))], COMPLETIONS, examples)
  again, _ = score([WeightedReward(name, rewards.build(spec))], COMPLETIONS, examples)
  assert total.shape == (3,) and total.tolist() == again.tolist()


@pytest.mark.parametrize("name, settings, message", [
  ("final", {}, f"expected one of {', '.join(rewards.REWARDS)}"),
  ("soft_overlng", {}, "did you mean 'soft_overlong'?"),
  ("soft_overlong", {}, "expected ['buffer_tokens', 'max_tokens']"),
  ("soft_overlong", {"max_tokens": 4, "buffer": 2}, "found settings ['buffer', 'max_tokens']"),
  ("final_answer", {"strict": True}, "found settings ['strict'], expected []"),
  ("pattern", {"regexp": "x"}, "expected ['regex'] and perhaps ['how', 'ignore_case', 'max_chars']; did you mean 'regex'?"),
])
def test_make_names_what_is_wrong(name, settings, message):
  with pytest.raises(ValueError) as caught:
    rewards.make(name, **settings)
  assert message in str(caught.value)


def test_rewards_are_cheap_to_import():
  """Workers import them: no JAX, and no algebra system before a reward asks for one."""
  code = "import sys, jaxrl_llm.rewards; print(sorted({'jax', 'sympy', 'math_verify', 'reasoning_gym'} & set(sys.modules)))"
  assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
