"""The command of a sampler in a process of its own, alone and with a learner."""

import argparse
import json
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from jaxrl_llm.cli import join
from jaxrl_llm.config.command_line import UsageError
from jaxrl_llm.decoding.apart import gate
from jaxrl_llm.decoding.engine.requests import Request
from jaxrl_llm.messages import RESTART, USAGE_ERROR
from jaxrl_llm.models import lower_precision
from jaxrl_llm.run.setup import experiment
from jaxrl_llm.run.setup.sampler_processes import mesh_of_sampler
from jaxrl_llm.workdir import claim
from tests.decoding.apart.links import LIMITS, PARAMS, VOCAB, Link, Steady, drawn, threads
from tests.runs import ROOT, column, environment, quick, run_here, tiny_config

WAIT = 120
COMMAND = [sys.executable, "-m", "jaxrl_llm.cli.join"]


def test_bad_input_is_one_line_before_jax_starts(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(join, "make_sampler", None)
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
  for argv, expected in {
    (): "the following arguments are required: workdir; expected WORKDIR",
    ("a", "b"): "unrecognized arguments: b; expected WORKDIR",
    ("a", "--timeout_s=-1"): "--timeout_s: found -1.0, expected 0 or more seconds",
    ("a", "--learner=host"): "--learner: found 'host', expected HOST:PORT",
    (str(tmp_path),): "without the config.json of a run, expected the --workdir of one",
    (str(tmp_path / "model"),): "without the config.json of a run, expected the --workdir of one",
  }.items():
    assert join.main(["join", *argv]) == USAGE_ERROR
    out, error = capsys.readouterr()
    assert not out and error.count("\n") == 1 and expected in error, error
  assert join.main(["join", "-h"]) == 0 and "WORKDIR" in capsys.readouterr().out


def test_a_finished_run_needs_no_sampler(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(join, "make_sampler", None)
  claim.claim(tmp_path, tiny_config("tools").to_dict())
  (tmp_path / "summary.json").write_text(json.dumps({"status": "finished"}))
  assert join.main(["join", str(tmp_path)]) == 0 and "finished run" in capsys.readouterr().out


class Process:
  """The part of the command behind the compilation, in a thread."""

  def __init__(self, workdir, timeout_s=WAIT, learner=None):
    self.args = argparse.Namespace(workdir=workdir, timeout_s=timeout_s, learner=learner)
    self.leave, self.ends, self.engine = threading.Event(), [], Steady(pace_s=0.01)
    self.sampler = join.Sampler(self.engine, Link.template(PARAMS), 4, VOCAB)
    self.fingerprint = gate.fingerprint_of(workdir)
    self.thread = threading.Thread(target=self._run, daemon=True)
    self.thread.start()

  def _run(self):
    try:
      self.ends.append(join._draw(self.args, self.sampler, self.fingerprint, self.leave))
    except Exception as error:
      self.ends.append(error)

  def end(self):
    self.thread.join(20)
    return self.ends[0]


@pytest.fixture
def workdir(tmp_path, monkeypatch):
  monkeypatch.setattr(join, "_LOOK_S", 0.02)
  (tmp_path / "config.json").write_text("{}")
  return tmp_path


def crew_of(workdir):
  crew = gate.open_crew(workdir, limits=LIMITS, vocab_size=VOCAB, timeout_s=WAIT)
  crew.update(PARAMS, 0)
  return crew


def test_a_sampler_waits_for_a_learner_and_returns_to_one_that_comes_back(workdir):
  process = Process(workdir)
  for version in range(2):  # The second one has the weights of the first one's end.
    with crew_of(workdir) as crew:
      assert crew.wait_for(1, WAIT) == 1
      assert crew.submit(Request([7], 5)).completion.result(WAIT).tokens == drawn(Request([7], 5))[0]
      assert (crew.metrics()["samplers/weights_bytes"] == 0) == bool(version)
  gate.write_learner(workdir, gate.Learner(("127.0.0.1", 1), b"of a learner that was killed"))
  (workdir / "summary.json").write_text(json.dumps({"status": "finished"}))
  assert process.end() == 0 and threads() == []


def test_a_sampler_that_leaves_gives_its_requests_back(workdir):
  with crew_of(workdir) as crew:
    process = Process(workdir)
    crew.wait_for(1, WAIT)
    handles = [crew.submit(Request([i], 40, seed=i)) for i in range(4)]
    while len(process.engine.asked) < 4:
      time.sleep(0.01)
    process.leave.set()
    assert process.end() == 0
    other = Process(workdir)
    for i, handle in enumerate(handles):
      assert handle.completion.result(WAIT).tokens == drawn(Request([i], 40, seed=i))[0]
    assert crew.redone == 4
    other.leave.set()
    assert other.end() == 0


def test_ends_without_a_learner(workdir, capsys):
  assert Process(workdir, timeout_s=0.1).end() == RESTART
  assert "no learner within 0.1 s" in capsys.readouterr().err
  process = Process(workdir)
  (workdir / "later.json").write_text('{"seed": 1}')
  (workdir / "later.json").replace(workdir / "config.json")  # At once, as the process reads it.
  assert process.end() == RESTART and "another config by now" in capsys.readouterr().err
  with gate.open_crew(workdir, limits=LIMITS, fingerprint="another"):
    refused = Process(workdir).end()
    assert isinstance(refused, UsageError) and str(refused).startswith("the learner refuses this sampler: config: found the fingerprint")
  with crew_of(workdir) as crew:
    process = Process(workdir)
    crew.wait_for(1, WAIT)
    process.engine.error = RuntimeError("of the device")
    handle = crew.submit(Request([1], 5))
    assert process.end() == 1 and "the engine has failed: RuntimeError: of the device" in capsys.readouterr().err
    handle.abort()
    assert handle.completion.result(WAIT).reason == "aborted"


def start(workdir, *options):
  return subprocess.Popen(
    [*COMMAND, str(workdir), *options], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )


def test_devices_that_the_mesh_does_not_divide_are_refused():
  config = tiny_config("gspo", {"model.preset": "nano-moe", "rollout.samplers": 1, "mesh.sampler_expert": 2, "mesh.sampler_tensor": 2})
  refusal = "^config.mesh.sampler_expert x sampler_tensor: found 2 x 2, expected a divisor of 2,"
  with pytest.raises(ValueError, match=refusal):
    mesh_of_sampler(config, jax.devices()[:2])


@pytest.mark.exhaustive
def test_a_run_without_lag_has_the_same_bits_whichever_process_draws(tmp_path):
  """Conversations, each turn of which reads what its process has cached of the turn before."""
  fields = {"num_steps": 2, "warm_start.num_steps": 4, "warm_start.batch_size": 8, "eval.every": 2, "log.tensorboard": False}
  config = tiny_config("tools", fields | {"rollout.samplers": 1})
  run_here(tiny_config("tools", fields | {"rollout.driver": "loop"}), tmp_path / "here")
  claim.claim(tmp_path / "apart", config.to_dict())
  sampler = start(tmp_path / "apart")
  try:
    run_here(config, tmp_path / "apart")
  finally:
    sampler.kill()
    sampler.wait()
  for name in ("rollout/tokens_sha256", "actor/loss", "actor/grad_norm", "critic/rewards/mean"):
    assert column(tmp_path / "apart", name) == column(tmp_path / "here", name), name


@pytest.mark.slow
def test_another_process_draws_the_bits_of_this_one_and_may_be_killed(tmp_path):
  """Also with new weights, and with a learner that comes back."""
  config = tiny_config("tools")
  claim.claim(tmp_path, config.to_dict())
  samplers = [start(tmp_path) for _ in range(2)]
  try:
    with quick():
      built = experiment.build_experiment(config)
      model = built.learner.model
      dtype = built.config.model.sampler_dtype or built.config.model.dtype
      weights = [lower_precision(jax.jit(model.init)(jax.random.key(i)), dtype) for i in range(2)]
      local = built.drawing.queue._make(weights[0], 0)
    rng = np.random.default_rng(0)
    asked = [Request(rng.integers(0, 200, 4 + i % 12).tolist(), 12, seed=i, owner=f"{i % 10}") for i in range(20)]
    crew = gate.open_crew(tmp_path, limits=local.limits, timeout_s=30.0)
    crew.update(weights[0], 0)
    assert crew.wait_for(2, WAIT) == 2
    for version in range(2):
      if version:
        local.update(weights[1], 1)
        crew.update(weights[1], 1)
      expected = [handle.completion.result(WAIT) for handle in [local.submit(x) for x in asked]]
      if version:
        samplers[0].send_signal(signal.SIGSTOP)
      handles = [crew.submit(x) for x in asked]
      if version:
        samplers[0].kill()
      for x, handle in zip(expected, handles, strict=True):
        got = handle.completion.result(WAIT)
        assert (got.tokens, got.logprobs, got.reason, got.version) == (x.tokens, x.logprobs, x.reason, version)
    assert crew.lost == 1 and crew.redone > 0 and crew.wait_for(2, 0) == 1
    crew.close()
    with gate.open_crew(tmp_path, limits=local.limits, timeout_s=30.0) as crew:
      assert crew.wait_for(1, WAIT) == 1
      crew.update(weights[1], 1)
      handle = crew.submit(asked[0])
      assert handle.completion.result(WAIT).tokens == expected[0].tokens
      assert crew.metrics()["samplers/weights_bytes"] == 0  # It still has them.
    (tmp_path / "summary.json").write_text(json.dumps({"status": "finished"}))
    out, _ = samplers[1].communicate(timeout=WAIT)
    assert samplers[1].returncode == 0 and "the run is finished" in out, out
    local.close()
  finally:
    for sampler in samplers:
      sampler.kill()
      sampler.wait()
