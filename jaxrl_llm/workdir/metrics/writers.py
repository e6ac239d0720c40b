"""Who writes rows: of scalars, and of sample rollouts."""

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
"""What a row may belong to. All but "eval" count their own steps; an "eval" row carries the RL step it was measured at, or the step of a
reward model's training."""


class MetricWriter(contextlib.AbstractContextManager):
  """Appends rows of scalars to `workdir/metrics.jsonl`, and their numbers to TensorBoard event files.

  A number that is not finite becomes `null`, and the row's `nonfinite` says which it was: strict JSON has no NaN, and a reader still
  sees what happened. Floats round-trip exactly. TensorBoard gets one run per phase (`workdir/tensorboard/rl`, ...), since phases count
  their own steps; its files are rebuilt from `metrics.jsonl` whenever a writer opens it or removes rows, so the two never contradict.

  Args:
    workdir: the run's folder; made if missing. None checks and counts rows and writes none, for processes that another one writes for.
    tensorboard: whether to write event files (needs tensorboardX).

  Raises:
    ImportError: `tensorboard` is set and tensorboardX is not installed.

  Example:
    >>> import tempfile
    >>> workdir = tempfile.mkdtemp()
    >>> with MetricWriter(workdir, tensorboard=False) as writer:
    ...   writer.write(1, "rl", {"actor/loss": np.float32(0.5), "actor/grad_norm": float("inf")})
    >>> print(Path(workdir, "metrics.jsonl").read_text(), end="")
    {"step": 1, "phase": "rl", "actor/loss": 0.5, "actor/grad_norm": null, "nonfinite": {"actor/grad_norm": "inf"}}
  """

  def __init__(self, workdir: str | os.PathLike | None, *, tensorboard: bool = True):
    # TensorBoard first: a missing package should say so before a file is touched.
    self._board = TensorBoard(Path(workdir) / "tensorboard") if tensorboard and workdir is not None else None
    self._file = RowFile(None if workdir is None else Path(workdir) / "metrics.jsonl")
    self._rebuild_board()

  @property
  def phase_steps(self) -> dict[str, int]:
    """The last step written of each phase: the high-water mark that a checkpoint stores and `resume` takes."""
    return dict(self._file.phase_steps)

  def write(self, step: int, phase: str, scalars: Mapping[str, Any]) -> None:
    """Appends one row.

    Args:
      step: the phase's own step; an "eval" row carries the RL step.
      phase: one of `PHASES`.
      scalars: by name; Python, NumPy or JAX numbers (0-d), or strings. Strings do not go to TensorBoard.

    Raises:
      ValueError: unknown phase, reserved name, or a step that is not after the phase's last one (a row would repeat).
      TypeError: a value that is neither a scalar nor a string.
      OSError: the disk refused the row, and not because it is full; the file is left as it was.
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
    """Removes every row written after a checkpoint, in one atomic replacement; the rows kept stay as they are, byte for byte.

    Args:
      phase_steps: last step to keep of each phase, as `phase_steps` was when the checkpoint was saved. A phase left out loses all its
        rows, except that "eval" left out follows "rl".
    """
    if self._file.truncate(_until(phase_steps)):
      self._rebuild_board()

  def _rebuild_board(self) -> None:
    if self._board:
      self._board.rebuild(read_rows(self._file.path))

  def close(self) -> None:
    """Closes the files. Rows are safe without it, but for those that wait for room: they get one more try."""
    self._file.close()
    if self._board:
      if self._board.is_lost and not self._file.pending:
        self._rebuild_board()
      self._board.close()

  def __exit__(self, *exc_info) -> None:
    self.close()


class SampleWriter(contextlib.AbstractContextManager):
  """Appends sample rollouts to `workdir/samples.jsonl`, one row each, for the report's viewer.

  A row has `prompt`, `response`, `answer`, `reward`, `advantage`, `num_tokens`, `stopped`, `level`, `token_ids` and `logprobs` (the
  sampler's), and may have `correct`, and for the heat-map per token its text in `tokens`, and under the policy after the step's updates
  `log_ratio`, `gate_weight` (see `objectives.gate_weight`) and `entropy`. Numbers that are not finite become `null`.

  Args:
    workdir: the run's folder; None as for `MetricWriter`.
  """

  def __init__(self, workdir: str | os.PathLike | None):
    self._file = RowFile(None if workdir is None else Path(workdir) / "samples.jsonl")

  def write(self, step: int, phase: str, samples: Iterable[Mapping[str, Any]]) -> None:
    """Appends the rollouts of one step, together: after a kill either the first few are there or all.

    Args:
      step: as for `MetricWriter.write`; a step may be written in several calls.
      phase: one of `PHASES`.
      samples: rows of strings, numbers, lists and arrays.

    Raises:
      ValueError: unknown phase or reserved name.
      OSError: the disk refused the rows, and not because it is full; the file is left as it was.
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
  """A scalar of any library as Python's own; the exact value, in whatever precision it came."""
  if isinstance(value, bool | int | float | str) and not isinstance(value, np.generic):
    return value
  array = np.asarray(value)
  if array.ndim or array.dtype.kind == "O":
    raise TypeError(f"metric {name!r} is not a scalar: {type(value).__name__} of shape {array.shape}")
  if array.dtype.kind in "biuU":
    return array.item()
  return float(array)  # Every float type, bfloat16 included, is exact in float64.


def _plain(value: Any) -> Any:
  """Nested values as strict JSON has them."""
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
