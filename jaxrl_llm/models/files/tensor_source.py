"""Where a checkpoint's tensors come from, whatever the format of its files."""

import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class TensorSource(NamedTuple):
  """A checkpoint whose headers have been read and whose tensors have not.

  Attributes:
    path: of the checkpoint, for messages.
    shapes: shape of each tensor under transformers' names and in its layout.
    dtypes: how each tensor is stored, such as "float32", "bfloat16" or "Q4_1".
    read: name to tensor, in float32, bfloat16 or float16; reads that tensor alone.
    files: file of each tensor, for messages.
  """

  path: pathlib.Path
  shapes: dict[str, tuple[int, ...]]
  dtypes: dict[str, str]
  read: Callable[[str], np.ndarray]
  files: dict[str, str]
