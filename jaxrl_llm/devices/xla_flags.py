"""Flags of XLA for each chip, set before JAX starts.

`FLAGS` is the table. What a user has set in LIBTPU_INIT_ARGS or XLA_FLAGS stays, and the variable
JAXRL_LLM_XLA_FLAGS changes the rest: NAME=VALUE sets a flag or adds one, -NAME leaves one out, and
"none" leaves all out. CPUs have flags for exact numerics alone.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from jaxrl_llm.devices.absent_tpu import device_text, skip_absent_tpu
from jaxrl_llm.messages import did_you_mean

VARIABLE = "JAXRL_LLM_XLA_FLAGS"
"""Environment variable with changes to the table, separated by spaces."""

CHIP = "JAXRL_LLM_CHIP"
"""Environment variable that names the chip, a key of `FLAGS`, or "cpu" for none."""


class Flag(NamedTuple):
  """A flag's value, and the reason for it.

  Attributes:
    value: Value of the flag.
    effect: What it changes, and how this is known.
  """

  value: str
  effect: str


FLAGS: Mapping[str, Mapping[str, Flag]] = MappingProxyType(
  {
    "v5e": MappingProxyType({}),
    "v5p": MappingProxyType({}),
    "v6e": MappingProxyType({}),
    "tpu7x": MappingProxyType(
      {
        "xla_tpu_control_large_2nd_minor_layout_for_x16": Flag(
          "0",
          "The cache's keys keep the tiles that attention reads, where by default each decoding step copies all of them. Seen in "
          "compiled programs (docs/pod_plans.md); how fast other products are with these tiles is not measured.",
        ),
      }
    ),
    "gpu": MappingProxyType(
      {
        "xla_gpu_enable_latency_hiding_scheduler": Flag(
          "true", "Collectives run beside other work. Recommended by docs.jax.dev/en/latest/gpu_performance_tips; not yet measured."
        ),
      }
    ),
  }
)
"""Flags by chip and name.

No flag has proved itself on v5e, v5p and v6e. libtpu's latency hiding scheduler is on by default,
and kernels ask for fast memory themselves, so that `xla_tpu_scoped_vmem_limit_kib` changes little.
Flags that let collectives run inside other fusions show in the compiled text of v6e, but libtpu
0.0.50.1 refuses them there, because results may be wrong (experiments/log/pods.md).
"""

EXACT: Mapping[str, Flag] = MappingProxyType(
  {
    "xla_cpu_experimental_ynn_fusion_type": Flag(
      "individual_dot",
      "The order of a sum does not depend on the size of the array, nor that of a product on the number of rows, from 64 on.",
    ),
    "xla_allow_excess_precision": Flag("false", "Numbers are rounded to bfloat16 wherever the program says so, even within a fusion."),
  }
)
"""Flags of CPUs under which sampler and learner get the same bits; see docs/sampler.md."""

_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_GOOGLE = "0x1ae0"
_TPUS = MappingProxyType({"0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"})
_NVIDIA = ("nvidia0", "nvidiactl", "dxg")


def set_flags(environment: MutableMapping[str, str] = os.environ, *, exact: bool = False) -> str:
  """Sets the flags of this machine's chip; must run before JAX starts its devices.

  On a machine without an accelerator, JAX is kept from looking for a TPU (`absent_tpu`).

  Args:
    environment: Variables of the environment.
    exact: Whether to set those of `EXACT`.

  Returns:
    A line that says what was set.

  Raises:
    ValueError: If a variable has an unknown chip or a change that has no effect, or there are no
      exact numerics here. One line.

  Example:
    >>> set_flags({"JAXRL_LLM_CHIP": "v6e", "JAXRL_LLM_XLA_FLAGS": "xla_tpu_scoped_vmem_limit_kib=98304"})
    'XLA flags for v6e: --xla_tpu_scoped_vmem_limit_kib=98304'
    >>> set_flags({"JAXRL_LLM_CHIP": "gpu", "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"})
    'XLA flags for gpu: none; set by the user: xla_gpu_enable_latency_hiding_scheduler'
  """
  chip = chip_here(environment)
  if exact and chip is not None:
    raise ValueError(f"config.numerics.exact: found True on a {chip}, expected False: only programs for CPUs add in one order so far")
  if chip is None:
    skip_absent_tpu(environment)
    if exact:
      given = _given(environment)
      text = " ".join(missing := [flag for flag in _missing_for_exact(environment) if flag[2:].partition("=")[0] not in given])
      environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {text}".strip()
      check_exact(environment)
      return f"XLA flags for exact numerics: {text if missing else 'none; all are set by the user'}"
    if environment.get(VARIABLE):
      raise ValueError(f"{VARIABLE}: found {environment[VARIABLE]!r} without an accelerator, expected none set, or {CHIP}=v5e, ...")
    return "XLA flags: none, because there is no accelerator that has any"
  variable = _VARIABLES[chip != "gpu"]
  flags, given = unset_flags(chip, environment), _given(environment)
  kept = sorted(given & chosen(chip, environment.get(VARIABLE, "")).keys())
  text = " ".join(f"--{name}={value}" for name, value in flags.items())
  if text:
    environment[variable] = f"{environment.get(variable, '')} {text}".strip()
  return f"XLA flags for {chip}: {text or 'none'}" + (f"; set by the user: {', '.join(kept)}" if kept else "")


def check_exact(environment: Mapping[str, str] = os.environ) -> None:
  """Checks that the flags of `EXACT` are set.

  Raises:
    ValueError: If one is missing. One line.

  Example:
    >>> check_exact({"XLA_FLAGS": "--xla_allow_excess_precision=true"})
    Traceback (most recent call last):
    ...
    ValueError: XLA_FLAGS: found no --xla_cpu_experimental_ynn_fusion_type=individual_dot ...
  """
  if missing := _missing_for_exact(environment):
    raise ValueError(
      f"XLA_FLAGS: found no {' '.join(missing)}, which exact numerics need; expected XLA_FLAGS='{' '.join(missing)}' before JAX starts"
    )


def _missing_for_exact(environment: Mapping[str, str]) -> list[str]:
  given = dict(re.findall(r"--(\w+)=(\S*)", environment.get("XLA_FLAGS", "")))
  return [f"--{name}={flag.value}" for name, flag in EXACT.items() if given.get(name) != flag.value]


def unset_flags(chip: str, environment: Mapping[str, str]) -> dict[str, str]:
  """Returns the flags of a chip that the user has not set, with the changes in `VARIABLE`.

  Raises:
    ValueError: If a change has no effect or cannot be read. One line.
  """
  given = _given(environment)
  return {name: value for name, value in chosen(chip, environment.get(VARIABLE, "")).items() if name not in given}


def _given(environment: Mapping[str, str]) -> set[str]:
  return {name for text in _VARIABLES for name in re.findall(r"--(\w+)", environment.get(text, ""))}


def chosen(chip: str, changes: str = "") -> dict[str, str]:
  """Returns the flags of a chip with a user's changes.

  Args:
    chip: Key of `FLAGS`.
    changes: Value of the environment variable `VARIABLE`.

  Raises:
    ValueError: If a change has no effect or cannot be read. One line.

  Example:
    >>> chosen("gpu"), chosen("gpu", "xla_gpu_autotune_level=0 -xla_gpu_enable_latency_hiding_scheduler")
    ({'xla_gpu_enable_latency_hiding_scheduler': 'true'}, {'xla_gpu_autotune_level': '0'})
    >>> chosen("gpu", "-xla_gpu_async")
    Traceback (most recent call last):
    ...
    ValueError: JAXRL_LLM_XLA_FLAGS: found '-xla_gpu_async', expected a flag of gpu's table, ...
  """
  if changes.strip() == "none":
    return {}
  flags = {name: flag.value for name, flag in FLAGS[chip].items()}
  for change in changes.split():
    match = re.fullmatch(r"(?:--)?(xla_\w+)=(\S+)|-(\w+)", change)
    if match is None:
      raise ValueError(f"{VARIABLE}: found {change!r}, expected xla_NAME=VALUE to set a flag, -NAME to leave one out, or none")
    name, value, left_out = match.groups()
    if left_out is None:
      flags[name] = value
    elif flags.pop(left_out, None) is None:
      hint = did_you_mean(left_out, flags, "; did you mean -{}?")
      table = ", ".join(FLAGS[chip]) or "which is empty"
      raise ValueError(f"{VARIABLE}: found {change!r}, expected a flag of {chip}'s table, {table}{hint}")
  return flags


def chip_here(environment: Mapping[str, str], *, root: Path = Path("/")) -> str | None:
  """Returns the chip of this machine, a key of `FLAGS`, without starting JAX.

  A chip without flags, and a run on CPUs, is None.

  Args:
    environment: Variables of the environment: `CHIP`, JAX_PLATFORMS and TPU_ACCELERATOR_TYPE, which
      launchers of pods set. Without them, the devices of the machine decide.
    root: Root of the file system.

  Raises:
    ValueError: If `CHIP` names no chip of the table. One line.

  Example:
    >>> chip_here({"TPU_ACCELERATOR_TYPE": "v5litepod-16"}), chip_here({"TPU_ACCELERATOR_TYPE": "v6e-256"})
    ('v5e', 'v6e')
  """
  if name := environment.get(CHIP):
    if name not in (*FLAGS, "cpu"):
      raise ValueError(f"{CHIP}: found {name!r}, expected one of cpu, {', '.join(FLAGS)}{did_you_mean(name.lower(), (*FLAGS, 'cpu'))}")
    return None if name == "cpu" else name
  if environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
    return None
  if kind := environment.get("TPU_ACCELERATOR_TYPE"):
    generation = kind.split("-")[0].replace("v5litepod", "v5e").replace("v5lite", "v5e")
    return generation if generation in FLAGS else None
  for device in sorted(root.glob("sys/bus/pci/devices/*")):
    if device_text(device / "vendor") == _GOOGLE and (chip := _TPUS.get(device_text(device / "device"))):
      return chip
  return "gpu" if any((root / "dev" / name).exists() for name in _NVIDIA) else None
