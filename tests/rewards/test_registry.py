"""The registry of rewards: each can be made in any process, and a mistake is one line."""

import pickle
import subprocess
import sys

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import WeightedReward, grade
from jaxrl_llm.text_types import Completion

COMPLETIONS = [Completion(text=f"#{i}", token_ids=(i,), num_tokens=i, stopped=True) for i in range(3)]

SETTINGS = {
  "cosine_length": {"shortest": 1.0, "longest": 0.0, "max_tokens": 4},
  "imported": {"path": "jaxrl_llm.rewards:final_answer"},
  "length_target": {"target_tokens": 4, "tolerance_tokens": 2},
  "pattern": {"regex": "{answer}"},
  "soft_overlong": {"max_tokens": 4, "buffer_tokens": 2},
}
EVERY_FIELD = {"answer": "B1", "question": "1 + 2 =", "entry": {"answer": "1", "metadata": {"source_dataset": "chain_sum"}}}


# `code_tests` needs a sandbox, and has tests of its own.
@pytest.mark.parametrize("name", sorted(set(rewards.REWARDS) - {"code_tests"}))
def test_every_reward(name):
  """A reward can be called, and built from its pickled spec to give the same verdicts."""
  spec = pickle.loads(pickle.dumps(rewards.RewardSpec(name, SETTINGS.get(name, {}))))
  answer = "B" if name == "choice" else "1"
  examples = [EVERY_FIELD | {"answer": answer}] * 3
  graded = grade([WeightedReward(name, rewards.make(name, **SETTINGS.get(name, {})))], COMPLETIONS, examples)
  again = grade([rewards.weighted(name, spec)], COMPLETIONS, examples)
  assert graded.valid.all() and graded.totals.shape == (3,) and graded.totals.tolist() == again.totals.tolist()


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


@pytest.mark.parametrize("name, text, answer, is_optional", [
  ("choice", "Answer: B", "B", True), ("exact_match", "Answer: Paris", "Paris", True), ("final_answer", "#10", "10", False),
  ("final_number", "#### 1200", "1200", False), ("final_text", "Paris", "Paris", True), ("maths", r"\boxed{5}", "5", True),
  ("tags", "<think>a</think>\n<answer>b</answer>", "", True),
])  # fmt: skip
def test_a_truncated_response_is_wrong_unless_told_otherwise(name, text, answer, is_optional):
  whole, row = Completion(text, (), 9, stopped=True), {"answer": answer}
  cut = whole._replace(stopped=False)
  assert rewards.make(name)(whole, row) == 1 and rewards.make(name)(cut, row) == 0
  assert not is_optional or rewards.make(name, require_stop=False)(cut, row) == 1


def test_rewards_are_cheap_to_import():
  """Workers import them without JAX, and without an algebra system until a reward needs one."""
  code = "import sys, jaxrl_llm.rewards; print(sorted({'jax', 'sympy', 'math_verify', 'reasoning_gym'} & set(sys.modules)))"
  assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
