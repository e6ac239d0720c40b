"""Joining of the processes of a run."""

import os
import socket
from collections.abc import Mapping

import jax

from jaxrl_llm.devices.hosts.common_end import limited
from jaxrl_llm.devices.hosts.exchange import WAIT_SECONDS, run_state
from jaxrl_llm.messages import one_line

ADDRESS, COUNT, INDEX = VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
TIMEOUT = "JAXRL_LLM_START_TIMEOUT"
"""Environment variable with the seconds that a process waits for the others at its start."""

HEARTBEAT = "JAXRL_LLM_HEARTBEAT_TIMEOUT"
"""Environment variable with the seconds without a heartbeat after which a process counts as dead.

The others then end.
"""

COLLECTIVES = "JAX_CPU_COLLECTIVES_IMPLEMENTATION"
"""JAX's environment variable for collectives between CPU devices.

With "gloo" one process sums over its devices in the same order as several processes, so the sums
are equal to the last bit.
"""

_HEARTBEAT_SECONDS = 10.0

# No other process waits for one that is alone, so it may outlive a laptop's sleep or a SIGSTOP.
_ALONE_SECONDS = 10**6


def join_processes() -> None:
  """Joins the processes of the run.

  It must be called before anything touches JAX's devices. A second call has no effect.

  `JAX_COORDINATOR_ADDRESS` (HOST:PORT of process 0), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` name
  the processes. If they are not set, the processes are those of the TPU pod, Slurm, Open MPI or
  Kubernetes job in which JAX finds itself. Outside such a job the process is alone, with a
  coordinator that only this machine can reach. JAX's handler of SIGTERM (see `preempted`) is
  installed in every case.

  Raises:
    ValueError: If settings are incomplete or wrong, the port is taken, or devices are in use.

  Note:
    A process without a heartbeat for `JAXRL_LLM_HEARTBEAT_TIMEOUT` seconds (default 10) ends the
    others, which would wait for it forever. A process that has waited for the others for
    `JAXRL_LLM_START_TIMEOUT` seconds (default 300) reports this and exits with status 2, because
    the library that waits cannot be interrupted.
  """
  if jax.distributed.is_initialized():
    return
  given, seconds = _from_environment(os.environ), _seconds(os.environ, TIMEOUT, WAIT_SECONDS)
  try:
    if given is not None:
      address, count, index = given
      others = f"the other {count - 1} of {COUNT}={count} processes to join at {address}"
      waited_for = f"process 0 at {ADDRESS}={address}" if index else others
      fix = "are all processes running, and is that port open?"
      with limited(f"process {index} waited {seconds:g} s for {waited_for}; {fix}", seconds):
        _initialize(address, count, index, seconds)
    else:
      waited = f"waited {seconds:g} s for the other processes of this cluster's job"
      with limited(f"{waited}; are all of them running?", seconds):
        _join_cluster(seconds)
  except jax.errors.JaxRuntimeError as error:
    reason = one_line(error, typed=False)
    raise ValueError(f"cannot join the processes of this run: {reason}; is the coordinator's port free?") from error
  except RuntimeError as error:
    raise ValueError(
      "cannot join the processes of this run: devices are in use already; start the run in a new process"
    ) from error
  if run_state().num_processes == 1 and COLLECTIVES not in os.environ:
    # Devices of one process share memory and need no sockets.
    jax.config.update(COLLECTIVES.lower(), None)


def _join_cluster(seconds: float) -> None:
  try:
    jax.distributed.initialize(initialization_timeout=_beyond(seconds), heartbeat_timeout_seconds=_heartbeat())
  except ValueError as error:
    if "coordinator_address" not in str(error):
      reason = one_line(error, typed=False)
      raise ValueError(
        f"cannot find the processes of this cluster's job: {reason}; set {', '.join(VARIABLES)}"
      ) from error
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      address = f"127.0.0.1:{free.getsockname()[1]}"
    _initialize(address, 1, 0, seconds)


def _initialize(address: str, count: int, index: int, seconds: float) -> None:
  host = address.rsplit(":", 1)[0]
  jax.distributed.initialize(
    address, count, index,
    initialization_timeout=_beyond(seconds),
    heartbeat_timeout_seconds=_heartbeat() if count > 1 else _ALONE_SECONDS,
    # A coordinator for this machine alone listens to no other machine.
    coordinator_bind_address=address if host in ("127.0.0.1", "localhost") else None,
    cluster_detection_method="deactivate",
  )


def _beyond(seconds: float) -> int:
  return int(seconds) + 60  # JAX's own timeout aborts with a stack trace, so it must come later.


def _from_environment(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
  """Reads the address, the number of processes and the index of this one from the environment.

  Returns:
    The three values, or None if none of them is set.

  Raises:
    ValueError: If only some of them are set, or one is wrong.
  """
  settings = {name: environment[name] for name in VARIABLES if environment.get(name)}
  if not settings:
    return None
  if missing := [name for name in VARIABLES if name not in settings]:
    there = ", ".join(f"{name}={value}" for name, value in settings.items())
    raise ValueError(f"{' and '.join(missing)}: not set, though {there} is; expected all of {', '.join(VARIABLES)}, or none")
  host, _, port = settings[ADDRESS].rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    raise ValueError(f"{ADDRESS}: found {settings[ADDRESS]!r}, expected HOST:PORT of process 0, as in 10.0.0.1:8476")
  for name in (COUNT, INDEX):
    if not settings[name].isdecimal():
      raise ValueError(f"{name}: found {settings[name]!r}, expected a whole number")
  count, index = int(settings[COUNT]), int(settings[INDEX])
  if not count:
    raise ValueError(f"{COUNT}: found 0, expected 1 or more")
  if index >= count:
    raise ValueError(f"{INDEX}: found {index} with {COUNT}={count}, expected 0 to {count - 1}")
  return settings[ADDRESS], count, index


def _heartbeat() -> int:
  return max(1, round(_seconds(os.environ, HEARTBEAT, _HEARTBEAT_SECONDS)))


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
  text = environment.get(name) or str(default)
  try:
    seconds = float(text)
  except ValueError:
    seconds = -1.0
  if not 0 < seconds < 1e6:
    raise ValueError(f"{name}: found {text!r}, expected a number of seconds above 0")
  return seconds
