"""The pool of workers, which maps jobs to outcomes in order."""

import math
import selectors
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

from jaxrl_llm.devices import cores
from jaxrl_llm.rewards.outcome import Outcome
from jaxrl_llm.rewards.workers import process
from jaxrl_llm.rewards.workers.jobs import Function, Task, WorkerJob, make_tasks
from jaxrl_llm.rewards.workers.process import Worker
from jaxrl_llm.rewards.workers.worker import READY

_MAX_JOBS_AT_ONCE = 32
_MAX_BYTES_AT_ONCE = 1 << 20
# A worker with fewer jobs than this in flight gets more, so that it never waits for the pool.
_REFILL_BELOW = 2
_START_SECONDS = 120.0
_MAX_FAILED_STARTS = 3
# Waiting time for guardians to kill their workers, which takes far less unless the machine is
# overloaded.
_END_SECONDS = 10.0


class WorkerPool:
  """A pool of killable worker processes, which are started and have built the functions.

  - Each worker is a spawned process that shares no state with this one. It has a session and a
    memory limit of its own and, if the kernel allows it, a PID namespace.
  - The output of a worker is dropped. No worker outlives this process, however it ends.
  - A call that takes its worker down, or exceeds the time limit as measured in this process, has an
    outcome without a value. The worker is replaced, and the rest of its jobs run in other workers.
  - A worker retires if a call leaves a thread or a process behind. Start anything that has to last
    in the factory of the reward function, not in its calls.

  It is a context manager, and `close` may be called twice.

  Args:
    functions: Reward functions by name.
    num_workers: Number of worker processes. None uses one per processor that this process may use,
      and at least two.
    timeout_s: Time limit of one call, in seconds. Building the functions does not count.
    max_chars: Number of characters sent to a function, from the end of a response. Token ids and
      counts remain complete.
    memory_gb: Address space limit of a worker, in GiB. None sets no limit.
    cache_size: Number of cached values, the most recently used. With 0, equal jobs share no value
      either.

  Attributes:
    num_replaced: Number of workers that were killed, lost or retired since the pool was opened.

  Raises:
    ValueError: If a setting is out of range, or a function cannot be built. One line.

  Example:
    >>> from jaxrl_llm.text_types import Completion
    >>> with WorkerPool({"form": Function("jaxrl_llm.rewards:answer_form")}, num_workers=1) as pool:
    ...   pool.call([WorkerJob("form", Completion("#### 12", (), 5, True), {})])
    [Outcome(value=1.0, cause=None, detail='')]
  """

  def __init__(
    self,
    functions: Mapping[str, Function],
    *,
    num_workers: int | None = None,
    timeout_s: float = 10.0,
    max_chars: int = 20_000,
    memory_gb: float | None = 4.0,
    cache_size: int = 100_000,
  ):
    if num_workers is None:
      num_workers = max(2, cores.num_cores())
    for name, value, least in (("num_workers", num_workers, 1), ("max_chars", max_chars, 1), ("cache_size", cache_size, 0)):
      if value < least:
        raise ValueError(f"pool of workers: found {name}={value}, expected at least {least}")
    own = [(f"timeout_s of {name!r}", function.timeout_s) for name, function in functions.items()]
    for name, value in (("timeout_s", timeout_s), ("memory_gb", memory_gb), *own):
      if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"pool of workers: found {name}={value}, expected more than 0")
    for name, function in functions.items():
      if not all(function.target.partition(":")):
        raise ValueError(f"reward function {name!r}: found {function.target!r}, expected 'package.module:name'")
    self._functions = dict(functions)
    self._num_workers, self._timeout_s, self._max_chars, self._memory_gb = num_workers, timeout_s, max_chars, memory_gb
    self._cache: OrderedDict[bytes, float] = OrderedDict()
    self._cache_size = cache_size
    self._lock = threading.Lock()
    self._selector = selectors.DefaultSelector()
    self._workers: list[Worker] = []
    self._ended: list[Worker] = []
    self._base = self._failed_starts = self.num_replaced = 0
    self._closed = False
    try:
      self._wait_until_ready()
    except BaseException as error:
      self.close()
      if isinstance(error, RuntimeError):
        raise ValueError(str(error)) from None
      raise

  def __enter__(self) -> "WorkerPool":
    return self

  def __exit__(self, *_) -> None:
    self.close()

  @property
  def num_workers(self) -> int:
    """Number of living worker processes."""
    return sum(worker.process.poll() is None for worker in self._workers)

  def under_way(self) -> str:
    """Describes which jobs the workers are running; may be called from another thread."""
    now, busy = time.monotonic(), [worker for worker in list(self._workers) if worker.queue]
    jobs = [
      f"response {worker.queue[0][0] - self._base} (process {worker.process.pid}, {now - worker.since:.0f} s)" for worker in busy
    ]
    return f"rewards of {', '.join(jobs)}" if jobs else "no reward: the workers have nothing to do"

  def call(self, jobs: Sequence[WorkerJob]) -> list[Outcome]:
    """Calls the function of every job and returns their outcomes in order.

    Equal jobs share one value if their function may be cached. A failure is never shared. On
    return, the pool is at full size again.

    Raises:
      ValueError: If the pool lacks the function of a job, or an example cannot be pickled.
      RuntimeError: If the pool is closed, or workers no longer start.
    """
    with self._lock:
      if self._closed:
        raise RuntimeError("the pool of workers is closed")
      tasks = make_tasks(jobs, self._functions, max_chars=self._max_chars, timeout_s=self._timeout_s, shared=self._cache_size > 0)
      outcomes = [self._cached(task.key) for task in tasks]
      first: dict[bytes, int] = {}
      new = [i for i, task in enumerate(tasks) if outcomes[i] is None and (task.key is None or first.setdefault(task.key, i) == i)]
      self._run(new, tasks, outcomes)
      for i, task in enumerate(tasks):
        if outcomes[i] is None and outcomes[first[task.key]].cause is None:
          outcomes[i] = outcomes[first[task.key]]
      self._run([i for i, outcome in enumerate(outcomes) if outcome is None], tasks, outcomes)
      self._refill()
      return outcomes

  def close(self) -> None:
    """Kills all workers and waits until they are gone.

    On an overloaded machine, their guardians may finish the work after this returns.
    """
    with self._lock:
      self._closed = True
      for worker in list(self._workers):
        self._end(worker)
      for worker in self._ended:
        process.reap(worker, wait_s=_END_SECONDS)
      self._ended.clear()
      self._selector.close()

  def _wait_until_ready(self) -> None:
    # A function that cannot be built is a mistake in the settings, so there is no second attempt.
    self._failed_starts = _MAX_FAILED_STARTS
    self._refill()
    while not all(worker.ready for worker in self._workers):
      for worker in self._poll():
        self._receive(worker, deque(), [])

  def _cached(self, key: bytes | None) -> Outcome | None:
    if key not in self._cache:
      return None
    self._cache.move_to_end(key)
    return Outcome(self._cache[key])

  def _run(self, indices: Sequence[int], tasks: Sequence[Task], outcomes: list[Outcome | None]) -> None:
    """Runs the tasks at `indices` in the workers and writes their outcomes to `outcomes`."""
    waiting = deque(indices)
    try:
      for key, event in self._selector.select(0.0):  # Workers may have died while idle.
        if event & selectors.EVENT_READ:
          self._receive(key.data, waiting, outcomes)
      while waiting or any(worker.queue for worker in self._workers):
        self._refill()
        for worker in self._workers:
          if waiting and worker.ready and len(worker.queue) < _REFILL_BELOW:
            self._send_batch(worker, waiting, tasks)
        for worker in self._poll():
          self._receive(worker, waiting, outcomes)
    except BaseException:  # After Control-C, jobs in flight would answer into the next call.
      for worker in [worker for worker in self._workers if worker.queue]:
        self._end(worker)
      raise
    finally:
      self._base += len(outcomes)  # Job numbers are never reused.
    for index in indices:
      if outcomes[index].cause is None and tasks[index].key is not None:
        self._cache[tasks[index].key] = outcomes[index].value
    while len(self._cache) > self._cache_size:
      self._cache.popitem(last=False)

  def _refill(self) -> None:
    """Starts missing workers, and reaps those that have been ended."""
    self._ended = [worker for worker in self._ended if not process.reap(worker, wait_s=0.0)]
    # Too many dying workers at once would overload the machine.
    while len(self._ended) > 2 * self._num_workers:
      process.reap(self._ended.pop(0), wait_s=2.0)
    specs = [(function.target, function.settings, function.imports) for function in self._functions.values()]
    while len(self._workers) < self._num_workers:
      worker = process.start_worker(specs, memory_gb=self._memory_gb)
      self._workers.append(worker)
      self._selector.register(worker.results_fd, selectors.EVENT_READ, worker)
      self._watch_outbox(worker)

  def _watch_outbox(self, worker: Worker) -> None:
    watched = worker.jobs_fd in self._selector.get_map()
    if worker.outbox and not watched:
      self._selector.register(worker.jobs_fd, selectors.EVENT_WRITE, worker)
    elif watched and not worker.outbox:
      self._selector.unregister(worker.jobs_fd)

  def _send_batch(self, worker: Worker, waiting: deque[int], tasks: Sequence[Task]) -> None:
    """Sends waiting jobs to a worker, many at once at first and one by one towards the end."""
    count, size, batch = max(1, min(_MAX_JOBS_AT_ONCE, len(waiting) // (2 * self._num_workers))), 0, []
    while waiting and len(batch) < count and size < _MAX_BYTES_AT_ONCE:
      index = waiting.popleft()
      task = tasks[index]
      batch.append((self._base + index, task.function, *task.payload))
      size += len(task.payload[0]) + len(task.payload[1]) + len(task.payload[-1])
    if not worker.queue:
      worker.since = time.monotonic()
    worker.queue.extend((number, tasks[number - self._base].timeout_s) for number, *_ in batch)
    process.send(worker, batch)
    self._watch_outbox(worker)

  def _poll(self) -> list[Worker]:
    """Waits for an answer or a deadline, and returns the workers that answered or are overdue."""
    now = time.monotonic()
    ends = [worker.since + self._limit(worker) for worker in self._workers if worker.queue or not worker.ready]
    answered = []
    for key, event in self._selector.select(max(0.0, min([end - now for end in ends], default=0.0))):
      if event & selectors.EVENT_WRITE:
        process.flush(key.data)
        self._watch_outbox(key.data)
        # A worker that still reads messages is not running a job.
        key.data.since = time.monotonic()
      else:
        answered.append(key.data)
    now = time.monotonic()
    overdue = [
      worker for worker in self._workers if (worker.queue or not worker.ready) and now - worker.since > self._limit(worker)
    ]
    return answered + [worker for worker in overdue if worker not in answered]

  def _limit(self, worker: Worker) -> float:
    return worker.queue[0][1] if worker.ready else _START_SECONDS

  def _receive(self, worker: Worker, waiting: deque[int], outcomes: list[Outcome | None]) -> None:
    """Takes a worker's answers. If it broke or is overdue, fails its current job and ends it."""
    replies, ended, broken = process.read_replies(worker)
    retires = False
    for reply in replies:
      if not worker.ready and reply.number == READY and not reply.cause:
        worker.ready, self._failed_starts = True, 0
      elif worker.ready and worker.queue and worker.queue[0][0] == reply.number:
        outcomes[worker.queue.popleft()[0] - self._base] = Outcome(None, reply.cause, reply.detail) if reply.cause else Outcome(reply.value)
        retires = retires or reply.retires
      elif not worker.ready and reply.number == READY:
        self._fail_start(worker, reply.detail)
        return
      else:
        broken = True
        break
      worker.since = time.monotonic()
    overdue = bool(worker.queue) and time.monotonic() - worker.since > self._limit(worker)
    if not worker.ready and (broken or ended or time.monotonic() - worker.since > _START_SECONDS):
      self._fail_start(worker, process.describe_exit(worker))
    elif retires or broken or ended or overdue:
      if worker.queue and not retires:
        number, limit = worker.queue.popleft()
        cause, detail = "timeout", f"no answer within {limit:g} s"
        if broken:
          cause, detail = "flooded", "its worker's pipe carried something other than an answer"
        elif ended:
          cause, detail = "died", process.describe_exit(worker)
        outcomes[number - self._base] = Outcome(None, cause, detail)
      # The other jobs are not at fault and run again.
      waiting.extendleft(number - self._base for number, _ in reversed(worker.queue))
      self._end(worker)

  def _fail_start(self, worker: Worker, detail: str) -> None:
    self._end(worker)
    self._failed_starts += 1
    if self._failed_starts > _MAX_FAILED_STARTS:
      raise RuntimeError(f"reward workers do not start: {detail}")

  def _end(self, worker: Worker) -> None:
    for fd in (worker.results_fd, worker.jobs_fd):
      if fd in self._selector.get_map():
        self._selector.unregister(fd)
    process.end_worker(worker)
    self._workers.remove(worker)
    self._ended.append(worker)
    self.num_replaced += not self._closed
