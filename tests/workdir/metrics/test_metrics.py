"""Rows after kills, full disks and resumes, and the lines that a terminal shows."""

import errno
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm.run.observe.progress import Progress, visible
from jaxrl_llm.workdir.metrics import MetricWriter, SampleWriter, read_rows, row_file

HOSTILE = "[bold]x[/bold] [/nope] \x1b[31mred\x1b[0m \r\x07\u202e\ud800\nsecond line"


def strict_loads(line):
  def refuse(name):
    raise AssertionError(f"{name} is not JSON")

  return json.loads(line, parse_constant=refuse)


def lines_of(workdir, name="metrics.jsonl"):
  return (Path(workdir) / name).read_bytes().splitlines(keepends=True)


def board_points(workdir, phase):
  """Reads the values by (tag, step) from the event files.

  A record is a length, its checksum, an event, and its checksum.
  """
  from tensorboardX.proto.event_pb2 import Event

  points = {}
  for path in sorted((Path(workdir) / "tensorboard" / phase).iterdir()):
    data, at = path.read_bytes(), 0
    while at < len(data):
      (length,) = struct.unpack_from("<Q", data, at)
      event = Event.FromString(data[at + 12 : at + 12 + length])
      at += 16 + length
      for value in event.summary.value:
        points.setdefault((value.tag, event.step), []).append(value.simple_value)
  return points


def read_terminal(reader):
  """Yields what is written to a terminal, until its other end is closed."""
  while True:
    try:
      yield os.read(reader, 1 << 16)
    except OSError:
      return


def run(workdir, steps, *, tensorboard=False, resume=None):
  """Writes the rows of a deterministic run, and returns its `phase_steps` after each step.

  Each step has an RL row, every second one an evaluation.
  """
  marks = {}
  with MetricWriter(workdir, tensorboard=tensorboard) as writer:
    if resume is not None:
      writer.resume(resume)
    for step in steps:
      writer.write(step, "rl", {"actor/loss": float(np.sin(step)), "rollout/tokens_sha256": f"{step:064x}"})
      if step % 2 == 0:
        writer.write(step, "eval", {"eval/accuracy": step / 100, "eval/pass@4": step / 50})
      marks[step] = writer.phase_steps
  return marks


def test_values_round_trip_exactly(tmp_path):
  values = {
    "a": 0.1 + 0.2, "b": 5e-324, "c": -0.0, "d": 2**60, "e": True, "f": "ab\n\u2028\ud800", "g": np.float32(0.1), "h": np.int64(7),
    "i": np.array(1 / 3), "j": np.float16(0.1), "k": np.str_("s"), "l": np.array(0.1, ml_dtypes.bfloat16),
  }  # fmt: skip
  with MetricWriter(tmp_path, tensorboard=False) as writer:
    writer.write(3, "warm_start", values)
  row = strict_loads(lines_of(tmp_path)[0])
  assert row == {"step": 3, "phase": "warm_start"} | {name: getattr(value, "item", lambda v=value: v)() for name, value in values.items()}
  assert str(row["c"]) == "-0.0" and row["e"] is True and isinstance(row["h"], int) and row["l"] == 0.10009765625


def test_nonfinite_numbers_stay_strict_json_and_named(tmp_path):
  with MetricWriter(tmp_path, tensorboard=False) as writer:
    writer.write(1, "rl", {"x": ml_dtypes.bfloat16(float("nan")), "y": np.float32("inf"), "z": -np.inf, "w": 1.0})
  row = strict_loads(lines_of(tmp_path)[0])
  assert (row["x"], row["y"], row["z"], row["w"]) == (None, None, None, 1.0)
  assert row["nonfinite"] == {"x": "nan", "y": "inf", "z": "-inf"}


@pytest.mark.parametrize(
  ("step", "phase", "scalars", "error", "match"),
  [
    (5, "rl", {"a": 1}, ValueError, "already has rl step 5"),
    (4, "rl", {"a": 1}, ValueError, "step 4 would repeat"),
    (6, "train", {"a": 1}, ValueError, "unknown phase 'train'"),
    (6, "rl", {"step": 1}, ValueError, "reserved"),
    (6, "rl", {"a": np.zeros(2)}, TypeError, "'a' is not a scalar"),
    (6, "rl", {"a": None}, TypeError, "'a' is not a scalar"),
  ],
)
def test_bad_rows_are_refused_and_leave_no_trace(tmp_path, step, phase, scalars, error, match):
  with MetricWriter(tmp_path, tensorboard=False) as writer:
    writer.write(5, "rl", {"a": 1})
    with pytest.raises(error, match=match):
      writer.write(step, phase, scalars)
    writer.write(5, "eval", {"a": 1})  # Phases count their own steps.
  assert len(lines_of(tmp_path)) == 2


def test_a_row_torn_at_any_byte_is_dropped(tmp_path):
  run(tmp_path, range(1, 4))
  path = tmp_path / "metrics.jsonl"
  whole = path.read_bytes()
  last = len(lines_of(tmp_path)[-1])
  for cut in {*range(1, last, 5), last - 1, last}:
    path.write_bytes(whole[:-cut])
    assert len(read_rows(path)) == 3, cut
    with MetricWriter(tmp_path, tensorboard=False) as writer:
      writer.write(3, "rl", {"actor/loss": float(np.sin(3)), "rollout/tokens_sha256": f"{3:064x}"})
    assert path.read_bytes() == whole, cut


def test_a_line_that_is_not_a_row_is_reported_and_dropped(tmp_path, caplog):
  run(tmp_path, range(1, 3))
  path = tmp_path / "metrics.jsonl"
  first, *rest = lines_of(tmp_path)
  path.write_bytes(first + b"\0\0\0\n[1]\n" + b"".join(rest))
  assert [row["step"] for row in read_rows(path)] == [1, 2, 2]
  assert "dropped 2 lines" in caplog.text and "line 2" in caplog.text


def test_rows_are_whole_and_in_order_after_sigkill(tmp_path):
  code = f"""
from jaxrl_llm.workdir.metrics import MetricWriter
writer = MetricWriter({str(tmp_path)!r}, tensorboard=False)
step = writer.phase_steps.get("rl", 0)
while True:
  step += 1
  writer.write(step, "rl", {{"text": "x" * 3000}})
"""
  seen = 0
  for _ in range(3):
    child = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while len(read_rows(tmp_path / "metrics.jsonl")) < seen + 5 and time.monotonic() < deadline:
      time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    steps = [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= seen + 5
    seen = len(steps)


@pytest.mark.parametrize("checkpoint", [1, 4, 5])
def test_a_resumed_run_writes_the_rows_of_an_uninterrupted_one(tmp_path, checkpoint):
  run(tmp_path / "unbroken", range(1, 11))
  marks = run(tmp_path / "broken", range(1, 8))
  with open(tmp_path / "broken" / "metrics.jsonl", "ab") as file:
    file.write(b'{"step": 8, "phase": "rl", "actor/lo')
  run(tmp_path / "broken", range(checkpoint + 1, 11), resume=marks[checkpoint])
  assert lines_of(tmp_path / "broken") == lines_of(tmp_path / "unbroken")


def test_resume_drops_phases_that_the_checkpoint_lacks(tmp_path):
  with MetricWriter(tmp_path, tensorboard=False) as writer:
    for step in (1, 2, 3):
      writer.write(step, "warm_start", {})
    writer.write(0, "eval", {})
    writer.write(1, "rl", {})
    writer.resume({"warm_start": 2})
    assert writer.phase_steps == {"warm_start": 2}
    writer.write(0, "eval", {})
    writer.write(1, "rl", {})
    writer.write(1, "eval", {})
    writer.resume({"warm_start": 2, "rl": 0})  # A missing "eval" follows "rl".
    assert writer.phase_steps == {"warm_start": 2, "eval": 0}
  with MetricWriter(tmp_path, tensorboard=False) as writer:
    writer.resume({"warm_start": 2, "rl": -1})
    assert writer.phase_steps == {"warm_start": 2}


def test_truncation_is_all_or_nothing(tmp_path, monkeypatch):
  run(tmp_path, range(1, 6))
  before = lines_of(tmp_path)
  with MetricWriter(tmp_path, tensorboard=False) as writer:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed here"):
      patch.setattr(row_file.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
      writer.resume({"rl": 1})
    assert lines_of(tmp_path) == before
    writer.resume({"eval": 5})
  assert lines_of(tmp_path) == [line for line in before if b'"eval"' in line]


def half_then(error, write=os.write):
  """Returns a function that writes half of what it is given, until little is left, which fails."""

  def fails(fd, data):
    if len(data) < 20:
      raise error
    return write(fd, data[: len(data) // 2])

  return fails


def test_a_failing_disk_leaves_no_partial_row(tmp_path, monkeypatch):
  with MetricWriter(tmp_path, tensorboard=False) as writer:
    writer.write(1, "rl", {"a": 1})
    before = lines_of(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
      patch.setattr(row_file.os, "write", half_then(OSError(5, "Input/output error")))
      writer.write(2, "rl", {"a": 2})
    assert lines_of(tmp_path) == before
    writer.write(2, "rl", {"a": 2})  # The disk works again, and the same row can be written.
  assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_rows_wait_while_the_disk_is_full(tmp_path, monkeypatch, caplog):
  with MetricWriter(tmp_path) as writer, SampleWriter(tmp_path) as samples:
    writer.write(1, "rl", {"a": 1})
    with monkeypatch.context() as patch:
      patch.setattr(row_file.os, "write", half_then(OSError(errno.ENOSPC, "No space left on device")))
      for step in (2, 3):
        writer.write(step, "rl", {"a": step})
        samples.write(step, "rl", [{"prompt": "x"}])
      with pytest.raises(ValueError, match="would repeat"):
        writer.write(3, "rl", {"a": 3})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1] and writer.phase_steps == {"rl": 3}
    writer.write(4, "rl", {"a": 4})  # There is space again.
  assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
  # Written by `close`.
  assert [row["step"] for row in read_rows(tmp_path / "samples.jsonl")] == [2, 3]
  assert sorted(step for _, step in board_points(tmp_path, "rl")) == [1, 2, 3, 4]
  assert len([line for line in caplog.messages if "the disk is full" in line]) == 2, "one warning for each file"


def test_lost_events_are_written_once_there_is_room(tmp_path, monkeypatch):
  pytest.importorskip("tensorboardX")
  from tensorboardX.record_writer import RecordWriter

  with MetricWriter(tmp_path) as writer:
    writer.write(1, "rl", {"a": 1})
    with monkeypatch.context() as patch:
      patch.setattr(RecordWriter, "write", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
      for step in range(2, 30):
        writer.write(step, "rl", {"a": step})
    assert not board_points(tmp_path, "rl")
    for step in (30, 31):
      writer.write(step, "rl", {"a": step})
      assert sorted(step for _, step in board_points(tmp_path, "rl")) == list(range(1, step + 1)), "seen at once"


def test_events_on_a_full_disk_do_not_block(tmp_path):
  """With a queue of ten events whose thread has ended unnoticed, this would block for ever."""
  pytest.importorskip("tensorboardX")
  script = f"""
import pathlib, resource
from jaxrl_llm.workdir.metrics.tensorboard import TensorBoard
rows = [{{"step": step, "phase": "rl"}} | {{f"x{{i}}": step / 3 for i in range(40)}} for step in range(1, 1001)]
board = TensorBoard(pathlib.Path({str(tmp_path)!r}, "tensorboard"))
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
for _ in range(3):
  board.rebuild(rows)
  assert board.is_lost
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
board.rebuild(rows)
board.close()
"""
  result = subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=60)
  assert result.returncode == 0 and not result.stderr, result.stderr
  assert {step for _, step in board_points(tmp_path, "rl")} == set(range(1, 1001))


def test_tensorboard_never_contradicts_the_rows(tmp_path):
  pytest.importorskip("tensorboardX")
  marks = run(tmp_path, range(1, 8), tensorboard=True)
  for path in (tmp_path / "tensorboard" / "rl").iterdir():
    # A restart within the same second would reuse the name.
    path.rename(path.with_name("events.out.tfevents.1000000000.earlier"))
  run(tmp_path, range(5, 10), tensorboard=True, resume=marks[4])
  points = board_points(tmp_path, "rl")
  assert points == {("actor/loss", step): [np.float32(np.sin(step))] for step in range(1, 10)}
  assert set(board_points(tmp_path, "eval")) == {(tag, step) for tag in ("eval/accuracy", "eval/pass_4") for step in (2, 4, 6, 8)}


def test_tensorboard_shows_non_finite_numbers(tmp_path):
  pytest.importorskip("tensorboardX")
  with MetricWriter(tmp_path) as writer:
    writer.write(1, "rl", {"a": float("inf"), "b": "text", "c": 2})
  assert board_points(tmp_path, "rl") == {("a", 1): [float("inf")], ("c", 1): [2.0]}


def test_samples_hold_arrays_and_resume(tmp_path):
  sample = {"prompt": HOSTILE, "reward": np.float32(0.5), "token_ids": np.array([1, 2])}
  sample |= {"logprobs": [-0.5, -np.inf], "stopped": np.bool_(True)}
  with SampleWriter(tmp_path) as writer:
    for step in (1, 2):
      writer.write(step, "rl", [sample, sample])
    writer.write(2, "rl", [sample])
  rows = [strict_loads(line) for line in lines_of(tmp_path, "samples.jsonl")]
  assert len(rows) == 5
  plain = {"prompt": HOSTILE, "reward": 0.5, "token_ids": [1, 2], "logprobs": [-0.5, None], "stopped": True}
  assert rows[0] == {"step": 1, "phase": "rl"} | plain
  with SampleWriter(tmp_path) as writer:
    writer.resume({"rl": 1})
  assert len(lines_of(tmp_path, "samples.jsonl")) == 2


def test_a_log_gets_plain_lines_at_intervals_and_every_evaluation(monkeypatch):
  monkeypatch.setenv("FORCE_COLOR", "1")
  now, stream = [0.0], io.StringIO()
  with Progress(every_seconds=10, stream=stream, clock=lambda: now[0]) as progress:
    progress.start("rl", 100)
    for step in range(1, 26):
      now[0] += 1
      progress.update(step, {"critic/rewards/mean": 0.5, "actor/loss": 9.0, "perf/throughput": 1234.5})
      if step == 7:
        progress.evaluation(step, {"eval/accuracy": 0.25, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.3})
  lines = stream.getvalue().splitlines()
  assert [line.split(" | ")[0] for line in lines] == ["RL 1/100", "eval at RL step 7", "RL 11/100", "RL 21/100", "RL 25/100"]
  assert lines[1].endswith("accuracy 25.0% (20.0% to 30.0%)")
  assert lines[3] == "RL 21/100 | accuracy 25.0% | reward 0.500 | 1,234 tokens/s | elapsed 0:21 | ETA 1:19"
  assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_model_output_cannot_drive_the_terminal(terminal):
  samples = [{"prompt": HOSTILE, "response": HOSTILE, "answer": None, "reward": 0.25}, {"response": "y" * 5000}]
  if terminal:
    reader, writer = pty.openpty()
    stream = os.fdopen(writer, "w", encoding="utf-8")
    chunks = []
    thread = threading.Thread(target=lambda: chunks.extend(read_terminal(reader)))
    thread.start()
  else:
    stream = io.StringIO()
  with Progress(every_seconds=0, stream=stream) as progress:
    progress.start("rl", 4)
    progress.update(1, {"critic/rewards/mean": 0.5})
    progress.samples(samples, title=HOSTILE)
    progress.note(HOSTILE)
  if terminal:
    stream.close()
    thread.join()
    os.close(reader)
    text = b"".join(chunks).decode()
    assert "\x1b[2K" in text  # The live line was drawn in place.
  else:
    text = stream.getvalue()
    assert "\x1b" not in text and "\r" not in text
  for raw in ("\x1b[31mred", "\x07", "\u202e", "red\x1b[0m"):
    assert raw not in text
  assert "[bold]x[/bold]" in text and r"\x1b[31m" in text and r"\u202e" in text and r"\ud800" in text
  assert text.count("y") < 1000


def test_visible_keeps_ordinary_text():
  assert visible("x² + 3 ≤ 7, 中文, naïve 😀") == "x² + 3 ≤ 7, 中文, naïve 😀"


def test_heavy_packages_load_only_when_asked():
  code = "import sys, jaxrl_llm.workdir.metrics, jaxrl_llm.run.observe.progress, jaxrl_llm.report; print([m for m in sys.modules if m in " \
    "('jax', 'matplotlib', 'tensorboardX', 'tensorflow')])"  # fmt: skip
  assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_process_that_does_not_write_checks_rows_and_shows_nothing(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  writer, stream = MetricWriter(None), io.StringIO()
  with writer, SampleWriter(None) as samples:
    writer.write(1, "rl", {"actor/loss": 0.5})
    samples.write(1, "rl", [{"prompt": "1+1"}])
    assert writer.phase_steps == {"rl": 1}
    with pytest.raises(ValueError, match="already has rl step 1"):
      writer.write(1, "rl", {})
    writer.resume({})
    writer.write(1, "rl", {})
  with Progress(every_seconds=0, stream=stream, quiet=True) as progress:
    progress.start("rl", total=2)
    progress.update(1, {"actor/loss": 0.5})
    progress.samples([{"prompt": "x"}])
  assert not list(tmp_path.iterdir()) and not stream.getvalue()
