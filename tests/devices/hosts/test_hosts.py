"""Tests of joining and exchange: one process alone, and two real ones over loopback."""

import concurrent.futures
import json
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest

from jaxrl_llm.devices import hosts
from jaxrl_llm.devices.hosts import startup
from tests.runs import ROOT, environment, free_address, two_processes

ADDRESS, COUNT, INDEX = hosts.VARIABLES

WRONG = {
  "only the address": ({ADDRESS: "a:1"}, ["JAX_NUM_PROCESSES and JAX_PROCESS_ID", "not set", "a:1", "or none"]),
  "no number": ({ADDRESS: "a:1", COUNT: "2"}, ["JAX_PROCESS_ID: not set", "JAX_NUM_PROCESSES=2"]),
  "no port": ({ADDRESS: "10.0.0.1", COUNT: "2", INDEX: "0"}, [ADDRESS, "'10.0.0.1'", "HOST:PORT"]),
  "no such port": ({ADDRESS: "a:70000", COUNT: "2", INDEX: "0"}, [ADDRESS, "'a:70000'", "HOST:PORT"]),
  "a word": ({ADDRESS: "a:1", COUNT: "two", INDEX: "0"}, [COUNT, "'two'", "whole number"]),
  "below zero": ({ADDRESS: "a:1", COUNT: "2", INDEX: "-1"}, [INDEX, "'-1'", "whole number"]),
  "one too many": ({ADDRESS: "a:1", COUNT: "2", INDEX: "2"}, [INDEX, "found 2 with JAX_NUM_PROCESSES=2", "0 to 1"]),
  "none at all": ({ADDRESS: "a:1", COUNT: "0", INDEX: "0"}, [COUNT, "found 0"]),
}

# What two processes exchange before one of them fails.
TOGETHER = """
import json
import jax, numpy as np
from jaxrl_llm.devices import hosts, mesh
from jaxrl_llm.devices.hosts import common_end
common_end._GRACE_SECONDS = 0.2
hosts.join_processes()
hosts.join_processes()
with hosts.together({ValueError: 2}):
  index, asked = jax.process_index(), []
  hosts.agree({"seed": 0})
  try:
    hosts.agree({"seed": index, "same": 1})
  except ValueError as error:
    refused = str(error)
  rows = mesh.place_rows(mesh.make_mesh(), np.arange(8.0).reshape(4, 2))
  square = lambda own: np.array([[i, i * i] for i in own], np.float32).reshape(-1, 2)
  hosts.exchange._AT_ONCE = 8  # So that the rows travel one by one.
  whole = hosts.to_main(rows)
  channel, heard = hosts.Channel("test"), []
  if index == 0:
    for number in range(300):  # More than are kept for those who have not read them.
      channel.send(bytes([number % 256]) * 3)
    kept = len(hosts.exchange.run_state().client.key_value_dir_get_bytes("jaxrl_llm/channel"))
  else:
    heard = [channel.receive(10.0) for _ in range(300)] + [channel.receive(0.01)]
    heard = [None if x is None else list(x) for x in heard]
  squares = hosts.share(lambda own: asked.extend(own) or square(own), 5)
  facts = {
    "index": index, "main": hosts.is_main(), "devices": jax.device_count(),
    "asked": asked, "squares": squares.tolist(),
    "own": sorted(int(s.data[0, 0]) for s in rows.addressable_shards),
    "rows": hosts.to_host({"x": rows})["x"].tolist(),
    "texts": hosts.gather_text(f"from {index}"), "told": hosts.on_main(lambda: [index, "x"]),
    "refused": refused, "on_main": None if whole is None else whole.tolist(), "heard": heard,
    "local": hosts.to_host(jax.numpy.ones(2)).tolist(),
  }
  hosts.barrier()
  if index == 0:
    facts["kept_messages"] = kept
    facts["kept"] = len(hosts.exchange.run_state().client.key_value_dir_get("jaxrl_llm/text"))
    try:
      hosts.gather_under("alone", "", seconds=0.2)
    except TimeoutError as error:
      facts["late"] = str(error)
  print(json.dumps(facts), flush=True)
  hosts.barrier()
  if index == 1:
    raise ValueError("the verifier broke\\nat once")
  hosts.to_host(jax.jit(lambda x: x @ x.T)(rows))  # Waits for the other process, which never comes.
"""


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_one_line(case):
  settings, parts = WRONG[case]
  with pytest.raises(ValueError) as caught:
    startup._from_environment(settings)
  for part in parts:
    assert part in str(caught.value), caught.value
  assert "\n" not in str(caught.value)


def test_settings_of_a_launcher():
  assert startup._from_environment({}) is None and startup._from_environment({ADDRESS: "", "HOME": "x"}) is None
  assert startup._from_environment({ADDRESS: "[::1]:8476", COUNT: "16", INDEX: "3"}) == ("[::1]:8476", 16, 3)
  assert startup._seconds({}, hosts.TIMEOUT, 300) == 300 and startup._seconds({hosts.TIMEOUT: "2.5"}, hosts.TIMEOUT, 300) == 2.5
  for text in ("soon", "0", "nan", "-1"):
    with pytest.raises(ValueError, match=f"JAXRL_LLM_START_TIMEOUT: found '{text}'"):
      startup._seconds({hosts.TIMEOUT: text}, hosts.TIMEOUT, 300)


def test_a_process_alone_outlives_a_sleep(monkeypatch):
  """JAX's coordinator ends a process without heartbeats, and a sleeping laptop sends none."""
  asked = []
  monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **settings: asked.append(settings["heartbeat_timeout_seconds"]))
  startup._initialize("127.0.0.1:8476", 1, 0, 1.0)
  startup._initialize("127.0.0.1:8476", 2, 0, 1.0)
  assert asked[0] > 7 * 24 * 3600 and asked[1] == 10


def test_one_process_does_everything_itself():
  sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), jax.sharding.PartitionSpec("x"))
  tree = hosts.to_host({"x": jax.device_put(np.arange(8), sharding), "none": None})
  assert isinstance(tree["x"], np.ndarray) and tree["x"].tolist() == list(range(8)) and tree["none"] is None
  assert hosts.is_main() and hosts.gather_text("x") == ["x"] and hosts.on_main(lambda: 3) == 3
  assert hosts.share(lambda own: np.zeros((len(own), 2), np.float32), 0).shape == (0, 2)
  hosts.agree({"seed": 0})
  hosts.barrier()
  assert not hosts.preempted() and not hosts.told_to_end()
  with pytest.raises(KeyError), hosts.together({}):  # As if it were not there.
    raise KeyError


def test_two_processes_exchange_what_they_have_and_end_together():
  both = two_processes(TOGETHER)
  assert [x.returncode for x in both] == [1, 2], both
  first, second = (json.loads(x.stdout.splitlines()[-1]) for x in both)
  assert (first["index"], first["main"], first["asked"], first["own"]) == (0, True, [0, 2, 4], [0, 2])
  assert (second["index"], second["main"], second["asked"], second["own"]) == (1, False, [1, 3], [4, 6])
  assert first["kept"] <= 4, "texts that all processes have read are removed"
  assert first["late"] == "process 1 of 2 has not answered within 0.2 s (waiting for its 'alone')"
  assert first["on_main"] == np.arange(8.0).reshape(4, 2).tolist() and second["on_main"] is None
  assert second["heard"] == [[number % 256] * 3 for number in range(300)] + [None] and first["kept_messages"] <= 3 * 64
  for name, expected in {
    "devices": 4,
    "squares": [[i, i * i] for i in range(5)],
    "rows": np.arange(8.0).reshape(4, 2).tolist(),
    "texts": ["from 0", "from 1"],
    "told": [0, "x"],
    "local": [1, 1],
    "refused": "process 1 was started with seed: 1, but 0 in process 0; start all processes with the same command",
  }.items():
    assert first[name] == second[name] == expected, name
  for process in both:
    assert "error: process 1 of 2: the verifier broke\nerror: process 1 of 2: at once\n" in process.stderr
    assert "Traceback" not in process.stderr
  assert "error: process 0 of 2: ends with it" in both[0].stderr


class Client:
  """Keys and texts of XLA's coordination service in this process, with the number of calls."""

  def __init__(self):
    self.texts, self.calls, self.changed = {}, 0, threading.Condition()

  def key_value_set(self, key, text):
    with self.changed:
      self.texts[key], self.calls = text, self.calls + 1
      self.changed.notify_all()

  def blocking_key_value_get(self, key, milliseconds):
    with self.changed:
      self.calls += 1
      if not self.changed.wait_for(lambda: key in self.texts, milliseconds / 1000):
        raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
      return self.texts[key]


@pytest.fixture
def processes(monkeypatch):
  """Function `(number, gather) -> outcomes` that calls `gather(index)` in threads, as processes."""
  client, own = Client(), threading.local()
  monkeypatch.setattr(hosts.exchange, "run_state", lambda: own.state)

  def run(count, gather, absent=()):
    def process(index):
      own.state = types.SimpleNamespace(process_id=index, num_processes=count, client=client)
      try:
        return gather(index)
      except TimeoutError as error:
        return str(error)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
      return list(pool.map(process, [index for index in range(count) if index not in absent])), client

  return run


def test_messages_grow_as_the_number_of_processes_does(processes):
  texts = [f'"{index}' if index % 3 else "" for index in range(64)]
  outcomes, client = processes(64, lambda index: hosts.gather_under("here", texts[index]))
  assert outcomes == [texts] * 64
  assert client.calls == 3 * 64 - 1, "each sets one text and gets one answer, and process 0 gets all texts"


@pytest.mark.parametrize("absent", [0, 2, 3])
def test_all_processes_learn_who_has_not_answered(processes, absent):
  outcomes, _ = processes(4, lambda index: hosts.gather_under("here", "", seconds=0.2), absent={absent})
  assert outcomes == [f"process {absent} of 4 has not answered within 0.2 s (waiting for its 'here')"] * 3


def test_a_late_process_0_still_names_the_absent_one(processes, monkeypatch):
  """The others have waited for their time when it comes, and wait for its answer."""
  monkeypatch.setattr(hosts.exchange, "_AT_LEAST", 1.0)

  def gather(index):
    if index == 0:
      time.sleep(0.6)
    return hosts.gather_under("here", "", seconds=0.2)

  outcomes, _ = processes(3, gather, absent={2})
  assert outcomes == ["process 2 of 3 has not answered within 0.2 s (waiting for its 'here')"] * 2


def test_a_coordinator_that_never_comes():
  settings = environment() | {ADDRESS: free_address(), COUNT: "2", INDEX: "1", hosts.TIMEOUT: "0.5"}
  command = [sys.executable, "-c", "from jaxrl_llm.devices import hosts; hosts.join_processes()"]
  result = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=200)
  (line,) = [line for line in result.stderr.splitlines() if line.startswith("error")]
  assert result.returncode == 2 and "process 1 waited 0.5 s for process 0 at" in line and settings[ADDRESS] in line
  assert "Traceback" not in result.stderr
