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


def prepare(program: Program, sandbox: Sandbox) -> tuple[dict[str, Any], Callable[[bool], str]]:
  """What the launcher is told, and what is to be called afterwards.

  Returns:
    The launcher's spec; and a function that is told whether the client ended by itself, tidies up, and says why there never was a
    container, if so.
  """
  limits = sandbox.limits
  folder = tempfile.mkdtemp(prefix="sandbox_")
  os.mkdir(files := os.path.join(folder, "files"))
  for path in (folder, files):  # For nobody, inside.
    os.chmod(path, 0o755)
  name, id_file = f"sandbox-{uuid.uuid4().hex}", os.path.join(folder, "id")  # The id is written once there is a container.
  memory, file_bytes = f"{int(limits.memory_gb * 1024)}m", limits.file_kb << 10
  argv = [
    shutil.which(sandbox.docker) or sandbox.docker, "run", "--rm", "--interactive", "--name", name, "--cidfile", id_file,
    "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", f"--user={_NOBODY}", "--init",
    f"--memory={memory}", f"--memory-swap={memory}", f"--pids-limit={limits.processes}", "--cpus=1", "--ulimit=core=0",
    f"--ulimit=fsize={file_bytes}", f"--ulimit=cpu={int(limits.timeout_s) + 2}",
    f"--tmpfs=/tmp:rw,nosuid,nodev,size={limits.disk_mb}m", "--env=HOME=/tmp", f"--volume={files}:{launcher.HOME}:ro",
    f"--workdir={launcher.HOME}", "--log-driver=none", sandbox.image, "python", "-I", MAIN, *program.argv,
  ]  # fmt: skip
  # The client is ours; its output is limited all the same.
  bounds, texts = dict(CORE=0, FSIZE=file_bytes), {**program.files, MAIN: program.source}
  spec = dict(argv=argv, env=dict(os.environ), files=texts, home=files, limits=bounds)

  def tidy(ended: bool) -> str:
    existed = os.path.exists(id_file)
    if not ended:  # Ending the client does not end the container.
      with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([argv[0], "kill", name], stdin=subprocess.DEVNULL, capture_output=True, timeout=_KILL_SECONDS, check=False)
    shutil.rmtree(folder, ignore_errors=True)
    return "" if existed or not ended else f"{sandbox.docker} made no container"  # A program's own exit code 125 proves nothing.

  return spec, tidy
