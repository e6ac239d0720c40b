"""Mathematical answers: verdicts, hedges, hostile answers, and agreement with math-verify."""

import subprocess
import sys
import threading
import time

import pytest

from jaxrl_llm.rewards import maths
from jaxrl_llm.rewards.maths import deadline, equivalent
from jaxrl_llm.rewards.outcome import attempt
from jaxrl_llm.text_types import Completion

pytest.importorskip("math_verify")


def reward(text, gold="5", **settings):
  return maths(**settings)(Completion(text=text, token_ids=(), num_tokens=len(text), stopped=True), {"answer": gold})


@pytest.mark.parametrize("text, gold", [
  (r"\boxed{5}", "5"), (r"\boxed{5}", 5), (r"\boxed{5.0}", 5), (r"\boxed{1/2}", 0.5), ("Answer: $5$.", "$5$"), ("#### 1,200", "1200"),
  ("The answer is 5 apples.", "5"), (r"\boxed{x = 5}", "5"), (r"\boxed{5\text{ cm}}", "5"), (r"\boxed{\frac{2}{4}}", r"\frac12"),
  (r"\boxed{(x+1)^2}", "x^2+2x+1"), (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"), (r"\boxed{\{2, 1\}}", r"\{1, 2\}"), (r"\boxed{[0, 1)}", "[0,1)"),
  (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"), (r"\boxed{\text{Evelyn}}", "Evelyn"),
  ("\\boxed{\uff15}", "5"), ("\\boxed{\u22125}", "-5"),
  ("\\boxed{5x\u00b2}", "5x^2"), ("\\boxed{1\u2009000}", "1000"), (r"\boxed{14{,}916}", "14916"), (r"\boxed{50\%}", "50"),
  # The row holds a whole solution.
  (r"\boxed{5}", "2 + 3 = 5\n#### 5"), (r"\boxed{5}", r"So it is $\boxed{5}$."),
  # Several statements of one answer; several answers that are the right ones together.
  (r"\boxed{1/2}, that is \boxed{0.5}", "0.5"), (r"\boxed{1} and \boxed{2}", "1, 2"), ("<think>\\boxed{4}</think>\\boxed{5}", "5"),
  (r"\boxed{x=1 \text{ or } x=2}", "x = 2 or x = 1"),
  # Answers spelt alike are not computed.
  (r"\boxed{99999999!}", "99999999!"), (r"\boxed{9^{9^{9^{9}}}}", "9^{9^{9^{9}}}"),
])  # fmt: skip
def test_right(text, gold):
  assert reward(text, gold) == 1.0


@pytest.mark.parametrize("text, gold", [
  ("5", "5"), ("It is 5", "5"), (r"\boxed{6}", "5"), (r"\boxed{-5}", "5"), (r"\boxed{}", "5"), ("", "5"), (r"\boxed{5.01}", "5"),
  (r"\boxed{0.33}", "1/3"), (r"\boxed{(2, 1)}", "(1, 2)"), (r"\boxed{(0, 1)}", "[0, 1)"), (r"\boxed{x^2+2x}", "x^2+2x+1"),
  # Hedges.
  (r"\boxed{5} or \boxed{6}", "5"), ("Answer: 5\nAnswer: 6", "5"), ("The answer is 5. Or the answer is 6.", "6"), ("Answer: 5 or 6", "5"),
  ("Answer: 5 or 6", "6"), ("Answer: $5$ or $6$", "6"), (r"\boxed{5, 6}", "5"), (r"\boxed{5 \text{ or } 6}", "6"),
  (r"\boxed{5 \pm 1}", "6"), (r"\boxed{1} and \boxed{2}", "1"), (r"\boxed{5}\boxed{x}", "5"),
  (" ".join(f"\\boxed{{{i}}}" for i in range(20)), "5"),
  # Answers that would fit any question.
  *((f"\\boxed{{{x}}}", "5") for x in (r"\mathbb{R}", "x", "x = x", r"\emptyset", "True", "0/0", r"\infty", "?", "nan", r"\{\}")),
  (r"\boxed{[0, 10]}", "5"), (r"\boxed{4 < x < 6}", "5"),
  # A letter of another script that looks like the right one.
  ("\\boxed{\u0445 + 1}", "x + 1"),
])  # fmt: skip
def test_wrong(text, gold):
  assert reward(text, gold) == 0.0


@pytest.mark.parametrize("example, message", [
  ({"question": "?"}, "maths: found a row with ['question'], expected the field 'answer'"),
  ({"answer": " "}, "maths: found ' ' in the field 'answer', expected text or a number"),
  ({"answer": None}, "maths: found 'None' in the field 'answer', expected text or a number"),
  ({"answer": "#### 1\n#### 2"}, "maths: found 2 answers in the field 'answer'"),
  ({"answer": "9^{9^{9^{8}}}"}, "expected at most 1000 characters and no huge numbers"),
])  # fmt: skip
def test_a_row_that_cannot_be_judged_is_no_wrong_answer(example, message):
  completion = Completion(text=r"\boxed{9^{9^{9^{9}}}}", token_ids=(), num_tokens=3, stopped=True)
  with pytest.raises(ValueError) as caught:
    maths()(completion, example)
  assert message in str(caught.value) and "\n" not in str(caught.value)


HOSTILE = [
  r"\boxed{9^{9^{9^{9}}}}", r"\boxed{99999999!}", "\\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
  "\\boxed{" + "+".join("1" * 20_000) + "}", "\\boxed{" + "9" * 200_000 + "}", r"\boxed{\sum_{k=1}^{\infty} \frac{1}{k^{1.0000001}}}",
  "\\boxed{" * 10_000 + "6" + "}" * 10_000,
  r"\boxed{__import__('os').system('touch pwned')}", "Answer: __import__('os').system('touch pwned')", "\\boxed{\u0665}", "\\boxed{\ud800}",
  "\\boxed{\x00}", "\\boxed{\\}", "\\boxed{%}", "\\boxed{" + "$" * 900 + "}", "\\boxed{" + "\\frac{" * 300 + "}", "Answer:" * 3000,
  r"\boxed{2^{-99999999999}}", r"\boxed{\binom{99999999}{3}}", r"\boxed{\gcd(99999999999999999999, 5)}", r"\boxed{\ln(9^{99999})}",
]  # fmt: skip


def test_hostile_answers_are_wrong_at_once(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  reward(r"\boxed{x}")  # Imports the algebra system.
  for text in HOSTILE:
    start = time.process_time()
    assert reward(text) == 0.0
    assert time.process_time() - start < 1.5, text[:60]
  assert not list(tmp_path.iterdir())


def test_an_answer_that_takes_too_long_fails_and_is_not_wrong():
  outcome = attempt(maths(seconds=0.3), Completion(r"\boxed{(x+1)^{2020}}", (), 3, True), {"answer": "5"})
  assert (outcome.cause, outcome.detail) == ("timeout", "TimeoutError: it took longer than 0.3 s")


def test_the_timer_is_gone_afterwards_and_leaves_other_threads_alone():
  with pytest.raises(TimeoutError), deadline(0.05):
    while True:
      time.sleep(0.01)
  time.sleep(0.15)  # A timer that still ran would end this.
  rewards = []
  thread = threading.Thread(target=lambda: rewards.append(reward(r"\boxed{x+x}", "2x", seconds=0.001)))
  thread.start()
  thread.join()
  assert rewards == [1.0]  # No timer there, and no "signal only works in main thread".


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_seconds(seconds):
  with pytest.raises(ValueError, match="maths: found seconds=.*expected a positive number"):
    maths(seconds=seconds)


def test_without_math_verify_it_says_what_to_install():
  code = (
    "import sys; sys.modules['math_verify'] = None\n"
    "from jaxrl_llm.rewards.maths import equivalent\n"
    "assert equivalent('5', '5.0')\n"  # Plain numbers need no package.
    "equivalent('x', '2x')"
  )
  result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert "the reward 'maths' needs the package math-verify: pip install" in result.stderr.splitlines()[-1]


# Typical of benchmarks: (correct answer, answer).
PAIRS = [
  ("-5", "-5"), ("7425000", "7,425,000"), ("1000.99", "1,000.99"), ("0.4", ".4"), ("10/9", r"\frac{10}{9}"), ("-10/9", r"-\frac{10}{9}"),
  ("[0,1)", "[0,1)"), ("[0,9)", "[0,1)"), ("(0,9)", "[0,9)"), ("9", "(9+1)"), ("10", "(9+1)"), ("1/3", r"\frac13"), ("1", r"\frac3{3}"),
  (r"\sqrt{3}", r"\sqrt3"), ("1/3", r"\dfrac{1}{3} \text{ metres}"), ("1/3", r"k = \frac{1}{3}"), (r"28\%", "28"), (r"28\%", "0.28"),
  ("28", "28/100"), ("0.28", "28"), (r"90^\circ", "90"), (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"), ("1,2,3", "3,2,1"),
  (r"\{1,2,3\}", r"\{1,2\}"), ("x^2+2x+1", "(x+1)^2"), ("x^2+2x+1", "x^2+2x"), ("2x", "x+x"),
  (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
  (r"\pi", "3.14"), (r"\pi", "3.141593"), ("1/3", "0.333333"), ("1/3", "0.3333"), ("x=5", "5"), ("5", "y=5"), ("x>5", "(5, \\infty)"),
  ("-1 < x < 1", "(-1, 1)"), (r"\log_2 8", "3"), (r"\sin(\pi/6)", "1/2"), ("2^{10}", "1024"), ("5!", "120"), (r"\binom{5}{2}", "10"),
  ("Evelyn", r"\text{Evelyn}"), ("Evelyn", "Briana"), (r"\text{(B)}", "B"), ("i", "-i"), ("1+i", "i+1"),
  (r"\infty", r"-\infty"), ("12:30", "12.5"), (r"3\frac{1}{2}", "3.5"), ("2:3", "2/3"), ("x \\in [1, 2]", "[1, 2]"), ("a+b", "b+a"),
  (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"), ("f(x) = x^2", "x^2"),
]  # fmt: skip


@pytest.mark.parametrize("gold, answer", PAIRS)
def test_the_verdict_is_math_verifys(gold, answer):
  import math_verify

  targets = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]
  theirs = math_verify.verify(math_verify.parse(f"\\boxed{{{gold}}}", targets), math_verify.parse(f"\\boxed{{{answer}}}", targets))
  assert equivalent(gold, answer) == theirs
