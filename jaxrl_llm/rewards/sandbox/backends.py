"""The back ends by name, with their ways to run programs, their probe and their fixes."""

import shutil
import socket
from collections.abc import Callable
from typing import NamedTuple

from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.rewards.sandbox import local, services
from jaxrl_llm.rewards.sandbox.program import Execution, Program, Sandbox


class Backend(NamedTuple):
  """One way to run programs.

  Attributes:
    execute: Function that runs a program.
    execute_pair: Function that runs two programs that read each other's output. None if the back
      end cannot do that.
    fix: Advice for a machine on which the back end does not work.
    own: Settings that no other kind of back end reads.
  """

  execute: Callable[[Program, Sandbox], Execution]
  execute_pair: Callable[[Program, Program, Sandbox], Execution] | None
  fix: str
  own: tuple[str, ...] = ()


BACKENDS: dict[str, Backend] = {
  "off": Backend(
    lambda program, sandbox: Execution("refused", cause="running programs is switched off"),
    None,
    "choose a back end: auto, namespaces, bubblewrap, docker, sandbox_fusion or piston",
  ),
  "namespaces": Backend(
    local.execute,
    local.execute_pair,
    "allow user namespaces (sysctl user.max_user_namespaces=10000, kernel.apparmor_restrict_unprivileged_userns=0; in a container, a "
    "seccomp profile that allows unshare and mount), or choose docker, sandbox_fusion or piston",
  ),
  "bubblewrap": Backend(
    local.execute, local.execute_pair, "install bubblewrap, allow it to make user namespaces, or choose docker"
  ),
  "docker": Backend(local.execute, local.execute_pair, "start the engine and pull the image, or choose namespaces", ("image",)),
  "sandbox_fusion": Backend(services.execute, None, "start the service and give its address in url", ("url",)),
  "piston": Backend(services.execute, None, "start the service and give its address in url", ("url",)),
  "unsafe": Backend(local.execute, local.execute_pair, "find out why a plain process cannot be started"),
}
"""Back ends by name.

`unsafe` is a plain process with limits. It can read and write everything that you can, so it is
only for programs that you trust.
"""

_CONFINED = ("namespaces", "bubblewrap", "docker")
# In this order, since only `namespaces` limits the number of processes if this process is root.
_AUTOMATIC = ("namespaces", "bubblewrap")

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
    ValueError: If there is no such back end.

  Example:
    >>> execute(Program("print(6 * 7)"), Sandbox("off")).cause
    'running programs is switched off'
  """
  return backend_of(sandbox).execute(program, sandbox)


def backend_of(sandbox: Sandbox) -> Backend:
  """Returns the back end of a sandbox.

  Raises:
    ValueError: If there is no back end of that name. One line.
  """
  if sandbox.backend not in BACKENDS:
    names = ["auto", *BACKENDS]
    hint = did_you_mean(sandbox.backend, names)
    raise ValueError(f"sandbox: found the back end {sandbox.backend!r}, expected one of {', '.join(names)}{hint}")
  return BACKENDS[sandbox.backend]


def probe(sandbox: Sandbox) -> str | None:
  """Tests whether a sandbox works on this machine, with a program that looks around in it.

  Returns:
    None if the sandbox works, else the problem and the fix in one line.

  Raises:
    ValueError: If there is no such back end.

  Example:
    >>> probe(Sandbox("off"))
    "sandbox 'off': running programs is switched off; choose a back end: auto, ..."
  """
  backend, problem = backend_of(sandbox), ""
  client = {"bubblewrap": "bwrap", "docker": sandbox.docker}.get(sandbox.backend)
  if sandbox.backend in ("sandbox_fusion", "piston") and not sandbox.url.startswith(("http://", "https://")):
    problem = f"found url {sandbox.url!r}, expected http://... or https://..."
  elif client is not None and shutil.which(client) is None:
    problem = f"the command {client} is not installed"
  else:
    with socket.socket() as listener:
      listener.bind(("127.0.0.1", 0))
      listener.listen()
      result = backend.execute(Program(_PROBE.replace("PORT", str(listener.getsockname()[1]))), sandbox)
    printed = result.stdout.split("\n")
    if result.status == "refused":
      problem = result.cause or "refused"
    elif "it runs" not in printed:
      problem = f"a program that prints a line printed {result.stdout[:80]!r} ({result.cause}) {result.stderr[-120:]}"
    elif "it reaches the network" in printed and sandbox.backend in _CONFINED:
      problem = "a program inside reached the network outside"
  return f"sandbox {sandbox.backend!r}: {' '.join(problem.split())}; {backend.fix}" if problem else None


def choose(sandbox: Sandbox) -> Sandbox:
  """Returns a sandbox with a back end that works on this machine.

  With `auto` it is the first that works, otherwise the named one.

  Raises:
    ValueError: If there is no such back end, or none of those tried works. One line, with the fix.
  """
  reasons = []
  for name in _AUTOMATIC if sandbox.backend == "auto" else (sandbox.backend,):
    reason = probe(chosen := sandbox._replace(backend=name))
    if reason is None:
      return chosen
    reasons.append(reason)
  raise ValueError("; ".join(reasons))
