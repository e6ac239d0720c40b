"""Flags of XLA: the table, what a user's variables change, and how the chip is found."""

import subprocess
import sys

import pytest

from jaxrl_llm.devices import xla_flags
from jaxrl_llm.devices.xla_flags import CHIP, FLAGS, VARIABLE, chip_here, chosen, set_flags

SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


def test_flags_of_a_tpu_join_those_of_the_user_which_stay():
  environment = {CHIP: "v6e", "LIBTPU_INIT_ARGS": "--xla_a=false", VARIABLE: "xla_a=true --xla_b=1"}
  line = set_flags(environment)
  assert environment["LIBTPU_INIT_ARGS"] == "--xla_a=false --xla_b=1" and "XLA_FLAGS" not in environment
  assert line == "XLA flags for v6e: --xla_b=1; set by the user: xla_a"
  before = dict(environment)
  set_flags(environment)
  assert environment == before


def test_flags_of_a_gpu_are_those_of_xla():
  environment = {CHIP: "gpu", VARIABLE: "xla_gpu_autotune_level=0"}
  set_flags(environment)
  assert environment["XLA_FLAGS"] == "--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_autotune_level=0"


@pytest.mark.parametrize(
  "environment", [{CHIP: "cpu"}, {"JAX_PLATFORMS": "cpu", "TPU_ACCELERATOR_TYPE": "v6e-8"}, {CHIP: "v6e", VARIABLE: "none"}]
)
def test_nothing_is_set_on_a_cpu_or_by_request(environment):
  environment = dict(environment)
  assert "none" in set_flags(environment) and not {"XLA_FLAGS", "LIBTPU_INIT_ARGS"} & environment.keys()


def test_exact_numerics_have_flags_on_a_cpu_which_a_user_may_have_set():
  environment = {CHIP: "cpu", "XLA_FLAGS": "--xla_allow_excess_precision=false --xla_a=1"}
  assert set_flags(environment, exact=True) == "XLA flags for exact numerics: --xla_cpu_experimental_ynn_fusion_type=individual_dot"
  assert environment["XLA_FLAGS"].endswith(" --xla_a=1 --xla_cpu_experimental_ynn_fusion_type=individual_dot")
  before = dict(environment)
  assert "none" in set_flags(environment, exact=True) and environment == before


@pytest.mark.parametrize(
  ("environment", "message"),
  [
    ({CHIP: "v6e"}, "config.numerics.exact: found True on a v6e, expected False"),
    ({CHIP: "cpu", "XLA_FLAGS": "--xla_allow_excess_precision=true"}, "XLA_FLAGS: found no --xla_allow_excess_precision=false"),
  ],
)
def test_exact_numerics_are_refused_where_they_cannot_be(environment, message):
  with pytest.raises(ValueError, match=message):
    set_flags(environment, exact=True)


def test_a_change_replaces_adds_or_leaves_out():
  assert chosen("gpu", f"{SCHEDULER}=false") == {SCHEDULER: "false"}
  assert chosen("gpu", f"-{SCHEDULER} xla_a=1") == {"xla_a": "1"} and chosen("gpu")[SCHEDULER] == FLAGS["gpu"][SCHEDULER].value


@pytest.mark.parametrize(
  ("environment", "message"),
  [
    ({CHIP: "v6", VARIABLE: ""}, "JAXRL_LLM_CHIP: found 'v6', expected one of cpu, v5e, v5p, v6e, tpu7x, gpu; did you mean 'v6e'?"),
    ({CHIP: "gpu", VARIABLE: "-xla_gpu_latency_hiding_scheduler"}, f"found '-xla_gpu_latency.*', .*; did you mean -{SCHEDULER}"),
    ({CHIP: "v6e", VARIABLE: "-xla_a"}, "found '-xla_a', expected a flag of v6e's table, which is empty"),
    ({CHIP: "v6e", VARIABLE: "async=1"}, "JAXRL_LLM_XLA_FLAGS: found 'async=1', expected xla_NAME=VALUE to set a flag"),
    ({CHIP: "cpu", VARIABLE: "xla_a=1"}, "JAXRL_LLM_XLA_FLAGS: found 'xla_a=1' without an accelerator, expected none set"),
  ],
)
def test_a_change_without_effect_is_refused_in_one_line(environment, message):
  with pytest.raises(ValueError, match=message) as error:
    set_flags(environment)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("files", "chip"),
  [
    ({"sys/bus/pci/devices/0/vendor": "0x1ae0\n", "sys/bus/pci/devices/0/device": "0x006f\n"}, "v6e"),
    ({"sys/bus/pci/devices/0/vendor": "0x1ae0\n", "sys/bus/pci/devices/0/device": "0x0076\n"}, "tpu7x"),
    ({"sys/bus/pci/devices/0/vendor": "0x1ae0\n", "sys/bus/pci/devices/0/device": "0x0027\n"}, None),
    ({"sys/bus/pci/devices/0/vendor": "0x8086\n", "sys/bus/pci/devices/0/device": "0x006f\n"}, None),
    ({"dev/nvidiactl": ""}, "gpu"),
    ({}, None),
  ],
)
def test_the_devices_of_a_machine_tell_the_chip(tmp_path, files, chip):
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  assert chip_here({}, root=tmp_path) == chip


@pytest.mark.parametrize(
  ("kind", "chip"), [("v5litepod-256", "v5e"), ("v5p-128", "v5p"), ("v6e-8", "v6e"), ("tpu7x-8", "tpu7x"), ("v4-8", None)]
)
def test_a_launcher_tells_the_chip(kind, chip):
  assert chip_here({"TPU_ACCELERATOR_TYPE": kind}) == chip


def test_jax_accepts_the_flags_of_gpus():
  """XLA refuses unknown flags, whatever the platform."""
  text = " ".join(f"--{name}={flag.value}" for name, flag in xla_flags.FLAGS["gpu"].items())
  done = [
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env={"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, check=False)
    for flags in (text, f"{text} --xla_gpu_no_such_flag=1")
  ]
  assert done[0].returncode == 0 and done[1].returncode != 0
