"""Evidence that a study's rules are older than its run.

It is commit, hash of the rules and time, taken at its start.
"""

import datetime
import hashlib
import json
import os
import pathlib
import subprocess
from types import ModuleType

ROOT = pathlib.Path(__file__).parents[1]


def record(rules: ModuleType, *also: pathlib.Path) -> dict:
  """Returns the state of the code at the start of a run.

  Args:
    rules: The module that judges the run.
    *also: Further files that have to be older than it.

  Returns:
    `commit`, the checked-out commit, "" outside of a repository; `changed`, whether tracked files
    differ from it; `rules`, the SHA-256 of the module's file; `also`, those of further files by
    path; `started`, the time in UTC; `cores`, how many there are.
  """
  status = _git("status", "--porcelain", "--untracked-files=no")
  return {
    "commit": _git("rev-parse", "HEAD") or "",
    "changed": bool(status) if status is not None else None,
    "rules": hash_of(pathlib.Path(rules.__file__).read_bytes()),
    "also": {path.relative_to(ROOT).as_posix(): hash_of(path.read_bytes()) for path in also},
    "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
  }


def begin(path: pathlib.Path, rules: ModuleType, *also: pathlib.Path) -> dict:
  """Returns what was recorded when a study was first started.

  The first call writes it to a file, and the others read it.

  Args:
    path: File of the record.
    rules: The module that judges the study.
    *also: Further files that have to stay as they are.

  Raises:
    SystemExit: If rules or files have changed between the trials that are done and those to come.
  """
  now = record(rules, *also)
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(now))
  recorded = json.loads(path.read_text())
  changed = [name for name, digest in now["also"].items() if recorded.get("also", {}).get(name) != digest]
  if recorded["rules"] != now["rules"]:
    changed.append(pathlib.Path(rules.__file__).relative_to(ROOT).as_posix())
  if changed:
    raise SystemExit(
      f"error: {', '.join(changed)}: changed since the study was started at {recorded['started']}; take the change back, or begin anew "
      f"without {path} and the trials beside it"
    )
  return recorded


def hash_of(data: bytes) -> str:
  """Returns SHA-256 in hexadecimal."""
  return hashlib.sha256(data).hexdigest()


def doubt(recorded: dict, rules: pathlib.Path) -> str | None:
  """Returns why a record does not show that the rules are older than the run.

  Args:
    recorded: What `record` returned at the start of the run.
    rules: File of the rules, today's path.

  Returns:
    "" if the commit holds these very rules and is older than the run; the reason if not; None where
    the history cannot be read.
  """
  if not recorded.get("commit"):
    return "no commit was recorded"
  if recorded["changed"]:
    return "tracked files differed from the commit"
  time = _git("show", "--no-patch", "--format=%cI", recorded["commit"])
  if time is None:
    return None
  for path, expected in {rules.relative_to(ROOT).as_posix(): recorded["rules"], **recorded.get("also", {})}.items():
    text = _git("show", f"{recorded['commit']}:{path}", strip=False)
    if text is None or hash_of(text.encode()) != expected:
      return f"the commit holds another {path}"
  if datetime.datetime.fromisoformat(time) > datetime.datetime.fromisoformat(recorded["started"]):
    return "the commit is younger than the run"
  return ""


def _git(*words: str, strip: bool = True) -> str | None:
  """Returns what git prints; None where it cannot."""
  try:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
  except OSError:
    return None
  return None if done.returncode else done.stdout.strip() if strip else done.stdout
