"""SkyPilot's tasks: their contents, and whether SkyPilot itself accepts them.

The latter needs JAXRL_LLM_SKYPILOT, the path of a Python interpreter with SkyPilot.
"""

import json
import os
import subprocess
import sys

import pytest
import yaml

from experiments.launch import skypilot
from experiments.launch.rows import Row
from experiments.launch.trial import Trial

PYTHON = os.environ.get("JAXRL_LLM_SKYPILOT")

OPTIONS = skypilot.Options("v5p-128", env=("A=a=b",))

# Reads a task as `sky jobs launch` does, without contacting a cloud.
READ = """
import json, sys
import jsonschema, sky, yaml
from sky.utils import schemas
task = yaml.safe_load(open(sys.argv[1]))
jsonschema.validate(task, schemas.get_task_schema())
jsonschema.validate(task["resources"], schemas.get_resources_schema())
task = sky.Task.from_yaml_config(task)
(resources,) = task.resources
described = [task.name, resources.accelerators, resources.use_spot, resources.job_recovery]
print(json.dumps([*described, task.run, list(task.storage_mounts)]))
"""


def trial(name="clip_low=3e-4,seed=0", workdir="/mnt/runs/clip/0", *extra):
  command = ("python", "-m", "jaxrl_llm.main", "--config=configs/gspo.py:qwen3-30b-a3b", *extra, f"--workdir={workdir}")
  return Trial(name, Row("1f2e3d4c", {}), workdir, command)


PROMPT = """--config.task.system=a "b" 'c' $HOME `ls` $(ls) \\ é"""
HOSTILE = trial("hostile", "/mnt/runs/clip/1", "--config.eval.metrics=('a', 'b')", PROMPT)


def test_a_task_for_each_trial(tmp_path):
  one, two, script = skypilot.write([trial(), HOSTILE], tmp_path, options=OPTIONS)
  task = yaml.safe_load(one.read_text())
  assert task["resources"] == {
    "infra": "gcp", "accelerators": "tpu-v5p-128", "use_spot": True,
    "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [42, 134, 137, 143]},
  }  # fmt: skip
  assert task["file_mounts"] == {"/mnt/runs": {"source": "gs://BUCKET", "mode": "MOUNT"}} and task["envs"] == {"A": "a=b"}
  assert script.read_text().splitlines()[1:] == [f"sky jobs launch --yes --async {path}" for path in (one, two)]


def test_a_shell_sees_the_trials_command(tmp_path):
  task = yaml.safe_load(skypilot.write([HOSTILE], tmp_path, options=OPTIONS)[0].read_text())
  python = tmp_path / ".venv" / "bin" / "python"
  python.parent.mkdir(parents=True)
  python.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\nsys.exit(42)\n")
  python.chmod(0o755)
  result = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, capture_output=True, text=True)
  assert json.loads(result.stdout) == list(HOSTILE.command[1:]) and result.returncode == 42


@pytest.mark.skipif(PYTHON is None, reason="JAXRL_LLM_SKYPILOT names no Python that has SkyPilot")
@pytest.mark.parametrize("one", [trial(), HOSTILE])
def test_skypilot_accepts_a_task(one, tmp_path):
  path, _ = skypilot.write([one], tmp_path, options=OPTIONS._replace(bucket="gs://my-bucket"))
  environment = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
  result = subprocess.run([PYTHON, "-c", READ, str(path)], capture_output=True, text=True, env=environment, timeout=120)
  assert result.returncode == 0, result.stderr
  name, accelerators, spot, recovery, run, mounts = json.loads(result.stdout.splitlines()[-1])
  assert name == path.stem and accelerators == {"tpu-v5p-128": 1} and spot and mounts == ["/mnt/runs"]
  assert recovery["recover_on_exit_codes"] == [42, 134, 137, 143] and run == yaml.safe_load(path.read_text())["run"]


@pytest.mark.parametrize(
  "options, made, message",
  [
    (dict(tpu_type="v5p"), trial(), "--tpu_type: found 'v5p', expected a generation and a number"),
    (dict(machines="cheap"), trial(), "--machines: found 'cheap', expected spot or on-demand"),
    (dict(env=("A",)), trial(), "--env: found 'A', expected NAME=VALUE"),
    ({}, trial("a", "/mnt/runs/a", "--config.mesh.slices=2"), r"config.mesh.slices: found 2, but a trial has 1 slice\(s\)"),
  ],
)
def test_bad_settings_are_refused(tmp_path, options, made, message):
  with pytest.raises(skypilot.SkyPilotError, match=message):
    skypilot.write([made], tmp_path, options=OPTIONS._replace(**options))


def test_a_submission_needs_a_bucket_and_skypilot(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(skypilot.SkyPilotError, match="^--bucket: not set"):
    skypilot.submit([trial()], tmp_path, options=OPTIONS)
  with pytest.raises(skypilot.SkyPilotError, match="^workdirs in runs/a are lost with their machine; set --workdirs=/mnt/runs/SWEEP"):
    skypilot.submit([trial("a", "runs/a")], tmp_path, options=OPTIONS._replace(bucket="gs://b"))
  with pytest.raises(skypilot.SkyPilotError, match=r"sky is not on the PATH; install it with `pipx install 'skypilot\[gcp\]'`"):
    skypilot.submit([trial()], tmp_path, options=OPTIONS._replace(bucket="gs://b"))


def test_a_relaunch_submits_only_new_and_failed_trials(tmp_path, monkeypatch):
  trials = [trial(name, f"/mnt/runs/{name}") for name in ("new", "runs", "done", "failed", "again")]
  name = {each.name: skypilot.job_name(each) for each in trials}
  states = [("runs", "RUNNING"), ("done", "SUCCEEDED"), ("failed", "FAILED_SETUP"), ("again", "RECOVERING"), ("again", "CANCELLED")]
  rows = [{"job_id": 9 - i, "job_name": name[each], "status": state} for i, (each, state) in enumerate(states)]
  sky = tmp_path / "sky"
  calls = tmp_path / "calls"
  sky.write_text(f"#!{sys.executable}\nimport sys\nopen({str(calls)!r}, 'a').write(sys.argv[2] + '\\n')\nprint({json.dumps(rows)!r})\n")
  sky.chmod(0o755)
  told = []
  options = OPTIONS._replace(bucket="gs://b", sky=str(sky))
  assert skypilot.submit(trials, tmp_path, options=options, tell=told.append) == [name["new"], name["failed"]]
  assert calls.read_text().split() == ["queue", "launch", "launch"]
  assert [line.split(": ")[1].partition(" ")[2] for line in told] == [
    "is submitted", "is RUNNING; skipped", "is SUCCEEDED; skipped", "was FAILED_SETUP, and is submitted again", "is RECOVERING; skipped",
  ]  # fmt: skip
