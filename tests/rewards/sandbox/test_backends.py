"""Back ends and their choice, with a service on this machine and a script as container engine."""

import base64
import json
import os
import sys

import pytest

from jaxrl_llm.rewards.sandbox import (
  BACKENDS,
  CallTests,
  Program,
  Sandbox,
  SandboxLimits,
  StdioTests,
  choose,
  execute,
  grade,
  local,
  probe,
  services,
)
from tests.rewards.processes import ps_lines
from tests.rewards.rubric.fake import Reply, serving

LIMITS = SandboxLimits(timeout_s=5.0)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
  monkeypatch.setattr(services, "_FIRST_WAIT_SECONDS", 0.0)


@pytest.fixture
def service():
  """Service that gives its `answers` in turn, and repeats the last one."""

  def reply(number, body):
    answer = endpoint.answers.pop(0) if len(endpoint.answers) > 1 else endpoint.answers[0]
    status, content = answer(body) if callable(answer) else answer
    return Reply(status=status, body=content if isinstance(content, bytes) else json.dumps(content).encode())

  with serving(reply) as endpoint:
    yield endpoint


def sandbox_at(service, backend):
  return Sandbox(backend, LIMITS, url=service.url.removesuffix("v1"))


def fusion(body):
  files = {name: base64.b64decode(data).decode() for name, data in body["files"].items()}
  ran = execute(Program(body["code"], body["stdin"], files), Sandbox("unsafe"))
  run = dict(status="Finished", execution_time=0.25, return_code=ran.exit_code, stdout=ran.stdout, stderr=ran.stderr)
  return 200, dict(status="Success" if ran.exit_code == 0 else "Failed", message="", compile_result=None, run_result=run)


def piston(body):
  main, *others = body["files"]
  ran = execute(Program(main["content"], body["stdin"], {each["name"]: each["content"] for each in others}), Sandbox("unsafe"))
  run = dict(stdout=ran.stdout, stderr=ran.stderr, output=ran.stdout + ran.stderr, code=ran.exit_code, signal=None)
  return 200, dict(language="python", version="3.12.0", run=run)


SERVICES = {"sandbox_fusion": fusion, "piston": piston}


@pytest.mark.parametrize("backend", SERVICES)
def test_a_service_runs_programs(service, backend):
  service.answers = [SERVICES[backend]]
  sandbox = sandbox_at(service, backend)
  assert probe(sandbox) is None and choose(sandbox) == sandbox
  execution = execute(Program("print(input() + open('note').read())", "in ", {"note": "é"}), sandbox)
  assert (execution.status, execution.stdout, execution.exit_code, execution.cause) == ("finished", "in é\n", 0, None)
  execution = execute(Program("print('so far'); raise SystemExit(3)"), sandbox)
  assert (execution.status, execution.stdout, execution.exit_code, execution.cause) == ("failed", "so far\n", 3, "exit")
  assert grade("print(2 * int(input()))", StdioTests([("1", "2"), ("2", "4")]), sandbox).passed == 2
  assert grade("def f(x): return 2 * x", CallTests("f", [([1], 2), ([2], 5)]), sandbox, stop_early=False).passed == 1


def test_requests_have_the_form_that_the_services_expect(service):
  service.answers = [(500, {})]
  program = Program("print(1)", "in", {"a": "b"})
  for backend in SERVICES:
    execute(program, sandbox_at(service, backend))
  assert (service.paths[0], service.paths[-1]) == ("/run_code", "/api/v2/execute")
  assert service.bodies[0] == dict(
    code="print(1)", language="python", stdin="in", run_timeout=5.0, memory_limit_MB=1024, files={"a": base64.b64encode(b"b").decode()}
  )
  assert service.bodies[-1] == dict(
    language="python", version="*", stdin="in", args=[], run_timeout=5000, run_memory_limit=2**30,
    files=[dict(name="main.py", content="print(1)"), dict(name="a", content="b")],
  )  # fmt: skip


RUN = dict(stdout="1\n", stderr="", code=0, signal=None)
ANSWERS = [
  ("sandbox_fusion", dict(status="Failed", run_result=dict(status="TimeLimitExceeded", stdout="", stderr="")), "failed", "timeout"),
  ("sandbox_fusion", dict(status="SandboxError", message="no room", run_result=None), "refused", "no room"),
  ("sandbox_fusion", dict(status="Success", run_result=dict(status="Error")), "refused", "Error"),
  ("sandbox_fusion", [], "refused", "no JSON object"),
  ("sandbox_fusion", b"<html>", "refused", "does not answer: JSONDecodeError"),
  ("piston", dict(run={**RUN, "code": None, "signal": "SIGKILL"}), "failed", "timeout"),
  ("piston", dict(run={**RUN, "code": None, "signal": "SIGKILL", "status": "TO"}), "failed", "timeout"),
  ("piston", dict(run={**RUN, "code": None, "signal": "SIGSEGV", "status": "SG"}), "failed", "signal"),
  ("piston", dict(run={**RUN, "status": "XX", "message": "no room"}), "refused", "no room"),
  ("piston", dict(run={**RUN, "stdout": "x" * (5 << 20)}), "failed", "output"),
  ("piston", dict(message="python-* runtime is unknown"), "refused", "runtime is unknown"),
]


@pytest.mark.parametrize(("backend", "answer", "status", "cause"), ANSWERS)
def test_answers_of_services_are_understood(service, backend, answer, status, cause):
  service.answers = [(200, answer)]
  execution = execute(Program("print(1)"), sandbox_at(service, backend))
  assert execution.status == status and cause in execution.cause, execution
  assert "\n" not in execution.cause and len(execution.stdout) <= LIMITS.file_kb << 10


def test_a_busy_service_is_asked_again(service):
  service.answers = [(503, {}), (429, {}), fusion]
  assert execute(Program("print(1)"), sandbox_at(service, "sandbox_fusion")).stdout == "1\n"
  assert len(service.bodies) == 3
  service.answers = [(400, {})]
  assert "HTTP 400" in execute(Program("print(1)"), sandbox_at(service, "sandbox_fusion")).cause
  assert len(service.bodies) == 4


def test_an_address_without_a_service():
  execution = execute(Program("print(1)"), Sandbox("piston", url="http://127.0.0.1:9"))
  assert execution.status == "refused" and "does not answer" in execution.cause


# An engine that runs programs without any isolation, and logs its command lines.
ENGINE = """#!{python}
import os, subprocess, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as file: print(arguments, file=file)
if arguments[0] == "kill": raise SystemExit(0)
if {broken!r}: print("docker: Cannot connect to the daemon", file=sys.stderr); raise SystemExit(125)
flags = [argument[2:] for argument in arguments if argument.startswith("--")]
options = dict(flag.partition("=")[::2] for flag in flags)
with open(arguments[arguments.index("--cidfile") + 1], "w") as file: file.write("id")
os.chdir(options["volume"].split(":")[0])
os.execv(sys.executable, [sys.executable, *arguments[arguments.index("python") + 1:]])
"""


def engine(tmp_path, *, broken=False):
  path, log = tmp_path / "engine", tmp_path / "log"
  path.write_text(ENGINE.format(python=sys.executable, log=str(log), broken=broken))
  path.chmod(0o755)
  return Sandbox("docker", LIMITS._replace(timeout_s=1.0), image="some/image:1", docker=str(path)), log


def test_the_command_line_of_docker_isolates_the_program(tmp_path):
  sandbox, log = engine(tmp_path)
  execution = execute(
    Program("import sys; print(input(), sys.argv[1:], open('a').read())", "in", {"a": "b"}, ("x y",)), sandbox
  )
  assert (execution.status, execution.stdout) == ("finished", "in ['x y'] b\n"), execution
  (command,) = (eval(line) for line in log.read_text().splitlines())
  assert command[0] == "run" and command[command.index("some/image:1") + 1 :] == ["python", "-I", "main.py", "x y"]
  for option in ("--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=65534:65534", "--init",
                 "--memory=1024m", "--memory-swap=1024m", "--pids-limit=32", "--rm", "--workdir=/sandbox"):  # fmt: skip
    assert option in command, option
  volumes = [option for option in command if option.startswith(("--volume", "-v", "--mount"))]
  assert len(volumes) == 1 and volumes[0].endswith(":/sandbox:ro")
  assert "--privileged" not in command and not any(option.startswith("--env=") and "HOME=/tmp" not in option for option in command)
  assert not os.path.exists(volumes[0].partition("=")[2].split(":")[0])


def test_failures_of_docker_are_distinguished_from_those_of_the_program(tmp_path, monkeypatch):
  monkeypatch.setattr(local, "_CONTAINER_SECONDS", 0.0)
  sandbox, log = engine(tmp_path)
  assert execute(Program("raise SystemExit(125)"), sandbox).status == "failed"
  assert execute(Program("while True: pass", argv=("looping-in-docker",)), sandbox).cause == "timeout"
  assert not [line for line in ps_lines("-o", "args=") if "main.py looping-in-docker" in line]
  assert any("kill" in line for line in log.read_text().splitlines())
  assert execute(Program("while True: print('x' * 100_000)"), sandbox).cause == "output"
  sandbox, _ = engine(tmp_path, broken=True)
  execution = execute(Program("print(1)"), sandbox)
  assert execution.status == "refused" and "Cannot connect to the daemon" in execution.cause
  assert "start the engine" in probe(sandbox)


@pytest.mark.parametrize(
  ("sandbox", "reason"),
  [
    (Sandbox("off"), "sandbox 'off': running programs is switched off; choose a back end"),
    (Sandbox("docker", docker="no-such-engine"), "the command no-such-engine is not installed; start the engine"),
    (Sandbox("piston"), "found url '', expected http://"),
    (Sandbox("sandbox_fusion", url="ftp://x"), "found url 'ftp://x', expected http://"),
  ],
)
def test_a_back_end_that_does_not_work_says_what_to_do(sandbox, reason):
  assert reason in probe(sandbox) and "\n" not in probe(sandbox)
  with pytest.raises(ValueError, match="sandbox"):
    choose(sandbox)


def test_denied_namespaces_name_the_fix(monkeypatch):
  """On a machine without namespaces, no other back end takes their place."""
  monkeypatch.setattr(local, "interpreter", lambda: "/bin/false")
  monkeypatch.setattr("jaxrl_llm.rewards.sandbox.backends.shutil.which", lambda name: None)
  assert "sysctl user.max_user_namespaces" in probe(Sandbox("namespaces"))
  with pytest.raises(ValueError, match="namespaces.*; sandbox 'bubblewrap': the command bwrap is not installed"):
    choose(Sandbox("auto"))


def test_an_unknown_back_end_is_refused():
  with pytest.raises(ValueError, match="found the back end 'namespace', expected one of auto, off, .*; did you mean 'namespaces'?"):
    choose(Sandbox("namespace"))


def test_every_back_end_has_a_fix():
  assert all(backend.fix for backend in BACKENDS.values())
