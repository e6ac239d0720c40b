"""Metrics and sample rollouts on disk: `metrics.jsonl` and `samples.jsonl`, the source of truth, and TensorBoard, a view of the first.

A row is one line of strict JSON, on the disk (fsync) before `write` returns. A killed process can leave at most one torn last line, which
the next reader or writer drops. Rows hold no time of day, so an unbroken run and a resumed one can be compared row by row.

Each phase counts its own steps. A checkpoint stores `writer.phase_steps`; a resumed run hands them to `writer.resume`, which removes every
row written after that checkpoint, so that no row repeats.
"""

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

PHASES = ("warm_start", "rl", "eval", "reward_model")
"""What a row may belong to. All but "eval" count their own steps; an "eval" row carries the RL step it was measured at, or the step of a
reward model's training."""

Row = dict[str, Any]

_RESERVED = ("step", "phase", "nonfinite")
_log = logging.getLogger(__name__)


class MetricWriter:
  """Appends rows of scalars to `workdir/metrics.jsonl`, and their numbers to TensorBoard event files.

  A number that is not finite becomes `null`, and the row's `nonfinite` says which it was: strict JSON has no NaN, and a reader still
  sees what happened. Floats round-trip exactly. TensorBoard gets one run per phase (`workdir/tensorboard/rl`, ...), since phases count
  their own steps; its files are rebuilt from `metrics.jsonl` whenever a writer opens it or removes rows, so the two never contradict.

  Args:
    workdir: the run's folder; made if missing. None checks and counts rows and writes none, for processes that another one writes for.
    tensorboard: whether to write event files (needs tensorboardX).
    resume_step: last RL step to keep; later "rl" and "eval" rows are removed. None removes nothing. `resume` is the exact way.

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

  def __init__(self, workdir: str | os.PathLike | None, *, tensorboard: bool = True, resume_step: int | None = None):
    # TensorBoard first: a missing package should say so before a file is touched.
    self._board = _TensorBoard(Path(workdir) / "tensorboard") if tensorboard and workdir is not None else None
    self._file = _NoFile() if workdir is None else _RowFile(Path(workdir) / "metrics.jsonl")
    if resume_step is not None:
      self._file.truncate(_until_rl_step(resume_step))
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
      OSError: the disk refused the row; the file is left as it was.
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

  def resume(self, phase_steps: Mapping[str, int]) -> None:
    """Removes every row written after a checkpoint, in one atomic replacement.

    Args:
      phase_steps: last step to keep of each phase, as `phase_steps` was when the checkpoint was saved. A phase left out loses all its
        rows, except that "eval" left out follows "rl".
    """
    self.truncate(_until(phase_steps))

  def truncate(self, keep: Callable[[Row], bool]) -> None:
    """Removes the rows for which `keep(row)` is false, in one atomic replacement; the rows kept stay as they are, byte for byte."""
    if self._file.truncate(keep):
      self._rebuild_board()

  def _rebuild_board(self) -> None:
    if self._board:
      self._board.rebuild(read_rows(self._file.path))

  def close(self) -> None:
    """Closes the files. Rows are safe without it; the last minutes of TensorBoard are not, until the next writer rebuilds them."""
    self._file.close()
    if self._board:
      self._board.close()

  def __enter__(self) -> "MetricWriter":
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()


class SampleWriter:
  """Appends sample rollouts to `workdir/samples.jsonl`, one row each, for the report's viewer.

  A row has `prompt`, `response`, `answer`, `reward`, `advantage`, `num_tokens`, `stopped`, `level`, `token_ids` and `logprobs` (the
  sampler's), and may have `tokens` (each token's text, for the heat-map), `ratio`, `clipped` (per token) and `correct`.
  Numbers that are not finite become `null`.

  Args:
    workdir: the run's folder; None as for `MetricWriter`.
    resume_step: last RL step to keep, as for `MetricWriter`.
  """

  def __init__(self, workdir: str | os.PathLike | None, *, resume_step: int | None = None):
    self._file = _NoFile() if workdir is None else _RowFile(Path(workdir) / "samples.jsonl")
    if resume_step is not None:
      self._file.truncate(_until_rl_step(resume_step))

  @property
  def phase_steps(self) -> dict[str, int]:
    """The last step written of each phase, as for `MetricWriter`."""
    return dict(self._file.phase_steps)

  def write(self, step: int, phase: str, samples: Iterable[Mapping[str, Any]]) -> None:
    """Appends the rollouts of one step, together: after a kill either the first few are there or all.

    Args:
      step: as for `MetricWriter.write`; a step may be written in several calls.
      phase: one of `PHASES`.
      samples: rows of strings, numbers, lists and arrays.

    Raises:
      ValueError: unknown phase or reserved name.
      OSError: the disk refused the rows; the file is left as it was.
    """
    self._file.append([_head(step, phase, sample) | {name: _plain(value) for name, value in sample.items()} for sample in samples])

  def resume(self, phase_steps: Mapping[str, int]) -> None:
    """Removes every row written after a checkpoint, as `MetricWriter.resume` does."""
    self.truncate(_until(phase_steps))

  def truncate(self, keep: Callable[[Row], bool]) -> None:
    """Removes the rows for which `keep(row)` is false, in one atomic replacement."""
    self._file.truncate(keep)

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def __enter__(self) -> "SampleWriter":
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()


def read_rows(path: str | os.PathLike) -> list[Row]:
  """Rows of a `.jsonl` file, also while a run is writing it.

  Args:
    path: the file. One that is missing has no rows.

  Returns:
    The rows in the order of the file. A torn last line is left out; any other line that is not a row is left out with a warning.
  """
  return [row for _, row in _read_lines(Path(path))]


class _RowFile:
  """An append-only file of JSON rows that a kill at any moment leaves readable."""

  def __init__(self, path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    self.path = path
    lines = _read_lines(path)
    self.phase_steps: dict[str, int] = {}
    self._count(row for _, row in lines)
    if path.exists() and path.stat().st_size != sum(len(line) for line, _ in lines):
      _replace(path, lines)  # A torn line must go before the next row is glued to it.
    self._fd = self._open()

  def append(self, rows: list[Row]) -> None:
    """Appends all rows, or raises OSError and leaves the file as it was."""
    data = b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows)
    size = os.fstat(self._fd).st_size
    try:
      while data:
        data = data[os.write(self._fd, data) :]
      os.fsync(self._fd)
    except OSError:
      os.ftruncate(self._fd, size)
      raise
    self._count(rows)

  def truncate(self, keep: Callable[[Row], bool]) -> int:
    """Removes rows; returns how many."""
    lines = _read_lines(self.path)
    kept = [(line, row) for line, row in lines if keep(row)]
    if len(kept) < len(lines):
      _replace(self.path, kept)
      os.close(self._fd)
      self._fd = self._open()
      self.phase_steps = {}
      self._count(row for _, row in kept)
    return len(lines) - len(kept)

  def close(self) -> None:
    if self._fd >= 0:
      os.close(self._fd)
      self._fd = -1

  def _open(self) -> int:
    return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

  def _count(self, rows: Iterable[Row]) -> None:
    for row in rows:
      self.phase_steps[row["phase"]] = max(row["step"], self.phase_steps.get(row["phase"], row["step"]))


class _NoFile:
  """In the place of a `_RowFile`: counts rows."""

  def __init__(self):
    self.phase_steps: dict[str, int] = {}

  def append(self, rows: list[Row]) -> None:
    for row in rows:
      self.phase_steps[row["phase"]] = max(row["step"], self.phase_steps.get(row["phase"], row["step"]))

  def truncate(self, keep: Callable[[Row], bool]) -> int:
    del keep
    self.phase_steps = {}
    return 0

  def close(self) -> None:
    pass


class _TensorBoard:
  """Event files, one folder per phase, always rebuildable from the rows."""

  def __init__(self, folder: Path):
    try:
      from tensorboardX import SummaryWriter  # Lazy: it takes a while, and runs without events do not need it.
      from tensorboardX.proto.summary_pb2 import Summary
    except ImportError as error:
      raise ImportError(
        "TensorBoard event files need tensorboardX: pip install tensorboardX, or set config.log.tensorboard = False"
      ) from error
    self._make, self._summary = SummaryWriter, Summary
    self._folder = folder
    self._writers: dict[str, Any] = {}

  def rebuild(self, rows: Iterable[Row]) -> None:
    self.close()
    shutil.rmtree(self._folder, ignore_errors=True)
    for row in rows:
      self.add(row)

  def add(self, row: Row) -> None:
    if (phase := row["phase"]) not in self._writers:
      # The purge mark makes a TensorBoard that has been watching since before a restart forget the points that it holds in memory.
      self._writers[phase] = self._make(str(self._folder / phase), purge_step=0, flush_secs=30)
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name not in _RESERVED}
    numbers |= {name: float(value) for name, value in row.get("nonfinite", {}).items()}
    # One event for the whole row: `add_scalar` would write one per number, which makes a rebuild ten times slower.
    values = [self._summary.Value(tag=_tag(name), simple_value=value) for name, value in numbers.items()]
    self._writers[phase].file_writer.add_summary(self._summary(value=values), row["step"])

  def close(self) -> None:
    for writer in self._writers.values():
      writer.close()
    self._writers = {}


def _head(step: int, phase: str, names: Iterable[str]) -> Row:
  if phase not in PHASES:
    raise ValueError(f"unknown phase {phase!r}; it is one of {', '.join(PHASES)}")
  if taken := sorted(set(_RESERVED) & set(names)):
    raise ValueError(f"reserved name of a row: {', '.join(taken)}")
  return {"step": int(step), "phase": phase}


def _tag(name: str) -> str:
  """The name as TensorBoard allows it: `eval/pass@4` becomes `eval/pass_4`."""
  return re.sub(r"[^-/\w.]", "_", name)


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


def _until_rl_step(step: int) -> Callable[[Row], bool]:
  return lambda row: row["phase"] == "warm_start" or row["step"] <= step


def _read_lines(path: Path) -> list[tuple[bytes, Row]]:
  """Whole lines that are rows, each with the bytes that it was read from."""
  if not path.exists():
    return []
  lines = path.read_bytes().splitlines(keepends=True)
  if lines and not lines[-1].endswith(b"\n"):
    lines.pop()  # Torn by a kill, or half written this moment.
  rows, bad = [], []
  for number, line in enumerate(lines, 1):
    try:
      row = json.loads(line)
    except ValueError:
      row = None
    if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("phase"), str):
      rows.append((line, row))
    else:
      bad.append(number)
  if bad:
    _log.warning("%s: left out %d lines that are not rows, the first at line %d", path, len(bad), bad[0])
  return rows


def _replace(path: Path, lines: list[tuple[bytes, Row]]) -> None:
  """Replaces the file in one step: a kill leaves the old file or the new one."""
  temporary = path.with_name(path.name + ".tmp")
  with open(temporary, "wb") as file:
    file.write(b"".join(line for line, _ in lines))
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)
  folder = os.open(path.parent, os.O_RDONLY)
  try:
    os.fsync(folder)  # The new name itself must reach the disk.
  finally:
    os.close(folder)
