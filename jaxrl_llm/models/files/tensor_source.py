"""The source of a checkpoint's tensors, independent of the format of its files."""

import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class TensorSource(NamedTuple):
  """A checkpoint whose headers have been read and whose tensors have not.

  Attributes:
    path: Path of the checkpoint, for messages.
    shapes: Shape of each tensor, under transformers' names and in its layout.
    dtypes: Stored type of each tensor, such as "float32", "bfloat16" or "Q4_1".
    read: Function from name to tensor (float32, bfloat16 or float16) that reads only that tensor.
    files: File of each tensor, for messages.
  """

  path: pathlib.Path
  shapes: dict[str, tuple[int, ...]]
  dtypes: dict[str, str]
  read: Callable[[str], np.ndarray]
  files: dict[str, str]
