"""Extraction of answers from responses."""

import time

import pytest

from jaxrl_llm.rewards import make
from jaxrl_llm.rewards.boxes import boxed
from jaxrl_llm.rewards.decoration import undecorated
from jaxrl_llm.rewards.extraction import MAX_CHARS, PLACES, answer_part, place, stated, stated_answers
from jaxrl_llm.rewards.forms import FORMS, tagged
from jaxrl_llm.text_types import Completion


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
  ("<think>\\boxed{4}", []), ("5\n<think>\\boxed{4}", []),
  ("<think>a</think>\\boxed{5}<think>\\boxed{4}", ["5"]), ("[THINK]\\boxed{4}[/THINK]\\boxed{5}", ["5"]),
  # A last box that is never closed is a statement that cannot be read.
  (r"So \boxed{3}. But no: \boxed{", []), (r"\boxed{3 and \boxed{4}", ["4"]),
  ("The answer is 3: \\boxed{", []),
  # Boxes without braces, other boxes, filler.
  (r"$\boxed3$", ["3"]), (r"\boxed\frac{1}{2}", [r"\frac{1}{2}"]), (r"\boxed 42.", ["42"]),
  (r"\fbox{5}", ["5"]), (r"\framebox{5}", ["5"]), (r"in \boxed form: \boxed{5}", ["5"]),
  *((rf"$6 = 2 + \boxed{{{filler}}}$, so \boxed{{4}}", ["4"]) for filler in (
    r"\phantom{1}", "?", r"\quad", "", " ", r"\_", r"\_\_\_", r"\ldots", "...", r"\hspace{1cm}", r"\square",
    r"\text{ }", r"\underline{\hspace{2em}}", "~", r"\text{your answer}",
    r"\qquad\qquad", "\u25a1", "answer", r"\,", "__")),
  (r"$6 = 2 + \boxed{?}$, so the answer is 4.", ["4"]),
  # Labels of options, and words behind the value.
  (r"\boxed{\textbf{(D) }15}", ["15"]), (r"\boxed{\text{(A) } \frac{1}{2}}", [r"\frac{1}{2}"]),
  (r"\boxed{\textbf{(073)}}", ["(073)"]), (r"\boxed{400 \; \text{cm}^2}", [r"400 \; \text{cm}^2"]),
  ("The answer is $42$ apples.", ["42"]), ("Answer: She has $42$ apples left", ["42"]),
  ("The answer is 42 apples that are red.", ["42"]), ("The answer is 5 or 6 apples.", ["5 or 6 apples"]),
  ("The answer is $5$ or $6$ apples.", ["$5$ or $6$ apples"]),
  ("The answer is 2 million people in all.", ["2 million people in all"]),
  ("It is 5.", []),
  ("Their answers: 5", []), ("The answer isn't 5.", []), ("The answer is not 5.", []),
  ("The answer is not 5. The answer is 6.", ["6"]),
  ("The answer is 5. Or 6.", ["5. Or 6"]), ("The answer is 5! + 3.", ["5! + 3"]),
  ("", []),
])  # fmt: skip
def test_stated_answers(text, expected):
  assert stated_answers(text) == expected


@pytest.mark.parametrize("text, expected", [
  ("$5$", "5"), ("$$5$$", "5"), ("\\(5\\)", "5"), ("\\[ 5 \\]", "5"), ("**5**", "5"), ("`5`", "5"),
  ("5.", "5"), ("5\\,", "5\\,"),
  ("$5$ or $6$", "$5$ or $6$"), ("**5** or **6**", "**5** or **6**"), ("(5)", "(5)"), (" ** $5$. ** ", "5"),
  ("$", "$"), ("", ""),
])  # fmt: skip
def test_undecorated(text, expected):
  assert undecorated(text) == expected


@pytest.mark.parametrize("text, expected", [
  (r"$\boxed{3} + \boxed{4}$ is $\boxed{7}$.", ["7"]), (r"\boxed{7}", ["7"]), (r"\boxed{3}", ["3"]),
  (r"The smaller of $\boxed{3}$ and $\boxed{4}$ is $\boxed{3}$.", ["3"]),
  (r"Of $\boxed{3}$ and $\boxed{4}$, the answer is 3.", ["3"]),
  (r"Of $\boxed{3}$ and $\boxed{4}$, the answer is $\boxed{3}$.", ["3"]),
  (r"I see $\boxed{3}$ and $\boxed{4}$.", []), ("none", []),
  (r"$\boxed{ 3 } + \boxed{4}$" + "\n#### 7", ["7"]),
  (r"\boxed{3}, \boxed{4}: \boxed{7} or \boxed{8}", ["7", "8"]),
])  # fmt: skip
def test_boxes_of_the_question_are_no_answers_unless_nothing_else_is_stated(text, expected):
  assert stated_answers(text, r"How do $\boxed{3}$ and $\boxed{4}$ compare?") == expected


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_examples_of_the_table(form):
  for text, answer in form.examples:
    rewards = ["choice"] if answer.isalpha() else ["final_number", "maths"]
    for reward in rewards:
      assert make(reward)(Completion(text, (), 9, True),
        {"answer": answer, "question": r"\boxed{7}"}) == 1.0, (text, reward)


@pytest.mark.parametrize("text, expected", [
  ("#### Step 1: add\n20+22=42\n#### Step 2: conclude\nThe answer is 42.", ["42"]),
  ("#### 1. Add\n20+22=42\n#### 42", ["42"]), ("#### 1. add\n#### 2. multiply\nThe answer is 42", ["42"]),
  ("#### Conclusion\nSo it is 42.\n#### 42", ["42"]), ("#### Conclusion\nThe answer is 42.", ["42"]),
  ("#### (a) First\nx\n#### 42", ["42"]), ("#### Case II\nx\n#### 42", ["42"]),
  ("#### **Step 3**: Final\n#### 42", ["42"]), ("#### 2 Solve\nx\n#### 42", ["42"]),
  ("#### 1.1 Setup\nx\n#### 42", ["42"]),
  # Answers: values, even with text below, and words that end the response.
  ("#### 42\n\nQuestion: How many?", ["42"]), ("#### 1. Since 7 is odd", ["1"]), ("#### Paris", ["Paris"]),
  ("#### Paris\n#### Rome", ["Paris", "Rome"]), ("#### Paris\n#### x-ray", ["Paris", "x-ray"]), ("#### x = 5\nDone.", ["x = 5"]),
  (r"#### \frac{1}{2}" + "\nDone.", [r"\frac{1}{2}"]), ("####\n42", ["42"]),
  ("#### Final Answer\n42", ["42"]), ("#### Answer: 42", ["42"]), ("so #### 42", ["42"]), ("##### 42", []),
])  # fmt: skip
def test_headings_of_markdown_are_no_answers(text, expected):
  assert stated_answers(text) == expected


def test_readings_of_a_statement():
  def readings(text):
    return [list(dict.fromkeys(statement.readings())) for statement in stated(text)]

  assert readings("The answer is just Paris, because it rains.") == [
    ["Paris", "Paris, because it rains"]
  ]
  assert readings("Answer: Only You") == [["You", "Only You"]] and readings("Paris") == []
  assert readings("Answer: St. Louis") == [["St. Louis"]]
  assert readings("Answer: J. K. Rowling")[0][-1] == "J. K. Rowling"
  assert readings(r"\boxed{left because of rain}") == [["left because of rain"]]


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
  with pytest.raises(ValueError,
    match="^answer_in: found .*expected one of whole, last_line, stated, tag, or 'after ' and a marker"):
    place(name)


HOSTILE = [
  "\\boxed{" * 10**5, "}" * 10**6, "\\boxed{1}" * 10**5, "{" * 10**6, "#### " * 10**5, "answer is " * 10**5,
  "Answer:" * 10**5,
  "\nAnswer:" * 10**5, "answer " * 10**5, "answer" + " " * 10**6, "\n" * 10**6, "*" * 10**6,
  "\n" + "_" * 10**6, "$" * 10**6,
  "<answer>" * 10**5, "</think>" * 10**5, "\ud800" * 1000, "\x00" * 1000, "answer is 5. " * 10**4,
  "\\" * 10**6,
]  # fmt: skip


def test_hostile_text_takes_milliseconds():
  """Quadratic work on a million characters would take minutes."""
  start = time.process_time()
  for text in HOSTILE:
    stated_answers(text), tagged(text), boxed(answer_part(text))
    for find in PLACES.values():
      find(text)
  assert time.process_time() - start < 5
