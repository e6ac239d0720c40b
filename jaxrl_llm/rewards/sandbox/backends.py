"""The back ends by name: how each runs a program, whether it works here, and what to do where it does not."""

import shutil
import socket
from collections.abc import Callable
from typing import NamedTuple

from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.rewards.sandbox import local, services
from jaxrl_llm.rewards.sandbox.program import Execution, Program, Sandbox


class Backend(NamedTuple):
  """One way to run a program.

  Attributes:
    execute: runs it.
    converse: runs two that talk to one another; None where that cannot be done.
    fix: what to do where it does not work.
  """

  execute: Callable[[Program, Sandbox], Execution]
  converse: Callable[[Program, Program, Sandbox], Execution] | None
  fix: str


BACKENDS: dict[str, Backend] = {
  "off": Backend(
    lambda program, sandbox: Execution("refused", cause="running programs is switched off"),
    None,
    "choose a back end: auto, namespaces, bubblewrap, docker, sandbox_fusion or piston",
  ),
  "namespaces": Backend(
    local.execute,
    local.converse,
    "allow user namespaces (sysctl user.max_user_namespaces=10000, kernel.apparmor_restrict_unprivileged_userns=0; in a container, a "
    "seccomp profile that allows unshare and mount), or choose docker, sandbox_fusion or piston",
  ),
  "bubblewrap": Backend(local.execute, local.converse, "install bubblewrap, allow it to make user namespaces, or choose docker"),
  "docker": Backend(local.execute, local.converse, "start the engine and pull the image, or choose namespaces"),
  "sandbox_fusion": Backend(services.execute, None, "start the service and give its address in url"),
  "piston": Backend(services.execute, None, "start the service and give its address in url"),
  "unsafe": Backend(local.execute, local.converse, "see why a plain process cannot be started"),
}
"""`unsafe` is a plain process with limits: it can read and write what you can, so it is for programs that you trust."""

_CONFINED = ("namespaces", "bubblewrap", "docker")
_AUTOMATIC = ("namespaces", "bubblewrap")  # The first also bounds the number of processes where we are root.

_PROBE = """
import socket
try:
  socket.create_connection(("127.0.0.1", PORT), timeout=2).close()
  print("it reaches the network")
except OSError: pass
print("it runs")
"""


def execute(program: Program, sandbox: Sandbox) -> Execution:
  """Runs a program in a sandbox and waits for it.

  Raises:
    ValueError: no such back end.

  Example:
    >>> execute(Program("print(6 * 7)"), Sandbox("off")).cause
    'running programs is switched off'
  """
  return backend_of(sandbox).execute(program, sandbox)


def backend_of(sandbox: Sandbox) -> Backend:
  """The back end of a sandbox, or a ValueError of one line where there is none of that name."""
  if sandbox.backend not in BACKENDS:
    names = ["auto", *BACKENDS]
    hint = did_you_mean(sandbox.backend, names)
    raise ValueError(f"sandbox: found the back end {sandbox.backend!r}, expected one of {', '.join(names)}{hint}")
  return BACKENDS[sandbox.backend]


def probe(sandbox: Sandbox) -> str | None:
  """Runs a program that looks around: None where the sandbox works here, else one line with what is wrong and what to do.

  Raises:
    ValueError: no such back end.

  Example:
    >>> probe(Sandbox("off"))
    "sandbox 'off': running programs is switched off; choose a back end: auto, ..."
  """
  backend, trouble = backend_of(sandbox), ""
  client = {"bubblewrap": "bwrap", "docker": sandbox.docker}.get(sandbox.backend)
  if sandbox.backend in ("sandbox_fusion", "piston") and not sandbox.url.startswith(("http://", "https://")):
    trouble = f"found url {sandbox.url!r}, expected http://... or https://..."
  elif client is not None and shutil.which(client) is None:
    trouble = f"the command {client} is not installed"
  else:
    with socket.socket() as listener:
      listener.bind(("127.0.0.1", 0))
      listener.listen()
      found = backend.execute(Program(_PROBE.replace("PORT", str(listener.getsockname()[1]))), sandbox)
    said = found.stdout.split("\n")
    if found.status == "refused":
      trouble = found.cause or "refused"
    elif "it runs" not in said:
      trouble = f"a program that prints a line printed {found.stdout[:80]!r} ({found.cause}) {found.stderr[-120:]}"
    elif "it reaches the network" in said and sandbox.backend in _CONFINED:
      trouble = "a program inside reached the network outside"
  return f"sandbox {sandbox.backend!r}: {' '.join(trouble.split())}; {backend.fix}" if trouble else None


def choose(sandbox: Sandbox) -> Sandbox:
  """The sandbox with a back end that works here: the first that does for `auto`, else the one that is named.

  Raises:
    ValueError: no such back end, or none that works. One line, with the fix.
  """
  reasons = []
  for name in _AUTOMATIC if sandbox.backend == "auto" else (sandbox.backend,):
    reason = probe(chosen := sandbox._replace(backend=name))
    if reason is None:
      return chosen
    reasons.append(reason)
  raise ValueError("; ".join(reasons))
