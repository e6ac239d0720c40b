"""The reward follows from the answers, and answers that no response can match are refused."""

import pytest

from jaxrl_llm.tasks.answers import check_answers, reward_for

REWARDS = [
  ([str(i) for i in range(50)], 0, "final_number"),
  (["$1,200", "3.5", "-7"], 0, "final_number"),
  (["A", "(B)", "C"], 0, "choice"),
  (["0", "3", "2"], 4, "choice"),
  (["0", "4", "2"], 4, "final_number"),  # No number of four options from 0.
  ([r"\frac{3}{2}", "2", r"\text{Evelyn}", "(3, 4)", "x^2 + 1", r"\sqrt{7}"], 0, "maths"),  # MATH.
  (["2", r"$\frac{1}{2}$", r"$f(n)=2 n+1$", "3,5", r"$(1,8,19)$"], 0, "maths"),  # OlympiadBench.
  (["He has 4 + 5 = 9 left.\n#### 9"] * 3, 0, "maths"),  # GSM8K, whose answers are solutions.
  ([r"It is $\boxed{9}$."] * 3, 0, "maths"),
  (["Paris", "Rome", "went"], 0, "final_text"),
  (["yes", "no"], 0, "final_text"),
  (["Paris"] * 9 + [r"\frac{1}{2}"] * 3, 0, "final_text"),
]


@pytest.mark.parametrize(("answers", "options", "reward"), REWARDS)
def test_the_reward_follows_from_the_answers(answers, options, reward):
  assert reward_for(answers, options=options) == reward


def rows(answers, prompt="?"):
  return [{"answer": answer, "prompt": prompt} for answer in answers]


@pytest.mark.parametrize("answer", ['{"value": "2"}', "['2', '3']", '[{"role": "user"}]', "{'a': 1}", '"12.50"', "'7'"])
def test_structures_and_quoted_numbers_are_refused(answer):
  with pytest.raises(ValueError, match="^task.answer_column: found ") as caught:
    check_answers(rows([answer] * 3), "final_text", column="answer")
  assert "\n" not in str(caught.value)
  assert check_answers(rows([answer] * 30), "my_module:judge", column="answer") == []


@pytest.mark.parametrize("answers", [["[1, 2]", "(0, 1]"] * 20, [r"\{1, 2\}", "{3}"] * 20, ['"went"', '"ran"'] * 20, ["A", "B"] * 9])
def test_intervals_sets_and_quoted_words_are_answers(answers):
  assert check_answers(rows(answers), "final_text", column="answer") == []


def test_letters_need_options_in_the_prompts():
  assert check_answers(rows(["A", "(b)", "1"] * 10, "Which?\n(A) 1\n(B) 2"), "choice", column="answer") == []
  (doubt,) = check_answers(rows(["A", "(b)", "1"] * 10, "Which one?"), "choice", column="answer")
  assert doubt == "the answers are letters, such as 'A', but the prompts show no options (task.prompt_template)"
