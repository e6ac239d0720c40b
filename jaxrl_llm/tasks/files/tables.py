"""Problems from files as TFDS datasets: checked and written once, and read from disk row by row."""

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds

from jaxrl_llm.tasks.files import report, storage
from jaxrl_llm.tasks.files.report import Report, Tally
from jaxrl_llm.tasks.files.storage import INDEX, Row

_VERSION = "1.1.0"  # Increase with any change to what is stored; otherwise old copies stay in use.
_REPORT = "problem_report.json"
_AT_ONCE = 64  # Rows read at once. Rows of programming problems contain megabytes of tests.

Generate = Callable[[Tally], Iterator[Row]]
"""Function that yields a split's rows and reports dropped ones to the tally.

All rows have the same columns, and each call yields the same rows.
"""


class Table(storage.StoredDataset, skip_registration=True):
  """A dataset of rows by split. Its name is its key; further settings are TFDS's."""

  VERSION = tfds.core.Version(_VERSION)

  def __init__(self, *, key: str, splits: Mapping[str, Callable | None], columns: Sequence[str], **settings):
    self.name = key  # Not a `BuilderConfig`, which TFDS would report as unknown in a warning.
    self.SPLITS, self._generators = tuple(splits), splits
    self.columns = (*columns, INDEX)
    super().__init__(**settings)

  def _generate_examples(self, split):
    # Without shuffling, TFDS would hold all rows of a split in memory at the end. With shuffling it
    # holds at most 1 GB, and the reader sorts by index.
    for index, row in enumerate(self._generators[split]()):
      yield index, row | {INDEX: index}


class ConvertedRows(Sequence):
  """Some items of a source, each converted to a row on access.

  Args:
    source: Random access to items, such as the records returned by `storage.open_split`.
    convert: Function from an item to a row.
    indices: Indices of the items to include; None includes all.

  Example:
    >>> rows = ConvertedRows(["1+2", "3+4", "5+6"], lambda text: {"prompt": f"{text}="}, indices=[2, 0])
    >>> rows[0], len(rows)
    ({'prompt': '5+6='}, 2)
  """

  def __init__(self, source: Sequence, convert: Callable[[Any], Row], *, indices: Sequence[int] | None = None):
    self._source, self._convert = source, convert
    self._indices = range(len(source)) if indices is None else indices

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.__getitems__(range(*index.indices(len(self))))
    return self._convert(self._source[int(self._indices[index])])

  def __getitems__(self, indices: Sequence[int]) -> list:
    return list(self._several(indices))

  def __iter__(self) -> Iterator[Row]:
    for start in range(0, len(self), _AT_ONCE):  # Several times faster than one by one.
      yield from self._several(range(len(self))[start : start + _AT_ONCE])

  def _several(self, indices: Sequence[int]) -> Iterator[Row]:
    get_many = getattr(self._source, "__getitems__", lambda indices: [self._source[i] for i in indices])
    return map(self._convert, get_many([int(self._indices[i]) for i in indices]))


def key_of(files: Sequence[str | os.PathLike], settings: Any) -> str:
  """Returns the folder name of a dataset: a digest of the files' bytes and the settings.

  Args:
    files: Files that are read; their names do not matter.
    settings: All other settings that determine the rows, JSON-serialisable.

  Returns:
    The digest, 16 hexadecimal digits.
  """
  digest = hashlib.blake2b(json.dumps([settings, len(files)], sort_keys=True).encode(), digest_size=8)
  for path in files:
    with open(path, "rb") as file:
      digest.update(hashlib.file_digest(file, "blake2b").digest())
  return digest.hexdigest()


def open_table(
  title: str, key: str, splits: Mapping[str, Generate], *, columns: Sequence[str], data_dir: str | os.PathLike | None, bad_rows: str
) -> tuple[dict[str, Sequence], Report]:
  """Opens a dataset of problems, and first builds it if it is absent.

  Args:
    title: Folder name of all datasets of this kind.
    key: Key of the dataset; see `key_of`.
    splits: Generators of rows by split. The splits are read in this order.
    columns: Columns of the rows; `level` is a whole number, all others are text.
    data_dir: Local folder that holds datasets; None is ~/.cache/jaxrl_llm/data.
    bad_rows: Policy for bad rows; see `Tally`.

  Returns:
    Data sources by split, in TFDS's order, which is the same everywhere; and the report of the
    build, which may have been in an earlier run.

  Raises:
    ValueError: If no row is left, a row is bad under the policy "error", the folder cannot be
      written, or the dataset is damaged. One line.
  """
  report.check_policy(bad_rows)
  root = storage.data_folder(data_dir)
  folder = root / title / key / _VERSION

  def make(folder: str | os.PathLike, generators: Mapping[str, Callable | None]) -> Table:
    return Table(key=key, splits=generators, columns=columns, data_dir=os.path.join(folder, title), file_format=storage.FORMAT)

  def read(folder: pathlib.Path) -> tuple[dict[str, Sequence], Report]:
    counts = report.from_json(json.loads((folder / _REPORT).read_text(encoding="utf-8")))
    builder = make(root, dict.fromkeys(splits))
    sources = {split: storage.open_split(builder, split) for split in splits}
    if sum(map(len, sources.values())) != counts.kept:
      raise ValueError(f"{sum(map(len, sources.values()))} rows, where {_REPORT} says {counts.kept}")
    return sources, counts

  prepare = lambda scratch: _prepare(make, scratch, folder.relative_to(root), splits, bad_rows)
  sources, counts = storage.open_or_build(
    folder, root, prepare=prepare, read=read, expected=f"{title} with splits {', '.join(splits)}"
  )
  report.refuse(counts, bad_rows)
  return sources, counts


def _prepare(make: Callable[..., Table], scratch: str, place: pathlib.Path, splits: Mapping[str, Generate], bad_rows: str) -> None:
  reports, failed = [], []

  def counted(generate: Generate) -> Iterator[Row]:
    tally, kept = Tally(bad_rows), 0
    try:
      for row in generate(tally):
        kept += 1
        yield row
      reports.append(report.report(tally, read=kept + sum(tally.dropped.values()), kept=kept))
      if not kept:
        raise ValueError(_nothing_left(reports[-1]))
    except Exception as error:
      failed.append(error)
      raise

  try:
    make(scratch, {split: lambda generate=generate: counted(generate) for split, generate in splits.items()}).download_and_prepare()
  except Exception as error:
    if failed and failed[0] is not error:  # TFDS adds its own lines to exceptions.
      raise failed[0] from error
    raise
  values = report.to_json(report.merge(reports))
  (pathlib.Path(scratch) / place / _REPORT).write_text(json.dumps(values, indent=1), encoding="utf-8")


def _nothing_left(counts: Report) -> str:
  """Returns the error message for a split without usable rows."""
  if not counts.dropped:
    return "found no problems at all"
  reason = max(counts.dropped, key=counts.dropped.get)
  words = report.in_words(counts).partition("dropped: ")[2]
  return f"{reason} ({counts.first[reason]}); none of the {counts.read} rows can be used ({words})"
