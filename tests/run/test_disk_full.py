"""A run on a full disk continues, reports it, saves again once there is space, and else fails."""

import json
import pathlib
import re
import resource
import subprocess
import textwrap

import pytest

from tests.runs import ROOT, VARIED, column, command, environment, flags, reach, start, succeed

OVERRIDES = VARIED | {
  "num_steps": 20, "warm_start.num_steps": 4, "warm_start.batch_size": 8, "checkpoint.every": 1, "checkpoint.keep": 1,
  "eval.every": 20, "log.num_table_rows": 0, "log.num_samples": 2,
}  # fmt: skip
ARGS = ["--config=configs/gspo.py:tiny", *flags(OVERRIDES)]
FULL_FROM = 3  # RL steps.
TROUBLE = re.compile(r"checkpoint \S+/checkpoints/(\d+) was not saved: .+ \([\d,]+ bytes needed, [\d,]+ free\); checkpoint (\d+) stands")


def may_mount() -> bool:
  return subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0


def on_small_disk(tmp_path: pathlib.Path, *, freed: bool, more: list[str] = ()) -> tuple[subprocess.CompletedProcess, pathlib.Path]:
  """Runs in a file system that fills up at an RL step; returns the process and its folder.

  With `freed` there is space again once five saves have failed.
  """
  disk = tmp_path / "disk"
  disk.mkdir()
  free = 'wait_for "^checkpoint .* was not saved" "$OUT.out" 5; find "$DISK/run/checkpoints" > "$OUT.full"; rm "$DISK/filler"'
  script = """
    mount -t tmpfs -o size=64m none "$DISK" || exit 99
    wait_for() { until [ "$(grep -c "$1" "$2" 2> /dev/null)" -ge $3 ] 2> /dev/null; do sleep 0.05; done }
    (wait_for '"phase": "rl"' "$DISK/run/metrics.jsonl" FULL_FROM; dd if=/dev/zero of="$DISK/filler" bs=4k 2> /dev/null; FREE) & helper=$!
    "$@" > "$OUT.out"; status=$?
    cat "$OUT.out"
    kill $helper 2> /dev/null
    cp -r "$DISK/run" "$OUT"
    exit $status
  """
  script = textwrap.dedent(script).replace("FULL_FROM", str(FULL_FROM)).replace("FREE", free if freed else "true")
  run = command(*ARGS, *more, f"--workdir={disk / 'run'}")
  env = environment() | {"DISK": str(disk), "OUT": str(tmp_path / "copy")}
  shell = ["unshare", "-rm", "sh", "-c", script, "sh"]
  result = subprocess.run([*shell, *run], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
  return result, tmp_path / "copy"


def whole_rows(workdir: pathlib.Path) -> list[dict]:
  """Returns the rows of RL steps, and checks that each line of the file is whole."""
  text = (workdir / "metrics.jsonl").read_text()
  assert text.endswith("\n")
  return [row for row in map(json.loads, text.splitlines()) if row["phase"] == "rl"]


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="this user may not mount a file system of a test's own")
def test_a_run_survives_a_full_disk(tmp_path):
  result, workdir = on_small_disk(tmp_path, freed=True)
  assert result.returncode == 0, result.stderr[-3000:]
  rows, summary = whole_rows(workdir), json.loads((workdir / "summary.json").read_text())
  assert [row["step"] for row in rows] == list(range(1, 21)), "no row is lost"
  told = TROUBLE.findall(result.stdout)
  assert len(told) == summary["failed_saves"] >= 5 and summary["status"] == "finished"
  assert {stands for _, stands in told} == {told[0][1]}, "the same checkpoint is kept all the time"
  assert max(row.get("checkpoint/failed", 0) for row in rows) == len(told) and "checkpoint/failed" not in rows[0]
  # Of the five failed saves nothing remained beside the kept checkpoint.
  left = [line.rsplit("/", 1)[-1] for line in (tmp_path / "copy.full").read_text().splitlines()]
  assert not [name for name in left if "saving" in name or "removing" in name or "tmp" in name]
  # At the end there is the last checkpoint.
  assert [path.name for path in (workdir / "checkpoints").iterdir()] == ["24"]


@pytest.mark.exhaustive
@pytest.mark.skipif(not may_mount(), reason="this user may not mount a file system of a test's own")
def test_a_run_that_cannot_save_its_last_checkpoint_fails(tmp_path):
  result, workdir = on_small_disk(tmp_path, freed=False, more=["--config.checkpoint.asynchronous=True"])
  assert result.returncode == 1, result.stderr[-3000:]
  (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
  assert (
    "checkpoints/24 was not saved" in line
    and " stands; free some space, and the same command repeats the steps after it" in line
  )
  assert len(whole_rows(workdir)) >= FULL_FROM
  (stands,) = (path.name for path in (workdir / "checkpoints").iterdir())
  assert f"checkpoint {stands} stands" in line
  assert "resumed" in succeed(*ARGS, "--config.checkpoint.asynchronous=True", f"--workdir={workdir}")
  assert [row["step"] for row in whole_rows(workdir)] == list(range(1, 21))


@pytest.mark.exhaustive
def test_a_limit_on_the_size_of_files(tmp_path):
  """A quota is such a limit: it cannot be predicted, so the write fails with an error of Orbax."""
  workdir = tmp_path / "run"
  more = {"model.preset": "tiny", "warm_start.num_steps": 59}
  # A truncated program would stay in the cache for other tests.
  process = start(*ARGS, *flags(more), f"--workdir={workdir}", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "xla"))
  reach(workdir, "warm_start", 1, process)  # Then datasets and programs are on the disk.
  resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (60_000, 60_000))
  output, errors = process.communicate(timeout=300)
  assert process.returncode == 1, errors[-3000:]
  (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
  assert line.startswith("error: checkpoint") and "File too large" in line and "there is no checkpoint yet" in line
  assert "Traceback" not in errors and "never" not in errors, (
    "one line, without Orbax's messages about the other arrays"
  )
  assert output.count("was not saved") == 21  # After the warm start, and after each RL step.
  assert not list((workdir / "checkpoints").iterdir())
  assert set(column(workdir, "step")) >= {1, 2}
