"""Answers of problems: the reward that suits them, and signs that a file's answers are none."""

import re
from collections.abc import Iterable, Sequence

from jaxrl_llm.messages import Problem
from jaxrl_llm.tasks.files.storage import IMAGES, Row
from jaxrl_llm.tasks.files.values import short

_NUMBER = re.compile(r"-?[$£€]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
ANSWERS = {
  "final_number": ("number", _NUMBER.fullmatch),
  "final_answer": ("whole number", _WHOLE_NUMBER.fullmatch),
  "choice": ("letter", re.compile(r"[(\[]?[A-Za-z][)\].:]{0,2}|[0-9]").fullmatch),
}
"""Kind of answer that a reward requires and its test, for rewards that do not accept any text."""

SPELT = ("final_number", "final_answer", "final_text", "exact_match")
"""Rewards of which a response must spell the answer, so that it must fit into the token budget."""

_READ = (*SPELT, "choice", "maths")
_LETTER = re.compile(r"\(?[A-J]\)?")
_STATED = re.compile(r"####|\\boxed")
_COMMAND = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{4,}")
_STRUCTURE = re.compile(r"""\s*(?:\{\s*["'].*\}|\[\s*["'{].*\])\s*""", re.DOTALL)
_QUOTED = re.compile(r"""\s*(["'])-?[0-9][0-9.,]*\1\s*""")
_COMMA = re.compile(r"\s*-?[0-9]+,[0-9]{1,2}\s*")
_MOST = 0.9
_SOME = 0.05
_ENOUGH = 20  # Fewer problems are no ground for a suspicion.


def reward_for(answers: Iterable[str], *, options: int = 0) -> str:
  r"""Returns the name of the reward that suits most answers.

  The answers may be numbers, letters of options or their numbers from 0, formulas in LaTeX,
  solutions that state the answer in a box or behind `####`, or any text.

  Args:
    answers: Answers of all problems.
    options: Number of options that the prompts show; 0 for none.

  Example:
    >>> reward_for(["12", "-3", "1,200.5"]), reward_for(["A", "(C)"]), reward_for(["Paris", "7"])
    ('final_number', 'choice', 'final_text')
    >>> reward_for(["2", "0", "3"], options=4), reward_for([r"\frac{1}{2}", "3", r"x^2 + 1"])
    ('choice', 'maths')
  """
  answers = [answer.strip() for answer in answers]
  share = lambda fits: sum(bool(fits(answer)) for answer in answers) / max(len(answers), 1)
  if options and all(answer.isdecimal() and int(answer) < min(options, 10) for answer in answers):
    return "choice"
  if share(ANSWERS["final_number"][1]) >= _MOST:
    return "final_number"
  if share(_LETTER.fullmatch) >= _MOST:
    return "choice"
  formal = lambda answer: _STATED.search(answer) or not _WORD.search(_COMMAND.sub("", answer))
  in_latex = share(lambda answer: _STATED.search(answer) or _COMMAND.search(answer))
  return "maths" if in_latex >= _SOME and share(formal) >= _MOST else "final_text"


def unfit(answer: str, reward: str) -> str | None:
  """Returns the kind of answer that a reward needs and this is not; None if the reward reads it.

  Example:
    >>> unfit("blue", "final_number"), unfit("blue", "final_text")
    ('number', None)
  """
  kind, fits = ANSWERS.get(reward, (None, bool))
  return None if kind is None or fits(answer.strip()) else kind


def check_answers(rows: Sequence[Row], reward: str, *, column: str) -> list[str]:
  """Refuses answers that no response can match, and returns what else looks wrong.

  Args:
    rows: Some problems with their prompts.
    reward: Name of the verifier; an unknown one is the user's own and may read anything.
    column: Column of the answers.

  Returns:
    Sentences, to be shown with the data.

  Raises:
    ValueError: If the answers are objects or lists as text, or numbers in quotation marks.
  """
  if reward not in _READ or not rows:
    return []
  answers, setting = [row["answer"] for row in rows], "task.answer_column"
  share = lambda fits: sum(bool(fits(answer)) for answer in answers) / len(answers)
  if share(_STRUCTURE.fullmatch) >= _MOST:
    fix = f"single values; name what is in them, such as {column}.ground_truth or {column}.0"
    raise ValueError(Problem(setting, f"lists or objects as text in {column!r}, such as {short(answers[0])}", fix))
  if share(_QUOTED.fullmatch) >= _MOST:
    raise ValueError(Problem(setting, f"numbers in quotation marks in {column!r}, such as {short(answers[0])}", "12.50 without them"))
  if len(rows) < _ENOUGH:
    return []
  if len(set(answers)) == 1:
    return [f"all answers are {short(answers[0])}: is {column!r} the column of the answers (task.answer_column)?"]
  if share(_COMMA.fullmatch) >= _MOST:
    return [f"the answers have decimal commas, such as {short(answers[0])}: a response with a point is wrong"]
  blind = sum(not row.get(IMAGES) and not _shows(row["prompt"], row["answer"]) for row in rows)
  if reward == "choice" and blind > _MOST * len(rows):
    return [f"the answers are letters, such as {short(answers[0])}, but the prompts show no options (task.prompt_template)"]
  return []


def _shows(prompt: str, answer: str) -> bool:
  """Returns whether a prompt shows the label of an option, given as its letter or number from 0."""
  letter = answer.strip().strip("()[].: ").upper()
  letter = "ABCDEFGHIJ"[int(letter)] if letter.isdecimal() and int(letter) < 10 else letter
  return re.search(rf"(?<![A-Za-z]){re.escape(letter)}(?![A-Za-z])", prompt) is not None
