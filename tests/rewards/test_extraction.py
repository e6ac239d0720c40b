"""Extraction of answers from responses."""

import time

import pytest

from jaxrl_llm.rewards.extraction import MAX_CHARS, PLACES, answer_part, boxed, place, stated_answers, tagged, undecorated


@pytest.mark.parametrize("text, expected", [
  (r"\boxed{5}", ["5"]),
  (r"\boxed {5}", ["5"]),
  (r"so $\boxed{\frac{1}{2}}$.", [r"\frac{1}{2}"]),
  (r"\boxed{\{1, 2\}}", [r"\{1, 2\}"]),
  (r"\boxed{\boxed{3}}", ["3"]),
  (r"\boxed{5", []),
  (r"\boxed{}", []),
  (r"\boxed{5} ... \boxed{ 5 }", ["5"]),
  (r"\boxed{5} or \boxed{6}", ["5", "6"]),
  (r"\boxed{5}" + "\nAnswer: 6", ["5"]),
  ("#### 5", ["5"]),
  ("#### 5\n#### 6", ["5", "6"]),
  ("Answer: 1.5", ["1.5"]),
  ("answer : 5.\n", ["5"]),
  ("**Final Answer:** \\(\\frac{1}{2}\\).", [r"\frac{1}{2}"]),
  ("**Answer**: **B**", ["B"]),
  ("- The final answer: $x = 5$. Done.", ["x = 5"]),
  ("Answer: 5\nAnswer: 6", ["5", "6"]),
  ("The answer is 5.", ["5"]),
  ("The answer is 5. No, the answer is 6.", ["5", "6"]),
  ("the answer is the sum of both. So the answer is 7.", ["7"]),
  ("The final answer is $\\frac{14}{3}$. I hope it is correct.", [r"\frac{14}{3}"]),
  ("<think>The answer is 4.</think>The answer is 5.", ["5"]),
  ("<think>\\boxed{4}", ["4"]),
  ("It is 5.", []),
  ("Their answers: 5", []),
  ("", []),
])  # fmt: skip
def test_stated_answers(text, expected):
  assert stated_answers(text) == expected


@pytest.mark.parametrize("text, expected", [
  ("$5$", "5"), ("$$5$$", "5"), ("\\(5\\)", "5"), ("\\[ 5 \\]", "5"), ("**5**", "5"), ("`5`", "5"), ("5.", "5"), ("5\\,", "5\\,"),
  ("$5$ or $6$", "$5$ or $6$"), ("**5** or **6**", "**5** or **6**"), ("(5)", "(5)"), (" ** $5$. ** ", "5"), ("$", "$"), ("", ""),
])  # fmt: skip
def test_undecorated(text, expected):
  assert undecorated(text) == expected


def test_only_the_end_after_the_reasoning_is_read():
  assert answer_part("x" * MAX_CHARS + "end") == "x" * (MAX_CHARS - 3) + "end"
  assert answer_part("a</think>b</think>c") == "c"
  assert stated_answers("\\boxed{1}" + " " * MAX_CHARS + "\\boxed{2}") == ["2"]


def test_tags():
  assert tagged("<answer> 5 </answer><ANSWER>6</ANSWER>") == ["5", "6"]
  assert tagged("<answer>5<answer>6</answer></answer>") == ["6"]
  assert tagged("</answer><answer>5") == []


@pytest.mark.parametrize("name, text, expected", [
  ("whole", " a\nb ", " a\nb "),
  ("last_line", "a\nb \n\n", "b"),
  ("stated", "\\boxed{5}", "5"),
  ("stated", "\\boxed{5}\\boxed{6}", None),
  ("stated", "5", None),
  ("tag", "<answer>5</answer>", "5"),
  ("tag", "<answer>5</answer><answer>6</answer>", None),
  ("tag", "<answer>5</answer><answer>5</answer>", "5"),
  ("after ####", "#### 5\n#### 6 \n7", "6"),
  ("after ####", "5", None),
])  # fmt: skip
def test_places(name, text, expected):
  assert place(name)(text) == expected


@pytest.mark.parametrize("name", ["", "boxed", "after", "after  ", "Whole"])
def test_no_such_place(name):
  with pytest.raises(ValueError, match="^answer_in: found .*expected one of whole, last_line, stated, tag, or 'after ' and a marker"):
    place(name)


HOSTILE = [
  "\\boxed{" * 10**5, "}" * 10**6, "\\boxed{1}" * 10**5, "{" * 10**6, "#### " * 10**5, "answer is " * 10**5, "Answer:" * 10**5,
  "\nAnswer:" * 10**5, "answer " * 10**5, "answer" + " " * 10**6, "\n" * 10**6, "*" * 10**6, "\n" + "_" * 10**6, "$" * 10**6,
  "<answer>" * 10**5, "</think>" * 10**5, "\ud800" * 1000, "\x00" * 1000, "answer is 5. " * 10**4, "\\" * 10**6,
]  # fmt: skip


def test_hostile_text_takes_milliseconds():
  """Quadratic work on a million characters would take minutes."""
  start = time.process_time()
  for text in HOSTILE:
    stated_answers(text), tagged(text), boxed(answer_part(text))
    for find in PLACES.values():
      find(text)
  assert time.process_time() - start < 5
