"""Datasets on disk: built once, by whichever process comes first, and checked whenever they are opened. No TensorFlow."""

import contextlib
import io
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from array_record.python import array_record_module

from jaxrl_llm.messages import one_line

Row = dict[str, str | int]

_DEFAULT_DATA_DIR = "~/.cache/jaxrl_llm/data"
FORMAT = "array_record"  # Random access, which grain needs; and readable without TensorFlow.


class GeneratedProblems(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """What generated datasets share: `train` and held-out `test` problems without a response, `demonstrations` of the training problems.

  A dataset has its `VERSION`, its module's docstring as description, and `_generate_examples(split)`.
  """

  SPLITS = ("train", "test", "demonstrations")
  code_path = None  # No citations or checksums lie beside these files; TFDS's search for them needs a package it does not install.

  def _info(self) -> tfds.core.DatasetInfo:
    text = tfds.features.Text
    features = {"question": text(), "answer": text(), "level": np.int32, "response": text()}
    description = sys.modules[type(self).__module__].__doc__
    return tfds.core.DatasetInfo(builder=self, description=description, features=tfds.features.FeaturesDict(features))

  def _split_generators(self, dl_manager):
    del dl_manager  # Nothing to download.
    return {split: self._generate_examples(split) for split in self.SPLITS}


def load_splits(builder_class: type[tfds.core.GeneratorBasedBuilder], *, data_dir: str | os.PathLike | None = None) -> dict[str, list[Row]]:
  """Every row of a dataset, which is built first where it is absent.

  Args:
    builder_class: the dataset, with its splits' names in `SPLITS`; generates text and integers, and the same bytes each time.
    data_dir: local folder that holds datasets; None is ~/.cache/jaxrl_llm/data.

  Returns:
    Rows by split, in the order of the files: TFDS's shuffle, the same on every machine.

  Raises:
    ValueError: the folder cannot be written, or what lies there is not this dataset, whole. One line, with the fix.

  Note:
    All rows are read, at about 30 µs each: the file format checks a hash of each block as it reads, so damage anywhere is found here
    and not hours into a run.
  """
  root = data_folder(data_dir)
  folder = root / builder_class.name / str(builder_class.VERSION)
  if not os.path.exists(folder):
    build(lambda scratch: builder_class(data_dir=scratch, file_format=FORMAT).download_and_prepare(), root, folder)
  try:
    return _read(builder_class, root, folder)
  except Exception as error:  # Depending on the damage, TFDS and the reader raise nearly anything.
    raise ValueError(
      f"{folder}: found a dataset that cannot be used ({one_line(error)}), expected {builder_class.name} {builder_class.VERSION} with "
      f"splits {', '.join(builder_class.SPLITS)}; delete {folder} and run again"
    ) from error


def data_folder(data_dir: str | os.PathLike | None) -> pathlib.Path:
  """Where datasets lie.

  Raises:
    ValueError: no local folder.
  """
  if "://" in str(data_dir):
    raise ValueError(f"task.data_dir: found {str(data_dir)!r}, expected a local folder; the dataset is small, each host can have its own")
  return pathlib.Path(_DEFAULT_DATA_DIR if data_dir is None else data_dir).expanduser()


def build(prepare: Callable[[str], None], root: pathlib.Path, folder: pathlib.Path) -> None:
  """Builds beside the target and renames: a folder under its final name is always whole, whoever was killed meanwhile.

  Args:
    prepare: writes the dataset below the folder it is given, under the same names as below `root`.
    root: holds datasets.
    folder: the dataset's, somewhere below `root`.

  Raises:
    ValueError: the folder cannot be written.
  """
  scratch = None
  try:
    root.mkdir(parents=True, exist_ok=True)
    # Not left to TFDS, which names its scratch folder from the global `random`: two processes with one seed would share it.
    scratch = tempfile.mkdtemp(prefix=".building-", dir=root)
    logging.info("Building the dataset %s.", folder)
    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):
      prepare(scratch)
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.rename(os.path.join(scratch, folder.relative_to(root)), folder)
  except OSError as error:
    if not os.path.exists(folder):  # If it exists by now, another process was faster, and its bytes are the same.
      raise ValueError(
        f"task.data_dir: {root}: found no dataset and no way to build one ({one_line(error)}), expected a folder that can be written, "
        "with 20 MB to spare; set task.data_dir to one"
      ) from error
  finally:
    if scratch is not None:
      shutil.rmtree(scratch, ignore_errors=True)


def _read(builder_class, root: pathlib.Path, folder: pathlib.Path) -> dict[str, list[Row]]:
  if not (folder / "dataset_info.json").is_file():
    raise ValueError("no dataset_info.json")  # TFDS would take it for a dataset without splits.
  builder = builder_class(data_dir=str(root), file_format=FORMAT)
  if set(builder.info.splits) != set(builder_class.SPLITS):
    raise ValueError(f"splits {', '.join(sorted(builder.info.splits)) or 'none'}")
  return {split: _read_split(builder, split) for split in builder_class.SPLITS}


def open_split(builder: tfds.core.GeneratorBasedBuilder, split: str) -> Sequence:
  """A split's data source, whole.

  Raises:
    ValueError: other records than the dataset says it has.
  """
  info = builder.info.splits[split]
  stored = 0
  for path in info.filepaths:
    reader = array_record_module.ArrayRecordReader(str(path))
    stored += reader.num_records()
    reader.close()
  if stored != info.num_examples:  # TFDS believes dataset_info.json, and reads no further than it says.
    raise ValueError(f"{stored} records in split {split}, where dataset_info.json says {info.num_examples}")
  return builder.as_data_source(split)


def _read_split(builder, split: str) -> list[Row]:
  source = open_split(builder, split)
  return list(map(plain, source.__getitems__(range(len(source)))))


def plain(row: Mapping[str, Any]) -> Row:
  """Returns a stored row with texts and whole numbers of Python's own types."""
  return {name: value.decode("utf-8") if isinstance(value, bytes) else int(value) for name, value in row.items()}
