"""Published sets by name: which files, which rows, which prompts and rewards."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxrl_llm.tasks.files import columns as columns_lib
from jaxrl_llm.tasks.files import downloads, storage, tables, text_files
from jaxrl_llm.tasks.files.downloads import Files
from jaxrl_llm.tasks.files.report import Tally
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.problem_set import Setup, Style, make_task
from jaxrl_llm.tasks.sets import code, logic, maths
from jaxrl_llm.tasks.sets.own_files import COLUMNS
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
  convert: columns_lib.Convert
  style: Style
  reads: tuple[str, ...] | None = None
  columns: tuple[str, ...] = ()
  version: int = 1


_MATHS = Style(maths.BOXED, ("maths",))
_CODE = Style(code.TEMPLATE, ("code_tests",))

PUBLISHED = {
  "gsm8k": Published("gsm8k", maths.GSM8K_FILES, maths.gsm8k, Style(maths.HASHES, ("final_number",), "answer_form")),
  "math": Published("math", maths.MATH_FILES, maths.math, _MATHS, columns=("subject",)),
  "math_500": Published("math_500", maths.MATH_500_FILES, maths.math, _MATHS, columns=("subject",)),
  "dapo_math": Published(
    "dapo_math",
    maths.DAPO_FILES,
    maths.dapo_math,
    Style(maths.DAPO, ("maths",), test_fraction=0.02),
    reads=("prompt", "solution", "answer", "reward_model"),
  ),
  "aime24": Published("aime24", maths.AIME24_FILES, maths.competition, _MATHS),
  "aime25": Published("aime25", maths.AIME25_FILES, maths.competition, _MATHS),
  "hmmt25": Published("hmmt25", maths.HMMT25_FILES, maths.competition, _MATHS),
  "livecodebench": Published(
    "livecodebench", code.LIVECODEBENCH_FILES, code.livecodebench, _CODE, columns=code.COLUMNS
  ),
  "codeforces": Published("codeforces", code.CODEFORCES_FILES, code.codeforces, _CODE, columns=code.COLUMNS),
}
_ZEBRALOGIC = {
  "grid": Published(
    "zebralogic_grid",
    logic.FILES["grid"],
    logic.grid,
    Style(logic.GRID, ("zebra_grid",), verifiers={"zebra_grid": logic.zebra_grid}),
    columns=logic.COLUMNS,
  ),
  "mc": Published(
    "zebralogic_mc", logic.FILES["mc"], logic.multiple_choice, Style(logic.CHOICES, ("choice",)), columns=logic.COLUMNS
  ),
}


def published_task(
  published: Published,
  setup: Setup,
  *,
  source: str | os.PathLike | None = None,
  prompt_template: str | None = None,
  reward: str | Sequence[str] | None = None,
  choose: Callable[[Row], bool] | None = None,
) -> Task:
  """A task made of a published set.

  Args:
    published: the set.
    setup: what every task is told.
    source: a local folder with its files; None downloads them, once, below `data_dir`.
    prompt_template: another prompt than the set's usual one.
    reward: other rewards.
    choose: which rows to take; None takes all.

  Returns:
    The task; without training problems where the set has none.

  Raises:
    ValueError: no files and no network, other columns than published, or rows that cannot be used. One line.
  """
  folder = storage.data_folder(setup.data_dir) / "published" / published.name
  files = {
    split: downloads.obtain(published.name, split, wanted, source=source, folder=folder) for split, wanted in published.files.items()
  }
  seen: set[bytes] = set()  # Test problems are read first, so that none of them is trained on.

  def reading(paths: Sequence[os.PathLike]):
    def generate(tally: Tally) -> Iterator[Row]:
      for path in paths:
        yield from columns_lib.problems(text_files.read(path, columns=published.reads), published.convert, tally, seen=seen)

    return generate

  sources, found = tables.open_table(
    published.name,
    tables.key_of([path for paths in files.values() for path in paths], [published.version, [len(paths) for paths in files.values()]]),
    {split: reading(paths) for split, paths in files.items()},
    columns=(*COLUMNS, *published.columns),
    data_dir=setup.data_dir,
    bad_rows=setup.bad_rows,
  )
  style = published.style._replace(template=prompt_template or published.style.template)
  if reward is not None:
    style = style._replace(rewards=(reward,) if isinstance(reward, str) else tuple(reward))
  return make_task(published.name, sources, found, style=style, setup=setup, choose=choose)


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
  choose = code.within(after, before)
  return published_task(
    PUBLISHED["livecodebench"], setup, source=source, prompt_template=prompt_template, reward=reward, choose=choose
  )


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
  return published_task(_ZEBRALOGIC[mode], setup, source=source, prompt_template=prompt_template, reward=reward)


def _plain(
  published: Published,
  setup: Setup,
  *,
  source: str | os.PathLike | None = None,
  prompt_template: str | None = None,
  reward: str | Sequence[str] | None = None,
) -> Task:
  return published_task(published, setup, source=source, prompt_template=prompt_template, reward=reward)


SETS: dict[str, Callable[..., Task]] = {
  **{name: functools.partial(_plain, published) for name, published in PUBLISHED.items() if name != "livecodebench"},
  "livecodebench": livecodebench,
  "zebralogic": zebralogic,
}
"""`(setup, **settings) -> task`."""
