"""What runs in a sandbox, under which limits, and what came of it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

MAIN = "main.py"
"""The name that a program's source has in its working directory."""


class Program(NamedTuple):
  """A Python program and what it is given.

  Attributes:
    source: its text.
    stdin: what it reads.
    files: further texts in its working directory, by relative path.
    argv: arguments after its name.
  """

  source: str
  stdin: str = ""
  files: Mapping[str, str] = MappingProxyType({})
  argv: tuple[str, ...] = ()


class Limits(NamedTuple):
  """What one program may take.

  Attributes:
    timeout_s: wall time from its start, in seconds; the time that a back end takes to set up is not part of it.
    memory_gb: address space of each of its processes, in GiB.
    file_kb: size of each file that it writes, in KiB; its standard output and its standard error count as files.
    disk_mb: all that it writes in its folder, in MiB.
    processes: that live at once, threads counted.
  """

  timeout_s: float = 10.0
  memory_gb: float = 1.0
  file_kb: int = 4096
  disk_mb: int = 64
  processes: int = 32


class Execution(NamedTuple):
  """How a run went.

  Attributes:
    status: `finished` where the program ended with exit code 0; `failed` where it did not, which is its own fault; `refused` where it was
      not run, or nobody knows how it ended, which says nothing about the program.
    stdout: what it printed, up to the limit; bytes that are no UTF-8 are replaced.
    stderr: likewise.
    exit_code: None where it did not exit by itself; minus the signal's number where a signal ended it.
    seconds: wall time of the program alone.
    cause: why it failed: `exit`, `signal`, `timeout`, `output` (a file grew beyond its limit), `memory` (by what it printed last); where it
      was refused, the reason in one line. None for a program that finished.
  """

  status: str
  stdout: str = ""
  stderr: str = ""
  exit_code: int | None = None
  seconds: float = 0.0
  cause: str | None = None


class Sandbox(NamedTuple):
  """A way to run untrusted programs, with its limits.

  Attributes:
    backend: a key of `BACKENDS`.
    limits: of each program.
    image: of the container; `docker` alone reads it.
    url: of the service; `sandbox_fusion` and `piston` alone read it.
    docker: the command that runs containers, such as `podman`.
  """

  backend: str = "off"
  limits: Limits = Limits()
  image: str = "python:3.12-slim"
  url: str = ""
  docker: str = "docker"


class Refused(RuntimeError):
  """A sandbox could not run a program; nothing is known about the program."""
