"""Machines without a TPU, on which libtpu is installed: JAX does not load it."""

import os
import subprocess
import sys

import pytest

from jaxrl_llm.devices import absent_tpu
from jaxrl_llm.devices.absent_tpu import skip_absent_tpu
from jaxrl_llm.devices.xla_flags import set_flags
from tests.runs import ROOT

PCI = "sys/bus/pci/devices/0"


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch):
  monkeypatch.setattr(absent_tpu.importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
  ("environment", "files", "skips"),
  [
    ({}, {}, True),
    ({"JAX_PLATFORMS": ""}, {}, True),
    # What JAX and libtpu leave behind when they are imported.
    ({"TPU_SKIP_MDS_QUERY": "1", "TPU_LIBRARY_PATH": "/x/libtpu.so"}, {}, True),
    ({"TPU_WORKER_HOSTNAMES": "WARNING: could not determine hosts"}, {}, True),
    # A network card of Google Cloud.
    ({}, {f"{PCI}/vendor": "0x1ae0\n", f"{PCI}/device": "0x0042\n"}, True),
    ({}, {f"{PCI}/vendor": "0x8086\n", f"{PCI}/device": "0x0063\n"}, True),
    ({}, {"dev/vfio/vfio": ""}, True),
    ({"JAX_PLATFORMS": "tpu,cpu"}, {}, False),
    ({"JAX_PLATFORMS": "cpu"}, {}, False),
    ({"JAX_FORCE_TPU_INIT": "1"}, {}, False),
    ({"TPU_ACCELERATOR_TYPE": "v4-8"}, {}, False),
    ({"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2", "TPU_WORKER_ID": "0"}, {}, False),
    # A v4, and one that is not made yet.
    ({}, {f"{PCI}/vendor": "0x1ae0\n", f"{PCI}/device": "0x005e\n"}, False),
    ({}, {f"{PCI}/vendor": "0x1ae0\n", f"{PCI}/device": "0x0099\n"}, False),
    ({}, {"dev/accel0": ""}, False),
    ({}, {"dev/vfio/0": ""}, False),
    ({}, {"dev/nvidiactl": ""}, False),
    ({}, {"dev/kfd": ""}, False),
  ],
)
def test_only_a_machine_without_accelerators_skips_the_tpu(tmp_path, environment, files, skips):
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  before = dict(environment)
  assert skip_absent_tpu(environment, root=tmp_path) is skips
  assert environment == (before | {"JAX_PLATFORMS": "cpu"} if skips else before)


def test_another_plugin_is_left_alone(monkeypatch, tmp_path):
  monkeypatch.setattr(absent_tpu.importlib.util, "find_spec", lambda name: name)
  assert not skip_absent_tpu({}, root=tmp_path)


def test_flags_of_a_chip_come_with_its_devices():
  environment = {"JAXRL_LLM_CHIP": "v6e"}
  set_flags(environment)
  assert "JAX_PLATFORMS" not in environment


@pytest.mark.slow
def test_a_command_prints_no_complaint():
  """Without the lock of libtpu, which would hide what it prints if another process has it."""
  environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_"))}
  environment |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  command = [sys.executable, "-m", "jaxrl_llm.main", "--config=configs/gspo.py:tiny", "--dry_run"]
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
  assert done.stderr == "" and done.stdout.endswith("no problem found\n")
