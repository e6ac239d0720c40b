"""Two processes of four devices equal one process of eight, also after kills, stops and moves."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jaxrl_llm.devices import hosts
from jaxrl_llm.run.setup import experiment, saved_state
from jaxrl_llm.workdir import checkpoint
from tests.runs import ROOT, VARIED, column, environment, flags, free_address, joined, lines_of, quick, reach, start, succeed, tiny_config

OVERRIDES = VARIED | {
  "warm_start.num_steps": 8, "checkpoint.warm_start_every": 4, "mesh.fsdp": 2, "rollout.staleness": 2,
  "log.num_table_rows": 0, "log.tensorboard": False,
}  # fmt: skip
ARGS = ["--config=configs/gspo.py:tiny", *flags(OVERRIDES)]
# Otherwise the sums over the devices of one process are taken in another order, and after some
# steps the sampler decides a near tie differently.
IN_ONE = {hosts.COLLECTIVES: "gloo"}
# In JAX only process 0 writes the cache of compiled programs. On CPUs the other process has its own
# programs, and would compile them again in each of the runs below.
MAIN = """
import runpy, types
from jax._src import compiler
write, first = compiler._cache_write, types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
compiler._cache_write = types.FunctionType(write.__code__, write.__globals__ | {"distributed": first})
runpy.run_module("jaxrl_llm.main", run_name="__main__", alter_sys=True)
"""


def launch(workdir: pathlib.Path, *, fault: str = "", heartbeat: str = "60", args: list[str] = ARGS) -> list[subprocess.Popen]:
  """Starts two processes of four devices each.

  `fault` is the value of `JAXRL_FAULT`. On a busy machine heartbeats come late; only a test that
  kills a process waits for them, and takes the default of 10 s.
  """
  address, processes = free_address(), []
  for index in range(2):
    settings = environment(4) | joined(address, index) | {hosts.HEARTBEAT: heartbeat, "JAXRL_FAULT": fault}
    output = open(workdir.with_name(f"{workdir.name}.{index}.log"), "w")  # noqa: SIM115
    line = [sys.executable, "-c", MAIN, *args, f"--workdir={workdir}"]
    processes.append(
      subprocess.Popen(line, cwd=ROOT, env=settings, stdout=output, stderr=subprocess.STDOUT, text=True)
    )
    output.close()
  return processes


def log(workdir: pathlib.Path, index: int) -> str:
  """Returns a process's output without the connection messages of gloo."""
  lines = workdir.with_name(f"{workdir.name}.{index}.log").read_text().splitlines()
  return "\n".join(line for line in lines if "connected peer ranks" not in line)


def finish(workdir: pathlib.Path, processes: list[subprocess.Popen]) -> None:
  statuses = [process.wait(timeout=600) for process in processes]
  assert statuses == [0, 0], log(workdir, 0) + log(workdir, 1)


def params(workdir: pathlib.Path) -> list[np.ndarray]:
  with quick(8):
    abstract = saved_state.abstract_arrays(experiment.build_experiment(tiny_config("gspo", OVERRIDES)))
  arrays, _ = checkpoint.restore_latest(checkpoint.open_checkpoints(workdir / "checkpoints", keep=2), abstract)
  return [np.asarray(leaf) for leaf in jax.tree.leaves(arrays["state"].params)]


def assert_same(one: pathlib.Path, two: pathlib.Path) -> None:
  """Checks that tokens, metrics, samples and weights are equal bit for bit."""
  assert lines_of(one) == lines_of(two)
  assert (one / "samples.jsonl").read_bytes() == (two / "samples.jsonl").read_bytes()
  for x, y in zip(params(one), params(two), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def one(folder):
  """Workdir of a run of one process with eight devices."""
  succeed(*ARGS, f"--workdir={folder / 'one'}", devices=8, **IN_ONE)
  return folder / "one"


@pytest.fixture(scope="module")
def two(folder):
  """Workdir of a run of two processes with four devices each."""
  finish(folder / "two", launch(folder / "two"))
  return folder / "two"


@pytest.mark.slow
def test_two_processes_equal_one(one, two):
  assert_same(one, two)
  assert min(column(one, "actor/grad_norm")) > 0, "without gradients the test would prove little"
  summary = json.loads((two / "summary.json").read_text())
  assert (summary["status"], summary["processes"], summary["device"][:7]) == ("finished", 2, "8 x cpu")
  assert "warm start 1/8" in log(two, 0) and "accuracy" in log(two, 0)
  assert "warm start" not in log(two, 1) and "accuracy" not in log(two, 1), "only process 0 prints"


@pytest.mark.parametrize("index", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_signal_to_one_process_ends_both_and_the_run_resumes(index, two, folder):
  """One process gets a SIGTERM in step 2, and in the next attempt a SIGKILL in step 3 or 4.

  After the SIGTERM both save the same step. A dead peer is noticed within 20 seconds.
  """
  workdir = folder / f"struck{index}"
  # The pause lasts until both know of the signal; without it the job could finish first.
  processes = launch(workdir, fault=f"rollout:2:term@{index},rollout:2:pause@{index}")
  reach(workdir, "rl", 1, *processes)
  begun = time.monotonic()
  assert [process.wait(timeout=60) for process in processes] == [42, 42], log(workdir, 0) + log(workdir, 1)
  assert time.monotonic() - begun < 30, "10 s on an idle machine"
  assert "error: stopped by SIGTERM; the same command resumes from checkpoint" in log(workdir, 0)
  assert "stopped by SIGTERM" in (workdir / "logs" / "attempt-1.process-1.log").read_text()

  processes = launch(workdir, heartbeat="10")
  reach(workdir, "rl", 3, *processes)  # After the checkpoint of step 2.
  assert "resumed" in log(workdir, 0)
  processes[index].send_signal(signal.SIGKILL)
  assert processes[1 - index].wait(timeout=20) not in (0, 1, 2), "a launcher would not restart these"

  finish(workdir, launch(workdir))
  assert "resumed" in log(workdir, 0)
  assert_same(workdir, two)


@pytest.mark.exhaustive
def test_one_process_saves_on_sigterm_and_two_resume(one, folder):
  workdir = folder / "moved"
  alone = start(*ARGS, f"--workdir={workdir}", devices=8, **IN_ONE)
  reach(workdir, "rl", 1, alone)
  alone.send_signal(signal.SIGTERM)
  _, errors = alone.communicate(timeout=120)
  assert alone.returncode == 42 and "error: stopped by SIGTERM; the same command resumes from checkpoint" in errors
  assert json.loads((workdir / "summary.json").read_text())["status"] == "stopped: SIGTERM"
  finish(workdir, launch(workdir))
  assert "resumed" in log(workdir, 0)
  assert_same(one, workdir)


# Single letters end a response, so that some responses of an untrained policy end early.
CARRYING = OVERRIDES | {
  "warm_start.num_steps": 0, "num_steps": 5, "checkpoint.every": 3, "rollout.num_prompts": 8, "rollout.spare_prompts": 8,
  "rollout.staleness": 0,
  "rollout.stop_strings": tuple("abcdefghijklmnopqrstuvwx"),
}  # fmt: skip
CARRYING_ARGS = ["--config=configs/gspo.py:tiny", *flags(CARRYING)]


@pytest.mark.exhaustive
def test_groups_are_carried_by_two_processes_as_by_one(folder):
  """A kill after the checkpoint, which holds carried groups, changes nothing either."""
  succeed(*CARRYING_ARGS, f"--workdir={folder / 'carrying'}", devices=8, **IN_ONE)
  workdir = folder / "carrying-struck"
  processes = launch(workdir, args=CARRYING_ARGS, fault="rollout:4:kill@1", heartbeat="10")
  assert processes[1].wait(timeout=600) == -signal.SIGKILL and processes[0].wait(timeout=60) != 0, log(workdir, 0) + log(workdir, 1)
  finish(workdir, launch(workdir, args=CARRYING_ARGS))
  assert "resumed" in log(workdir, 0)
  assert_same(folder / "carrying", workdir)
  carried = column(workdir, "rollout/carried_tokens")
  assert carried[0] == 0 and min(carried[1:]) > 0, "the test would prove little"


# Conversations of process 0, which the engines of both draw in lock step.
TALKING = {
  "warm_start.num_steps": 6, "warm_start.batch_size": 8, "num_steps": 2, "checkpoint.every": 2, "eval.every": 2, "mesh.fsdp": 4,
  "mesh.tensor": 2, "eval.num_prompts": 8, "eval.batch_prompts": 8, "log.num_table_rows": 0, "log.tensorboard": False,
}  # fmt: skip
# Devices that only sample, half of them in each process.
APART = OVERRIDES | {"warm_start.num_steps": 0, "num_steps": 4, "mesh.sampler": 4, "rollout.staleness": 1}
# Groups that the engine cuts and carries, on routes that the learner replays.
ROUTED = CARRYING | {
  "model.preset": "nano-moe", "moe.replay": "R3", "mesh.expert": 4, "mesh.fsdp": 2, "rollout.driver": "loop", "num_steps": 3,
  "checkpoint.every": 3,
}  # fmt: skip


# In CI two processes draw alike in `decoding/test_same_tokens.py`.
@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "changes"), [("tools", TALKING), ("gspo", APART), ("gspo", ROUTED)])
def test_two_processes_draw_what_one_draws(name, changes, tmp_path):
  args = [f"--config=configs/{name}.py:tiny", *flags(changes)]
  succeed(*args, f"--workdir={tmp_path / 'one'}", devices=8, **IN_ONE)
  finish(tmp_path / "two", launch(tmp_path / "two", args=args))
  assert lines_of(tmp_path / "one") == lines_of(tmp_path / "two")
  assert len(set(column(tmp_path / "two", "rollout/tokens_sha256"))) == changes["num_steps"]


QUEUED = OVERRIDES | {
  "rollout.update_in_flight": "keep", "rollout.window": 0.3, "rollout.samplers": 1, "warm_start.num_steps": 0, "num_steps": 7,
  "checkpoint.every": 4, "mesh.sampler_tensor": 2,
}  # fmt: skip


@pytest.mark.exhaustive
def test_samplers_apart_draw_for_two_processes_and_one_repeats_it(tmp_path):
  """Learner and sampler are two processes each; of both one is killed, which ends the other."""
  args, samplers = ["--config=configs/gspo.py:tiny", *flags(QUEUED)], []

  def join(workdir, count):
    while not (workdir / "samplers.json").exists():
      time.sleep(0.1)
    line, address = [sys.executable, "-m", "jaxrl_llm.cli.join", str(workdir)], free_address()
    of = lambda index: environment(4 // count) | (joined(address, index) if count > 1 else {hosts.COLLECTIVES: "gloo"})
    silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    samplers.extend(subprocess.Popen(line, cwd=ROOT, env=of(index), **silent) for index in range(count))

  try:
    processes = launch(tmp_path / "two", args=args, fault="rollout:6:kill@1", heartbeat="10")
    join(tmp_path / "two", 2)
    assert processes[1].wait(timeout=600) == -signal.SIGKILL and processes[0].wait(timeout=60) != 0, log(tmp_path / "two", 0)
    samplers[1].kill()
    assert samplers[0].wait(timeout=60) != 0
    processes = launch(tmp_path / "two", args=args)
    join(tmp_path / "two", 2)
    finish(tmp_path / "two", processes)
    assert [sampler.wait(timeout=60) for sampler in samplers[2:]] == [0, 0]
    one = start(*args, f"--workdir={tmp_path / 'one'}", f"--replay={tmp_path / 'two'}", devices=8, **IN_ONE)
    join(tmp_path / "one", 1)
    _, errors = one.communicate(timeout=600)
    assert one.returncode == 0, errors
  finally:
    for sampler in samplers:
      sampler.kill()
      sampler.wait()
  assert "resumed" in log(tmp_path / "two", 0) and max(column(tmp_path / "two", "rollout/staleness")) >= 1
  for metric in ("rollout/tokens_sha256", "actor/loss", "actor/grad_norm"):
    assert column(tmp_path / "two", metric) == column(tmp_path / "one", metric), metric
