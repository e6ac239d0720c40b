"""Published sets of mathematical problems, converted from records to rows."""

import re

from jaxrl_llm.tasks.files import chats
from jaxrl_llm.tasks.files.columns import BLANK, Unusable, text, whole_number
from jaxrl_llm.tasks.files.downloads import Files, hub
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.files.text_files import Record

BOXED = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
HASHES = "{question}\nAnswer with a number after ####."
DAPO = (
  "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer (without quotes) "
  "where $Answer is the answer to the problem.\n\n{question}\n\nRemember to put your answer on its own line after \"Answer:\"."
)
"""Prompt that DAPO's records contain."""

_DAPO_BEFORE, _DAPO_AFTER = (part.strip() for part in DAPO.split("{question}"))
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+([^\s${}\\]+)")
_SUBJECTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra", "precalculus")
_GSM8K = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"

GSM8K_FILES = {
  "test": Files(("**/test.jsonl", "**/main/test-*.parquet", "**/test-*.parquet"), (f"{_GSM8K}/test.jsonl",)),
  "train": Files(("**/train.jsonl", "**/main/train-*.parquet", "**/train-*.parquet"), (f"{_GSM8K}/train.jsonl",)),
}
MATH_FILES = {
  "test": Files(
    ("test.jsonl", "test/test.jsonl", "test/*/*.json", "MATH/test/*/*.json", "**/test-*.parquet"),
    hub("HuggingFaceH4/MATH-500", "test.jsonl"),
  ),
  "train": Files(
    ("train.jsonl", "train/*/*.json", "MATH/train/*/*.json", "**/train*.parquet"),
    hub("EleutherAI/hendrycks_math", *(f"{subject}/train-00000-of-00001.parquet" for subject in _SUBJECTS)),
  ),
}
MATH_500_FILES = {"test": MATH_FILES["test"]._replace(patterns=("**/test.jsonl", "**/test-*.parquet"))}
DAPO_FILES = {
  "train": Files(("**/*.parquet", "**/*.jsonl"), hub("BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet")),
}
_ANY = ("**/*.jsonl", "**/*.parquet", "**/*.json", "**/*.csv")
AIME24_FILES = {"test": Files(_ANY, hub("HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet"))}
AIME25_FILES = {"test": Files(_ANY, hub("opencompass/AIME2025", "aime2025-I.jsonl", "aime2025-II.jsonl"))}
HMMT25_FILES = {"test": Files(_ANY, hub("MathArena/hmmt_feb_2025", "data/train-00000-of-00001.parquet"))}


def gsm8k(record: Record) -> Row:
  """Converts a record of GSM8K.

  The record has `question` and `answer`, with calculations in <<>> and the result after ####. The
  level is the number of steps in the answer, one per line.

  Example:
    >>> row = gsm8k({"question": "Two packs of 500?", "answer": "2*500=<<2*500=1000>>1000 in all.\\n#### 1,000"})
    >>> row["answer"], row["level"], row["response"]
    ('1000', 1, '2*500=1000 in all.\\n#### 1000')
  """
  steps, mark, answer = text(record, "answer").rpartition("####")
  answer = answer.strip().replace(",", "")
  if not mark or not answer:
    raise Unusable("answer without ####")
  steps = re.sub(r"<<[^<>]*>>", "", steps).strip()
  level = sum(bool(line.strip()) for line in steps.split("\n"))
  return BLANK | {"question": text(record, "question"), "answer": answer, "level": level, "response": f"{steps}\n#### {answer}"}


def math(record: Record) -> Row:
  """Converts a record of MATH or MATH-500.

  MATH has `problem`, `level` (such as "Level 3"), `type` and `solution` with a boxed answer.
  MATH-500 also has `answer`, `subject` and `unique_id`.

  Example:
    >>> record = {"problem": "1/2 + 1?", "level": "Level 1", "type": "Prealgebra", "solution": r"It is $\\boxed{\\frac{3}{2}}$."}
    >>> row = math(record)
    >>> row["answer"], row["level"], row["subject"]
    ('\\\\frac{3}{2}', 1, 'Prealgebra')
  """
  solution = text(record, "solution")
  # Two problems have "Level ?".
  level = 0 if "?" in str(record.get("level")) else whole_number(record, "level")
  return {
    "question": text(record, "problem"),
    "answer": text(record, "answer") if "answer" in record else boxed(solution),
    "level": level,
    "response": solution,
    "id": text(record, "unique_id", empty=True) if "unique_id" in record else "",
    "subject": text(record, first_of(record, "subject", "type"), empty=True),
  }


def dapo_math(record: Record) -> Row:
  """Converts a record of DAPO-Math-17k, in the original or the processed form.

  In the original, `prompt` is a chat and the answer is in `reward_model`. In the processed form,
  `prompt` is the question and `solution` is the answer. The original contains each problem about a
  hundred times; the repetitions count as duplicates.
  """
  question = chats.asked(record, "prompt").question
  answer = "reward_model.ground_truth" if isinstance(record["prompt"], list) else first_of(record, "solution", "answer")
  question = question.strip().removeprefix(_DAPO_BEFORE).removesuffix(_DAPO_AFTER).strip()
  return BLANK | {"question": question, "answer": text(record, answer)}


def competition(record: Record) -> Row:
  """Converts a record of AIME or HMMT.

  Publishers use various names for the problem and its answer. Some give the answer only in the box
  of a solution.
  """
  solution = first_of(record, "solution", "Solution", default=None)
  answer = first_of(record, "answer", "Answer", default=None)
  number = first_of(record, "id", "ID", "problem_idx", "unique_id", default=None)
  if answer is None and solution is None:
    raise Unusable("no column 'answer'", f"but {', '.join(map(str, record))}")
  return BLANK | {
    "question": text(record, first_of(record, "problem", "Problem", "question")),
    "answer": text(record, answer) if answer else boxed(text(record, solution)),
    "id": "" if number is None else text(record, number),
  }


def first_of(record: Record, *names: str, **default: str | None) -> str | None:
  """Returns the first of some columns that a record has.

  Raises:
    Unusable: If it has none of them and there is no `default`.
  """
  for name in names:
    if name in record:
      return name
  if default:
    return default["default"]
  raise Unusable(f"no column {names[0]!r}", f"but {', '.join(map(str, list(record)[:12]))}")


def boxed(solution: str) -> str:
  """Returns the content of the last box in a solution.

  Raises:
    Unusable: If there is no box, or the last one has no end.

  Example:
    >>> boxed(r"First \\boxed{1}, then $\\boxed{\\text{a } \\{2\\}}$.")
    '\\\\text{a } \\\\{2\\\\}'
  """
  boxes = list(_BOX.finditer(solution))
  if not boxes:
    raise Unusable("solution without \\boxed")
  last = boxes[-1]
  if last[1] is not None:
    return last[1]
  depth = 0
  for i in range(last.end(), len(solution)):
    if solution[i] in "{}" and solution[i - 1] != "\\":
      depth += 1 if solution[i] == "{" else -1
      if not depth:
        return solution[last.end() + 1 : i].strip()
  raise Unusable("solution without \\boxed", "the box has no end")
