"""Escape suite: forbidden actions tried by hostile programs, in every back end that works here."""

import functools
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxrl_llm.rewards.sandbox import AssertTests, CallTests, Program, Sandbox, SandboxLimits, StdioTests, execute, grade, probe
from tests.rewards.processes import becomes_true, ps_lines
from tests.runs import ROOT

BACKENDS = ("namespaces", "bubblewrap") if shutil.which("bwrap") else ("namespaces",)
SECRET = "canary-5f1c"
LIMITS = SandboxLimits(timeout_s=6.0)

# Makes user, mount, PID and network namespaces by hand. If this works and the sandbox does not, the
# sandbox is broken.
DENIED = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000 | 0x00020000 | 0x20000000 | 0x40000000) != 0)"


@functools.cache
def working(backend):
  if subprocess.run([sys.executable, "-c", DENIED]).returncode:
    pytest.skip("this machine denies namespaces")
  assert probe(Sandbox(backend)) is None
  return Sandbox(backend, LIMITS)


@pytest.fixture(params=BACKENDS)
def sandbox(request):
  return working(request.param)


@pytest.fixture
def canary(tmp_path):
  (path := tmp_path / "canary").write_text(SECRET)
  return path


def run(sandbox, source, **fields):
  return execute(Program(source, **fields), sandbox)


def quickly(sandbox, timeout_s=1.0):
  return sandbox._replace(limits=sandbox.limits._replace(timeout_s=timeout_s))


def programs_left(mark):
  return [line for line in ps_lines("-o", "args=") if mark in line and "main.py" in line]


def none_left(mark):
  return becomes_true(lambda: not programs_left(mark), 3)


def test_an_honest_program_runs(sandbox):
  source = """
import collections, json, math, os, re, sys, tempfile, threading
with open("notes.txt") as file: print(file.read())
with tempfile.TemporaryFile() as file: file.write(b"x" * 1000)
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
rest = open("/dev/stdin").read() if os.path.exists("/dev/stdin") else "first"
print(sys.argv[1:], input(), os.getcwd(), rest)
"""
  execution = run(sandbox, source, stdin="first\nrest", files={"notes.txt": "notes"}, argv=("a", "b c"))
  assert (execution.status, execution.exit_code, execution.cause) == ("finished", 0, None), execution
  assert execution.stdout.split("\n")[:3] == ["notes", "thread", "['a', 'b c'] first /sandbox first"]
  assert 0 < execution.seconds < 5


def test_no_file_outside_can_be_read(sandbox, canary):
  source = f"""
import glob, os
for path in [{str(canary)!r}, "/etc/passwd", "/etc/shadow", "/proc/1/environ", "/proc/1/root/etc/passwd", "/dev/sda", "/dev/mem"]:
  try: print("read", path, open(path, "rb").read(20))
  except OSError: pass
print([name for name in os.listdir("/") if name in ("etc", "home", "var", "srv", "mnt", "opt", "sys", "boot") and os.listdir("/" + name)])
print(glob.glob("/proc/[0-9]*/roo[t]/*"))
"""
  execution = run(sandbox, source)
  assert execution.status == "finished" and "read" not in execution.stdout and SECRET not in execution.stdout, execution
  seen = execution.stdout.split("\n")[0]
  assert seen in ("[]", "['etc']"), seen  # /etc holds the cache of the dynamic linker.


def test_no_secret_of_the_environment_is_visible(sandbox, monkeypatch):
  monkeypatch.setenv("API_KEY", SECRET)
  source = """
import glob, os
print(dict(os.environ))
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
  try: print(open(path, errors="replace").read())
  except OSError: pass
os.system("env")
"""
  execution = run(sandbox, source)
  assert execution.status == "finished" and SECRET not in execution.stdout and "API_KEY" not in execution.stdout
  assert str(pathlib.Path.home()) not in execution.stdout and "TERM" not in execution.stdout


def test_nothing_outside_can_be_written_or_removed(sandbox, canary):
  prefix, library = os.path.realpath(sys.base_prefix), f"python{sys.version_info[0]}.{sys.version_info[1]}"
  source = f"""
import os, shutil
for folder in [{str(canary.parent)!r}, "/", "/usr", "/etc", "/dev", "/proc", {prefix!r}, "/usr/lib"]:
  try:
    open(folder + "/escaped", "w").close()
    print("wrote", folder)
  except OSError: pass
os.system("rm -rf / --no-preserve-root {canary.parent} /etc /dev /bin/ls {prefix}/lib/{library}/json 2>/dev/null & sleep 0.5; kill $!")
shutil.rmtree({prefix!r} + "/lib/{library}/json", ignore_errors=True)
print("done" if os.path.exists("/usr/bin") and os.path.exists({json.__file__!r}) and os.path.exists("/dev/null") else "wrote")
"""
  before = sorted(os.listdir(prefix))
  execution = run(sandbox, source)
  assert "wrote" not in execution.stdout and execution.stdout.strip() == "done", execution
  assert canary.read_text() == SECRET and sorted(os.listdir(canary.parent)) == ["canary"]
  assert sorted(os.listdir(prefix)) == before and not os.path.exists("/escaped") and not os.path.exists("/dev/escaped")


def test_written_files_are_bounded_and_removed(sandbox):
  source = """
import os
try:
  with open("large", "wb") as file:
    for _ in range(100): file.write(b"x" * (1 << 20))
except OSError as error: print("file", error.errno)
count = 0
try:
  for i in range(100):
    with open(f"part{i}", "wb") as file: file.write(b"x" * (1 << 20))
    count += 1
except OSError as error: print("disk", error.errno, count)
"""
  small = sandbox._replace(limits=sandbox.limits._replace(file_kb=2048, disk_mb=8))
  execution = run(small, source)
  assert (
    execution.stdout.split("\n")[:2] == ["file 27", "disk 28 6"] or execution.stdout.startswith("file 27\ndisk 28")
  ), execution
  assert run(sandbox, "import os; print(os.listdir('.'))").stdout == "['main.py']\n"


def test_a_listener_outside_is_not_reached(sandbox):
  with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
    abstract.bind("\0jaxrl-escape")
    abstract.listen()
    port = listener.getsockname()[1]
    source = f"""
import socket
for family, address in [(socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_UNIX, "\\0jaxrl-escape"), (socket.AF_INET, ("192.0.2.1", 9))]:
  try:
    socket.socket(family).connect(address)
    print("reached", address)
  except OSError as error: print("refused")
"""
    execution = run(sandbox, source)
    assert execution.stdout == "refused\n" * 3, execution
    listener.settimeout(0.05)
    with pytest.raises(TimeoutError):
      listener.accept()


def test_no_process_outside_can_be_traced_or_killed(sandbox):
  source = f"""
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
for pid in (1, os.getppid(), {os.getpid()}, {os.getppid()}):
  if pid != os.getpid():
    print("traced" if libc.ptrace(16, pid, 0, 0) == 0 else "no", end=" ")
    for path in ("mem", "environ", *(f"fd/{{i}}" for i in range(16))):
      try:
        open(f"/proc/{{pid}}/{{path}}", "rb")
        print("opened", path)
      except OSError: pass
for pid in ({os.getpid()}, {os.getppid()}):
  try: os.kill(pid, signal.SIGKILL); print("killed")
  except OSError: pass
os.kill(-1, signal.SIGKILL)
"""
  witness = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
  try:
    execution = run(sandbox, source)
    time.sleep(0.05)
    assert witness.poll() is None
  finally:
    witness.kill()
    witness.wait()
  assert (
    "traced" not in execution.stdout and "opened" not in execution.stdout and "killed" not in execution.stdout
  ), execution


def test_a_fork_bomb_is_bounded_and_ended(sandbox):
  mark = "bomb-in-" + sandbox.backend
  source = """
import os, sys, time
count = 0
try:
  while count < 200:
    if os.fork() == 0: time.sleep(600)
    count += 1
except OSError: pass
print(count, flush=True)
if sys.argv[1].endswith("namespaces"):
  while True:
    try: os.fork()
    except OSError: pass
time.sleep(600)
"""
  execution = run(quickly(sandbox), source, argv=(mark,))
  assert (execution.status, execution.cause) == ("failed", "timeout"), execution
  # If root runs the tests, the programs in bubblewrap belong to root, whose processes the kernel
  # does not limit. The time limit is then the only bound.
  if sandbox.backend == "namespaces" or os.geteuid() != 0:
    assert int(execution.stdout) < LIMITS.processes
  assert none_left(mark)


def test_processes_left_behind_are_killed(sandbox):
  mark = "daemon-in-" + sandbox.backend
  source = """
import os, time
if os.fork() == 0:
  os.setsid()
  if os.fork() == 0: time.sleep(600)
  os._exit(0)
os.wait()
print("left")
"""
  execution = run(sandbox, source, argv=(mark,))
  assert (execution.status, execution.stdout) == ("finished", "left\n")
  assert none_left(mark)


@pytest.mark.parametrize(
  ("source", "cause"),
  [
    ("while True: pass", "timeout"),
    ("import time; time.sleep(600)", "timeout"),
    ("import signal, time\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass", "timeout"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    ("x = bytearray(10 << 30)", "memory"),
    ("x = [0]\nwhile True: x = x + x", "memory"),
    ("while True: print('x' * 100_000)", "output"),
    ("import os\nwhile True: os.write(2, b'x' * 100_000)", "output"),
    ("import os; os.lseek(1, 1 << 30, 0); os.write(1, b'x')", "exit"),
    ("import os; os.ftruncate(1, 1 << 30)", "exit"),
    ("raise SystemExit(3)", "exit"),
    ("import ctypes; ctypes.string_at(0)", "signal"),
    ("import os; os.abort()", "signal"),
    ("not python", "exit"),
    ("\0", "exit"),
  ],
)
def test_a_failed_program_has_a_cause(sandbox, source, cause):
  timeout_s, started = 0.5 if cause == "timeout" else 8.0, time.monotonic()
  execution = run(sandbox._replace(limits=LIMITS._replace(timeout_s=timeout_s, memory_gb=0.25)), source)
  assert (execution.status, execution.cause) == ("failed", cause), execution
  assert time.monotonic() - started < timeout_s + 2.0
  assert max(len(execution.stdout), len(execution.stderr)) <= LIMITS.file_kb << 10


def test_privileged_system_calls_are_denied(sandbox):
  source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
doors = {
  "user namespace": lambda: libc.unshare(0x10000000),
  "mount namespace": lambda: libc.unshare(0x00020000),
  "mount": lambda: libc.mount(b"none", b"/sandbox", b"tmpfs", 0, None),
  "remount": lambda: libc.mount(b"none", b"/", None, 32 | 4096, None),
  "umount": lambda: libc.umount2(b"/usr", 2),
  "chroot": lambda: libc.chroot(b"/sandbox"),
  "root": lambda: libc.setuid(0),
  "hostname": lambda: libc.sethostname(b"x", 1),
  "device": lambda: libc.mknod(b"/sandbox/sda", 0o60666, 0x800),
}
opened = []
for name, door in doors.items():
  if os.fork() == 0: os._exit(door() == 0)
  if os.wait()[1]: opened.append(name)
print(opened)
caps = "CapEff", "CapPrm", "CapInh", "CapAmb"
lines = [line for line in open("/proc/self/status") if line.startswith(caps)]
print([line for line in lines if line.split()[1].strip("0")])
print(os.getuid(), os.getgid(), os.getgroups() in ([], [1000], [65534]))
print([fd for fd in range(3, 200) if os.path.exists(f"/proc/self/fd/{fd}")])
mounts = [line.split()[4:6] for line in open("/proc/self/mountinfo")]
writable = [where for where, flags in mounts if not flags.startswith("ro")]
print(sorted(where for where in writable if not where.startswith(("/dev/", "/proc"))))
"""
  execution = run(sandbox, source)
  opened, capabilities, user, descriptors, writable = execution.stdout.splitlines()
  allowed = ("[]", "['user namespace']") if sandbox.backend == "bubblewrap" else ("[]",)
  # In a user namespace of its own, a program is root, but only over what it owns.
  assert opened in allowed, opened
  assert capabilities == "[]" and user == "1000 1000 True" and descriptors == "[]", execution
  assert writable == "['/sandbox']"


def test_the_parent_of_a_program_may_be_killed(tmp_path):
  """No program outlives a parent that is killed."""
  working("namespaces")
  mark = f"orphan-{os.getpid()}"
  source = f"""
from jaxrl_llm.rewards.sandbox import Program, Sandbox, execute
print("begun", flush=True)
execute(Program("while True: pass", argv=({mark!r},)), Sandbox("namespaces"))
"""
  parent = subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
  try:
    parent.stdout.readline()
    assert becomes_true(lambda: programs_left(mark), 10)
  finally:
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
  assert none_left(mark)


# Attempts of a program to pass tests that it does not pass.
FORGERIES = {
  "exit": "import os; os._exit(0)",
  "sys_exit": "import sys; sys.exit(0)",
  "says_so": "print('ALL TESTS PASSED'); print('passed'); print('OK'); import os; os._exit(0)",
  "at_exit": "import atexit, os; atexit.register(lambda: (print('ALL TESTS PASSED'), os._exit(0)))\ndef f(x): raise SystemExit(0)",
  "import_hook": """
import builtins, sys
class Hook:
  def find_spec(self, name, path=None, target=None): print("ALL TESTS PASSED"); raise SystemExit(0)
sys.meta_path.insert(0, Hook())
original = builtins.__import__
builtins.__import__ = lambda *a, **k: (print("passed"), original(*a, **k))[1]
def f(x): import unittest""",
  "equal_to_all": "class Yes(int):\n  def __eq__(self, other): return True\n  def __hash__(self): return 0\ndef f(x): return Yes(7)",
  "equal_object": "class Yes:\n  def __eq__(self, other): return True\n  __ne__ = lambda s, o: False\ndef f(x): return Yes()",
  "patches_compare": "import builtins, json\nbuiltins.all = lambda x: True\njson.dumps = lambda *a, **k: '[true, 7]'\ndef f(x): return 7",
  "walks_frames": """
import gc, sys
def f(x):
  frame = sys._getframe()
  while frame:
    for name, value in list(frame.f_locals.items()) + list(frame.f_globals.items()):
      if "expect" in name or "answer" in name or "nonce" in name or "verdict" in name:
        try: frame.f_globals[name] = lambda *a: "[true, 0]"
        except Exception: pass
    frame = frame.f_back
  for o in gc.get_objects():
    if isinstance(o, dict) and "expected" in o: return o["expected"]
  return 7""",
  "writes_everywhere": """
import os
for fd in range(64):
  status = b'{"status": 0, "seconds": 0.1}\\n'
  for line in (b"passed\\n", b"[true, 0]\\n", b'{"t": [true, 0]}\\n', status):
    try: os.write(fd, line)
    except OSError: pass
os._exit(0)""",
  "reads_tests": """
import glob, os, re
found = ""
patterns = "/sandbox/*", "/tmp/**/*", "/proc/*/fd/*", "/proc/*/cmdline", "/proc/*/environ"
for path in sum(map(glob.glob, patterns), []):
  try: found += open(path, errors="replace").read(10000)
  except OSError: pass
nonce = re.findall(r"\\b[0-9a-f]{32}\\b", found)
for word in nonce or ["x"]:
  for fd in range(64):
    try: os.write(fd, (word + " passed\\n").encode())
    except OSError: pass
def f(x): return 7""",
  "stops_iteration": "def f(x): raise StopIteration",
  "link_to_tests": "import os\nfor n in ('tests.py', 'given.py', 'literals.py', 'expected'):\n"
  "  try: os.symlink('/sandbox/main.py', n)\n  except OSError: pass\ndef f(x): return 7",
  "replaces_harness": "import os, sys\nfor n in os.listdir('.'):\n  open(n, 'w').write('print(\"passed\")')\n"
  "os.execv(sys.executable, [sys.executable, '-c', 'print(\"[true, 0]\")'])",
  "forks": "import os, time\nif os.fork() == 0:\n  while True: time.sleep(1)\nos._exit(0)",
  "traces_parent": "import ctypes, os\nctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)\nos.kill(os.getppid(), 9)\ndef f(x): return 7",
}
# The answer to the first case is 7, which distinguishes a constant from a function.
ASSERTS = AssertTests(
  "def check(candidate):\n  assert all(map(lambda pair: candidate(pair[0]) == pair[1], [(0, 7), (1, 8), (2, 91)]))\ncheck(f)\n", "f"
)
CALLS = CallTests("f", [([0], 7), ([1], 8), ([2], 91)])
PRINTS = StdioTests([("0", "7"), ("1", "8"), ("2", "91")])


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_verdict_cannot_be_forged(forgery):
  sandbox = working("namespaces")
  source = FORGERIES[forgery]
  for tests in (ASSERTS, CALLS):
    result = grade(source, tests, quickly(sandbox, 3.0))
    assert result.passed <= 1 and result.passed < result.total, (type(tests).__name__, result)
  # The other forgeries attack parts that do not exist if only the output counts.
  if forgery in ("exit", "says_so", "at_exit", "writes_everywhere"):
    assert grade(f"{source}\nprint(7)", PRINTS, quickly(sandbox, 3.0)).passed <= 1


@pytest.mark.parametrize("tests", [ASSERTS, CALLS, PRINTS], ids=lambda tests: type(tests).__name__)
def test_the_same_tests_can_be_passed(sandbox, tests):
  source = "def f(x): return {0: 7, 1: 8, 2: 91}[x]\n"
  if tests is PRINTS:
    source += "print(f(int(input())))"
  assert grade(source, tests, sandbox).passed == (1 if tests is ASSERTS else 3)


@pytest.mark.slow
def test_a_gigabyte_of_output_costs_no_memory_here(sandbox):
  import resource

  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  execution = run(
    sandbox, "import os\nfor _ in range(1 << 10):\n  try: os.write(1, b'x' * (1 << 20))\n  except OSError: pass"
  )
  assert len(execution.stdout) <= LIMITS.file_kb << 10
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_unsafe_isolates_nothing_and_still_has_limits(canary):
  sandbox = Sandbox("unsafe", LIMITS)
  assert run(sandbox, f"print(open({str(canary)!r}).read())").stdout.strip() == SECRET
  assert run(sandbox, "x = bytearray(10 << 30)").cause == "memory"
  assert run(quickly(sandbox), "import os; os.fork()\nwhile True: pass", argv=("looping-unsafely",)).cause == "timeout"
  assert run(sandbox, "import os, time\nif os.fork() == 0: time.sleep(600)", argv=("looping-unsafely",)).status == "finished"
  assert none_left("looping-unsafely")
  assert run(sandbox, "while True: print('x' * 100_000)").cause == "output"
  assert "API_KEY" not in run(sandbox, "import os; print(os.environ)").stdout
