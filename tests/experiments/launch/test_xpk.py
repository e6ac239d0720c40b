"""Pods through xpk: the manifests are valid and as requested, and pods run the trials' commands.

The golden manifest was written by xpk 1.16.0. If xpk is installed (on the PATH, or as
JAXRL_LLM_XPK), it must still write the same manifest.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from experiments.launch import jobset, slices, xpk
from experiments.launch.rows import Row
from experiments.launch.trial import Trial
from jaxrl_llm.devices import hosts
from tests.runs import ROOT, environment, free_address

GOLDEN = pathlib.Path(__file__).parent / "xpk-1.16.0.yaml"
XPK = os.environ.get("JAXRL_LLM_XPK") or shutil.which("xpk")

# The flag that a config for one slice lacks for two.
TWO = ["--config.mesh.data=2"]
OPTIONS = xpk.Options(cluster="my-cluster", tpu_type="v5p-128", num_slices=2, max_restarts=10, env=("TWO=a b",))

# A stand-in for xpk. It writes the golden manifest with the given name and command, and records its
# calls.
FAKE = f"""#!{sys.executable}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "calls.jsonl", "a") as file:
  file.write(json.dumps(sys.argv[1:]) + "\\n")
said = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv if argument.startswith("--") and "=" in argument)
if said.get("tpu-type", "v5p-128") != "v5p-128":
  sys.exit("usage: xpk\\nxpk workload create: error: argument --tpu-type: invalid choice (closest matches: v5p-128)")
if "output-manifest-file" in said:
  text = pathlib.Path({str(GOLDEN)!r}).read_text()
  start, end = text.index("(exec ") + 1, text.rindex(") & PID=")
  text = (text[:start] + said["command"] + text[end:]).replace("golden-1b5808ce", said["workload"])
  pathlib.Path(said["output-manifest-file"]).write_text(text)
"""


def trial(name="golden", workdir="/mnt/runs/clip/golden", *extra):
  command = ("python", "-m", "jaxrl_llm.main", "--config=configs/gspo.py:qwen3-30b-a3b", *extra, f"--workdir={workdir}")
  return Trial(name, Row("1f2e3d4c", {}), workdir, command)


HOSTILE = trial(
  "golden", "/mnt/runs/clip/golden",
  "--config.eval.metrics=('maj@n:n=4', 'avg@n:n=2')",
  """--config.task.system=a "b" 'c' $(date) $(TPU_WORKER_ID) $$ $HOME `ls` \\ é {question} %s ) & PID=$!; #""",
)  # fmt: skip


@pytest.fixture
def fakes(tmp_path, monkeypatch):
  """A folder with a stand-in for xpk, alone on the PATH."""
  folder = tmp_path / "bin"
  folder.mkdir()
  program(folder / "xpk", FAKE)
  monkeypatch.setenv("PATH", str(folder))
  return folder


def program(path, text):
  path.write_text(text)
  path.chmod(0o755)


def calls(folder):
  return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def golden(tmp_path):
  path = tmp_path / "golden.yaml"
  shutil.copy(GOLDEN, path)
  xpk.finish(path, HOSTILE, options=OPTIONS)
  return path


def test_two_slices_with_restarts(tmp_path):
  document = jobset.read(golden(tmp_path))
  assert jobset.problems(document) == []
  (job,) = document["spec"]["replicatedJobs"]
  pod = job["template"]["spec"]["template"]["spec"]
  assert (job["replicas"], job["template"]["spec"]["parallelism"], document["spec"]["failurePolicy"]["maxRestarts"]) == (2, 16, 10)
  assert pod["nodeSelector"] == {"cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice", "cloud.google.com/gke-tpu-topology": "4x4x4"}
  assert jobset.chips(document) == 128 and pod["terminationGracePeriodSeconds"] == 120
  assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "multislice-queue"
  assert pod["containers"][0]["env"] == [{"name": "JAXRL_LLM_START_TIMEOUT", "value": "86400"}, {"name": "TWO", "value": "a b"}]
  assert jobset.command(document) == [*HOSTILE.command, *TWO]


def test_the_schema_refuses_xpks_raw_manifest_and_accepts_the_clusters_form(tmp_path):
  import yaml

  problems = jobset.problems(yaml.safe_load(GOLDEN.read_text()))
  assert len(problems) == 3 and all("None is not" in line or "'name' is a required" in line for line in problems), problems


def test_a_shell_in_the_pod_sees_the_trials_command(tmp_path):
  container = jobset.read(golden(tmp_path))["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
  # Kubernetes replaces $$ as well.
  script = container["command"][-1].replace("$$", "$").replace("echo XPK", "#")
  program(tmp_path / "python", f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\nsys.exit(42)\n")
  program(tmp_path / "sleep", "#!/bin/sh\n")
  environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TPU_WORKER_ID": "7"}
  result = subprocess.run([*container["command"][:-1], script], capture_output=True, text=True, env=environment)
  assert json.loads(result.stdout.splitlines()[0]) == [*HOSTILE.command[1:], *TWO], result
  assert result.returncode == 42, "the exit status that starts it again"


@pytest.mark.skipif(XPK is None, reason="xpk is not on the PATH, nor in JAXRL_LLM_XPK")
def test_the_real_xpk_writes_the_golden_manifest(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", "/nowhere")  # Hides gcloud and kubectl.
  monkeypatch.setenv("HOME", str(tmp_path))
  paths = xpk.write([HOSTILE, trial("other", "/mnt/runs/clip/other")], tmp_path, options=OPTIONS._replace(xpk=XPK))
  assert [path.name for path in paths] == [f"{xpk.job_name(HOSTILE)}.yaml", "other-dda0032c.yaml", "submit.sh"]
  assert paths[0].read_text() == golden(tmp_path).read_text()


@pytest.mark.skipif(XPK is None, reason="xpk is not on the PATH, nor in JAXRL_LLM_XPK")
def test_the_real_xpk_lists_the_slices(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  with pytest.raises(xpk.XpkError, match=r"invalid choice: 'v5p-129' \(closest matches: .*v5p-128"):
    xpk.write([trial()], tmp_path, options=OPTIONS._replace(xpk=XPK, tpu_type="v5p-129"))


def test_a_dry_run_writes_manifests_and_the_commands(fakes, tmp_path):
  trials = [trial("a,seed=0", "/mnt/runs/a0"), trial("a,seed=1", "/mnt/runs/a1")]
  *manifests, script = xpk.write(trials, tmp_path / "sweep", options=OPTIONS)
  assert [jobset.command(jobset.read(path)) for path in manifests] == [[*each.command, *TWO] for each in trials]
  assert all({"--dry-run", "--skip-validation"} < set(call) for call in calls(fakes))
  assert [line.split()[:3] for line in script.read_text().splitlines()[1:]] == [["xpk", "workload", "create"]] * 2
  assert "--dry-run" not in script.read_text() and "PROJECT" in script.read_text(), "missing options must be visible"


def test_names_are_short_stable_and_unique():
  names = [xpk.job_name(trial(name, f"/runs/{name}")) for name in ("Clip_Low=3e-4, Seed=1" * 9, "", "7", "ü-ü", "a" * 99)]
  assert len(set(names)) == len(names) and all(len(name) <= 28 and jobset._NAME.fullmatch(name) and name[0].isalpha() for name in names)
  assert xpk.job_name(trial("a", "/runs/1")) == xpk.job_name(trial("a", "/runs/1")) != xpk.job_name(trial("a", "/runs/2"))


@pytest.mark.parametrize(
  "options, extra, message",
  [
    (dict(num_slices=0), (), "--num_slices: found 0, expected 1 or more"),
    (dict(max_restarts=-1), (), "--max_restarts: found -1, expected 0 or more"),
    (dict(xpk_args="--priority='high"), (), "--xpk_args: No closing quotation"),
    (dict(env=("1A=2",)), (), "--env: found '1A=2', expected NAME=VALUE"),
    (dict(env=('A="2"',)), (), "--env: found a quote or a backslash in the value of A"),
    ({}, ("--config.task.system=a\nb",), "found a value with a line break"),
    ({}, ("--config.mesh.data=3",), "config.mesh.data: found 3, expected a multiple of the 2 slices"),
    ({}, ("--config.mesh.data=1",), "config.mesh.data: found 1, expected a multiple of the 2 slices"),
    ({}, ("--config.mesh.slices=4",), r"config.mesh.slices: found 4, but a trial has 2 slice\(s\)"),
    ({}, ("--config.mesh.fsdp=5",), "mesh.data=2, mesh.fsdp=5, mesh.expert=4, .*: 40 devices, but a trial has 128"),
    ({}, ("--config.learner.row_buckets=(64,512)",), "row_buckets: 64 is not a multiple of 128 devices .*multiple is 128"),
    (dict(tpu_type="v5p-129"), (), r"xpk wrote no manifest \(exit status 1\): .*closest matches: v5p-128"),
    (dict(max_restarts=3), (), "restarts: found 10, expected 3"),
    (dict(grace_seconds=9), (), "grace_seconds: found 120, expected 9"),
    (dict(xpk="/nowhere/xpk"), (), "--xpk=/nowhere/xpk: no such command; install it with `pipx install xpk==1.16.0`"),
  ],
)
def test_bad_settings_are_refused(fakes, tmp_path, options, extra, message):
  with pytest.raises(xpk.XpkError, match=message):
    xpk.write([trial("golden", "/mnt/runs/clip/golden", *extra)], tmp_path, options=OPTIONS._replace(**options))


def test_the_error_without_xpk_says_how_to_install_it(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(
    xpk.XpkError, match="^--target=xpk: xpk is not on the PATH; install it with `pipx install xpk==1.16.0`, or give its"
  ):
    xpk.write([trial()], tmp_path, options=OPTIONS)


def test_a_mesh_for_several_slices():
  command = trial().command
  assert slices.mesh_arguments(command, 1) == [] and slices.mesh_arguments(command, 2) == TWO
  assert slices.mesh_arguments((*command, "--config.learner.rows_per_device=2"), 4) == ["--config.mesh.data=4"]
  assert slices.mesh_arguments((*command, "--config.mesh.data=4"), 2) == []
  assert slices.mesh_arguments((*command, "--config.mesh.data=-1", "--config.mesh.fsdp=16"), 2) == []


SUBMITTED = OPTIONS._replace(docker_image="image", project="project", zone="us-east5-a", storage="runs")


def test_a_relaunch_submits_only_new_and_failed_trials(fakes, tmp_path):
  trials = [trial(name, f"/mnt/runs/{name}") for name in ("new", "runs", "queued", "done", "failed")]
  status = {"runs": [], "queued": [{"type": "Suspended", "status": "True"}], "done": [{"type": "Completed", "status": "True"}]}
  status["failed"] = [{"type": "Completed", "status": "False"}, {"type": "Failed", "status": "True"}]
  items = [{"metadata": {"name": xpk.job_name(x)}, "status": {"conditions": status[x.name]}} for x in trials if x.name in status]
  program(fakes / "kubectl", f"#!{sys.executable}\nprint({json.dumps({'items': items})!r})\n")
  told = []
  assert xpk.submit(trials, tmp_path, options=SUBMITTED, tell=told.append) == [xpk.job_name(trials[0]), xpk.job_name(trials[4])]
  made = [call for call in calls(fakes) if call[1] == "create" and "--dry-run" not in call]
  assert [f"--workload={xpk.job_name(trials[0])}" in made[0], "--quiet" in made[0], "--quiet" in made[1]] == [True, False, True]
  assert "--storage=runs" in made[0] and len(made) == 2
  assert [line.split(": ")[1].partition(" ")[2] for line in told] == [
    "is waiting or running; skipped", "is waiting or running; skipped", "is finished; skipped", "is submitted",
    "was failed, and is submitted again",
  ]  # fmt: skip


def test_a_submission_needs_image_project_zone_and_storage(fakes, tmp_path):
  with pytest.raises(xpk.XpkError, match="^--docker_image, --project, --zone, --storage: not set"):
    xpk.submit([trial()], tmp_path, options=OPTIONS)
  with pytest.raises(xpk.XpkError, match="^--workdirs: found runs/a, expected a folder on the storage"):
    xpk.submit([trial("a", "runs/a")], tmp_path, options=SUBMITTED)
  with pytest.raises(xpk.XpkError, match="^kubectl is not on the PATH; experiments/pods.md"):
    xpk.submit([trial()], tmp_path, options=SUBMITTED)


@pytest.mark.parametrize(
  "change, message",
  [
    (lambda d, s, p: s.update(replicas=2), "'replicas' was unexpected"),
    (lambda d, s, p: d["spec"]["failurePolicy"].update(maxRestarts="10"), "maxRestarts: '10' is not of type 'integer'"),
    (lambda d, s, p: d["spec"]["failurePolicy"]["rules"][0].update(action="Restart"), "'Restart' is not one of"),
    (lambda d, s, p: p["containers"][0].pop("name"), "'name' is a required property"),
    (lambda d, s, p: p["containers"][0]["resources"]["limits"].update({"google.com/tpu": "four"}), "'four' does not match"),
    (lambda d, s, p: s["podFailurePolicy"]["rules"][0]["onExitCodes"].update(values=[43, 42]), "in ascending order"),
    (lambda d, s, p: s["podFailurePolicy"]["rules"][0]["onExitCodes"].update(containerName="x"), "found 'x', expected one of jax-tpu"),
    (lambda d, s, p: p.update(restartPolicy="OnFailure"), "expected 'Never'"),
    (lambda d, s, p: p.update(volumes=[]), "found 'dshm-2' in volumeMounts"),
    (lambda d, s, p: d["metadata"].update(name="A_b"), "metadata.name: found 'A_b'"),
    (lambda d, s, p: d["metadata"].update(name="a" * 60), "characters, expected at most 63"),
    (lambda d, s, p: d["spec"].update(replicatedJobs=[]), "replicatedJobs: found none"),
  ],
)
def test_a_manifest_that_a_cluster_would_refuse_has_one_problem(tmp_path, change, message):
  document = jobset.read(golden(tmp_path))
  spec = document["spec"]["replicatedJobs"][0]["template"]["spec"]
  change(document, spec, spec["template"]["spec"])
  problems = jobset.problems(document)
  assert len(problems) == 1 and message in problems[0], problems


@pytest.mark.parametrize("text, message", [("a: [", "is not YAML"), ("- 1", "holds no JobSet: found list")])
def test_an_invalid_manifest_is_refused(tmp_path, text, message):
  (tmp_path / "x.yaml").write_text(text)
  with pytest.raises(xpk.XpkError, match=message):
    xpk.finish(tmp_path / "x.yaml", trial(), options=OPTIONS)


JOIN = """
import jax
from jaxrl_llm.devices import hosts
hosts.join_processes()
texts = hosts.gather_text(str(jax.process_index()))
print(jax.process_index(), jax.process_count(), jax.device_count(), ''.join(texts))
"""


def test_processes_find_each_other_through_gkes_variables_in_pods_of_two_slices():
  port = free_address().rpartition(":")[2]
  slices_of_one_host = {
    "JAX_FORCE_TPU_INIT": "1", "JAX_COORDINATOR_PORT": port, "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "127.0.0.1", "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1", "MEGASCALE_NUM_SLICES": "2",
    hosts.HEARTBEAT: "60",
  }  # fmt: skip
  pods = [
    subprocess.Popen([sys.executable, "-c", JOIN], cwd=ROOT, env=environment(4) | slices_of_one_host | {"MEGASCALE_SLICE_ID": index},
                     stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for index in "01"
  ]  # fmt: skip
  outputs = [pod.communicate(timeout=300) for pod in pods]
  assert [out.split() for out, _ in outputs] == [["0", "2", "8", "01"], ["1", "2", "8", "01"]], outputs
