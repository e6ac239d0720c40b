"""MathVision, mathematical problems about pictures, converted from records to rows.

References:
  Measuring multimodal mathematical reasoning with the MATH-Vision dataset, arXiv:2402.14804, 2024.
"""

import pathlib

from jaxrl_llm.tasks.files import picture_column
from jaxrl_llm.tasks.files.columns import BLANK, Unusable, short, text, whole_number
from jaxrl_llm.tasks.files.downloads import Files, hub
from jaxrl_llm.tasks.files.storage import IMAGES, Row
from jaxrl_llm.tasks.files.text_files import Record

TEMPLATE = (
  'Please solve the problem step by step and put your answer in one "\\boxed{{}}". If it is a multiple choice question, '
  'only one letter is allowed in the "\\boxed{{}}".\n{question}\n{options}'
)
"""The publishers' prompt, which the picture precedes."""

_HUB = "MathLLMs/MathVision"
FILES = {
  "test": Files(("**/test-*.parquet", "**/test.parquet"), hub(_HUB, "data/test-00000-of-00001-3532b8d3f1b4047a.parquet")),
  "testmini": Files(("**/testmini-*.parquet", "**/testmini.parquet"), hub(_HUB, "data/testmini-00000-of-00001-f8ff70fcb2f29b1d.parquet")),
}
READS = ("id", "question", "options", "decoded_image", "answer", "level", "subject")
COLUMNS = ("options", "subject", "reward", IMAGES)

_LETTERS = "ABCDE"


def mathvision(record: Record) -> Row:
  """Converts a record of MathVision.

  The record has `id`, `question` with marks such as <image1>, `options`, `decoded_image` with the
  picture of all marks, `answer`, `level` from 1 to 5 and `subject`. The marks stay in the text, as
  in the publishers' prompt. Options that are only letters stand in the picture and are not written.
  The row names its verifier in `reward`: a problem with options is judged by the letter, the others
  by mathematical equivalence.

  Raises:
    Unusable: If a column is missing, or the picture cannot be used.
  """
  options = record.get("options") or []
  if not isinstance(options, list):
    raise Unusable("options are no list", short(str(options)))
  options = list(map(str, options))
  if len(options) > len(_LETTERS):
    raise Unusable("too many options", f"{len(options)}, expected at most {len(_LETTERS)}")
  written = "" if "".join(options) == _LETTERS else "".join(f"({letter}) {option}\n" for letter, option in zip(_LETTERS, options))
  images = picture_column.load(record.get("decoded_image"), pathlib.Path())
  if len(images) != 1:
    raise Unusable("no picture", "column 'decoded_image'")
  return BLANK | {
    "question": text(record, "question"),
    "answer": text(record, "answer"),
    "level": whole_number(record, "level"),
    "id": text(record, "id"),
    "options": written,
    "subject": text(record, "subject", empty=True),
    "reward": "choice" if options else "maths",
    IMAGES: images,
  }
