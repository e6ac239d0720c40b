"""Grading speed: answers per second, the cost of hanging calls, and programs in the sandbox.

  python -m experiments.benchmarks.graders --workers=2 --repeats=5

Answers are graded in this process, and in the pool of killable workers, once as new answers and
once as remembered ones. The three methods take turns. Each repeat has answers of its own, so that
only the last method can remember them. The benchmark uses no accelerator and no JAX.

  python -m experiments.benchmarks.graders --against=../other_checkout

With `--against` only the CPU time of each reward per 10,000 answers is measured, beside that of
another checkout (`grader_times`).
"""

import argparse
import pathlib
import random
import sys
import time
from collections.abc import Sequence

from experiments.benchmarks import grader_times
from experiments.benchmarks.reporting import between, lines, spread, write_json
from jaxrl_llm import rewards
from jaxrl_llm.rewards import sandbox
from jaxrl_llm.rewards.workers import Function, WorkerJob, WorkerPool
from jaxrl_llm.text_types import Completion

MATHS = Function("jaxrl_llm.rewards:make", {"name": "maths", "seconds": 30.0}, imports=("math_verify",), timeout_s=60.0)
_REASONING = "We start from what is given and simplify step by step, keeping both sides equal. "
_SUM = "a, b = map(int, input().split())\nprint(a + b)"


def sleep_forever(completion, example) -> float:
  """Sleeps instead of answering, as a reward function that hangs."""
  del completion, example
  time.sleep(3600)
  return 0.0


def plain(draw: random.Random) -> tuple[str, str]:
  """Draws a number as the right answer, and a response's answer."""
  number = draw.randrange(-(10**6), 10**6)
  return str(number), f"{number + draw.choice([0, 0, 1]):,}"


def expression(draw: random.Random) -> tuple[str, str]:
  """Draws a right answer that takes algebra to compare, and a response's answer."""
  a, b, c = (draw.randrange(2, 10**4) for _ in range(3))
  off = draw.choice([0, 0, 1])
  return draw.choice(
    [
      (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{a * c}}}{{{b * c + off}}}"),
      (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b + off}}}"),
      (f"(x+{a})(x-{b})", f"x^2+{a - b + off}x-{a * b}"),
      (f"({a},{a + b}]", f"({a},{a + b + off}]"),
      (rf"\frac{{\pi}}{{{a}}}", rf"\frac{{{b}\pi}}{{{a * b + off}}}"),
    ]
  )


def mixed(draw: random.Random) -> tuple[str, str]:
  """Draws two numbers for each expression, about as in the MATH data set."""
  return draw.choice([plain, plain, expression])(draw)


KINDS = {"plain": plain, "mixed": mixed, "expression": expression}


def make_jobs(kind: str, count: int, *, seed: int) -> list[WorkerJob]:
  """Makes responses of about a thousand characters with a boxed answer.

  Args:
    kind: Kind of the answers, a key of `KINDS`.
    count: Number of responses, all of them different.
    seed: Seed of the answers.
  """
  draw, jobs = random.Random(seed), []
  for i in range(count):
    right, answer = KINDS[kind](draw)
    text = f"{_REASONING * 12}Case {i} of {seed}. So the answer is $\\boxed{{{answer}}}$."
    jobs.append(WorkerJob("maths", Completion(text, tuple(range(250)), 250, True), {"answer": right}))
  return jobs


def rate(run, jobs: Sequence[WorkerJob]) -> tuple[float, list[float | None]]:
  """Measures the jobs per second, and returns them with the values."""
  started = time.perf_counter()
  values = run(jobs)
  return len(jobs) / (time.perf_counter() - started), values


def measure_answers(pool: WorkerPool, kind: str, *, count: int, repeats: int) -> dict[str, dict[str, float]]:
  """Measures the answers per second of the three methods, in turn.

  Args:
    pool: Pool with the function `maths`.
    kind: Kind of the answers.
    count: Number of answers of one repeat.
    repeats: Number of timed rounds, after one that warms up.
  """
  fn = rewards.make(**MATHS.settings)

  def here(jobs):
    return [fn(job.completion, job.example) for job in jobs]

  def there(jobs):
    return [outcome.value for outcome in pool.call(jobs)]

  rates = {"here": [], "new": [], "remembered": []}
  for repeat in range(repeats + 1):
    jobs = make_jobs(kind, count, seed=repeat)
    results = {"here": rate(here, jobs), "new": rate(there, jobs), "remembered": rate(there, jobs)}
    if not results["here"][1] == results["new"][1] == results["remembered"][1]:
      raise RuntimeError("the pool returned other values than the function itself")
    for name, (answers_per_s, _) in results.items():
      rates[name] += [answers_per_s] if repeat else []
  return {name: spread(values) for name, values in rates.items()}


def measure_hangs(*, count: int, workers: int, timeout_s: float) -> dict[str, float]:
  """Measures calls that never return, one after another.

  Args:
    count: Number of calls.
    workers: Number of workers of the pool.
    timeout_s: Deadline of a call, in seconds.
  """
  with WorkerPool(
    {"hang": Function("experiments.benchmarks.graders:sleep_forever")}, num_workers=workers, timeout_s=timeout_s
  ) as pool:
    seconds, timeouts = [], 0
    for _ in range(count):
      started = time.perf_counter()
      (outcome,) = pool.call([WorkerJob("hang", Completion("", (), 0, True), {})])
      timeouts += outcome.cause == "timeout"
      seconds.append(time.perf_counter() - started)
    return dict(count=count, timeouts=timeouts, workers_after=pool.num_workers, **spread(seconds))


def programs_per_second(box: sandbox.Sandbox, count: int) -> float:
  """Grades a right program with `count` tests, and returns its runs per second."""
  tests = sandbox.StdioTests([(f"{i} {i}", str(2 * i)) for i in range(count)])
  started = time.perf_counter()
  grade = sandbox.grade(_SUM, tests, box, total_s=600.0)
  if grade.passed != count:
    raise RuntimeError(f"a right program passed {grade.passed} of {count} tests: {grade.detail}")
  return count / (time.perf_counter() - started)


def measure_programs(*, count: int, repeats: int) -> dict[str, dict[str, float] | str]:
  """Measures the programs per second in each available sandbox, one at a time.

  Args:
    count: Number of programs of one repeat.
    repeats: Number of timed rounds, after one that warms up.

  Returns:
    The rates by sandbox, or the reason why a sandbox is not available.
  """
  rates_by_sandbox: dict[str, dict[str, float] | str] = {}
  for backend in ("namespaces", "bubblewrap", "unsafe"):
    box = sandbox.Sandbox(backend)
    if reason := sandbox.probe(box):
      rates_by_sandbox[backend] = reason
      continue
    rates = [programs_per_second(box, count) for _ in range(repeats + 1)]
    rates_by_sandbox[backend] = spread(rates[1:])
  return rates_by_sandbox


def report_times(against: pathlib.Path, *, count: int, repeats: int) -> dict:
  """Measures the rewards beside those of another checkout, and prints a line for each."""
  result = grader_times.compare([grader_times.ROOT, against.resolve()], count=count, repeats=repeats)
  rows = {}
  for name, (here, there) in result.items():
    ratios = [a / b for a, b in zip(here["seconds"], there["seconds"], strict=True)]
    rows[name] = (
      f"{between(spread(here['seconds']), '.2f')} s per 10,000 answers, there {between(spread(there['seconds']), '.2f')}, "
      f"{between(spread(ratios), '.2f')} times"
    )
  print(lines(rows))
  return result


def main(argv: Sequence[str] | None = None) -> None:
  """Measures, prints and, if a file is given, writes the results."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--workers", type=int, default=2, help="number of processes of the pool")
  parser.add_argument("--count", type=int, default=2000, help="number of answers per round")
  parser.add_argument("--repeats", type=int, default=5, help="number of timed rounds")
  parser.add_argument("--hangs", type=int, default=100, help="number of calls that never return")
  parser.add_argument("--timeout", type=float, default=0.05, help="deadline of these calls, in seconds")
  parser.add_argument("--programs", type=int, default=10, help="number of programs per round; 0 for none")
  parser.add_argument("--against", type=pathlib.Path, default=None, help="root of another checkout to compare each reward with")
  parser.add_argument("--json", type=pathlib.Path, default=None, help="file for the results")
  flags = parser.parse_args(argv)
  if flags.against is not None:
    write_json(flags.json, report_times(flags.against, count=flags.count, repeats=flags.repeats))
    return
  result = dict(workers=flags.workers, answers={}, hangs={}, programs={})
  started = time.perf_counter()
  with WorkerPool({"maths": MATHS}, num_workers=flags.workers) as pool:
    result["open_seconds"] = time.perf_counter() - started
    for kind in KINDS:
      result["answers"][kind] = measure_answers(pool, kind, count=flags.count, repeats=flags.repeats)
  result["hangs"] = (
    measure_hangs(count=flags.hangs, workers=flags.workers, timeout_s=flags.timeout) if flags.hangs else {}
  )
  result["programs"] = measure_programs(count=flags.programs, repeats=flags.repeats) if flags.programs else {}
  rows = {"pool": f"{flags.workers} workers, opened in {result['open_seconds']:.2f} s"}
  for kind, rates in result["answers"].items():
    rows |= {f"{kind}, {way}"[:30].ljust(24): f"{between(x, ',.0f')} answers/s" for way, x in rates.items()}
  if hangs := result["hangs"]:
    rows["hangs"] = (
      f"{between(hangs, '.3f')} s per call, {hangs['timeouts']} of {hangs['count']} timed out, "
      f"{hangs['workers_after']} workers left"
    )
  for name, programs in result["programs"].items():
    rows[name] = programs if isinstance(programs, str) else f"{between(programs, '.1f')} programs/s"
  print(lines(rows))
  write_json(flags.json, result)


if __name__ == "__main__":
  main(sys.argv[1:])
