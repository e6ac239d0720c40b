"""The texts of probes: right answers in many forms, wrong ones, and responses that say nothing."""

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.rewards import REWARDS, RewardSpec, WeightedReward
from jaxrl_llm.tasks import Row, Task

FORMS = (
  "{}", "\\boxed{{}}", "<answer>{}</answer>", "#### {}", "#{}", '{"answer": "{}"}', "Answer: {}",
  "The answer is {}.",
)  # fmt: skip
"""Forms in which a response may state its answer, which `{}` stands for."""

EMPTY, BLANK, RANDOM, LONG = "empty", "whitespace", "random words", "many random words"
PROMPT, QUESTION, DEMONSTRATION = "copied prompt", "copied question", "demonstration"
SPACES = ("space before", "space behind", "line break before", "line break behind")
CASES = ("upper case", "lower case")
EXPLAINED, BEFORE, BEHIND = "explanation behind", "other number before", "other number behind"
OTHER, MORE, LESS, NEXT = "another problem's answer", "X + 1", "X - 1", "letter after X"
CUT, COLUMN = "X cut in the middle", "column "

_KNOWN = ("question", "answer", "prompt", "response", "place")
_NUMBER = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,9})?")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*")


class Probe(NamedTuple):
  """A prepared response to a problem.

  Attributes:
    kind: Kind of response, or a form in which the right answer is stated, such as `#### {}`.
    row: Index of the problem.
    text: Text of the response.
    stopped: Whether it ends by itself, rather than at its budget.
  """

  kind: str
  row: int
  text: str
  stopped: bool = True


def probes(rows: Sequence[Mapping[str, Any]], forms: Sequence[str], *, long_chars: int = 400) -> list[Probe]:
  r"""Returns the probes that need no right form: the right answers, copies and random words.

  Args:
    rows: Problems with `question`, `prompt`, `answer` and `response`, their demonstration or "".
    forms: Forms of an answer, as in `FORMS`.
    long_chars: Length of the long random text, in characters.

  Example:
    >>> row = {"question": "7 + 8", "prompt": "7 + 8 =", "answer": "15", "response": ""}
    >>> [probe.text for probe in probes([row], ("{}", "#{}")) if probe.kind in ("{}", "#{}", "copied prompt")]
    ['7 + 8 =', '15', '#15']
  """
  of = lambda i: _of_row(rows[i], i, forms, long_chars)
  return [Probe(kind, i, text) for i in range(len(rows)) for kind, text in of(i)]


def _of_row(
  row: Mapping[str, Any], i: int, forms: Sequence[str], long_chars: int
) -> Iterator[tuple[str, str]]:
  words = random_words(i, max(long_chars, 24))
  yield from ((EMPTY, ""), (BLANK, " \n "), (RANDOM, words[: min(16, long_chars // 2)].rstrip()))
  yield LONG, words[:long_chars]
  yield PROMPT, row["prompt"]
  if row["question"] not in ("", row["prompt"]):
    yield QUESTION, row["question"]
  if row.get("response"):
    yield DEMONSTRATION, row["response"]
  if answer := str(row["answer"]).strip():
    yield from ((form, form.replace("{}", answer)) for form in forms)


def random_words(seed: int, num_chars: int) -> str:
  """Returns words of random letters, with that many characters at least."""
  draws, words = random.Random(seed), ""
  while len(words) < num_chars:
    words += "".join(draws.choices("abcdefghijklmnopqrstuvwxyz", k=draws.randint(3, 8))) + " "
  return words


def variants(rows: Sequence[Mapping[str, Any]], form: str) -> list[Probe]:
  r"""Returns the probes in a form that earns: its variations, and wrong answers stated in it.

  Args:
    rows: Problems, as for `probes`.
    form: Form of an answer, as in `FORMS`, or `DEMONSTRATION`.

  Example:
    >>> rows = [{"question": "7 + 8", "prompt": "7 + 8 =", "answer": x, "response": ""} for x in ("15", "4")]
    >>> [probe.text for probe in variants(rows, "#{}") if probe.kind == "another problem's answer"]
    ['#4', '#15']
  """
  of = lambda i: _in_form(rows, i, form)
  return [Probe(kind, i, text, kind != CUT) for i in range(len(rows)) for kind, text in of(i)]


def _in_form(rows: Sequence[Mapping[str, Any]], i: int, form: str) -> Iterator[tuple[str, str]]:
  answer, demonstration = str(rows[i]["answer"]).strip(), rows[i].get("response", "")
  if not answer or (form == DEMONSTRATION and answer not in demonstration):
    return
  parts = demonstration.rpartition(answer) if form == DEMONSTRATION else form.partition("{}")
  state = lambda answer: parts[0] + answer + parts[2]
  right, other = state(answer), _other(rows, i)
  yield from zip(SPACES, (" " + right, right + " ", "\n" + right, right + "\n"), strict=True)
  if _WORDS.fullmatch(answer):
    cases = zip(CASES, (answer.upper(), answer.lower()), strict=True)
    yield from ((kind, state(text)) for kind, text in cases if text != answer)
  yield EXPLAINED, right + "\nThis follows from the question."
  if _NUMBER.fullmatch(answer):
    value = Decimal(answer)
    number = next((x for x in _NUMBER.findall(rows[i]["question"]) if Decimal(x) != value), str(value + 3))
    yield BEFORE, f"First take {number}.\n{right}"
    yield BEHIND, f"{right}\nThe first is {number}."
    yield from ((MORE, state(str(value + 1))), (LESS, state(str(value - 1))))
  if re.fullmatch("[A-Ya-y]", answer):
    yield NEXT, state(chr(ord(answer) + 1))
  if form == DEMONSTRATION:
    yield CUT, right[: len(right) // 2]
  elif len(answer) > 1:
    yield CUT, parts[0] + answer[: len(answer) // 2]
  if other is not None:
    yield OTHER, other["response"] if form == DEMONSTRATION else state(str(other["answer"]))
  for name, value in rows[i].items():
    text = str(value) if isinstance(value, str | int | float) and name not in _KNOWN else ""
    if 0 < len(text) < 1000 and not _same(text, answer):
      yield COLUMN + name, state(text)


def _other(rows: Sequence[Mapping[str, Any]], i: int) -> Mapping[str, Any] | None:
  """Returns the next problem with another answer, or None if there is none.

  A neighbouring number or letter is avoided, so that a tolerance is not taken for another fault.
  """
  of = lambda row: str(row["answer"]).strip()
  answer, rest = of(rows[i]), (*rows[i + 1 :], *rows[:i])
  others = [row for row in rest if of(row) and not _same(of(row), answer)]
  return next((row for row in others if not _near(of(row), answer)), next(iter(others), None))


def _near(one: str, other: str) -> bool:
  if _NUMBER.fullmatch(one) and _NUMBER.fullmatch(other):
    return abs(Decimal(one) - Decimal(other)) <= 1
  return len(one) == len(other) == 1 and abs(ord(one) - ord(other)) == 1


def _same(one: str, other: str) -> bool:
  one, other = one.strip().casefold(), other.strip().casefold()
  numbers = _NUMBER.fullmatch(one) and _NUMBER.fullmatch(other)
  return one == other or bool(numbers and Decimal(one) == Decimal(other))


def common_ending(rows: Sequence[Mapping[str, Any]]) -> str | None:
  """Returns the form of the answer in the last line of most demonstrations, or None.

  Demonstrations whose last line does not have the right answer, which may be wrong, do not count.

  Example:
    >>> common_ending([{"answer": "15", "response": "7+8=15\\n#15"}, {"answer": "3", "response": "#2"}])
    '#{}'
  """
  endings: Counter[str] = Counter()
  for row in rows:
    before, mark, behind = row.get("response", "").rstrip().rpartition("\n")[2].rpartition(str(row["answer"]))
    if mark:
      endings[f"{before}{{}}{behind}"] += 1
  form, count = endings.most_common(1)[0] if endings else ("", 0)
  return form if 2 * count > endings.total() else None


def right_answer(verifier: WeightedReward, row: Mapping[str, Any]) -> str:
  """Returns the right answer of a problem as a response states it, such as the letter of an option.

  Example:
    >>> from jaxrl_llm.rewards import weighted
    >>> right_answer(weighted("choice", RewardSpec("choice")), {"answer": "2"})
    'C'
  """
  if verifier.routes:
    return right_answer(next(route for route in verifier.routes if route.name == row["reward"]), row)
  spec = verifier.spec or RewardSpec(verifier.name)
  states = REWARDS[spec.name].states if spec.name in REWARDS else None
  try:
    return str(row["answer"] if states is None else states(str(row["answer"])))
  except ValueError:  # The verifier reads another column, or will say what is wrong with this one.
    return str(row["answer"])


def marked_forms(verifier: WeightedReward) -> tuple[str, ...]:
  """Returns the forms with the markers behind which a verifier's settings place the answer.

  Example:
    >>> from jaxrl_llm.rewards import weighted
    >>> marked_forms(weighted("exact_match", RewardSpec("exact_match", {"answer_in": "after Result:"})))
    ('Result: {}',)
  """
  place = str((verifier.spec or RewardSpec(verifier.name)).settings.get("answer_in", ""))
  own = (f"{place.removeprefix('after ').strip()} {{}}",) if place.startswith("after ") else ()
  return (*own, *(form for route in verifier.routes for form in marked_forms(route)))


def shown_forms(
  rows: Sequence[Mapping[str, Any]], *, shots: int, template: str, stop_strings: Sequence[str] = ()
) -> dict[str, str]:
  r"""Returns the forms of an answer that a policy is shown, by where.

  Args:
    rows: Problems with their demonstrations.
    shots: Number of solved problems in front of each prompt.
    template: Text of a solved problem.
    stop_strings: Texts that end a response; the first is its end.

  Example:
    >>> options = dict(shots=3, template="{prompt} {answer}\n\n", stop_strings=("\n",))
    >>> shown_forms([{"answer": "15", "response": ""}], **options)
    {'the solved problems': ' {}\n'}
  """
  forms, demonstrated = {}, any(row.get("response") for row in rows)
  _, mark, solved = template.partition("{prompt}")
  # A solution is a demonstration, if there are any, and else the answer.
  for name in ("{answer}",) if demonstrated else ("{answer}", "{solution}"):
    solved = solved.replace(name, "{}")
  if shots and mark and solved.count("{") == 1 and "{}" in solved:
    ends = [solved.index(text) + len(text) for text in stop_strings if text in solved]
    forms["the solved problems"] = solved[: min(ends)] if ends else solved.rstrip()
  if (ending := common_ending(rows)) is not None:
    forms["the demonstrations"] = ending
  return forms


def some_problems(task: Task, num_problems: int) -> list[Row]:
  """Returns training problems from all over a task, each with a demonstration if the task has any.

  Args:
    task: Task with training problems.
    num_problems: Largest number of problems.
  """
  source = task.demonstrations if len(task.demonstrations) else task.train
  distinct = {}
  # Several demonstrations may be those of one problem.
  for i in np.linspace(0, len(source) - 1, min(4 * num_problems, len(source)), dtype=int):
    distinct.setdefault(source[i]["prompt"], source[i])
  rows = list(distinct.values())
  return [dict(rows[i]) for i in np.linspace(0, len(rows) - 1, min(num_problems, len(rows)), dtype=int)]
