"""Published sets by name: which files, which rows, which prompts and rewards."""

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxrl_llm.tasks.files import downloads, storage, tables, text_files
from jaxrl_llm.tasks.files.columns import Convert
from jaxrl_llm.tasks.files.downloads import Files
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.problem_set import Entry, Setup, Style, make_task
from jaxrl_llm.tasks.sets import code, logic, maths
from jaxrl_llm.tasks.task import Task


class Published(NamedTuple):
  """A published set.

  Attributes:
    name: of the task.
    files: by split, the one to hold out first.
    convert: a record to a row.
    style: prompts and rewards.
    reads: columns of the files; None is all. Others of a Parquet file are not loaded.
    columns: of the rows, besides those that all have.
    version: raise it with any change to `convert`, or old copies stay in use.
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
  """A task made of a published set; without training problems where the set has none.

  Args:
    published: the set.
    choose: which rows to take; None takes all.
    setup: what every task is told.
    source: a local folder with its files; None downloads them, once, below `data_dir`.
    prompt_template: another prompt than the set's usual one.
    reward: other rewards.

  Raises:
    ValueError: no files and no network, other columns than published, or rows that cannot be used. One line.
  """
  folder = storage.data_folder(setup.data_dir) / "published" / published.name
  obtain = functools.partial(downloads.obtain, published.name, source=source, folder=folder)
  files = {split: obtain(split, wanted) for split, wanted in published.files.items()}
  read = functools.partial(text_files.read, columns=published.reads)
  records = {split: lambda paths=paths: itertools.chain.from_iterable(map(read, paths)) for split, paths in files.items()}
  key = tables.key_of(list(itertools.chain(*files.values())), [published.version, list(map(len, files.values()))])
  style = published.style.with_settings(prompt_template, reward)
  return make_task(
    published.name, records, published.convert, key=key, style=style, setup=setup, columns=published.columns, choose=choose
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
  """LiveCodeBench, by the dates of its contests: later ones than a model has read about. See `published_task` and `code.within`."""
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
  """ZebraLogic: mode "grid" asks for the whole grid, "mc" one question with choices. See `published_task`."""
  if mode not in _ZEBRALOGIC:
    raise ValueError(f"task.mode: found {mode!r}, expected one of {', '.join(_ZEBRALOGIC)}")
  return published_task(_ZEBRALOGIC[mode], None, setup, source=source, prompt_template=prompt_template, reward=reward)


SETS: dict[str, Entry] = {
  **{published.name: Entry(functools.partial(published_task, published, None)) for published in PUBLISHED},
  "livecodebench": Entry(livecodebench, lambda after=None, before=None, **_: code.within(after, before)),
  "zebralogic": Entry(zebralogic),
}
