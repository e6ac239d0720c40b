"""Whether the process that writes to a run's folder is alive, without touching its lock."""

import os
import re
import socket
from pathlib import Path


def is_alive(workdir: Path) -> bool | None:
  """Returns whether the process that `claim.lock` has noted in a folder still runs.

  The lock itself is not tried: a reader that held it for an instant could keep a run from starting.

  Returns:
    None if the folder names no process, or one of another machine.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> is_alive(folder) is None
    True
    >>> _ = (folder / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}")
    >>> is_alive(folder)
    True
  """
  try:
    noted = re.fullmatch(r"process (\d+) on (.+)", (workdir / ".lock").read_text().strip())
  except (OSError, ValueError):
    return None
  if noted is None or noted[2] != socket.gethostname():
    return None
  try:
    os.kill(int(noted[1]), 0)
  except ProcessLookupError:
    return False
  except (OSError, OverflowError):  # Alive, and another user's; or no number of a process.
    return True
  return stat_of(int(noted[1]))[:1] != ["Z"]  # A zombie has ended, and waits for its parent.


def stat_of(process: int) -> list[str]:
  """Returns the fields of a process behind its name: state, parent, ... (Linux); none if unknown.

  Example:
    >>> stat_of(os.getpid())[:1] in (["R"], ["S"], [])
    True
  """
  try:
    # The name stands in brackets, and may hold spaces.
    return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
  except OSError:
    return []
