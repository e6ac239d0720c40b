"""Execution of a program in a container, with `docker run` or its equivalent in podman."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

from jaxrl_llm.rewards.sandbox import launcher
from jaxrl_llm.rewards.sandbox.program import MAIN, STACK_BYTES, Program, Sandbox

_USER_AND_GROUP = "65534:65534"
_KILL_SECONDS = 30.0


def prepare_container(program: Program, sandbox: Sandbox) -> tuple[dict[str, Any], Callable[[bool], str]]:
  """Prepares the command line and the files of a container.

  Returns:
    The launcher's spec, and a function `(ended) -> error` that cleans up. Its argument says whether
    the client ended by itself. Its result is empty unless the client ended without creating a
    container.
  """
  limits = sandbox.limits
  folder = tempfile.mkdtemp(prefix="sandbox_")
  os.mkdir(files := os.path.join(folder, "files"))
  for path in (folder, files):  # Readable for the unprivileged user in the container.
    os.chmod(path, 0o755)
  # The client writes the id file as soon as the container exists.
  name, id_file = f"sandbox-{uuid.uuid4().hex}", os.path.join(folder, "id")
  memory, file_bytes = f"{int(limits.memory_gb * 1024)}m", limits.file_kb << 10
  argv = [
    shutil.which(sandbox.docker) or sandbox.docker, "run", "--rm", "--interactive", "--name", name, "--cidfile", id_file,
    "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges",
    f"--user={_USER_AND_GROUP}", "--init",
    f"--memory={memory}", f"--memory-swap={memory}", f"--pids-limit={limits.processes}", "--cpus=1", "--ulimit=core=0",
    f"--ulimit=fsize={file_bytes}", f"--ulimit=cpu={int(limits.timeout_s) + 2}", f"--ulimit=stack={STACK_BYTES}",
    f"--tmpfs=/tmp:rw,nosuid,nodev,size={limits.disk_mb}m", "--env=HOME=/tmp", f"--volume={files}:{launcher.HOME}:ro",
    f"--workdir={launcher.HOME}", "--log-driver=none", sandbox.image, "python", "-I", MAIN, *program.argv,
  ]  # fmt: skip
  # The client is trusted, but its output is limited as well.
  bounds, texts = dict(CORE=0, FSIZE=file_bytes), {**program.files, MAIN: program.source}
  spec = dict(argv=argv, env=dict(os.environ), files=texts, home=files, limits=bounds)

  def clean_up(ended: bool) -> str:
    existed = os.path.exists(id_file)
    if not ended:  # Ending the client does not end the container.
      with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([argv[0], "kill", name], stdin=subprocess.DEVNULL, capture_output=True, timeout=_KILL_SECONDS, check=False)
    shutil.rmtree(folder, ignore_errors=True)
    # The exit code 125 proves nothing, since a program may also return it.
    return "" if existed or not ended else f"{sandbox.docker} created no container"

  return spec, clean_up
