"""The tables of docs/verdicts.md: which forms of an answer earn what, by reward.

`python -m jaxrl_llm.rewards.verdicts docs/verdicts.md` writes them between the marks of the page.
"""

import pathlib
import sys
from collections.abc import Sequence

from jaxrl_llm.rewards import make
from jaxrl_llm.rewards.choice import EXAMPLES as CHOICES
from jaxrl_llm.rewards.forms import FORMS
from jaxrl_llm.rewards.written_number import EXAMPLES as NUMBERS
from jaxrl_llm.text_types import Completion

START, END = "<!-- Written by jaxrl_llm.rewards.verdicts, from here -->\n", "<!-- to here. -->\n"
JUDGES = ("final_number", "maths", "final_text", "exact_match", "choice")
"""Rewards that read the forms, in the order of the columns."""

QUESTION = r"Which number makes $3 + \boxed{7} = 10$ true?"
"""Question of all examples, for the boxes that a response quotes."""

CASES = (
  ("It is 42.", "42", "nothing is stated: `final_number` takes the last number"),
  ("Paris", "Paris", "nothing is stated: `final_text` takes the last line"),
  ("**B) four**", "B", "nothing is stated: `choice` takes a last line that is an option"),
  ("<think>The answer is 7.</think>The answer is 42.", "42", "reasoning does not count"),
  (r"<think>So \boxed{42}", "42", "nor does reasoning that is never closed"),
  (r"So \boxed{42}. But no: \boxed{", "42", "the last box breaks off: what it would have held is unknown"),
  (r"\boxed{41} or \boxed{42}", "42", 'two statements are a hedge; to `final_number` if "or" joins them'),
  ("#### 42\n\nAnother question.\n#### 3", "42",
    "`final_number` takes the last statement, and for the others this is a hedge"),
  ("#### 41\nNo.\n#### 42", "42", "the same"),
  ("#### 42" + " \n" * 1200 + "That is all.", "42", "the last 20,000 characters are read"),
  (r"$3 + \boxed{7} = 10$, so \boxed{42}", "42", "the box of the question is no answer"),
  ("#### 42. Add\n3 + 4 = 7\n\nThe answer is 7.", "42", "a numbered heading is no answer"),
  ("The answer is not 42.", "42", "nor is what is denied"),
  ("Answer: 41 or 42", "42", "an alternative is a hedge"),
  ("The answer is 42 apples.", "42", "units do not matter to numbers"),
  ("The answer is Paris, because it rains.", "Paris", "remarks do not matter"),
  ("The answer is 2:00 pm.", "2", "a time is no number"),
  ("The answer is 10%.", "10", "a percentage is its number"),
  ("The answer is 10%.", "0.1", "and to `maths` also its value"),
  ("The answer is 84/2.", "42", "an expression that is left to do is a number to `maths` alone"),
  ("The answer is 42!", "42", "an exclamation"),
  (r"\boxed{42!}", "42", "a factorial"),
)  # fmt: skip
"""Responses with a correct answer and the decision that they show."""


def tables() -> str:
  """Returns the tables of the page, in Markdown."""
  forms = [
    [form.rule if i == 0 else "", _code(text), *_verdicts(text, answer)]
    for form in FORMS
    for i, (text, answer) in enumerate(form.examples)
  ]
  cases = [[_code(text), f"`{answer}`", *_verdicts(text, answer), why] for text, answer, why in CASES]
  return "\n".join((
    "## Forms of a statement\n",
    "The strongest first; only the first form that occurs in a response is read, by `choice` the\nfirst that names a letter.\n",
    _table(("the answer stands", "example", *JUDGES), forms), "## Decisions\n",
    _table(("response", "correct", *JUDGES, ""), cases),
    "## Numbers\n", "What is stated, and the number that `final_number` reads.\n",
    _table(("stated", "number"), [[_code(x), y or "none"] for x, y in NUMBERS]),
    "## Options\n", "What is stated, and the letter that `choice` reads.\n",
    _table(("stated", "letter"), [[_code(x), y or "none"] for x, y in CHOICES]),
  ))  # fmt: skip


def _verdicts(text: str, answer: str) -> list[str]:
  """Returns the reward of each of `JUDGES`; empty for one that does not judge such an answer."""
  completion, example = Completion(text, (), 9, True), {"answer": answer, "question": QUESTION}
  judges = (
    ["choice"]
    if len(answer) == 1 and answer.isalpha()
    else ["final_text", "exact_match"]
    if answer.isalpha()
    else JUDGES[:-1]
  )
  # The first call of `maths` imports an algebra system.
  settings = {"maths": {"seconds": 600.0}}
  return [
    f"{make(name, **settings.get(name, {}))(completion, example):g}" if name in judges else "" for name in JUDGES
  ]


def _code(text: str) -> str:
  """Returns a text as code within a cell; a sign stands for a line break, dots for many."""
  text = text.replace(" \n" * 1200, "\n...\n").replace("\n", "\u23ce").replace("|", "\\|")
  return f"`` {text} ``" if "`" in text else f"`{text}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def page_with_tables(page: str) -> str:
  """Returns a page with the tables of now between its marks."""
  before, _, rest = page.partition(START)
  return before + START + "\n" + tables() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
  path = pathlib.Path(sys.argv[1])
  path.write_text(page_with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
