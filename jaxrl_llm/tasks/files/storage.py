"""Datasets on disk, built by the first process that needs them and checked on opening.

TensorFlow is not needed.
"""

import contextlib
import functools
import hashlib
import io
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from array_record.python import array_record_module
from tensorflow_datasets.proto import tf_example_pb2

from jaxrl_llm.messages import one_line

Row = dict[str, str | int | tuple[bytes, ...]]
T = TypeVar("T")

_DEFAULT_DATA_DIR = "~/.cache/jaxrl_llm/data"
# Has the random access that grain needs and is readable without TensorFlow.
FORMAT = "array_record"
_TEST_FRACTION = 0.1
INDEX = "index"
"""Column of a row's number in its split, in the order of the files."""
IDS = "prompt_ids"
"""Column of the ids of a prompt, for problems whose prompts are more than one text."""
LESSON = "lesson_ids"
"""Column of the ids of a demonstration of several turns, each with whether it is imitated."""

IMAGES = "images"
"""Column of a row's pictures, each as the content of its file. Rows of text alone lack it."""


def uniform(*key: object) -> float:
  """Returns a number in [0, 1) that depends on `key` alone.

  Unlike `random`, a hash is the same in every process, order and Python version.
  """
  digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
  return int.from_bytes(digest[:6], "big") / 2**48


def split_of(question: str) -> str:
  """Returns the split that owns a problem: "test" or "train".

  It depends on the text alone, so that no other setting can leak a test problem into training.
  """
  return "test" if uniform("split", question) < _TEST_FRACTION else "train"


def picture_digests(row: Row) -> tuple[str, ...]:
  """Returns a digest of each of a row's pictures.

  Example:
    >>> picture_digests({"question": "?"}), picture_digests({"question": "?", "images": (b"a",)})
    ((), ('27c35e6e9373877f29e562464e46497e',))
  """
  return tuple(hashlib.blake2b(picture, digest_size=16).hexdigest() for picture in row.get(IMAGES, ()))


class LocalInfo(tfds.core.DatasetInfo):
  """Metadata of a dataset that TFDS does not publish."""

  def initialize_from_bucket(self) -> None:
    """Does nothing; TFDS would make a temporary folder, find no published dataset, and leave it."""


class StoredDataset(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """A base class for datasets of texts, pictures, a level and an index.

  Subclasses define `SPLITS`, `columns`, `VERSION` and `_generate_examples(split)`.
  """

  # There are no citations or checksums beside these files, and TFDS's search for them needs a
  # package that it does not install.
  code_path = None

  def _info(self) -> tfds.core.DatasetInfo:
    kinds = {"level": np.int64, INDEX: np.int64, IMAGES: tfds.features.Sequence(tfds.features.Text())}
    features = {name: kinds.get(name, tfds.features.Text()) for name in self.columns}
    description = sys.modules[type(self).__module__].__doc__
    return LocalInfo(builder=self, description=description, features=tfds.features.FeaturesDict(features))

  def _split_generators(self, dl_manager):
    del dl_manager  # Nothing to download.
    return {split: self._generate_examples(split) for split in self.SPLITS}


class GeneratedProblems(StoredDataset, skip_registration=True):
  """A base class for generated datasets.

  The splits are `train` and held-out `test` problems without responses, and `demonstrations` of the
  training problems. Subclasses define `VERSION`, `LEVELS` and `_rows`.
  """

  SPLITS = ("train", "test", "demonstrations")
  LEVELS: Sequence[int]  # Difficulty levels of the problems.
  TEMPLATE = "{question}\n"  # Text of a prompt.
  columns = ("question", "answer", "level", "response")

  def _rows(self) -> Iterable[Row]:
    """Returns all problems, each once."""
    raise NotImplementedError

  def _demonstrations(self, row: Row) -> dict[str, str]:
    """Returns responses to imitate, each under a key that is unique in the split."""
    return {row["question"]: row["response"]}

  def _name(self, row: Row) -> str:
    """Returns a text that no other problem has."""
    return row["question"]

  def _is_test(self, row: Row) -> bool:
    """Returns whether a problem is held out."""
    return split_of(row["question"]) == "test"

  def _generate_examples(self, split):
    for row in self._rows():
      if (split == "test") == self._is_test(row):
        responses = self._demonstrations(row) if split == "demonstrations" else {self._name(row): ""}
        for key, response in responses.items():
          yield key, row | {"response": response}


def load_splits(builder_class: type[tfds.core.GeneratorBasedBuilder], *, data_dir: str | os.PathLike | None = None) -> dict[str, list[Row]]:
  """Returns all rows of a dataset, and first builds it if it is absent.

  Args:
    builder_class: Dataset class with the names of its splits in `SPLITS`. It generates text and
      integers, and the same bytes each time.
    data_dir: Local folder that holds datasets; None is ~/.cache/jaxrl_llm/data.

  Returns:
    Rows by split, in the order of the files: TFDS's shuffle, the same on every machine.

  Raises:
    ValueError: If the folder cannot be written, or does not hold this dataset, complete and
      undamaged. One line, with the fix.

  Note:
    All rows are read, at about 13 µs each. The file format checks a hash of each block as it is
    read, so damage anywhere is detected here and not hours into a run.
  """
  root = data_folder(data_dir)
  make = functools.partial(builder_class, file_format=FORMAT)
  return open_or_build(
    root / builder_class.name / str(builder_class.VERSION),
    root,
    prepare=lambda scratch: make(data_dir=scratch).download_and_prepare(),
    read=lambda folder: _read(make(data_dir=str(root)), folder),
    expected=f"{builder_class.name} {builder_class.VERSION} with splits {', '.join(builder_class.SPLITS)}",
  )


def data_folder(data_dir: str | os.PathLike | None) -> pathlib.Path:
  """Returns the folder of datasets.

  Raises:
    ValueError: If the folder is not local.
  """
  if "://" in str(data_dir):
    raise ValueError(f"task.data_dir: found {str(data_dir)!r}, expected a local folder; the dataset is small, each host can have its own")
  return pathlib.Path(_DEFAULT_DATA_DIR if data_dir is None else data_dir).expanduser()


def open_or_build(
  folder: pathlib.Path, root: pathlib.Path, *, prepare: Callable[[str], object], read: Callable[[pathlib.Path], T], expected: str
) -> T:
  """Reads a dataset, and first builds it if it is absent.

  Args:
    folder: Folder of the dataset, anywhere below `root`.
    root: Folder that holds datasets.
    prepare: Function that writes the dataset below a given folder, under the same names as below
      `root`.
    read: Function that returns the result; it may raise any exception if the dataset is damaged.
    expected: Description of the dataset, for the error message.

  Raises:
    ValueError: If the folder cannot be written or `read` fails. One line, with the fix.
  """
  if not os.path.exists(folder):
    _build(prepare, root, folder)
  try:
    return read(folder)
  except Exception as error:
    # Depending on the damage, TFDS and the reader raise almost any exception.
    problem = f"found a dataset that cannot be used ({one_line(error)})"
    raise ValueError(f"{folder}: {problem}, expected {expected}; delete {folder} and run again") from error


def _build(prepare: Callable[[str], object], root: pathlib.Path, folder: pathlib.Path) -> None:
  """Builds beside the target and renames, so that a folder at its final path is complete."""
  scratch = None
  try:
    root.mkdir(parents=True, exist_ok=True)
    # TFDS names its own scratch folder with the global `random`, so processes with the same seed
    # would share it.
    scratch = tempfile.mkdtemp(prefix=".building-", dir=root)
    logging.info("Building the dataset %s.", folder)
    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):
      prepare(scratch)
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.rename(os.path.join(scratch, folder.relative_to(root)), folder)
  except OSError as error:
    # If it exists by now, another process has built it, with the same bytes.
    if not os.path.exists(folder):
      raise ValueError(
        f"task.data_dir: {root}: found no dataset and no way to build one ({one_line(error)}), expected a folder that can be written, "
        "with 20 MB to spare; set task.data_dir to one"
      ) from error
  finally:
    if scratch is not None:
      shutil.rmtree(scratch, ignore_errors=True)


def _read(builder: tfds.core.GeneratorBasedBuilder, folder: pathlib.Path) -> dict[str, list[Row]]:
  if not (folder / "dataset_info.json").is_file():
    raise ValueError("no dataset_info.json")  # TFDS would treat it as a dataset without splits.
  if set(builder.info.splits) != set(builder.SPLITS):
    raise ValueError(f"splits {', '.join(sorted(builder.info.splits)) or 'none'}")
  sources = {split: open_split(builder, split) for split in builder.SPLITS}
  rows = {split: list(map(plain, source.__getitems__(range(len(source))))) for split, source in sources.items()}
  if any(row.keys() != builder.info.features.keys() for rows_of_split in rows.values() for row in rows_of_split[:1]):
    raise ValueError(f"rows with columns other than {', '.join(builder.info.features)}")
  return rows


def open_split(builder: tfds.core.GeneratorBasedBuilder, split: str) -> Sequence[bytes]:
  """Returns a split's records, to be decoded with `plain`.

  Raises:
    ValueError: If the number of records differs from the one in the dataset's metadata.
  """
  info = builder.info.splits[split]
  stored = 0
  for path in info.filepaths:
    reader = array_record_module.ArrayRecordReader(str(path))
    stored += reader.num_records()
    reader.close()
  # TFDS trusts dataset_info.json and reads no further than it says.
  if stored != info.num_examples:
    raise ValueError(f"{stored} records in split {split}, where dataset_info.json says {info.num_examples}")
  return builder.as_data_source(split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)


def plain(record: bytes) -> Row:
  """Decodes a record to a row.

  TFDS's own decoding, which handles any feature, takes three times as long, and every start of a
  run waits for it.
  """
  features = sorted(tf_example_pb2.Example.FromString(record).features.feature.items())
  is_text = lambda feature: feature.HasField("bytes_list")
  row = {name: x.bytes_list.value[0].decode("utf-8") if is_text(x) else x.int64_list.value[0] for name, x in features if name != IMAGES}
  return row | {name: tuple(x.bytes_list.value) for name, x in features if name == IMAGES}
