"""How the processes of a run find each other."""

import os
import socket
from collections.abc import Mapping

import jax

from jaxrl_llm.devices.hosts.ending import limited
from jaxrl_llm.devices.hosts.exchange import WAIT_SECONDS, run_state
from jaxrl_llm.messages import one_line

ADDRESS, COUNT, INDEX = VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
TIMEOUT = "JAXRL_LLM_START_TIMEOUT"
"""Environment variable: seconds that a process waits for the others when it starts."""

HEARTBEAT = "JAXRL_LLM_HEARTBEAT_TIMEOUT"
"""Environment variable: seconds without a sign of life after which a process counts as dead, and the others end."""

COLLECTIVES = "JAX_CPU_COLLECTIVES_IMPLEMENTATION"
"""JAX's environment variable. With "gloo" one process sums over its CPU devices in the order that several processes do, to the last bit."""

_HEARTBEAT_SECONDS = 10.0

_ALONE_SECONDS = 10**6  # A process alone keeps nobody waiting: it outlives a laptop's sleep, or a SIGSTOP.


def start() -> None:
  """Joins the processes of the run; to be called before anything touches JAX's devices, and without effect the second time.

  The processes are those of `JAX_COORDINATOR_ADDRESS` (HOST:PORT of process 0), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`; without these,
  those of the TPU pod, Slurm, Open MPI or Kubernetes job that JAX finds itself in; else this one alone, with a coordinator that only
  this machine can reach. JAX's handler of SIGTERM, see `preempted`, is there in any case.

  Raises:
    ValueError: settings that are incomplete or wrong, a port that is taken, or devices that are in use.

  Note:
    A process that gives no sign of life for `JAXRL_LLM_HEARTBEAT_TIMEOUT` seconds (default 10) ends the others: they would wait for it for
    ever. One that has waited in vain for the others, `JAXRL_LLM_START_TIMEOUT` seconds (default 300), says so and exits
    with status 2: the library that waits cannot be interrupted.
  """
  if jax.distributed.is_initialized():
    return
  given, seconds = _from_environment(os.environ), _seconds(os.environ, TIMEOUT, WAIT_SECONDS)
  try:
    if given is not None:
      address, count, index = given
      whom = f"process 0 at {ADDRESS}={address}" if index else f"the other {count - 1} of {COUNT}={count} processes to come to {address}"
      with limited(f"process {index} waited {seconds:g} s for {whom}, in vain; are all of them running, and is that port open?", seconds):
        _initialize(address, count, index, seconds)
    else:
      with limited(f"waited {seconds:g} s for the other processes of this cluster's job, in vain; are all of them running?", seconds):
        _join_cluster(seconds)
  except jax.errors.JaxRuntimeError as error:
    reason = one_line(error, typed=False)
    raise ValueError(f"the processes of this run cannot be joined: {reason}; is the coordinator's port free?") from error
  except RuntimeError as error:
    raise ValueError("the processes of this run cannot be joined: devices are in use already; start the run in a new process") from error
  if run_state().num_processes == 1 and COLLECTIVES not in os.environ:
    jax.config.update(COLLECTIVES.lower(), None)  # Between devices of one process memory does what sockets would.


def _join_cluster(seconds: float) -> None:
  try:
    jax.distributed.initialize(initialization_timeout=_beyond(seconds), heartbeat_timeout_seconds=_heartbeat())
  except ValueError as error:
    if "coordinator_address" not in str(error):
      reason = one_line(error, typed=False)
      raise ValueError(f"this cluster does not say what its processes are: {reason}; set {', '.join(VARIABLES)}") from error
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
    # A coordinator for this machine alone listens to nobody else.
    coordinator_bind_address=address if host in ("127.0.0.1", "localhost") else None,
    cluster_detection_method="deactivate",
  )


def _beyond(seconds: float) -> int:
  return int(seconds) + 60  # JAX's own end of waiting is an abort with a stack trace.


def _from_environment(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
  """Address, number of processes and number of this one; None where none is set, ValueError where some are, or one is wrong."""
  found = {name: environment[name] for name in VARIABLES if environment.get(name)}
  if not found:
    return None
  if missing := [name for name in VARIABLES if name not in found]:
    there = ", ".join(f"{name}={value}" for name, value in found.items())
    raise ValueError(f"{' and '.join(missing)}: not set, though {there} is; expected all of {', '.join(VARIABLES)}, or none")
  host, _, port = found[ADDRESS].rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    raise ValueError(f"{ADDRESS}: found {found[ADDRESS]!r}, expected HOST:PORT of process 0, as in 10.0.0.1:8476")
  for name in (COUNT, INDEX):
    if not found[name].isdecimal():
      raise ValueError(f"{name}: found {found[name]!r}, expected a whole number")
  count, index = int(found[COUNT]), int(found[INDEX])
  if not count:
    raise ValueError(f"{COUNT}: found 0, expected 1 or more")
  if index >= count:
    raise ValueError(f"{INDEX}: found {index} with {COUNT}={count}, expected 0 to {count - 1}")
  return found[ADDRESS], count, index


def _heartbeat() -> int:
  return max(1, round(_seconds(os.environ, HEARTBEAT, _HEARTBEAT_SECONDS)))


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
  text = environment.get(name) or str(default)
  try:
    seconds = float(text)
  except ValueError:
    seconds = -1.0
  if not 0 < seconds < 1e6:
    raise ValueError(f"{name}: found {text!r}, expected seconds, above 0")
  return seconds
