"""Pages that follow runs in progress: what the server answers, and what a real browser shows."""

import base64
import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from jaxrl_llm.report import live
from jaxrl_llm.report.__main__ import main
from jaxrl_llm.workdir import owner
from jaxrl_llm.workdir.metrics import MetricWriter
from tests.report.test_report import HOSTILE, make_run
from tests.runs import wait_for
from tests.serve.browser import HAS_CHROMIUM, browsing
from tests.serve.fake_engine import ask, port_of

in_a_browser = pytest.mark.skipif(not HAS_CHROMIUM, reason="needs chromium")
GONE = 2**22 - 3  # Number of a process that does not run.


@contextlib.contextmanager
def serving(*folders, host="127.0.0.1", api_key=None, **options):
  with live.make_server(live.Followed(folders, every_ms=100, **options), host=host, api_key=api_key) as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield SimpleNamespace(url=live.address(server).removesuffix("/"))
    server.shutdown()
    thread.join()


@pytest.fixture
def served(tmp_path):
  """A server that shows one run."""
  with serving(make_run(tmp_path)) as server:
    yield server


def data_of(server, path="/data"):
  status, _, body = ask(server, path)
  assert status == 200, body
  return json.loads(body)


def running(workdir, process=None, status="running"):
  """Makes the summary and the lock of a run that a process writes."""
  (workdir / "summary.json").write_text(json.dumps({"status": status}))
  (workdir / ".lock").write_text(f"process {process or os.getpid()} on {socket.gethostname()}")
  return workdir


def add_step(workdir, step):
  with MetricWriter(workdir, tensorboard=False) as writer:
    writer.write(step, "rl", {"critic/rewards/mean": step / 10, "actor/entropy": 0.3})


def test_new_rows_arrive_and_no_answer_repeats(tmp_path):
  running(make_run(tmp_path))
  with serving(tmp_path) as server:
    first = data_of(server)
    assert (first["kind"], first["header"]["status"], first["ended"]) == ("run", "running", False)
    assert first["phases"]["rl"]["step"][-1] == 6
    known = {"If-None-Match": first["version"]}
    status, _, body = ask(server, "/data", headers=known)
    assert (status, body) == (304, "")
    add_step(tmp_path, 7)
    status, _, body = ask(server, "/data", headers=known)
    assert status == 200 and json.loads(body)["phases"]["rl"]["step"][-1] == 7


@pytest.mark.parametrize("status, process, shown, ended", [
  ("running", None, "running", False),
  ("running", GONE, "died: its process is gone", True),
  ("finished", GONE, "finished", True),
  ("out of memory", GONE, "out of memory", True),
])  # fmt: skip
def test_the_state_of_a_run(tmp_path, status, process, shown, ended):
  running(make_run(tmp_path), process, status)
  with serving(tmp_path) as server:
    data = data_of(server)
    assert (data["header"]["status"], data["ended"]) == (shown, ended)
  with serving(tmp_path, compares=True) as server:
    run = data_of(server)["arms"][0]["runs"][0]
    assert run["status"] == {"running": "running, step 6 of 80", "finished": "finished"}.get(shown, f"{shown.split(':')[0]}, step 6 of 80")


@pytest.mark.parametrize("text", [f"process {GONE} on another-machine", "what?"])
def test_a_process_of_another_machine_is_unknown(tmp_path, text):
  (tmp_path / ".lock").write_text(text)
  assert owner.is_alive(tmp_path) is None


def test_a_run_that_was_killed_without_a_parent_that_waits_is_gone(tmp_path):
  child = subprocess.Popen([sys.executable, "-c", "pass"])
  os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # It has ended, and stays a zombie.
  (tmp_path / ".lock").write_text(f"process {child.pid} on {socket.gethostname()}")
  assert owner.is_alive(tmp_path) is False
  child.wait()


def test_a_folder_that_does_not_exist_yet_waits(tmp_path):
  with serving(tmp_path / "later") as server:
    data = data_of(server)
    assert (data["kind"], data["header"]["status"], data["ended"]) == ("nothing yet", "waiting: it does not exist yet", False)
    (tmp_path / "later").mkdir()
    assert data_of(server)["header"]["status"] == "waiting: no run in it yet"
    make_run(tmp_path / "later")
    assert data_of(server)["kind"] == "run"


def test_a_sweep_grows_and_its_runs_keep_their_addresses(tmp_path):
  make_run(tmp_path / "trial-1")
  with serving(tmp_path) as server:
    assert [run["report"] for arm in data_of(server)["arms"] for run in arm["runs"]] == ["runs/0/"]
    make_run(tmp_path / "trial-0")
    rows = [run for arm in data_of(server)["arms"] for run in arm["runs"]]
    assert {run["name"]: run["report"] for run in rows} == {"trial-1": "runs/0/", "trial-0": "runs/1/"}
    assert data_of(server, "/runs/1/data")["header"]["workdir"] == "trial-0"
    assert ask(server, "/runs/2/data")[0] == 404


def test_a_metric_that_no_run_has_yet_is_a_note(tmp_path):
  make_run(tmp_path / "a")
  with serving(tmp_path, metrics=("no/such",)) as server:
    assert any("no/such" in note for note in data_of(server)["notes"])


@pytest.mark.parametrize("path", [
  "/config.json", "/../config.json", "/runs/../data", "/runs/0", "/runs/-1/data", "/data/", "/data?x=/etc/passwd",
  "/%2e%2e/config.json", "/runs/0/../../data", "/runs/00000000000000000001/data", "http://127.0.0.1/data",
])  # fmt: skip
def test_only_fixed_addresses_are_answered(served, path):
  status, _, body = ask(served, path)
  assert status == 404 and "gspo" not in body


def test_only_reading_and_only_for_this_machine(served, tmp_path):
  port = port_of(served)
  assert ask(served, "/data", method="POST")[0] == 501
  for path in ("/", "/data", "/none"):
    status, headers, body = ask(served, path, method="HEAD")
    assert status == (404 if path == "/none" else 200) and int(headers["Content-Length"]) > 0 and body in ("", b"", None)
  for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "evil]", ""):
    assert ask(served, "/data", headers={"Host": host})[0] == 403, host
  for host in (f"localhost:{port}", "127.0.0.1", f"[::1]:{port}"):
    assert ask(served, "/data", headers={"Host": host})[0] == 200, host
  _, headers, body = ask(served, "/")
  assert "connect-src 'self'" in body and "default-src 'none'" in body and "unsafe" not in body
  assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
  assert not (tmp_path / "report.html").exists()


def raw(url, sent, *, family=socket.AF_INET):
  """Sends bytes and returns what the server sends until it ends the connection."""
  host, _, port = url.removeprefix("http://").rpartition(":")
  with socket.socket(family) as connection:
    connection.settimeout(20)
    connection.connect((host.strip("[]"), int(port)))
    connection.sendall(sent)
    parts = []
    while part := connection.recv(65536):
      parts.append(part)
    return b"".join(parts)


def data_request(host, *lines):
  return "\r\n".join(["GET /data HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode()


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_other_addresses_of_this_machine(tmp_path, host):
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  with serving(make_run(tmp_path), host=host) as server:
    own = server.url.removeprefix("http://")
    assert raw(server.url, data_request(own, "Connection: close"), family=family).startswith(b"HTTP/1.1 200 ")
    assert raw(server.url, data_request("evil.example", "Connection: close"), family=family).startswith(b"HTTP/1.1 403 ")


def test_others_need_the_key_as_a_password(tmp_path):
  run = make_run(tmp_path)
  with pytest.raises(ValueError, match="--host: found '0.0.0.0' without an API key"), serving(run, host="0.0.0.0"):
    raise AssertionError
  with serving(run, host="0.0.0.0", api_key="a key of sixteen") as server:
    for path in ("/", "/data", "/none"):
      for given in ({}, {"Authorization": "Basic eDp5"}, {"Authorization": "Bearer a key of sixtee"}, {"Authorization": "Basic %"}):
        status, headers, body = ask(server, path, headers=given)
        assert status == 401 and headers["WWW-Authenticate"].startswith("Basic ") and "gspo" not in body
    basic = "Basic " + base64.b64encode(b"anyone:a key of sixteen").decode()
    for given in (basic, "bearer a key of sixteen"):
      assert ask(server, "/data", headers={"Authorization": given, "Host": "my.machine"})[0] == 200


@pytest.mark.parametrize("body", ["Content-Length: 40", "Transfer-Encoding: chunked"])
def test_a_body_is_no_further_request(served, body):
  request = data_request("127.0.0.1", body) + data_request("127.0.0.1")
  answer = raw(served.url, request)
  assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in answer


def test_a_head_that_drips_is_cut(tmp_path, monkeypatch):
  monkeypatch.setattr(live, "_PATIENCE_S", 0.6)
  with serving(make_run(tmp_path)) as server, socket.create_connection(("127.0.0.1", port_of(server))) as connection:
    begun = time.monotonic()
    with contextlib.suppress(ConnectionError):
      for letter in data_request("127.0.0.1", "X-Long: " + "x" * 200):
        connection.sendall(bytes([letter]))
        time.sleep(0.05)
    assert time.monotonic() - begun < 8
    assert ask(server, "/data")[0] == 200


def test_connections_are_limited(tmp_path, monkeypatch):
  monkeypatch.setattr(live, "_MOST_CONNECTIONS", 2)
  with serving(make_run(tmp_path)) as server, contextlib.ExitStack() as stack:
    for _ in range(2):
      connection = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(server)), timeout=20))
      connection.sendall(data_request("127.0.0.1"))
      assert connection.recv(12) == b"HTTP/1.1 200"
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=20) as third:
      assert third.recv(1) == b""
    stack.close()
    wait_for(lambda: is_answered(server))


def is_answered(server):
  try:
    return ask(server, "/data")[0] == 200
  except (ConnectionError, http.client.HTTPException):
    return False


def test_damaged_files_are_one_line(served, monkeypatch):
  monkeypatch.setattr(live, "report_data", lambda workdir: 1 / 0)
  status, _, body = ask(served, "/data")
  assert status == 500 and "division" in body and "\n" not in body
  monkeypatch.undo()
  assert ask(served, "/data")[0] == 200


@pytest.mark.parametrize("words, expected", [
  (["metrics.jsonl", "--serve"], "metrics.jsonl: found a file, expected the folder"),
  (["--serve", "--figure=a.pdf"], "--figure: found with --serve"),
  (["--port=1"], "found no --serve"),
  (["--serve", "--host=192.0.2.1", "--port=0"], "--host: found '192.0.2.1' without an API key"),
  (["--serve", "--host=0.0.0.0", "--port=0"], "--host: found '0.0.0.0' without an API key"),
  (["--serve", "--host=0.0.0.0", "--api_key=short"], "--api_key: found 5 characters, expected 16 or more"),
  (["--serve", "--host=192.0.2.1", "--api_key=a key of sixteen"], "expected an address of this machine"),
  (["--api_key=x"], "found no --serve"),
  (["--serve", "--port=99999"], "a free port"),
])  # fmt: skip
def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch, words, expected):
  monkeypatch.chdir(make_run(tmp_path))
  assert main([".", *words]) == 2
  error = capsys.readouterr().err
  assert expected in error and error.startswith("error: ") and error.count("\n") == 1


def test_the_command_serves_until_it_is_ended(tmp_path):
  command = [sys.executable, "-m", "jaxrl_llm.report", str(tmp_path / "later"), "--serve", "--port=0"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    line = process.stdout.readline()
    url = re.search(r"(http://127\.0\.0\.1:\d+)/ \(.*later: nothing there yet, the page waits\); Ctrl-C ends it", line)[1]
    assert data_of(SimpleNamespace(url=url))["kind"] == "nothing yet"
    process.terminate()
    assert process.wait(20) == 0


@in_a_browser
def test_a_browser_follows_a_run_and_keeps_what_the_reader_chose(tmp_path):
  run = tmp_path / "run"
  with serving(run) as server, browsing(server.url, tmp_path) as page:
    page.wait("document.querySelector('.pill').textContent === 'waiting: it does not exist yet'")
    run.mkdir()
    running(make_run(run, steps=30))
    page.wait("document.querySelector('.pill')?.textContent === 'running' && document.querySelector('.live')?.textContent === 'live'")
    reward = "[...document.querySelectorAll('figure')].find((x) => x.querySelector('h3').textContent === 'Reward')"
    last = f"{reward}.querySelector('.at').textContent"
    page.wait(f"{last} === 'step 30'")
    page.run("document.querySelector('#smooth').value = '0.9'; document.querySelector('#smooth').dispatchEvent(new Event('change'))")
    page.type("#rollouts input[type=search]", "al")
    page.run("document.querySelector('#rollouts .pager button:last-child').click()")
    page.run("document.querySelector('#rollouts .list summary').click()")
    page.wait("document.querySelectorAll('#rollouts details[open] .heat span').length === 2")
    page.run("document.querySelector('#rollouts input[type=search]').focus({ preventScroll: true }); window.scrollTo(0, 700)")
    assert page.run("window.scrollY") == 700
    add_step(run, 31)
    with (run / "samples.jsonl").open("a") as file:
      file.write(json.dumps({"step": 31, "phase": "rl", "prompt": HOSTILE, "response": "al", "reward": 1.0, "num_tokens": 1}) + "\n")
    page.wait(f"{last} === 'step 31'")
    page.wait("document.querySelector('#rollouts .pager span').textContent.startsWith('31 of 31')")
    kept = "[window.scrollY, document.querySelector('#smooth').value, document.querySelector('#rollouts input[type=search]').value]"
    assert page.run(kept) == [700, "0.9", "al"]
    assert page.run("document.activeElement === document.querySelector('#rollouts input[type=search]')")
    assert page.run("document.querySelectorAll('#rollouts details[open] .heat span').length") == 2
    assert page.run("document.querySelectorAll('#rollouts img').length") == 0
    running(run, GONE)
    page.wait("document.querySelector('.pill').textContent.startsWith('died') && document.querySelector('.live').textContent === 'ended'")
    running(run)
    page.wait("document.querySelector('.pill').textContent === 'running' && document.querySelector('.live').textContent === 'live'")
    running(run, status="finished")
    page.wait("document.querySelector('.pill.good')?.textContent === 'finished'")
    assert {url for url in page.requests if not url.startswith("data:")} == {f"{server.url}/", f"{server.url}/data"}
    assert page.problems == []
    page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    page.wait("document.querySelector('.live.bad')?.textContent.startsWith('not connected')")


@in_a_browser
def test_a_browser_follows_a_sweep(tmp_path):
  sweep = tmp_path / "sweep"
  running(make_run(sweep / "trial-0"))
  with serving(sweep) as server, browsing(server.url, tmp_path) as page:
    page.wait("document.querySelectorAll('#runs tbody tr').length === 1")
    page.run("document.querySelector('[aria-label=Against]').value = 'seconds'")
    page.run("document.querySelector('[aria-label=Against]').dispatchEvent(new Event('change'))")
    page.run("document.querySelector('button.arm').click()")
    other = make_run(sweep / "trial-1")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_steps": 90}))
    page.wait("document.querySelectorAll('#runs tbody tr').length === 2")
    assert page.run("document.querySelector('[aria-label=Against]').value") == "seconds"
    running(sweep / "trial-0", GONE)
    page.wait("document.querySelector('#runs .pill.bad')?.textContent === 'died, step 6 of 80'")
    page.run("document.querySelector('#runs a').click()")
    page.wait("location.pathname === '/runs/0/' && document.querySelector('.pill')?.textContent.startsWith('died')")
    assert page.problems == []
