"""One run in four trackers, killed and resumed: each has one entry, and the numbers of the rows.

Three trackers are extras outside `test`: `pip install 'jaxrl-llm[wandb,mlflow,trackio]'`.
"""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_llm.config.trackers import PACKAGES, is_installed
from jaxrl_llm.run.observe.trackers.entry import numbers
from jaxrl_llm.run.observe.trackers.mlflow import key
from jaxrl_llm.workdir.metrics import read_rows, reproducible
from tests.runs import ROOT, VARIED, command, environment, flags

MISSING = sorted({module for modules in PACKAGES.values() for module in modules if not is_installed(module)})
SHORT = VARIED | {
  "warm_start.num_steps": 4, "checkpoint.warm_start_every": 2, "num_steps": 6, "checkpoint.every": 2, "eval.every": 2,
  "eval.num_prompts": 8, "log.samples_every": 1, "log.num_table_rows": 0, "log.trackers": "('wandb','mlflow','trackio')",
}  # fmt: skip

# Each reads a tracker's files with the tracker's own code, and prints the number of entries, and
# (name, step, value) of all that they hold.
READERS = {
  "tensorboard": """
import re
from tensorboardX.proto.event_pb2 import Event
runs, points = set(), []
for path in sorted((folder.parent / "tensorboard").rglob("events*")):
  runs.add(path.parent.parent)
  data, phase = path.read_bytes(), path.parent.name
  prefix = "" if phase == "rl" else f"{phase}/"
  while data:
    size = int.from_bytes(data[:8], "little")
    event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
    for x in event.summary.value:
      name = x.tag if x.tag.startswith(prefix) else prefix + x.tag
      points.append((name, event.step, x.simple_value))
""",
  "wandb": """
from wandb.proto.wandb_internal_pb2 import Record

def records(data):
  # W&B has no public reader. The file is a log of LevelDB: 7 bytes of its own, then blocks of
  # 32 KiB, with chunks of a checksum (4 bytes), a length (2) and a kind (1): whole, first, middle
  # or last.
  position, parts = 7, b""
  while position + 7 <= len(data):
    if 32768 - position % 32768 < 7:
      position += 32768 - position % 32768
    size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
    parts, position = parts + data[position + 7 : position + 7 + size], position + 7 + size
    if kind in (1, 4):
      yield parts
      parts = b""

runs, points = set(), []
for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
  for data in records(path.read_bytes()):
    record = Record.FromString(data)
    if record.HasField("run"):
      runs.add((record.run.project, record.run.run_id))
    items = record.history.item
    row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    special = ("NaN", "Infinity", "-Infinity")
    row = {name: float(x) if x in special else x for name, x in row.items()}
    for phase in ("rl", "eval", "warm_start"):
      if f"{phase}/step" in row:
        step = row.pop(f"{phase}/step")
        points += [
          (name, step, x) for name, x in row.items()
          if isinstance(x, int | float) and not name.startswith("_") and "/samples/" not in name
        ]
""",
  "mlflow": """
from mlflow.tracking import MlflowClient
client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
points = []
for run in runs:
  for name in run.data.metrics:
    points += [(name, x.step, x.value) for x in client.get_metric_history(run.info.run_id, name)]
  assert run.info.status == "FINISHED" and run.data.params["objective.name"] == "gspo"
names = {x.path for x in client.list_artifacts(runs[0].info.run_id)}
assert {"report.html", "learning_curves.png", "samples"} <= names, names
""",
  "trackio": """
import os
os.environ["TRACKIO_DIR"] = str(folder / "trackio")
from trackio.sqlite_storage import SQLiteStorage
runs, points = SQLiteStorage.get_runs("jaxrl_llm"), []
for run in runs:
  for row in SQLiteStorage.get_logs("jaxrl_llm", run):
    numbers = {name: x for name, x in row.items() if isinstance(x, int | float)}
    step = numbers.pop("step")
    points += [(name, step, x) for name, x in numbers.items()]
assert SQLiteStorage.get_run_config("jaxrl_llm", runs[0])["objective.name"] == "gspo"
""",
}


def read(tracker, workdir):
  begin, end = "import json, pathlib, sys\nfolder = pathlib.Path(sys.argv[1])", "print('READ', json.dumps([len(runs), points]))"
  code = f"{begin}\n{READERS[tracker]}\n{end}"
  result = subprocess.run([sys.executable, "-c", code, str(workdir / "trackers")], capture_output=True, text=True, timeout=120)
  assert result.returncode == 0, result.stderr
  (line,) = [line for line in result.stdout.splitlines() if line.startswith("READ ")]
  return json.loads(line.removeprefix("READ "))


def assert_equal_numbers(workdir):
  expected, clocked = {}, set()
  for row in read_rows(workdir / "metrics.jsonl"):
    measured = numbers(row).keys() - numbers(reproducible(row)).keys()
    expected |= {(name, row["step"]): x for name, x in numbers(row).items()}
    clocked |= {(name, row["step"]) for name in measured}
  assert len(expected) > 400 and ("actor/pg_clipfrac", 6) in expected
  for tracker in ("tensorboard", *PACKAGES):
    num_runs, points = read(tracker, workdir)
    assert num_runs == 1, f"{tracker} has {num_runs} entries"
    named = {(key(name) if tracker in ("mlflow", "tensorboard") else name, step): x for (name, step), x in expected.items()}
    times = {(key(name) if tracker in ("mlflow", "tensorboard") else name, step) for name, step in clocked}
    shown = {(name, step): x for name, step, x in points}
    assert len(points) == len(shown), f"{tracker} has a step twice"
    assert shown.keys() == named.keys(), (tracker, sorted(shown.keys() ^ named.keys())[:5])
    # What the clock measured of a repeated step is that of the step that was killed.
    for place in named.keys() - times:
      ours = np.float32(named[place]) if tracker == "tensorboard" else named[place]
      assert ours == shown[place] or (math.isnan(ours) and math.isnan(shown[place])), (tracker, place)


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: pip install 'jaxrl-llm[wandb,mlflow,trackio]' for this test")
def test_a_run_that_is_killed_is_one_entry_in_each_tracker_with_the_numbers_of_its_rows(tmp_path):
  workdir = tmp_path / "run"
  args = command("--config=configs/gspo.py:tiny", *flags(SHORT), f"--workdir={workdir}")
  here = {name: x for name, x in environment().items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
  first = subprocess.run(args, cwd=ROOT, env=here | {"JAXRL_FAULT": "update:4:kill"}, capture_output=True, text=True, timeout=300)
  assert first.returncode == -9, first.stderr
  second = subprocess.run(args, cwd=ROOT, env=here, capture_output=True, text=True, timeout=300)
  assert second.returncode == 0 and "resumed" in second.stdout and "tracker" not in second.stdout, second.stdout + second.stderr
  assert_equal_numbers(workdir)
  figures = [path for path in (workdir / "trackers" / "wandb").rglob("*") if path.suffix in (".png", ".html")]
  assert {path.suffix for path in figures} == {".png", ".html"} and os.listdir(workdir / "trackers" / "trackio" / "artifacts")
