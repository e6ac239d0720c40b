"""Small runs for tests, in this process on some of its simulated devices, or in another process.

Datasets and compiled programs are made once, in the home folder that `conftest.py` makes for the
session.
"""

import collections
import contextlib
import functools
import importlib
import itertools
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict

from jaxrl_llm import tasks, train
from jaxrl_llm.config.fields import unread_defaults
from jaxrl_llm.decoding.engine import make as engine
from jaxrl_llm.devices import hosts
from jaxrl_llm.run.setup import drawing, experiment
from jaxrl_llm.run.steps import learn
from jaxrl_llm.workdir.metrics import read_rows, reproducible

ROOT = pathlib.Path(__file__).resolve().parents[1]

# A policy with random weights is never right. With a length penalty its rewards differ, so that
# advantages and gradients are not 0.
VARIED = {"reward.overlong_buffer": 16}


def tiny_config(name: str = "gspo", overrides: dict[str, Any] | None = None) -> ConfigDict:
  """Returns `configs/NAME.py:tiny` with other values, as the command line sets them."""
  config = importlib.import_module(f"configs.{name}").get_config("tiny")
  config.log.num_table_rows, overrides = 0, overrides or {}
  config.update_from_flattened_dict(overrides)
  config.update_from_flattened_dict({path: value for path, value in unread_defaults(config).items() if path not in overrides})
  return config


@contextlib.contextmanager
def quick(devices: int = 1):
  """Restricts runs to the first `devices` devices, and makes them fast.

  A dataset is loaded once, and a program is compiled once, without the costly optimizations. Runs
  with equal settings have the same programs, which are then not even traced again.
  """
  cache = {
    "jax_compilation_cache_dir": str(pathlib.Path.home() / "xla"),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_disable_most_optimizations": True,
  }
  before = {name: jax.config.values[name] for name in cache}
  for name, value in cache.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  try:
    with contextlib.ExitStack() as patches:
      patched = lambda module, name, value: patches.enter_context(mock.patch.object(module, name, value))
      patched(jax, "device_count", lambda: devices)
      patched(tasks, "make", load_once)
      for module, name, key_of in SHARED:
        patched(module, name, shared(getattr(module, name), key_of))
      yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()


_UNREAD = (
  "seed", "task", "advantage", "alarms", "checkpoint", "environment", "log", "profile", "sandbox", "watchdog",
  "memory_gb",
)  # fmt: skip
"""Sections of a config that no program of a run reads, but for `log.gradient_noise_every`."""

_MOST_PROGRAMS = 12
_programs: collections.OrderedDict[tuple, Any] = collections.OrderedDict()


def shared(make: Callable[..., Any], key_of: Callable[..., tuple | None]) -> Callable[..., Any]:
  """Wraps a function to make what has the same key only once; None is the key of nothing."""

  @functools.wraps(make)
  def make_once(*args: Any, **settings: Any) -> Any:
    key = key_of(*args, **settings)
    if key is None:
      return make(*args, **settings)
    # The arguments stay, so that no other object gets the id of one of them.
    made = _programs.pop((make, *key), None) or (make(*args, **settings), args)
    _programs[make, *key] = made
    while len(_programs) > _MOST_PROGRAMS:
      _programs.popitem(last=False)
    return made[0]

  return make_once


def _of_config(config: ConfigDict, *others: Any) -> tuple | None:
  """Returns a key of programs made from a config and other values.

  What a test imports by path may be another component under the same name.
  """
  values = {name: value for name, value in config.to_dict().items() if name not in _UNREAD}
  text = json.dumps([values, config.log.gradient_noise_every], default=str)
  return None if re.search(r"[a-z_]:[a-z_]", text) else (text, jax.device_count(), *others)


def _of_learner(config: ConfigDict, mesh: Any, shape: Any, objective: Any, **settings: Any) -> tuple | None:
  return _of_config(config, mesh, shape, repr(sorted(settings.items())))


def _of_samplers(config: ConfigDict, model: Any, tokenizer: Any, params: Any, *, records_routes: bool) -> tuple | None:
  ids = (type(tokenizer), tokenizer.vocab_size, tuple(tokenizer.stop_ids), tokenizer.pad_id)
  return _of_config(config, model.mesh, model.config, ids, records_routes, *_places(params))


def _of_model(shape: Any, *, mesh: Any, **settings: Any) -> tuple:
  return shape, mesh, repr(sorted(settings.items()))


def _of_engine(model: Any, params: Any, *, vocabulary: Any = None, **settings: Any) -> tuple:
  text = None if vocabulary is None else vocabulary.data.tobytes()
  return id(model), *_places(params), text, repr(sorted(settings.items()))


def _places(params: Any) -> list[tuple]:
  """Returns shape and devices of each array; the text of a mesh does not name its devices."""
  return [(x.shape, str(x.dtype), getattr(x, "sharding", None)) for x in jax.tree.leaves(params)]


def forget_programs() -> None:
  """Frees the programs of earlier runs."""
  _programs.clear()


SHARED = (
  (experiment, "make_programs", _of_learner),
  (drawing, "make_samplers", _of_samplers),
  (drawing, "make_model", _of_model),
  (engine, "make_programs", _of_engine),
)

_make_task = tasks.make
load_once = functools.cache(
  lambda name, **settings: _make_task(name, **settings)
)


def run_here(config: ConfigDict, workdir: pathlib.Path, *, devices: int = 1) -> dict[str, Any]:
  """Trains in this process. Returns the summary."""
  workdir.mkdir(parents=True, exist_ok=True)
  with quick(devices):
    return train.run(config, workdir)


def cached_runs(folders: pytest.TempPathFactory, name: str, base: dict[str, Any]) -> Callable[..., pathlib.Path]:
  """Makes a function that runs `NAME:tiny` with `base` and further values, equal ones only once.

  It takes fields as `section__name`, and returns the workdir, with the config as a command writes
  it.
  """

  @functools.cache
  def run(**changes: Any) -> pathlib.Path:
    workdir = folders.mktemp("run")
    config = tiny_config(name, base | {field.replace("__", "."): value for field, value in changes.items()})
    run_here(config, workdir)
    (workdir / "config.json").write_text(json.dumps(config.to_dict()))
    return workdir

  return run


def break_at(
  config: ConfigDict, workdir: pathlib.Path, step: int, *, devices: int = 1, only: Callable[[Any], bool] = lambda run: True
) -> None:
  """Trains until an RL step, from 0, whose update ends the run as a kill would.

  `only` says of a `Run` whether it may end there.
  """

  def dying(run, batch, at, update=learn.update):
    if at == step and only(run):
      raise KeyError("killed")
    return update(run, batch, at)

  with mock.patch.object(learn, "update", dying), pytest.raises(KeyError, match="killed"):
    run_here(config, workdir, devices=devices)


def rows(workdir: pathlib.Path, phase: str) -> list[dict[str, Any]]:
  """Reads the rows of a phase from `metrics.jsonl`."""
  return [row for row in read_rows(workdir / "metrics.jsonl") if row["phase"] == phase]


def column(workdir: pathlib.Path, name: str, phase: str = "rl") -> list[Any]:
  """Returns a metric at every step of a phase."""
  return [row[name] for row in rows(workdir, phase)]


def lines_of(workdir: pathlib.Path, *phases: str) -> list[str]:
  """Returns the rows of some phases, or of all, without what depends on the clock or the machine.

  JSON writes the shortest exact form of a float, so equal text means equal bits.
  """
  every = read_rows(workdir / "metrics.jsonl")
  return [json.dumps(reproducible(row)) for row in every if not phases or row["phase"] in phases]


def environment(devices: int = 1) -> dict[str, str]:
  """Returns the environment of another process with a number of simulated devices.

  It compiles as quickly as this process: the other flags of `conftest.py` stay.
  """
  return os.environ | {
    "XLA_FLAGS": re.sub(r"(?<=device_count=)\d+", str(devices), os.environ["XLA_FLAGS"]),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path.home() / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
  }


# Far below the ports that the kernel gives to connections: one of those may be taken by any process
# before the process that it is meant for listens. The start differs from process to process, so
# that two of them hardly try the same port at the same time.
_PORTS = itertools.cycle(range(15_000, 30_000))
collections.deque(itertools.islice(_PORTS, os.getpid() * 97 % 15_000), maxlen=0)


def free_address() -> str:
  """Returns an address of this machine on which nothing listens; each call returns another one."""
  for port in itertools.islice(_PORTS, 15_000):
    with socket.socket() as listener:
      try:
        listener.bind(("127.0.0.1", port))
      except OSError:
        continue
      return f"127.0.0.1:{port}"
  raise OSError("no free port from 15000 to 30000")


def joined(address: str, index: int) -> dict[str, str]:
  """Returns the variables of one of two processes. On a busy machine, heartbeats come late."""
  return dict(zip(hosts.VARIABLES, (address, "2", str(index)), strict=True)) | {hosts.HEARTBEAT: "60"}


def wait_for(condition: Callable[[], Any], seconds: float = 20) -> None:
  """Waits until a condition holds."""
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "it never came true"
    time.sleep(0.01)


def command(*args: str) -> list[str]:
  """Returns the command line of a run."""
  return [sys.executable, "-m", "jaxrl_llm.main", *args]


def two_processes(source: str) -> list[subprocess.CompletedProcess]:
  """Runs a program in two processes of two devices each, which may join, until both end."""
  address, processes = free_address(), []
  command = [sys.executable, "-c", source]
  for index in range(2):
    settings = environment(2) | joined(address, index)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes.append(subprocess.Popen(command, cwd=ROOT, env=settings, **pipes))
  outputs = [process.communicate(timeout=300) for process in processes]
  return [
    subprocess.CompletedProcess(command, process.returncode, *output)
    for process, output in zip(processes, outputs, strict=True)
  ]


def start(*args: str, devices: int = 1, **variables: str) -> subprocess.Popen:
  """Starts the command line with further variables of the environment."""
  env, pipe = environment(devices) | variables, subprocess.PIPE
  return subprocess.Popen(command(*args), cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)


def reach(workdir: pathlib.Path, phase: str, step: int, *processes: subprocess.Popen) -> None:
  """Waits until a step of a run in other processes is on disk."""
  until = time.monotonic() + 600
  while not any((row["phase"], row["step"]) == (phase, step) for row in read_rows(workdir / "metrics.jsonl")):
    assert all(process.poll() is None for process in processes) and time.monotonic() < until, "the run has ended, or hangs"
    time.sleep(0.01)


def call(*args: str, devices: int = 1, **variables: str) -> subprocess.CompletedProcess:
  """Runs the command line to its end, with further variables of the environment."""
  env = environment(devices) | variables
  return subprocess.run(command(*args), cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def succeed(*args: str, devices: int = 1, **variables: str) -> str:
  """Runs the command line, which must succeed. Returns what it prints."""
  result = call(*args, devices=devices, **variables)
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


def flags(overrides: dict[str, Any]) -> list[str]:
  """Converts overrides to flags."""
  return [f"--config.{field}={value}" for field, value in overrides.items()]
