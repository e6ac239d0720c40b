"""Execution of a program in a service over HTTP: SandboxFusion or Piston."""

import base64
import json
import time
import urllib.error
import urllib.request
from typing import Any

from jaxrl_llm.rewards.sandbox.program import MAIN, Execution, Program, Sandbox

_MAX_ANSWER_BYTES = 16 << 20  # Besides the output, which JSON may escape.
_TRIES = 3
_FIRST_WAIT_SECONDS = 0.5
_SECONDS_BEYOND = 30.0  # Time for the queue of the service and for the network.


class _Unusable(Exception):
  """Error of a service whose answer says nothing about the program."""


def execute(program: Program, sandbox: Sandbox) -> Execution:
  """Runs a program in the service of a sandbox.

  The `url` of the sandbox has no path. The execution is refused if the service does not run the
  program.
  """
  try:
    return {"sandbox_fusion": _sandbox_fusion, "piston": _piston}[sandbox.backend](program, sandbox)
  except _Unusable as error:
    return Execution("refused", cause=f"{sandbox.backend}: {error}")


def _post(sandbox: Sandbox, path: str, body: dict[str, Any]) -> dict[str, Any]:
  """Sends a request and returns the JSON of the answer; retries if the service is busy or down."""
  url, timeout_s = f"{sandbox.url.rstrip('/')}{path}", sandbox.limits.timeout_s + _SECONDS_BEYOND
  request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
  most = _MAX_ANSWER_BYTES + (sandbox.limits.file_kb << 12)
  for left in reversed(range(_TRIES)):
    try:
      with urllib.request.urlopen(request, timeout=timeout_s) as response:
        data = response.read(most + 1)
      answer = json.loads(data) if len(data) <= most else None
      if not isinstance(answer, dict):
        raise _Unusable(f"{url} answered with no JSON object of at most {most} bytes")
      return answer
    except urllib.error.HTTPError as error:
      if error.code < 500 and error.code != 429:
        raise _Unusable(f"{url} answered HTTP {error.code} {error.reason}") from None
      reason = f"HTTP {error.code} {error.reason}"
    except (OSError, ValueError) as error:
      reason = f"{type(error).__name__}: {error}"
    if left:
      time.sleep(_FIRST_WAIT_SECONDS * 2 ** (_TRIES - 1 - left))
  raise _Unusable(f"{url} does not answer: {reason}")


def _ended(sandbox: Sandbox, run: dict[str, Any], code: Any, seconds: Any, *, overdue: bool) -> Execution:
  limit, signal = sandbox.limits.file_kb << 10, run.get("signal")
  stdout, stderr, seconds = str(run.get("stdout") or ""), str(run.get("stderr") or ""), float(seconds or 0.0)
  exceeds = max(len(stdout), len(stderr)) >= limit
  stdout, stderr = stdout[:limit], stderr[:limit]
  if code == 0 and not (overdue or signal or exceeds):
    return Execution("finished", stdout, stderr, 0, seconds)
  cause = "output" if exceeds else "timeout" if overdue else "signal" if signal else "exit"
  return Execution("failed", stdout, stderr, code if isinstance(code, int) else None, seconds, cause)


def _sandbox_fusion(program: Program, sandbox: Sandbox) -> Execution:
  if program.argv:
    raise _Unusable("found command-line arguments, expected none: this service cannot pass them on")
  files = {name: base64.b64encode(text.encode("utf-8", "surrogatepass")).decode() for name, text in program.files.items()}
  body = dict(code=program.source, stdin=program.stdin, language="python", run_timeout=sandbox.limits.timeout_s, files=files)
  body["memory_limit_MB"] = int(sandbox.limits.memory_gb * 1024)
  answer = _post(sandbox, "/run_code", body)
  run = answer.get("run_result")
  if answer.get("status") not in ("Success", "Failed") or not isinstance(run, dict):
    raise _Unusable(f"{answer.get('status')}: {str(answer.get('message'))[:200]}")
  if run.get("status") not in ("Finished", "TimeLimitExceeded"):
    raise _Unusable(f"the run has the status {str(run.get('status'))[:80]}")
  return _ended(sandbox, run, run.get("return_code"), run.get("execution_time"), overdue=run["status"] == "TimeLimitExceeded")


def _piston(program: Program, sandbox: Sandbox) -> Execution:
  body = dict(
    language="python",
    version="*",
    files=[dict(name=name, content=text) for name, text in {MAIN: program.source, **program.files}.items()],
    stdin=program.stdin,
    args=list(program.argv),
    run_timeout=int(1000 * sandbox.limits.timeout_s),
    run_memory_limit=int(sandbox.limits.memory_gb * 2**30),
  )
  answer = _post(sandbox, "/api/v2/execute", body)
  run = answer.get("run")
  if not isinstance(run, dict):
    raise _Unusable(str(answer.get("message"))[:200])
  if run.get("status") == "XX":  # An error of the service itself, according to its documentation.
    raise _Unusable(str(run.get("message"))[:200])
  # Older versions report a timeout only by the signal.
  overdue = run.get("status") == "TO" or (run.get("status") is None and run.get("signal") == "SIGKILL")
  return _ended(sandbox, run, run.get("code"), (run.get("wall_time") or 0) / 1000, overdue=overdue)
