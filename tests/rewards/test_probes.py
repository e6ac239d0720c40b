"""Probes of rewards: planted faults are named, and the package's own rewards raise no alarm."""

import re

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.rewards import RewardSpec, WeightedReward, grade, weighted
from jaxrl_llm.rewards.probes import FORMS, findings, measure, shown_forms, some_problems, table_lines
from jaxrl_llm.rewards.probes.texts import OTHER, PROMPT, marked_forms, right_answer
from jaxrl_llm.tasks.sets import arithmetic
from jaxrl_llm.text_types import Completion

WORDS = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Seoul", "Quito", "Accra")
NUMBERS = [
  {"question": f"What is {a} + {b}?", "prompt": f"Q: What is {a} + {b}?\nA:", "answer": str(a + b), "response": "", "total": f"{a}{b}"}
  for a, b in zip(range(12, 28), range(31, 79, 3), strict=True)
]
CAPITALS = [
  {"question": f"Which one is it? {', '.join(WORDS)}", "prompt": f"Q{i}: {', '.join(WORDS)}", "answer": word, "response": ""}
  for i, word in enumerate(WORDS * 2)
]
last_number = lambda text: (re.findall(r"-?\d+", text) or [""])[-1]

BROKEN = {
  "constant": (lambda y, x: 1.0, NUMBERS),
  "length": (lambda y, x: len(y.text) / 1000, NUMBERS),
  "format only": (lambda y, x: float("\\boxed{" in y.text), NUMBERS),
  "accepts anything": (lambda y, x: float(y.text != ""), NUMBERS),
  "exact spaces": (lambda y, x: float(y.text == x["answer"]), NUMBERS),
  "wrong column": (lambda y, x: float(y.text.strip() == x["total"]), NUMBERS),
  "off by one": (lambda y, x: float(abs(float(last_number(y.text) or "inf") - float(x["answer"])) <= 1), NUMBERS),
  "case": (lambda y, x: float(y.text.strip() == x["answer"]), CAPITALS),
  "first number": (lambda y, x: float((re.findall(r"-?\d+", y.text) or [""])[0] == x["answer"]), NUMBERS),
  "reads the prompt": (lambda y, x: float(x["answer"].lower() in y.text.lower()), CAPITALS),
}
"""Functions by the fault that each has and the line names, with problems that show it."""

VARIANTS = {
  "constant": [(lambda y, x: -0.5, NUMBERS)],
  "length": [(lambda y, x: float(len(y.text) > 100), NUMBERS), (lambda y, x: float(y.num_tokens), CAPITALS)],
  "format only": [(lambda y, x: float(bool(re.search(r"\d", y.text))), NUMBERS), (lambda y, x: float("Answer: " in y.text), CAPITALS)],
  "accepts anything": [(lambda y, x: float(bool(y.text.strip())), CAPITALS)],
  "wrong column": [
    (lambda y, x: float(y.text.strip() == "17 apples"), NUMBERS), (lambda y, x: 0.0, CAPITALS),
    (lambda y, x: float(y.text.strip() == x["response"]), NUMBERS),
  ],
  "case": [(lambda y, x: float(y.text.strip() == x["answer"].upper()), CAPITALS)],
  "exact spaces": [(lambda y, x: float(y.text == x["answer"] + "\n"), NUMBERS)],
  "failure": [(lambda y, x: float(y.text == x["solution"]), NUMBERS)],
  "off by one": [(lambda y, x: float(last_number(y.text) == str(int(x["answer"]) + 1)), NUMBERS)],
  "reads the prompt": [(lambda y, x: float(x["question"] in y.text), NUMBERS)],
  "empty response": [(lambda y, x: -float(y.num_tokens), NUMBERS)],
  "accepts a beginning": [(lambda y, x: float(bool(y.text.strip()) and x["answer"].startswith(y.text.strip())), NUMBERS)],
}
"""The same faults in other functions, and further faults."""



def graded(rows, *terms):
  """Returns a grader of probes to some problems."""

  def grade_probes(probes):
    completions = [Completion(probe.text, (), len(probe.text), probe.stopped) for probe in probes]
    return grade(terms, completions, [rows[probe.row] | {"response": ""} for probe in probes])

  return grade_probes


def measured(rows, *terms, **options):
  stated = [row | {"answer": right_answer(terms[0], row)} for row in rows]
  return measure(stated, graded(rows, *terms), forms=(*marked_forms(terms[0]), *FORMS), **options)


def faults(fn, rows, **options):
  return findings(measured(rows, WeightedReward("own", fn), **options))


@pytest.mark.parametrize("fault", BROKEN)
def test_a_planted_fault_is_named_and_no_other(fault):
  (line,) = faults(*BROKEN[fault])
  assert line.startswith(f"{fault}: ") and line.count(": ") >= 2


@pytest.mark.parametrize(("fault", "planted"), [(fault, x) for fault, planted in VARIANTS.items() for x in planted])
def test_so_are_others(fault, planted):
  assert [line.partition(":")[0] for line in faults(*planted)] == [fault]


def test_the_column_that_earns_is_named():
  assert "the right answer earns nothing and the column total does" in faults(*BROKEN["wrong column"])[0]


def test_a_neighbouring_letter_is_told_from_another_answer():
  rows = answers(*"ABCBABCBABCB")
  near = lambda y, x: float(len(y.text.strip()) == 1 and abs(ord(y.text.strip()) - ord(x["answer"])) <= 1)
  assert [line.partition(":")[0] for line in faults(near, rows)] == ["off by one", "case"]


def test_a_reward_without_a_fault_has_none():
  assert faults(lambda y, x: float(last_number(y.text) == x["answer"]), NUMBERS) == []


def own(name, weight=1.0, **settings):
  """Returns a term with a reward of the package."""
  return weighted(name, RewardSpec(name, settings), weight)


def answers(*texts, question="Which one, {}?"):
  asked = [question.format(i) for i in range(len(texts))]
  return [{"question": x, "prompt": x, "answer": text, "response": "", "level": 1} for x, text in zip(asked, texts, strict=True)]


def solved(question, answer, response):
  return {"question": question, "prompt": question, "answer": answer, "response": response, "level": 1}


def step_by_step(a, b):
  return solved(f"{a} + {b} + {a} =", str(a + b + a), f" {a} + {b} = {a + b}, {a + b} + {a} = {a + b + a}")


# The teacher errs, so that only some demonstrations are right.
TASKS = [f"{a}{rest}" for a in range(1, 9) for rest in ("+9-4", "-3+7")]
WORKINGS = [solved(x, str(arithmetic.evaluate(x)), arithmetic.working(x, error_rate=0.3)) for x in TASKS]
STEPS = [step_by_step(a, b) for a, b in zip(range(20, 36), range(3, 19), strict=True)]
OPTIONS = "{}\n(A) yes\n(B) no"
FORMULAS = ("\\frac{1}{3}", "2\\sqrt{2}", "x^2 + 1", "7", "(3, 4)", "\\pi", "x", "0.25")
SOUND = {
  "number": lambda: (NUMBERS, own("final_number")),
  "number with terms": lambda: (NUMBERS, own("final_number"), own("tags", 0.1), own("answer_form", 0.2)),
  "number, short": lambda: (NUMBERS, own("final_number"), own("soft_overlong", max_tokens=40, buffer_tokens=20)),
  "text": lambda: (CAPITALS, own("final_text")),
  "spelling": lambda: (CAPITALS, own("exact_match")),
  "whole": lambda: (CAPITALS, own("exact_match", answer_in="whole", strip=False)),
  "marker": lambda: (CAPITALS, own("exact_match", answer_in="after Result:")),
  "formula": lambda: (answers(*FORMULAS), own("maths", seconds=600.0)),
  "letter": lambda: (answers(*"ABBABAABBBAB", question=OPTIONS), own("choice")),
  "index": lambda: (answers(*"011010010110", question=OPTIONS), own("choice")),
  "pattern": lambda: (NUMBERS, own("pattern", regex=r"\b{answer}\b")),
  "working": lambda: (WORKINGS, own("final_answer")),
  "steps": lambda: (STEPS, own("final_number"), own("running_sum")),
  "steps alone": lambda: (STEPS, own("running_sum")),
}
"""Problems and the package's rewards that suit them."""


@pytest.mark.parametrize("name", SOUND)
def test_the_rewards_of_the_package_raise_no_alarm(name):
  rows, *terms = SOUND[name]()
  table = measured(rows, *terms, shown=shown_forms(rows, shots=0, template=""))
  assert findings(table, is_own=False, reads="") == [] and table.as_right(OTHER).size
  assert np.nanmean(table.right) > np.nanmean(table.nothing)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(tasks.TASKS) - {"figures", "blank_figures"}))
def test_nor_do_they_on_the_tasks_of_the_package(name):
  task = tasks.make(name)
  rows = some_problems(task, 32)
  table = measured(rows, *map(own, task.rewards), shown=shown_forms(rows, shots=0, template=""))
  assert findings(table, is_own=False, reads="") == [] and table.num_problems == 32


def test_a_mixture_is_judged_part_by_part():
  parts = {"final_answer": NUMBERS[:8], "exact_match": CAPITALS[:8]}
  routes = tuple(own(name, **({"answer_in": "tag"} if name == "exact_match" else {})) for name in parts)
  rows = [row | {"reward": name} for name, part in parts.items() for row in part]
  call = {route.name: route.fn for route in routes}
  verifier = WeightedReward("verifier", lambda y, x: call[x["reward"]](y, x), routes=routes)
  table = measured(rows, verifier)
  # No form suits both.
  assert findings(table, is_own=False) == [] and len(table.as_right(OTHER)) == 8


def test_strictness_is_a_fault_of_a_function_that_documents_none():
  table = measured(CAPITALS, own("exact_match", answer_in="whole", strip=False))
  assert findings(table, is_own=False) == []
  assert [line.partition(":")[0] for line in findings(table, is_own=True)] == ["exact spaces", "case"]


def test_what_the_policy_is_shown_must_earn():
  exact = lambda y, x: float(y.text == x["answer"])
  shown = shown_forms(NUMBERS, shots=2, template="{prompt} {answer}\n\n", stop_strings=("\n",))
  first, second = faults(exact, NUMBERS, shown=shown)
  assert first.startswith("shown form: the solved problems state the answer as ' 43\\n', which earns nothing")
  assert second.startswith("exact spaces: ")
  solved = [row | {"response": f"It is {row['answer']}!"} for row in NUMBERS]
  assert any(line.startswith("demonstrations: none earns") for line in faults(exact, solved))


def test_a_failure_is_named_once_by_its_cause():
  (line,) = faults(lambda y, x: float(int(y.text) == int(x["answer"])), NUMBERS)
  assert line.startswith("failure: reward 'own' raised: ValueError (on empty, whitespace, random words, many random words and ")
  assert [line.partition(":")[0] for line in faults(lambda y, x: 1 / 0, NUMBERS)] == ["failure"]


def test_a_slow_reward_is_probed_on_the_first_problem_only():
  table = measured(NUMBERS, own("final_number"), seconds=0.0)
  assert table.num_problems == 1 and table.of("{}").tolist() == [1.0] and findings(table) == []


def test_a_wrong_answer_that_is_right_by_chance_is_no_fault():
  """A copy of the prompt ends with an option, which is right for half of the problems."""
  table = measured(*SOUND["letter"]())
  assert 0.5 < table.as_right(PROMPT).mean() < 0.75 and findings(table, is_own=False) == []


def test_the_table():
  rows = NUMBERS[:2]
  table = measured(rows, own("final_number"), WeightedReward("brief", lambda y, x: float(y.num_tokens < 3), 0.5))
  assert table_lines(table) == [
    "  right answer X   1.50 (1.00)  X",
    "                          1.00  \\boxed{X}  <answer>X</answer>  #### X  #X  {\"answer\": \"X\"}  Answer: X  The answer is X.",
    "  variations of X         1.00  space before  space behind  line break before  line break behind  explanation behind",
    "                                other number before",
    "                          0.00  other number behind",
    "  wrong or none    0.50 (0.00)  empty  X + 1  X - 1  X cut in the middle  another problem's answer",
    "                          0.00  whitespace  random words  many random words  copied prompt  copied question",
  ]
