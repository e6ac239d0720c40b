"""Evidence that a study's rules are older than its run: commit, hash of the rules, and time."""

import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import subprocess
from types import ModuleType

ROOT = pathlib.Path(__file__).parents[1]


def record(rules: ModuleType, *also: pathlib.Path) -> dict:
  """Records the state of the code at the start of a run.

  Args:
    rules: Module that judges the run.
    *also: Further files that must be older than the run.

  Returns:
    `commit`, the checked-out commit ("" outside of a repository); `changed`, whether tracked files
    differ from it (None if git cannot tell); `rules`, the SHA-256 of the module's file; `also`, the
    SHA-256 of each further file, by path; `started`, the time in UTC; `cores`, the number of
    processor cores available; `processor`, its name.
  """
  status = _git("status", "--porcelain", "--untracked-files=no")
  return {
    "commit": _git("rev-parse", "HEAD") or "",
    "changed": bool(status) if status is not None else None,
    "rules": hash_of(pathlib.Path(rules.__file__).read_bytes()),
    "also": {path.relative_to(ROOT).as_posix(): hash_of(path.read_bytes()) for path in also},
    "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    "processor": processor(),
  }


def processor() -> str:
  """Returns the name of the processor, "" if it is unknown."""
  with contextlib.suppress(OSError):
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
      if line.startswith("model name"):
        return line.partition(":")[2].strip()
  return ""


def begin(path: pathlib.Path, rules: ModuleType, *also: pathlib.Path) -> dict:
  """Returns the record of a study's first start.

  The first call writes the record to a file. Later calls read it.

  Args:
    path: File of the record.
    rules: Module that judges the study.
    *also: Further files that must not change during the study.

  Raises:
    SystemExit: If the rules or a file have changed since the study was started.
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
      f"error: {', '.join(changed)}: changed since the study was started at {recorded['started']}; revert the change, or remove "
      f"{path} and the trials beside it to start over"
    )
  return recorded


def hash_of(data: bytes) -> str:
  """Returns the SHA-256 of some bytes in hexadecimal."""
  return hashlib.sha256(data).hexdigest()


def doubt(recorded: dict, rules: pathlib.Path) -> str | None:
  """Explains why a record does not show that the rules are older than the run.

  Args:
    recorded: Record that `record` made at the start of the run.
    rules: Current path of the file of the rules.

  Returns:
    "" if the commit contains exactly these rules and is older than the run; otherwise the reason;
    None if the history cannot be read.
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
      return f"the commit contains a different {path}"
  if datetime.datetime.fromisoformat(time) > datetime.datetime.fromisoformat(recorded["started"]):
    return "the commit is newer than the run"
  return ""


def _git(*words: str, strip: bool = True) -> str | None:
  """Runs git and returns its output; None if it fails or is not installed."""
  try:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
  except OSError:
    return None
  return None if done.returncode else done.stdout.strip() if strip else done.stdout
