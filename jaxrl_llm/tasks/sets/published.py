"""Published sets by name, with their files, rows, prompts and rewards."""

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxrl_llm.pretrained.pictures import check_installed
from jaxrl_llm.tasks import prompt_template as prompt_template_lib
from jaxrl_llm.tasks.files import downloads, storage, tables, text_files
from jaxrl_llm.tasks.files.columns import Convert
from jaxrl_llm.tasks.files.downloads import Files
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.problem_set import ProblemSetEntry, Setup, Style, make_task
from jaxrl_llm.tasks.sets import code, logic, maths
from jaxrl_llm.tasks.sets import mathvision as mathvision_lib
from jaxrl_llm.tasks.task import Task


class Published(NamedTuple):
  """A published set.

  Attributes:
    name: Name of the task.
    files: Locations of the files by split, the held-out split first.
    convert: Function from a record to a row.
    style: Prompts and rewards.
    reads: Columns to load from Parquet files; None loads all.
    columns: Columns of the rows besides those that all rows have.
    version: Version of the rows. Any change to `convert` must increase it; otherwise old copies
      stay in use.
  """

  name: str
  files: Mapping[str, Files]
  convert: Convert
  style: Style
  reads: tuple[str, ...] | None = None
  columns: tuple[str, ...] = ()
  version: int = 1


_MATHS = Style(maths.BOXED, ("maths",))
_CODE = Style(code.TEMPLATE, ("code_tests",))
_DAPO = Style(maths.DAPO, ("maths",), test_fraction=0.02)
_GRID = Style(logic.GRID, ("zebra_grid",), verifiers={"zebra_grid": logic.zebra_grid})
_CHOICES = Style(logic.CHOICES, ("choice",))

PUBLISHED = (
  Published("gsm8k", maths.GSM8K_FILES, maths.gsm8k, Style(maths.HASHES, ("final_number",), "answer_form")),
  Published("math", maths.MATH_FILES, maths.math, _MATHS, columns=("subject",)),
  Published("math_500", maths.MATH_500_FILES, maths.math, _MATHS, columns=("subject",)),
  Published("dapo_math", maths.DAPO_FILES, maths.dapo_math, _DAPO, reads=("prompt", "solution", "answer", "reward_model")),
  Published("aime24", maths.AIME24_FILES, maths.competition, _MATHS),
  Published("aime25", maths.AIME25_FILES, maths.competition, _MATHS),
  Published("hmmt25", maths.HMMT25_FILES, maths.competition, _MATHS),
  Published("codeforces", code.CODEFORCES_FILES, code.codeforces, _CODE, columns=code.COLUMNS),
)
_LIVECODEBENCH = Published("livecodebench", code.LIVECODEBENCH_FILES, code.livecodebench, _CODE, columns=code.COLUMNS)
_MATHVISION = {
  split: Published(
    "mathvision" if split == "test" else f"mathvision_{split}", {"test": files}, mathvision_lib.mathvision,
    Style(mathvision_lib.TEMPLATE, ("maths", "choice")), reads=mathvision_lib.READS, columns=mathvision_lib.COLUMNS,
  )
  for split, files in mathvision_lib.FILES.items()
}  # fmt: skip
_ZEBRALOGIC = {
  "grid": Published("zebralogic_grid", logic.FILES["grid"], logic.grid, _GRID, columns=logic.COLUMNS),
  "mc": Published("zebralogic_mc", logic.FILES["mc"], logic.multiple_choice, _CHOICES, columns=logic.COLUMNS),
}


def published_task(
  published: Published,
  choose: Callable[[Row], bool] | None,
  setup: Setup,
  *,
  source: str | os.PathLike | None = None,
  prompt_template: str | None = None,
  reward: str | Sequence[str] | None = None,
) -> Task:
  """Loads a published set; the task has no training problems if the set has none.

  Args:
    published: Set to load.
    choose: Predicate of the rows to keep; None keeps all.
    setup: Settings common to all tasks.
    source: Local folder with the set's files; None downloads them, once, below `data_dir`.
    prompt_template: Prompt template; None is the set's own.
    reward: Name or names of reward functions; None is the set's own.

  Raises:
    ValueError: If there are no files and no network, the columns differ from the published ones, or
      rows cannot be used. One line.
  """
  folder = storage.data_folder(setup.data_dir) / "published" / published.name
  obtain = functools.partial(downloads.obtain, published.name, source=source, folder=folder)
  files = {split: obtain(split, location) for split, location in published.files.items()}
  read = functools.partial(text_files.read_records, columns=published.reads)
  records = {split: lambda paths=paths: itertools.chain.from_iterable(map(read, paths)) for split, paths in files.items()}
  key = tables.key_of(list(itertools.chain(*files.values())), [published.version, list(map(len, files.values()))])
  shown = [name for name in prompt_template_lib.fields(published.style.template) if name in published.columns]
  style = published.style.with_settings(prompt_template, reward)
  return make_task(
    published.name, records, published.convert, key=key, style=style, setup=setup, columns=published.columns, shown=shown, choose=choose
  )


def livecodebench(
  setup: Setup,
  *,
  source: str | os.PathLike | None = None,
  prompt_template: str | None = None,
  reward: str | Sequence[str] | None = None,
  after: str | None = None,
  before: str | None = None,
) -> Task:
  """Loads LiveCodeBench, filtered by contest date; see `published_task` and `code.within`.

  A model cannot have been trained on the contests after its training data were collected.
  """
  settings = {"source": source, "prompt_template": prompt_template, "reward": reward}
  return published_task(_LIVECODEBENCH, code.within(after, before), setup, **settings)


def zebralogic(
  setup: Setup,
  *,
  source: str | os.PathLike | None = None,
  prompt_template: str | None = None,
  reward: str | Sequence[str] | None = None,
  mode: str = "grid",
) -> Task:
  """Loads ZebraLogic; see `published_task`.

  Mode "grid" asks for the whole grid, and mode "mc" asks one question with choices.
  """
  if mode not in _ZEBRALOGIC:
    raise ValueError(f"task.mode: found {mode!r}, expected one of {', '.join(_ZEBRALOGIC)}")
  return published_task(_ZEBRALOGIC[mode], None, setup, source=source, prompt_template=prompt_template, reward=reward)


def mathvision(
  setup: Setup,
  *,
  source: str | os.PathLike | None = None,
  prompt_template: str | None = None,
  mode: str = "test",
) -> Task:
  """Loads MathVision; see `published_task`.

  Mode "test" has all 3,040 problems, and mode "testmini" the 304 of the small part. Each problem
  names its verifier.
  """
  if mode not in _MATHVISION:
    raise ValueError(f"task.mode: found {mode!r}, expected one of {', '.join(_MATHVISION)}")
  return published_task(_MATHVISION[mode], None, setup, source=source, prompt_template=prompt_template)._replace(routed=True)


SETS: dict[str, ProblemSetEntry] = {
  **{published.name: ProblemSetEntry(functools.partial(published_task, published, None)) for published in PUBLISHED},
  "livecodebench": ProblemSetEntry(livecodebench, lambda after=None, before=None, **_: code.within(after, before)),
  "mathvision": ProblemSetEntry(mathvision, check_installed),
  "zebralogic": ProblemSetEntry(zebralogic),
}
