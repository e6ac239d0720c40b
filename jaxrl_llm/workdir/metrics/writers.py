"""Writers of the rows of scalars and of sample rollouts."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.workdir.metrics.row_file import RESERVED, Row, RowFile, read_rows
from jaxrl_llm.workdir.metrics.tensorboard import TensorBoard

PHASES = ("warm_start", "rl", "eval", "reward_model")
"""Phases of a row.

All but "eval" count their own steps. An "eval" row carries the RL step at which it was measured, or
the step of a reward model's training.
"""


class MetricWriter(contextlib.AbstractContextManager):
  """A writer of rows of scalars to `workdir/metrics.jsonl` and to TensorBoard event files.

  A non-finite number becomes `null`, since strict JSON has no NaN, and the row's `nonfinite` holds
  its value. Floats round-trip exactly. TensorBoard has one run per phase (`workdir/tensorboard/rl`,
  ...), since phases count their own steps. Its files are rebuilt from `metrics.jsonl` whenever a
  writer opens it or removes rows, so that the two always agree.

  Args:
    workdir: Folder of the run, which is created if it is missing. With None, rows are checked and
      counted but not written, for processes that leave the writing to another one.
    tensorboard: Whether to write event files (needs tensorboardX).

  Raises:
    MissingPackageError: If `tensorboard` is set and tensorboardX is not installed.

  Example:
    >>> import tempfile
    >>> workdir = tempfile.mkdtemp()
    >>> with MetricWriter(workdir, tensorboard=False) as writer:
    ...   writer.write(1, "rl", {"actor/loss": np.float32(0.5), "ratio": float("inf")})
    >>> print(Path(workdir, "metrics.jsonl").read_text(), end="")
    {"step": 1, "phase": "rl", "actor/loss": 0.5, "ratio": null, "nonfinite": {"ratio": "inf"}}
  """

  def __init__(self, workdir: str | os.PathLike | None, *, tensorboard: bool = True):
    # TensorBoard comes first: a missing package must be reported before a file is touched.
    self._board = TensorBoard(Path(workdir) / "tensorboard") if tensorboard and workdir is not None else None
    self._file = RowFile(None if workdir is None else Path(workdir) / "metrics.jsonl")
    self._rebuild_board()

  @property
  def phase_steps(self) -> dict[str, int]:
    """The last step written in each phase, which a checkpoint stores and `resume` takes."""
    return dict(self._file.phase_steps)

  def write(self, step: int, phase: str, scalars: Mapping[str, Any]) -> None:
    """Appends one row.

    Args:
      step: Step of the phase; an "eval" row carries the RL step.
      phase: One of `PHASES`.
      scalars: Values by name: Python, NumPy or JAX numbers (0-d), or strings. TensorBoard does not
        show strings.

    Raises:
      ValueError: If the phase is unknown, a name is reserved, or the step is not after the last one
        of the phase.
      TypeError: If a value is neither a scalar nor a string.
      OSError: If the row cannot be written for another reason than a full disk. The file stays as
        it was.
    """
    last = self._file.phase_steps.get(phase)
    if last is not None and step <= last:
      raise ValueError(f"metrics.jsonl already has {phase} step {last}, so step {step} would repeat; call resume() after a restart")
    row = _head(step, phase, scalars)
    nonfinite = {}
    for name, value in scalars.items():
      row[name] = _scalar(name, value)
      if isinstance(row[name], float) and not math.isfinite(row[name]):
        nonfinite[name], row[name] = repr(row[name]), None
    if nonfinite:
      row["nonfinite"] = nonfinite
    self._file.append([row])
    if self._board:
      self._board.add(row)
      if self._file.pending:
        self._board.is_lost = True
      elif self._board.is_lost:
        self._rebuild_board()

  def resume(self, phase_steps: Mapping[str, int]) -> None:
    """Removes every row written after a checkpoint, atomically.

    The other rows stay as they are, byte for byte.

    Args:
      phase_steps: Last step to keep in each phase, the `phase_steps` of the moment when the
        checkpoint was saved. A missing phase loses all its rows, except that a missing "eval"
        follows "rl".
    """
    if self._file.truncate(_until(phase_steps)):
      self._rebuild_board()

  def _rebuild_board(self) -> None:
    if self._board:
      self._board.rebuild(read_rows(self._file.path))

  def close(self) -> None:
    """Closes the files. Rows that wait for room get one more try; all others are safe already."""
    self._file.close()
    if self._board:
      if self._board.is_lost and not self._file.pending:
        self._rebuild_board()
      self._board.close()

  def __exit__(self, *exc_info) -> None:
    self.close()


class SampleWriter(contextlib.AbstractContextManager):
  """A writer of sample rollouts to `workdir/samples.jsonl`, one row each, for the report's viewer.

  A row has `prompt`, `response`, `answer`, `reward`, `advantage`, `num_tokens`, `stopped`, `level`,
  `token_ids` and `logprobs` (the sampler's), and may have `correct`. For the heat-map it may have,
  per token, its text in `tokens`, and `log_ratio`, `gate_weight` (see `objectives.gate_weight`) and
  `entropy` under the policy after the step's updates. Non-finite numbers become `null`.

  Args:
    workdir: Folder of the run. With None, rows are checked but not written, as by `MetricWriter`.
  """

  def __init__(self, workdir: str | os.PathLike | None):
    self._file = RowFile(None if workdir is None else Path(workdir) / "samples.jsonl")

  def write(self, step: int, phase: str, samples: Iterable[Mapping[str, Any]]) -> None:
    """Appends rollouts of one step in one write. A kill can cut off the last ones.

    Args:
      step: Step of the phase; an "eval" row carries the RL step. Several calls may write the same
        step.
      phase: One of `PHASES`.
      samples: Rows of strings, numbers, lists and arrays.

    Raises:
      ValueError: If the phase is unknown or a name is reserved.
      OSError: If the rows cannot be written for another reason than a full disk. The file stays as
        it was.
    """
    self._file.append([_head(step, phase, sample) | {name: _plain(value) for name, value in sample.items()} for sample in samples])

  def resume(self, phase_steps: Mapping[str, int]) -> None:
    """Removes every row written after a checkpoint, as `MetricWriter.resume` does."""
    self._file.truncate(_until(phase_steps))

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def __exit__(self, *exc_info) -> None:
    self.close()


def _head(step: int, phase: str, names: Iterable[str]) -> Row:
  if phase not in PHASES:
    raise ValueError(f"unknown phase {phase!r}; it is one of {', '.join(PHASES)}")
  if taken := sorted(set(RESERVED) & set(names)):
    raise ValueError(f"reserved name of a row: {', '.join(taken)}")
  return {"step": int(step), "phase": phase}


def _scalar(name: str, value: Any) -> bool | int | float | str:
  """Converts a scalar of any library to a Python scalar of exactly the same value."""
  if isinstance(value, bool | int | float | str) and not isinstance(value, np.generic):
    return value
  array = np.asarray(value)
  if array.ndim or array.dtype.kind == "O":
    raise TypeError(f"metric {name!r} is not a scalar: {type(value).__name__} of shape {array.shape}")
  if array.dtype.kind in "biuU":
    return array.item()
  return float(array)  # Every float type, bfloat16 included, is exact in float64.


def _plain(value: Any) -> Any:
  """Converts nested values to those of strict JSON."""
  if isinstance(value, Mapping):
    return {str(name): _plain(item) for name, item in value.items()}
  if isinstance(value, list | tuple) or getattr(value, "ndim", 0):
    return [_plain(item) for item in (value if isinstance(value, list | tuple) else np.asarray(value).tolist())]
  if value is None:
    return None
  scalar = _scalar("sample", value)
  return None if isinstance(scalar, float) and not math.isfinite(scalar) else scalar


def _until(phase_steps: Mapping[str, int]) -> Callable[[Row], bool]:
  limits = {"eval": phase_steps["rl"], **phase_steps} if "rl" in phase_steps else dict(phase_steps)
  return lambda row: row["phase"] in limits and row["step"] <= limits[row["phase"]]
