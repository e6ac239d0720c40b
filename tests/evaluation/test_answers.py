"""The answers that verifiers judge and majorities count."""

import pytest

from jaxrl_llm.evaluation import answer_reader
from jaxrl_llm.rewards import RewardSpec, WeightedReward, answer_key, make, weighted
from jaxrl_llm.text_types import Completion

CASES = {
  "final_answer": [("1+1=2\n#2", "2"), ("#1\n#2", None), ("2", None), ("#", None)],
  "final_number": [("so\n#### $1,200.00", "1200"), ("it is 10-5", None), ("none", None),
    ("x" * 3000 + " 7", "7"), ("9" * 2500, "9" * 2500), ("9" * 25_000, None)],
  "maths": [(r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{1} and \boxed{2}", "1, 2"), ("dunno", None)],
  "choice": [("The answer is (b).", "B"), ("A or C\nAnswer: A or C", None), ("**D) both**", "D")],
  "exact_match": [("Answer: Paris", "Paris"), ("#### a\n#### b", None)],
  "gym": [("<answer> 5 </answer>", "5"), ("5", None)],
}


def completion(text, *, stopped=True, failed=None):
  return Completion(text, (), 9, stopped, failed=failed)


@pytest.mark.parametrize("name", CASES)
def test_answers(name):
  read = answer_reader(WeightedReward(name, make(name)))
  for text, answer in CASES[name]:
    assert read(completion(text), {}) == (answer and (answer, answer_key(answer))), text
    assert read(completion(text, stopped=False), {}) is None and read(completion(text, failed=("raised", "")),
      {}) is None


@pytest.mark.parametrize("name", ["final_answer", "final_number", "maths", "choice", "exact_match"])
def test_the_answer_that_is_read_is_the_one_that_is_judged(name):
  """The answer that is read, given as the gold answer, makes the response right."""
  for text, answer in CASES[name]:
    if answer:
      # The imports of its first call may be slow on a busy machine.
      settings = {"seconds": 600.0} if name == "maths" else {}
      assert make(name, **settings)(completion(text),
        {"answer": answer_key(answer) if name == "maths" else answer}) == 1.0, text


def test_settings_and_routes():
  last_line = weighted("exact_match", RewardSpec("exact_match", {"answer_in": "last_line"}))
  assert answer_reader(last_line)(completion("a\nb"), {}).text == "b"
  letters = weighted("choice", RewardSpec("choice", {"letters": "AB"}))
  assert answer_reader(letters)(completion("Answer: C"), {}) is None
  number = WeightedReward("final_number", make("final_number"))
  routed = WeightedReward("verifier", number.fn, routes=(last_line, number))
  assert [answer_reader(routed)(completion("a\nb 5"), {"reward": name}).text for name in ("exact_match",
      "final_number")] == ["b 5", "5"]
  boxes = completion(r"$\boxed{?} + \boxed{3} = \boxed{7}$"), {"question": r"What is $\boxed{?} + \boxed{3}$?", "reward": "final_number"}
  assert answer_reader(routed)(*boxes).text == "7" and answer_reader(number)(boxes[0], {}).text == "7"
  program = WeightedReward("code_tests", number.fn)
  assert answer_reader(program) is None and answer_reader(routed._replace(routes=(number, program))) is None
