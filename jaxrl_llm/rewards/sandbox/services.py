"""Running a program elsewhere: over HTTP, in SandboxFusion or in Piston."""

import base64
import json
import time
import urllib.error
import urllib.request
from typing import Any

from jaxrl_llm.rewards.sandbox.program import MAIN, Execution, Program, Sandbox

_MAX_ANSWER_BYTES = 16 << 20
_TRIES = 3
_FIRST_WAIT_SECONDS = 0.5
_SECONDS_BEYOND = 30.0  # For the service's queue and the way there.


class _Unusable(Exception):
  pass


def _post(url: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
  """The answer's JSON; tries again where the service is busy or away."""
  request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
  for left in reversed(range(_TRIES)):
    try:
      with urllib.request.urlopen(request, timeout=timeout_s) as response:
        data = response.read(_MAX_ANSWER_BYTES + 1)
      answer = json.loads(data) if len(data) <= _MAX_ANSWER_BYTES else None
      if not isinstance(answer, dict):
        raise _Unusable(f"{url} answered with something that is no JSON object of at most {_MAX_ANSWER_BYTES} bytes")
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


def _ended(sandbox: Sandbox, stdout: Any, stderr: Any, code: Any, seconds: Any, *, overdue: bool, signal: Any = None) -> Execution:
  limit = sandbox.limits.file_kb << 10
  stdout, stderr, seconds = str(stdout or ""), str(stderr or ""), float(seconds or 0.0)
  grown = max(len(stdout), len(stderr)) >= limit
  stdout, stderr = stdout[:limit], stderr[:limit]
  if code == 0 and not (overdue or signal or grown):
    return Execution("finished", stdout, stderr, 0, seconds)
  cause = "output" if grown else "timeout" if overdue else "signal" if signal else "exit"
  return Execution("failed", stdout, stderr, code if isinstance(code, int) else None, seconds, cause)


def sandbox_fusion(program: Program, sandbox: Sandbox) -> Execution:
  """Runs a program in SandboxFusion: POST `/run_code`.

  Args:
    program: to run; without arguments, which that service does not know.
    sandbox: whose `url` is the service's, without a path.

  Returns:
    How it went.
  """
  files = {name: base64.b64encode(text.encode("utf-8", "surrogatepass")).decode() for name, text in program.files.items()}
  body = dict(code=program.source, stdin=program.stdin, language="python", run_timeout=sandbox.limits.timeout_s, files=files)
  body["memory_limit_MB"] = int(sandbox.limits.memory_gb * 1024)
  if program.argv:
    return Execution("refused", cause="sandbox_fusion: found arguments, which this service cannot pass on")
  try:
    answer = _post(f"{sandbox.url.rstrip('/')}/run_code", body, timeout_s=sandbox.limits.timeout_s + _SECONDS_BEYOND)
  except _Unusable as error:
    return Execution("refused", cause=f"sandbox_fusion: {error}")
  run = answer.get("run_result")
  if answer.get("status") not in ("Success", "Failed") or not isinstance(run, dict):
    return Execution("refused", cause=f"sandbox_fusion: {answer.get('status')}: {str(answer.get('message'))[:200]}")
  if run.get("status") not in ("Finished", "TimeLimitExceeded"):
    return Execution("refused", cause=f"sandbox_fusion: the run is {str(run.get('status'))[:80]}")
  overdue = run["status"] == "TimeLimitExceeded"
  return _ended(sandbox, run.get("stdout"), run.get("stderr"), run.get("return_code"), run.get("execution_time"), overdue=overdue)


def piston(program: Program, sandbox: Sandbox) -> Execution:
  """Runs a program in Piston: POST `/api/v2/execute`.

  Args:
    program: to run.
    sandbox: whose `url` is the service's, without a path.

  Returns:
    How it went.
  """
  limits = sandbox.limits
  body = dict(
    language="python",
    version="*",
    files=[dict(name=name, content=text) for name, text in {MAIN: program.source, **program.files}.items()],
    stdin=program.stdin,
    args=list(program.argv),
    run_timeout=int(1000 * limits.timeout_s),
    run_memory_limit=int(limits.memory_gb * 2**30),
  )
  try:
    answer = _post(f"{sandbox.url.rstrip('/')}/api/v2/execute", body, timeout_s=limits.timeout_s + _SECONDS_BEYOND)
  except _Unusable as error:
    return Execution("refused", cause=f"piston: {error}")
  run = answer.get("run")
  if not isinstance(run, dict):
    return Execution("refused", cause=f"piston: {str(answer.get('message'))[:200]}")
  if run.get("status") == "XX":  # Its own trouble, by its documentation.
    return Execution("refused", cause=f"piston: {str(run.get('message'))[:200]}")
  # Older versions say no more of a timeout than the signal.
  seconds = (run.get("wall_time") or 0) / 1000
  overdue = run.get("status") == "TO" or (run.get("status") is None and run.get("signal") == "SIGKILL")
  return _ended(sandbox, run.get("stdout"), run.get("stderr"), run.get("code"), seconds, overdue=overdue, signal=run.get("signal"))
