"""A server that is killed: what clients had saved comes back with the same bits."""

import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.run.test_train_models import checkpoint_folder  # noqa: F401
from tests.runs import ROOT, environment
from tests.serve.tinker.client import Client
from tests.serve.tinker.test_training import SEEN, course

URL = re.compile(r"the Tinker API serves (\S+) at (http://127\.0\.0\.1:\d+)")


def begin(folder, states, devices=1):
  """Starts a server in a process of its own."""
  options = [f"--model=nano={folder}", f"--states={states}", "--port=0", "--slots=2", "--context=64"]
  process = subprocess.Popen(
    [sys.executable, "-m", "jaxrl_llm.serve", "--tinker", *options],
    cwd=ROOT, env=environment(devices), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  line = process.stdout.readline()
  if not (match := URL.match(line)):
    raise AssertionError(f"{line}{process.communicate()}")
  return process, SimpleNamespace(url=match[2])


@pytest.mark.slow
def test_a_killed_server_loses_nothing_that_was_saved(checkpoint_folder, tmp_path):  # noqa: F811
  process, service = begin(checkpoint_folder, tmp_path / "states")
  client = Client(service)
  model = client.create()
  course(client, model, 2)
  path = client.on("save_weights", model, path="two")["path"]
  expected = course(client, model, 2)
  scored = client.compute_logprobs(client.publish(model), SEEN[0])
  process.send_signal(signal.SIGKILL)
  process.communicate()

  process, service = begin(checkpoint_folder, tmp_path / "states")
  client = Client(service)
  value = {"session_id": client.session, "model_seq_id": 0, "path": path, "optimizer": True}
  model = client.fetch(client.ask("load_weights", value))["model_id"]
  assert course(client, model, 2) == expected
  np.testing.assert_array_equal(client.compute_logprobs(client.publish(model), SEEN[0]), scored)
  process.send_signal(signal.SIGINT)
  output, log = process.communicate(timeout=30)
  assert (process.returncode, output, log) == (0, "", "ended\n")


@pytest.mark.slow
def test_two_devices_compute_what_one_does(checkpoint_folder, tmp_path):  # noqa: F811
  computed = []
  for devices in (1, 2):
    process, service = begin(checkpoint_folder, tmp_path / "states", devices)
    client = Client(service)
    model = client.create()
    out = course(client, model, 3)
    logprobs = np.concatenate([np.frombuffer(x, "<f4") for x in out if isinstance(x, bytes)])
    drawn = client.sample(
      client.publish(model), SEEN[0], params={"max_tokens": 20, "stop": [], "seed": 1}, prompt_logprobs=True
    )
    computed.append((logprobs, drawn.prompt[1:], drawn.sequences[0][0]))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
  (logprobs, prompt, tokens), (others, other_prompt, other_tokens) = computed
  np.testing.assert_allclose(logprobs, others, atol=2e-5)
  np.testing.assert_allclose(prompt, other_prompt, atol=2e-5)
  assert tokens == other_tokens
