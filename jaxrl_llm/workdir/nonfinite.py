"""Dumps of the batches of non-finite updates, for the search for a cause.

An update is refused if its loss or a gradient is not finite.
"""

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.devices import hosts
from jaxrl_llm.types import TrainBatch
from jaxrl_llm.workdir import disk

FOLDER = "nonfinite"
"""Folder of the dumps in the workdir."""

MAX_DUMPS = 8
"""Maximum number of dumps per run, so that a run that never recovers does not fill the disk."""


def dump(path: Path, batch: TrainBatch, about: Mapping[str, Any]) -> bool:
  """Writes a packed batch to a file unless the disk is full.

  Process 0 writes the batch of all processes. All processes must call this function.

  Args:
    path: File to write, WORKDIR/nonfinite/NAME.npz.
    batch: Batch of the update, on the devices or the host.
    about: Further facts as JSON values. Non-finite numbers in them become strings.

  Returns:
    Whether the file was written.

  Example:
    >>> import tempfile
    >>> from jaxrl_llm.types import TrainBatch
    >>> ones = np.ones((1, 4), np.float32)
    >>> batch = TrainBatch(*[np.int32(ones)] * 3, mask=ones, advantages=ones * np.nan, old_logprobs=-ones)
    >>> path = Path(tempfile.mkdtemp(), "nonfinite", "step_3.npz")
    >>> dump(path, batch, {"step": 3, "metrics": {"actor/loss": math.nan}})
    True
    >>> arrays, about = read_dump(path)
    >>> [name for name, x in arrays.items() if not np.all(np.isfinite(x))]
    ['advantages']
    >>> about["metrics"]
    {'actor/loss': 'nan'}
  """
  # An array inside another tuple, such as a teacher's rows, is named like "taught.tokens".
  leaves = jax.tree_util.tree_leaves_with_path(hosts.to_host(batch))
  arrays = {".".join(key.name for key in keys): np.asarray(x) for keys, x in leaves}
  return hosts.on_main(lambda: _write(path, arrays, about))


def read_dump(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Reads the arrays of a dumped batch, by their names in `TrainBatch`, and the further facts.

  It opens no pickle.
  """
  with np.load(path, allow_pickle=False) as file:
    arrays = {name: file[name] for name in file.files}
  return arrays, json.loads(str(arrays.pop("about")))


def _write(path: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> bool:
  packed = io.BytesIO()
  np.savez_compressed(packed, about=np.array(json.dumps(_plain(about))), **arrays)

  def write() -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    disk.replace(path, packed.getvalue())

  return disk.write_if_room(path, write)


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {name: _plain(x) for name, x in value.items()}
  return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
