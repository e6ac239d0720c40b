"""Running a program in a container: `docker run`, or the same of podman."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

from jaxrl_llm.rewards.sandbox import launcher
from jaxrl_llm.rewards.sandbox.program import MAIN, Program, Sandbox

_NOBODY = "65534:65534"
_KILL_SECONDS = 30.0


def command(program: Program, sandbox: Sandbox, *, name: str, folder: str, id_file: str) -> list[str]:
  """The command line of one run.

  Args:
    program: to run.
    sandbox: whose image and limits are taken.
    name: of the container, to kill it by.
    folder: on this machine, which holds the program's files; read-only inside, where `/tmp` is the only place to write to.
    id_file: is written by docker once there is a container.
  """
  limits = sandbox.limits
  memory = f"{int(limits.memory_gb * 1024)}m"
  return [
    shutil.which(sandbox.docker) or sandbox.docker, "run", "--rm", "--interactive", "--name", name, "--cidfile", id_file,
    "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", f"--user={_NOBODY}", "--init",
    f"--memory={memory}", f"--memory-swap={memory}", f"--pids-limit={limits.processes}", "--cpus=1", "--ulimit=core=0",
    f"--ulimit=fsize={limits.file_kb << 10}", f"--ulimit=cpu={int(limits.timeout_s) + 2}",
    f"--tmpfs=/tmp:rw,nosuid,nodev,size={limits.disk_mb}m", "--env=HOME=/tmp", f"--volume={folder}:{launcher.HOME}:ro",
    f"--workdir={launcher.HOME}", "--log-driver=none", sandbox.image, "python", "-I", MAIN, *program.argv,
  ]  # fmt: skip


def prepare(program: Program, sandbox: Sandbox) -> tuple[dict[str, Any], Callable[[bool], str]]:
  """What the launcher is told, and what is to be called afterwards.

  Args:
    program: to run.
    sandbox: whose image and limits are taken.

  Returns:
    The launcher's spec; and a function that is told whether the client ended by itself, tidies up, and says why there never was a
    container, if so.
  """
  folder = tempfile.mkdtemp(prefix="sandbox_")
  os.mkdir(files := os.path.join(folder, "files"))
  for path in (folder, files):  # For nobody, inside.
    os.chmod(path, 0o755)
  name, id_file = f"sandbox-{uuid.uuid4().hex}", os.path.join(folder, "id")
  argv = command(program, sandbox, name=name, folder=files, id_file=id_file)
  # The client is ours; its output is limited all the same.
  limits = dict(CORE=0, FSIZE=sandbox.limits.file_kb << 10)
  spec = dict(argv=argv, env=dict(os.environ), files={**program.files, MAIN: program.source}, home=files, limits=limits)

  def tidy(ended: bool) -> str:
    existed = os.path.exists(id_file)
    if not ended:  # Ending the client does not end the container.
      with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([argv[0], "kill", name], stdin=subprocess.DEVNULL, capture_output=True, timeout=_KILL_SECONDS, check=False)
    shutil.rmtree(folder, ignore_errors=True)
    return "" if existed or not ended else f"{sandbox.docker} made no container"  # A program's own exit code 125 proves nothing.

  return spec, tidy
