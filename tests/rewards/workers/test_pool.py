"""The pool of workers: whatever a call does costs only its own sample."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxrl_llm.rewards import CAUSES, Outcome
from jaxrl_llm.rewards.workers import Function, WorkerJob, WorkerPool, process
from jaxrl_llm.rewards.workers import worker as protocol
from jaxrl_llm.text_types import Completion, Turn
from tests.marks import few
from tests.rewards.processes import becomes_true, ps_lines
from tests.rewards.workers import hostile

HERE = "tests.rewards.workers.hostile"
FUNCTIONS = {
  name: Function(f"{HERE}:{name}")
  for name in "act count_characters first_character count_tokens spoil_example loaded num_threads times_called".split()
}
TIMEOUT_S = 0.8

COSTS = {deed: cost for deed, (_, cost) in hostile.DEEDS.items() if cost != hostile.UNSURE}
KILLS = ("timeout", "died", "flooded")


def completion(text, tokens=(1, 2)):
  return Completion(text=text, token_ids=tuple(tokens), num_tokens=len(tokens), stopped=True)


def job(text, function="act", **example):
  return WorkerJob(function, completion(text), example)


@pytest.fixture(scope="module")
def pool():
  with WorkerPool(FUNCTIONS, num_workers=2, timeout_s=TIMEOUT_S, max_chars=100, memory_gb=4.0) as opened:
    yield opened


def worker_pids():
  """Returns the workers of this process, their guardians, and the processes that they forked."""
  return set(parents_below(os.getpid()))


def parents_below(pool_pid):
  """Returns the parent of each process started by a pool, even if its original parents are gone."""
  lines = [line.split(None, 2) for line in ps_lines("-o", "pid=", "-o", "ppid=", "-o", "args=")]
  return {int(pid): int(parent) for pid, parent, args in lines if "workers/guardian.py" in args and args.endswith(f" {pool_pid}")}


def settled_pids():
  """Returns `worker_pids` once each outer guardian has two processes below it."""

  def are_whole():
    parents = parents_below(os.getpid())
    return len(parents) == 3 * sum(parent == os.getpid() for parent in parents.values())

  becomes_true(are_whole, 10)
  return worker_pids()


def are_gone(pids, within_s=5.0):
  # A zombie process has no arguments.
  return becomes_true(lambda: not pids & worker_pids(), within_s)


def test_the_deeds_have_all_costs():
  assert set(CAUSES) == {cost for cost in COSTS.values() if cost}


@pytest.mark.parametrize("deed", COSTS)
def test_a_deed_costs_its_own_sample(pool, deed):
  replaced = pool.num_replaced
  started = time.monotonic()
  # With this many jobs, the deed is in the middle of a message.
  jobs = [job(f"fine {i} {deed}") for i in range(90)]
  jobs.insert(30, job(deed))
  outcomes = pool.call(jobs)
  outcome = outcomes.pop(30)
  assert time.monotonic() - started < TIMEOUT_S + 2
  assert [x.value for x in outcomes] == [0.5] * 90
  assert outcome.cause == COSTS[deed], outcome
  assert (outcome.value is None) == (outcome.cause is not None)
  assert len(outcome.detail) <= 300 and "\n" not in outcome.detail and bool(outcome.detail) == bool(outcome.cause)
  assert pool.num_workers == 2
  if COSTS[deed] in KILLS:
    assert pool.num_replaced == replaced + 1


@pytest.mark.parametrize("deed", sorted(hostile.DEEDS.keys() - COSTS))
def test_a_deed_that_may_or_may_not_be_possible_costs_no_other_sample(pool, deed):
  outcomes = pool.call([job("fine before"), job(deed), job("fine after")])
  assert [x.value for x in outcomes] == [0.5, None, 0.5]
  assert pool.num_workers == 2


def test_processes_of_a_killed_worker_are_gone():
  others = settled_pids()
  with WorkerPool({"act": FUNCTIONS["act"]}, num_workers=1, timeout_s=TIMEOUT_S) as pool:
    before = settled_pids() - others
    assert len(before) == 3  # Two guardians and the worker.
    assert pool.call([job("fork_away")])[0].cause == "timeout"
    assert are_gone(before)
    assert pool.call([job("fine")])[0].value == 0.5
    after = settled_pids() - others
    assert len(after) == 3
    # Forked children hold the pipe in the same way.
    held = [os.dup(worker.jobs_fd) for worker in pool._workers]
  assert are_gone(after, within_s=0.1)
  for fd in held:
    os.close(fd)


def test_a_worker_that_left_something_running_retires_with_its_value(pool):
  for deed in ("stay", "leave_process"):
    replaced, before = pool.num_replaced, worker_pids()
    assert pool.call([job(f"{deed} behind")])[0] == Outcome(0.5)
    assert pool.num_replaced == replaced + 1
    assert pool.call([job(f"fine after {deed}")])[0].value == 0.5
    assert len(before - settled_pids()) >= 3


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_hangs_in_a_row_leave_the_pool_at_full_size(count):
  timeout_s, longest = 0.05, 0.0
  with WorkerPool({"act": FUNCTIONS["act"]}, num_workers=2, timeout_s=timeout_s) as pool:
    for i in range(count):
      started = time.monotonic()
      # The same job each time, since failures are not cached.
      assert pool.call([job("sleep")])[0].cause == "timeout"
      longest = max(longest, time.monotonic() - started)
      assert pool.num_replaced == i + 1
    assert pool.num_workers == 2
    assert pool.call([job("fine at last")])[0].value == 0.5
  assert longest < timeout_s + 2


def test_the_deadline_applies_to_each_call_and_depends_on_the_function():
  functions = {"act": FUNCTIONS["act"], "slow": Function(f"{HERE}:act", timeout_s=30.0)}
  with WorkerPool(functions, num_workers=1, timeout_s=0.2) as pool:
    started = time.monotonic()
    assert pool.call([job("sleep")])[0].cause == "timeout"
    assert 0.2 <= time.monotonic() - started < 2.2
    outcomes = pool.call([job("sleep", "act"), job("fork", "act"), job("fine", "slow")])
    assert [x.cause for x in outcomes] == ["timeout", "timeout", None]
    assert "0.2 s" in outcomes[0].detail


def test_outcomes_are_in_order_and_hold_the_results(pool, rng):
  lengths = rng.integers(1, 90, 300)
  jobs = [WorkerJob("count_characters", completion("x" * n), {"i": i}) for i, n in enumerate(lengths)]
  assert [x.value for x in pool.call(jobs)] == lengths.tolist()
  assert pool.call([]) == []


def test_a_function_sees_the_end_of_the_text_and_all_tokens(pool):
  text = "a" * 50 + "b" + "c" * 99
  jobs = [WorkerJob(name, completion(text, tokens=range(1000)), {}) for name in ("count_characters", "first_character", "count_tokens")]
  assert [x.value for x in pool.call(jobs)] == [100, ord("b"), sum(range(1000)) + 1000 + 1]


def test_unusual_texts_arrive_unchanged(pool):
  jobs = [WorkerJob("count_characters", completion(text), {}) for text in ("", "\x00\n", "\ud800", "𝔸" * 50)]
  assert [x.value for x in pool.call(jobs)] == [0, 2, 1, 50]


def test_a_large_example_passes_through_a_small_pipe(pool):
  example = {"tests": "x" * (8 << 20)}
  jobs = [WorkerJob("count_characters", completion("x" * n), example) for n in range(1, 5)]
  assert [x.value for x in pool.call(jobs)] == [1, 2, 3, 4]


def test_examples_are_not_shared_between_calls(pool):
  example = {"uses": []}
  outcomes = pool.call([WorkerJob("spoil_example", completion(str(i)), example) for i in range(10)])
  assert {x.value for x in outcomes} == {1} and example == {"uses": []}


def test_equal_jobs_share_a_value_and_never_a_failure():
  functions = {"times": FUNCTIONS["times_called"], "act": FUNCTIONS["act"]}
  with WorkerPool(functions, num_workers=1, timeout_s=TIMEOUT_S, cache_size=3) as pool:
    assert [x.value for x in pool.call([job("a", "times")] * 3 + [job("b", "times")])] == [1, 1, 1, 2]
    assert [x.value for x in pool.call([job("b", "times"), job("a", "times"), job("c", "times")])] == [2, 1, 3]
    # Another example, which evicts "b" from the cache.
    assert pool.call([job("a", "times", other=1)])[0].value == 4
    assert [x.value for x in pool.call([job("a", "times"), job("b", "times")])] == [1, 5]
    different = [completion("a")._replace(**{name: value}) for name, value in dict(token_ids=(9,), num_tokens=9, stopped=False).items()]
    assert [x.value for x in pool.call([WorkerJob("times", x, {}) for x in different])] == [6, 7, 8]
    replaced = pool.num_replaced
    assert [x.cause for x in pool.call([job("exit")] * 3)] == ["died"] * 3
    assert pool.num_replaced == replaced + 3


def test_a_pool_without_a_cache_calls_every_time():
  with WorkerPool({"times": FUNCTIONS["times_called"]}, num_workers=1, cache_size=0) as pool:
    assert [x.value for x in pool.call([job("a", "times")] * 3)] == [1, 2, 3]


def test_workers_load_no_jax_and_hold_no_threads(pool):
  outcomes = pool.call([job(name, "loaded") for name in ("numpy", "jax", "jaxlib", "jaxtyping", "flax")] + [job("", "num_threads")])
  assert [x.value for x in outcomes] == [1, 0, 0, 0, 0, 1]


def test_imports_are_loaded_beforehand():
  loaded = FUNCTIONS["loaded"]._replace(imports=("xml.dom.pulldom",))
  with WorkerPool({"loaded": loaded}, num_workers=1) as pool:
    assert pool.call([job("xml.dom.pulldom", "loaded")])[0].value == 1
  with pytest.raises(ValueError, match="hostile:loaded: ModuleNotFoundError: No module named 'no_such_module'"):
    WorkerPool({"loaded": loaded._replace(imports=("no_such_module",))}, num_workers=1)


def test_a_factory_gets_its_settings():
  with WorkerPool({"scaled": Function(f"{HERE}:scaled", {"factor": 0.5})}, num_workers=1) as pool:
    assert pool.call([job("abc", "scaled")])[0].value == 1.5


@pytest.fixture
def no_pid_namespaces(monkeypatch, tmp_path):
  """Program of a worker to which the kernel seems to deny a PID namespace."""
  change_program(monkeypatch, tmp_path, "  _enter_pid_namespace()\n", "")


def change_program(monkeypatch, tmp_path, old, new):
  program, folder = pathlib.Path(process._PROGRAM), tmp_path / "workers"
  text = program.read_text()
  assert text.count(old) == 1
  folder.mkdir(exist_ok=True)
  (folder / program.name).write_text(text.replace(old, new))
  (folder / "worker.py").write_text(pathlib.Path(protocol.__file__).read_text())
  monkeypatch.setattr(process, "_PROGRAM", str(folder / program.name))


# A child that was forked keeps the pipes open, so that they do not tell of the death of its parent.
OTHER_POOL = f"""
import os, sys
from jaxrl_llm.rewards.workers import Function, WorkerJob, WorkerPool, process
from jaxrl_llm.text_types import Completion
process._PROGRAM = sys.argv[1]
with WorkerPool({{"act": Function("{HERE}:act")}}, num_workers=1, timeout_s=600) as pool:
  if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
  for deed in ("fork_away", "fine"):
    print(pool.call([WorkerJob("act", Completion(deed, (), 0, True), {{}})])[0], flush=True)
"""


def with_path():
  return {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[3])}


@contextlib.contextmanager
def other_pool():
  """Starts another process with a pool, whose worker has forked five processes away.

  Yields the process, its chain of processes by name, and the ids of all processes below it.
  """
  command, pipe = [sys.executable, "-c", OTHER_POOL, process._PROGRAM], subprocess.PIPE
  with subprocess.Popen(command, env=with_path(), stdin=pipe, stdout=pipe, text=True) as pool:
    try:
      until = time.monotonic() + 60
      while len(parents := parents_below(pool.pid)) < 8:  # Two guardians, the worker and the five.
        assert time.monotonic() < until and pool.poll() is None, parents
        time.sleep(0.02)
      child = {parent: pid for pid, parent in parents.items()}
      outer = child[pool.pid]
      yield pool, {"pool": pool.pid, "outer": outer, "inner": child[outer], "worker": child[child[outer]]}, set(parents)
    finally:
      pool.kill()
      for pid in parents_below(pool.pid):
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.SIGKILL)


def survivors(pool_pid, pids):
  left = lambda: pids & set(parents_below(pool_pid))
  becomes_true(lambda: not left(), 20)  # A busy machine takes several seconds.
  return left()


def test_no_worker_outlives_a_parent_that_becomes_another_program():
  source = f"""
import os, threading
from jaxrl_llm.rewards.workers import Function, WorkerJob, WorkerPool
from jaxrl_llm.text_types import Completion
pool = WorkerPool({{"act": Function("{HERE}:act")}}, num_workers=1, timeout_s=600)
threading.Timer(0.3, os.execvp, ("sleep", ["sleep", "600"])).start()  # The worker is busy and reads no jobs.
print(flush=True)
pool.call([WorkerJob("act", Completion("sleep", (), 0, True), {{}})])
"""
  with subprocess.Popen([sys.executable, "-c", source], env=with_path(), stdout=subprocess.PIPE) as pool:
    try:
      pool.stdout.readline()
      assert not survivors(pool.pid, set(parents_below(pool.pid)))
    finally:
      pool.kill()


@pytest.mark.parametrize("namespaces", few([True, False], 0))
@pytest.mark.parametrize(
  "blows",
  ["KILL pool", "KILL outer", "KILL inner", "KILL worker", "KILL pool, KILL outer", "KILL pool, KILL inner", "KILL worker, KILL inner",
   "STOP inner, KILL outer", "STOP inner, KILL worker, KILL outer", "STOP outer, KILL inner, KILL pool",
   "STOP inner, STOP outer, KILL pool"],
)  # fmt: skip
def test_nothing_survives_whichever_process_dies_first(request, namespaces, blows):
  if not namespaces:
    request.getfixturevalue("no_pid_namespaces")
  with other_pool() as (pool, chain, pids):
    for blow in blows.split(", "):
      name, whom = blow.split()
      with contextlib.suppress(ProcessLookupError):  # The previous blow may have ended it already.
        os.kill(chain[whom], getattr(signal, f"SIG{name}"))
    left = survivors(pool.pid, pids)
    assert not left, {name: pid for name, pid in chain.items() if pid in left} or "only what the worker forked"
    if "pool" not in blows:  # The pool continues.
      assert "'died'" in pool.stdout.readline()
      assert "value=0.5" in pool.stdout.readline()


def test_nothing_survives_an_outer_guardian_that_dies_during_its_work(no_pid_namespaces, monkeypatch, tmp_path):
  """It dies right after its first kill, like a guardian that is killed from outside then."""
  kill = "        os.kill(pid, signal.SIGKILL)\n"
  change_program(monkeypatch, tmp_path, kill, kill + "        os.getppid() == int(sys.argv[3]) and os.kill(pids[0], signal.SIGKILL)\n")
  with other_pool() as (pool, chain, pids):
    os.kill(chain["outer"], signal.SIGTERM)
    assert not survivors(pool.pid, pids)


@pytest.mark.parametrize(
  "costs",
  [
    {"fork_away": "timeout", "fine": None, "exit": "died", "kill_group": "died", "leave_process": None, "fork": "timeout",
     "leave_alarm": None, "nap": None},
    {"kill_parents": "died", "kill_guardian": "died", "stop_guardians": "timeout", "run_away": "timeout", "nap": None},
  ],
  ids=["workers", "guardians"],
)  # fmt: skip
def test_a_pool_works_without_pid_namespaces(no_pid_namespaces, costs):
  """Without them, the guardians kill the processes that left the process group."""
  with WorkerPool({"act": FUNCTIONS["act"]}, num_workers=1, timeout_s=TIMEOUT_S) as pool:
    outcomes = pool.call([job(deed) for deed in costs])
    assert [x.cause for x in outcomes] == list(costs.values())
    assert pool.call([job("fine again")])[0].value == 0.5
  assert program_has_ended()


def program_has_ended():
  """Returns whether no process runs the changed program; a busy machine reaps the last one late."""
  return becomes_true(lambda: not [line for line in ps_lines("-o", "args=") if process._PROGRAM in line], 5)


def test_the_process_group_is_killed_if_the_kernel_lists_no_children(no_pid_namespaces, monkeypatch, tmp_path):
  change_program(monkeypatch, tmp_path, "/children", "/no_children")
  with WorkerPool({"act": FUNCTIONS["act"]}, num_workers=1, timeout_s=TIMEOUT_S) as pool:
    assert [x.cause for x in pool.call([job(deed) for deed in ("fork", "exit", "fine")])] == ["timeout", "died", None]
  assert program_has_ended()


def test_a_worker_that_dies_while_idle_is_replaced_at_no_cost():
  others = settled_pids()
  with WorkerPool({"act": FUNCTIONS["act"]}, num_workers=2, timeout_s=TIMEOUT_S) as pool:
    for pid in worker_pids() - others:
      with contextlib.suppress(ProcessLookupError):  # It may have died with the previous process.
        os.kill(pid, signal.SIGKILL)
    assert are_gone(worker_pids() - others)
    assert [x.value for x in pool.call([job(f"fine {i}") for i in range(10)])] == [0.5] * 10
    assert pool.num_workers == 2 and pool.num_replaced == 2


def test_an_interrupted_call_leaves_no_answers_for_the_next(pool, monkeypatch):
  def interrupt(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(pool, "_receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
      pool.call([job(f"fine {i}", interrupted=True) for i in range(5)])
  assert pool.call([job("nan"), job("fine after the interrupt")]) == [
    Outcome(None, "not_finite", "it returned nan, expected one finite number"),
    Outcome(0.5),
  ]


@pytest.mark.parametrize(
  ("function", "settings", "message"),
  [
    (Function("no_such_module:f"), {}, "no_such_module:f: ModuleNotFoundError: No module named 'no_such_module'"),
    (Function(f"{HERE}:no_such_name"), {}, "AttributeError: module .* has no attribute 'no_such_name'"),
    (Function(f"{HERE}:cannot_be_built", {}), {}, "cannot_be_built: FileNotFoundError: no such vocabulary"),
    (Function(HERE), {}, "reward function 'f': found 'tests.rewards.workers.hostile', expected 'package.module:name'"),
    (FUNCTIONS["act"], dict(timeout_s=0.0), "found timeout_s=0.0, expected more than 0"),
    (FUNCTIONS["act"], dict(num_workers=0), "found num_workers=0, expected at least 1"),
    (FUNCTIONS["act"], dict(memory_gb=0.001), "reward workers do not start"),
    (FUNCTIONS["act"]._replace(timeout_s=float("nan")), {}, "timeout_s of 'f'=nan"),
  ],
)
def test_mistakes_are_reported_when_a_pool_is_opened(function, settings, message):
  with pytest.raises(ValueError, match=message) as caught:
    WorkerPool({"f": function}, **{"num_workers": 1, **settings})
  assert "\n" not in str(caught.value)


def test_mistakes_in_jobs(pool):
  with pytest.raises(ValueError, match="job 1: found the function 'atc', expected one of act, .*; did you mean 'act'?"):
    pool.call([job("fine"), job("fine", "atc")])
  with pytest.raises(ValueError, match="job 0: its example cannot be sent to a worker"):
    pool.call([job("fine", f=lambda: 0)])


def test_a_closed_pool_refuses():
  pool = WorkerPool({"act": FUNCTIONS["act"]}, num_workers=1)
  pool.close()
  pool.close()
  with pytest.raises(RuntimeError, match="closed"):
    pool.call([job("fine")])


def test_a_worker_sees_the_turns_of_a_conversation():
  turned = lambda *rewards: Completion("7", (1,), 1, True, tuple(Turn("2*3=", "6", reward, i) for i, reward in enumerate(rewards)))
  with WorkerPool({"turns": Function(f"{HERE}:rewards_of_turns")}, num_workers=1) as pool:
    jobs = [WorkerJob("turns", turned(0.5, 1.0), {}), WorkerJob("turns", turned(0.5, 2.0), {}), WorkerJob("turns", turned(), {})]
    assert [outcome.value for outcome in pool.call(jobs)] == [1.5, 2.5, 0.0], (
      "jobs that differ only in their turns are not equal"
    )


def test_frames_hold_what_was_written():
  data = protocol.frame(7, 0.5, "memory", "é" * 400, retires=True)
  number, value, cause, retires, length = protocol.FRAME.unpack_from(data)
  assert (number, value, protocol.CAUSES[cause], retires, length) == (7, 0.5, "memory", 1, len(data) - protocol.FRAME.size)
  assert np.isfinite(np.float32(protocol.LARGEST))
