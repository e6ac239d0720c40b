"""Problems from files as TFDS datasets: checked and written once, then read from disk row by row."""

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

_VERSION = "1.0.0"  # Raise it with any change to what is stored, or old copies stay in use.
_REPORT = "problem_report.json"
_AT_ONCE = 64  # Rows read together: those of programming problems carry megabytes of tests.

Generate = Callable[[Tally], Iterator[Row]]
"""Reads a split's rows, all of the same columns, and tells the tally what it drops; the same rows each time."""


class Table(storage.StoredDataset, skip_registration=True):
  """A dataset of rows by split; its name is its key, and further settings are TFDS's."""

  VERSION = tfds.core.Version(_VERSION)

  def __init__(self, *, key: str, splits: Mapping[str, Callable | None], columns: Sequence[str], **settings):
    self.name = key  # Not a `BuilderConfig`, which TFDS would warn of as unknown.
    self.SPLITS, self._generators = tuple(splits), splits
    self.columns = (*columns, INDEX)
    super().__init__(**settings)

  def _generate_examples(self, split):
    # Unshuffled, TFDS would hold all rows of a split in memory at the end; shuffled it holds 1 GB at most, and who reads sorts by number.
    for index, row in enumerate(self._generators[split]()):
      yield index, row | {INDEX: index}


class StoredRows(Sequence):
  """Rows of a dataset on disk, read when they are asked for.

  Args:
    source: records as `storage.open_split` gives them.
    indices: those to have; None has all.
    finish: what is done to a row that was read.

  Example:
    >>> from tensorflow_datasets.proto import tf_example_pb2
    >>> features = {"level": {"int64_list": {"value": [2]}}, "question": {"bytes_list": {"value": [b"1+1"]}}}
    >>> record = tf_example_pb2.Example(features={"feature": features}).SerializeToString()
    >>> rows = StoredRows([record], finish=lambda row: row | {"prompt": row["question"] + "="})
    >>> rows[0]
    {'level': 2, 'question': '1+1', 'prompt': '1+1='}
  """

  def __init__(self, source: Sequence, *, indices: Sequence[int] | None = None, finish: Callable[[Row], Row] = dict):
    self._source, self._finish = source, finish
    self._indices = range(len(source)) if indices is None else indices

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    return self._finish(storage.plain(self._source[int(self._indices[index])]))

  def __iter__(self) -> Iterator[Row]:
    get_many = getattr(self._source, "__getitems__", lambda indices: [self._source[i] for i in indices])
    for start in range(0, len(self), _AT_ONCE):  # Several times as fast as one by one.
      for row in get_many([int(i) for i in self._indices[start : start + _AT_ONCE]]):
        yield self._finish(storage.plain(row))


def key_of(files: Sequence[str | os.PathLike], settings: Any) -> str:
  """The folder of a dataset, 16 hexadecimal digits: a digest of the files' bytes and of what was made of them.

  Args:
    files: what is read; their names do not matter.
    settings: anything else that decides the rows, fit for JSON.
  """
  digest = hashlib.blake2b(json.dumps([settings, len(files)], sort_keys=True).encode(), digest_size=8)
  for path in files:
    with open(path, "rb") as file:
      digest.update(hashlib.file_digest(file, "blake2b").digest())
  return digest.hexdigest()


def open_table(
  title: str, key: str, splits: Mapping[str, Generate], *, columns: Sequence[str], data_dir: str | os.PathLike | None, bad_rows: str
) -> tuple[dict[str, Sequence], Report]:
  """A dataset of problems, which is built first where it is absent.

  Args:
    title: folder of all datasets of this kind.
    key: see `key_of`.
    splits: rows by split. They are read in this order.
    columns: of the rows; `level` is a whole number, all others are text.
    data_dir: local folder that holds datasets; None is ~/.cache/jaxrl_llm/data.
    bad_rows: see `Tally`.

  Returns:
    Data sources by split, in TFDS's order, which is the same everywhere, and the report of the reading, also of one in an earlier run.

  Raises:
    ValueError: no row is left, a bad row under the policy "error", a folder that cannot be written, a damaged dataset. One line.
  """
  report.check_policy(bad_rows)
  root = storage.data_folder(data_dir)
  folder = root / title / key / _VERSION

  def make(folder: str | os.PathLike, generators: Mapping[str, Callable | None]) -> Table:
    return Table(key=key, splits=generators, columns=columns, data_dir=os.path.join(folder, title), file_format=storage.FORMAT)

  def read(folder: pathlib.Path) -> tuple[dict[str, Sequence], Report]:
    found = report.from_json(json.loads((folder / _REPORT).read_text(encoding="utf-8")))
    builder = make(root, dict.fromkeys(splits))
    sources = {split: storage.open_split(builder, split) for split in splits}
    if sum(map(len, sources.values())) != found.kept:
      raise ValueError(f"{sum(map(len, sources.values()))} rows, where {_REPORT} says {found.kept}")
    return sources, found

  prepare = lambda scratch: _prepare(make, scratch, folder.relative_to(root), splits, bad_rows)
  sources, found = storage.open_or_build(folder, root, prepare=prepare, read=read, expected=f"{title} with splits {', '.join(splits)}")
  report.refuse(found, bad_rows)
  return sources, found


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
    if failed and failed[0] is not error:  # TFDS adds lines of its own to what is raised.
      raise failed[0] from error
    raise
  found = report.to_json(report.merge(reports))
  (pathlib.Path(scratch) / place / _REPORT).write_text(json.dumps(found, indent=1), encoding="utf-8")


def _nothing_left(found: Report) -> str:
  """The line about a split whose every row is bad."""
  if not found.dropped:
    return "found no problems at all"
  reason = max(found.dropped, key=found.dropped.get)
  return f"{reason} ({found.first[reason]}); none of the {found.read} rows can be used ({found.dropped[reason]} for this reason)"
