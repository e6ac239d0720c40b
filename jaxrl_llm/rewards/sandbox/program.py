"""Programs for sandboxes, their limits, and the outcome of their execution."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

MAIN = "main.py"
"""Name of a program's source in its working directory."""

STACK_BYTES = 64 << 20
"""Stack of a program: some 1 kB of C for each frame of Python at the depth that judges allow."""


class Program(NamedTuple):
  """A Python program and its input.

  Attributes:
    source: Source of the program.
    stdin: Text on the standard input.
    files: Texts of further files in the working directory, by relative path.
    argv: Command-line arguments after the name of the program.
  """

  source: str
  stdin: str = ""
  files: Mapping[str, str] = MappingProxyType({})
  argv: tuple[str, ...] = ()


class Judge(NamedTuple):
  """What a judge gives to each program; the defaults are those of LiveCodeBench's.

  Attributes:
    imports: Whether a program has the names that the judge imports (`prelude.IMPORTS`). Programs
      that complete a prompt, as in HumanEval, have the imports of the prompt alone.
    recursion_limit: Largest number of frames of the stack, as for `sys.setrecursionlimit`.
  """

  imports: bool = True
  recursion_limit: int = 50_000


class SandboxLimits(NamedTuple):
  """Resource limits of one program.

  Attributes:
    timeout_s: Wall time from the start of the program, in seconds. The set-up time of a back end
      does not count.
    memory_gb: Address space of each process of the program, in GiB.
    file_kb: Size of each file that the program writes, in KiB. Standard output and standard error
      count as files. Tests raise it to twice the size of the expected output.
    disk_mb: Total size of the files in the working directory, in MiB.
    processes: Number of processes and threads at any one time.
  """

  timeout_s: float = 10.0
  memory_gb: float = 1.0
  file_kb: int = 4096
  disk_mb: int = 64
  processes: int = 32


class Execution(NamedTuple):
  """The outcome of running a program.

  Attributes:
    status: `finished` if the program ended with exit code 0. `failed` if it did not, which is the
      program's own fault. `refused` if it was not run, or its end is unknown, which says nothing
      about the program.
    stdout: Standard output up to the limit, with invalid UTF-8 replaced.
    stderr: Standard error up to the limit, with invalid UTF-8 replaced.
    exit_code: Exit code, or minus the number of the signal that ended the program. None if it did
      not end by itself.
    seconds: Wall time of the program alone, in seconds.
    cause: Cause of the failure: `exit`, `signal`, `timeout`, `output` (a file exceeded its limit)
      or `memory` (recognised by the last line of the standard error). The reason in one line if the
      program was refused. None if it finished.
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
    backend: Key of `BACKENDS`.
    limits: Limits of each program.
    image: Image of the container; only for `docker`.
    url: Address of the service; only for `sandbox_fusion` and `piston`.
    docker: Command that runs containers, such as `podman`.
  """

  backend: str = "off"
  limits: SandboxLimits = SandboxLimits()
  image: str = "python:3.12-slim"
  url: str = ""
  docker: str = "docker"


class ProgramRefused(RuntimeError):
  """Error of a sandbox that could not run a program, so that nothing is known about the program."""
