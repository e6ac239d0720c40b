"""The columns of published formats, so that their files are read as they are."""

from collections.abc import Sequence

from jaxrl_llm.tasks.files import chats
from jaxrl_llm.tasks.files.columns import Columns, has
from jaxrl_llm.tasks.files.text_files import Record
from jaxrl_llm.tasks.files.values import OPTIONS, Unusable, options_of

QUESTIONS = ("question", "problem", "prompt", "messages")
"""Columns of the question, best first: own files, EasyR1 and MATH, verl and TRL, TRL's chats."""

ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", "final_answer", "answerKey", "solution", "completion", "messages")
"""Columns of the answer, best first: own files and MMLU, verl, OlympiadBench, ARC, TRL."""


def known(records: Sequence[Record], question: str | None, answer: str | None) -> tuple[str, str]:
  """Returns the columns of the question and the answer, those of published formats where None.

  The columns of a file of no known format are "question" and "answer".

  Args:
    records: First records of a file.
    question: Column of the question; None for the first of `QUESTIONS` that the records have.
    answer: Column of the answer; None for the first of `ANSWERS`.

  Example:
    >>> user = {"role": "user", "content": "6*12?"}
    >>> known([{"data_source": "gsm8k", "prompt": [user], "reward_model": {"ground_truth": "72"}}], None, None)
    ('prompt', 'reward_model.ground_truth')
  """
  first = lambda names: next((name for name in names if has(records, name)), names[0])
  return question or first(QUESTIONS), answer or first(ANSWERS)


def options_column(records: Sequence[Record], question: str) -> tuple[str | None, int]:
  """Returns the column with the options of the questions, and their largest number.

  Args:
    records: First records of a file.
    question: Column of the question. If its texts show the options already, the column is None.

  Example:
    >>> options_column([{"question": "Which?", "choices": ["red", "blue"], "answer": 1}], "question")
    ('choices', 2)
  """
  for name in OPTIONS:
    lists = [record[name] for record in records if record.get(name)]
    options = [options_of(value) if isinstance(value, list | dict) else {} for value in lists]
    if options and all(options):
      texts = [str(record.get(question)) for record in records if record.get(name)]
      repeated = all(str(x) in text for text, some in zip(texts, options, strict=True) for x in some.values())
      return None if repeated else name, max(map(len, options))
  return None, 0


def in_words(records: Sequence[Record], columns: Columns, template: str) -> str:
  """Returns a line on the columns that are read, for the report of a run.

  Example:
    >>> user = {"role": "user", "content": "6*12?"}
    >>> in_words([{"prompt": [user], "solution": "72"}], Columns("prompt", "solution"), "{question}")
    "columns: question 'prompt' (chats), answer 'solution'; the prompt is '{question}'"
  """
  names = {"question": columns.question, "answer": columns.answer, "response": columns.response, "level": columns.level,
           "id": columns.id, "pictures": columns.images}  # fmt: skip
  replies = columns.response is None and any(_ends_with_assistant(record, columns.question) for record in records)
  kinds = {"question": " (chats, whose last message is the demonstration)" if replies else ""}
  if not replies and any(_is_chat(record, columns.question) for record in records):
    kinds["question"] = " (chats)"
  parts = [f"{use} {name!r}{kinds.get(use, '')}" for use, name in names.items() if name is not None]
  return f"columns: {', '.join(parts)}; the prompt is {template!r}"


def _is_chat(record: Record, name: str) -> bool:
  try:
    return not isinstance(chats.read(record, name), str)
  except Unusable:
    return False


def _ends_with_assistant(record: Record, name: str) -> bool:
  try:
    return bool(chats.asked(record, name).reply)
  except Unusable:
    return False
