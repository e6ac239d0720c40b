"""Answers graded per second: here, and in the pool of killable workers, new and remembered; what a hang costs; programs in the sandbox.

  python -m experiments.benchmarks.graders --workers=2 --repeats=5

The ways take turns, and each repeat has answers of its own, so that nothing but the last way remembers. No accelerator and no JAX.
"""

import argparse
import pathlib
import random
import sys
import time
from collections.abc import Sequence

from experiments.benchmarks.reporting import between, lines, spread, write_json
from jaxrl_llm import rewards
from jaxrl_llm.rewards import sandbox
from jaxrl_llm.rewards.workers import Function, Job, Pool, open_pool
from jaxrl_llm.text_types import Completion

MATHS = Function("jaxrl_llm.rewards:make", {"name": "maths", "seconds": 30.0}, imports=("math_verify",), timeout_s=60.0)
_REASONING = "We start from what is given and simplify step by step, keeping both sides equal. "
_SUM = "a, b = map(int, input().split())\nprint(a + b)"


def sleep_forever(completion, example) -> float:
  """A reward function that never answers."""
  del completion, example
  time.sleep(3600)
  return 0.0


def plain(draw: random.Random) -> tuple[str, str]:
  """A right answer that is a number, and a response's."""
  number = draw.randrange(-(10**6), 10**6)
  return str(number), f"{number + draw.choice([0, 0, 1]):,}"


def expression(draw: random.Random) -> tuple[str, str]:
  """A right answer that takes algebra to compare, and a response's."""
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
  """Two numbers for each expression, about as in the MATH data set."""
  return draw.choice([plain, plain, expression])(draw)


KINDS = {"plain": plain, "mixed": mixed, "expression": expression}


def make_jobs(kind: str, count: int, *, seed: int) -> list[Job]:
  """Responses of about a thousand characters with an answer in a box.

  Args:
    kind: a key of `KINDS`.
    count: how many; no two are alike.
    seed: of the answers.
  """
  draw, jobs = random.Random(seed), []
  for i in range(count):
    right, answer = KINDS[kind](draw)
    text = f"{_REASONING * 12}Case {i} of {seed}. So the answer is $\\boxed{{{answer}}}$."
    jobs.append(Job("maths", Completion(text, tuple(range(250)), 250, True), {"answer": right}))
  return jobs


def rate(run, jobs: Sequence[Job]) -> tuple[float, list[float | None]]:
  """Jobs per second, and the values."""
  started = time.perf_counter()
  values = run(jobs)
  return len(jobs) / (time.perf_counter() - started), values


def measure_answers(pool: Pool, kind: str, *, count: int, repeats: int) -> dict[str, dict[str, float]]:
  """Answers per second of the three ways, in turn.

  Args:
    pool: with the function `maths`.
    kind: of the answers.
    count: of one repeat.
    repeats: timed rounds, after one that warms up.
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
      raise RuntimeError("the pool gave other values than the function itself")
    for name, (found, _) in results.items():
      rates[name] += [found] if repeat else []
  return {name: spread(values) for name, values in rates.items()}


def measure_hangs(*, count: int, workers: int, timeout_s: float) -> dict[str, float]:
  """Calls that never return, one after another.

  Args:
    count: of them.
    workers: of the pool.
    timeout_s: deadline of a call, in seconds.
  """
  with open_pool({"hang": Function("experiments.benchmarks.graders:sleep_forever")}, num_workers=workers, timeout_s=timeout_s) as pool:
    seconds, timeouts = [], 0
    for _ in range(count):
      started = time.perf_counter()
      (outcome,) = pool.call([Job("hang", Completion("", (), 0, True), {})])
      timeouts += outcome.cause == "timeout"
      seconds.append(time.perf_counter() - started)
    return dict(count=count, timeouts=timeouts, workers_after=pool.num_workers, **spread(seconds))


def programs_per_second(box: sandbox.Sandbox, count: int) -> float:
  """Grades one right program by `count` tests."""
  tests = sandbox.StdioTests([(f"{i} {i}", str(2 * i)) for i in range(count)])
  started = time.perf_counter()
  found = sandbox.grade(_SUM, tests, box, total_s=600.0)
  if found.passed != count:
    raise RuntimeError(f"a right program passed {found.passed} of {count} tests: {found.detail}")
  return count / (time.perf_counter() - started)


def measure_programs(*, count: int, repeats: int) -> dict[str, dict[str, float] | str]:
  """Programs per second in each sandbox that works here, one at a time.

  Args:
    count: of one repeat.
    repeats: timed rounds, after one that warms up.
  """
  found: dict[str, dict[str, float] | str] = {}
  for backend in ("namespaces", "bubblewrap", "unsafe"):
    box = sandbox.Sandbox(backend)
    if reason := sandbox.probe(box):
      found[backend] = reason
      continue
    rates = [programs_per_second(box, count) for _ in range(repeats + 1)]
    found[backend] = spread(rates[1:])
  return found


def main(argv: Sequence[str] | None = None) -> None:
  """Measures, prints and maybe writes."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--workers", type=int, default=2, help="processes of the pool")
  parser.add_argument("--count", type=int, default=2000, help="answers of one round")
  parser.add_argument("--repeats", type=int, default=5, help="rounds that are timed")
  parser.add_argument("--hangs", type=int, default=100, help="calls that never return")
  parser.add_argument("--timeout", type=float, default=0.05, help="their deadline, in seconds")
  parser.add_argument("--programs", type=int, default=10, help="programs of one round; 0 runs none")
  parser.add_argument("--json", type=pathlib.Path, default=None, help="a file for the results")
  flags = parser.parse_args(argv)
  result = dict(workers=flags.workers, answers={}, hangs={}, programs={})
  started = time.perf_counter()
  with open_pool({"maths": MATHS}, num_workers=flags.workers) as pool:
    result["open_seconds"] = time.perf_counter() - started
    for kind in KINDS:
      result["answers"][kind] = measure_answers(pool, kind, count=flags.count, repeats=flags.repeats)
  result["hangs"] = measure_hangs(count=flags.hangs, workers=flags.workers, timeout_s=flags.timeout) if flags.hangs else {}
  result["programs"] = measure_programs(count=flags.programs, repeats=flags.repeats) if flags.programs else {}
  rows = {"pool": f"{flags.workers} workers, open in {result['open_seconds']:.2f} s"}
  for kind, rates in result["answers"].items():
    rows |= {f"{kind}, {way}"[:30].ljust(24): f"{between(found, ',.0f')} answers/s" for way, found in rates.items()}
  if hangs := result["hangs"]:
    rows["hangs"] = (
      f"{between(hangs, '.3f')} s a call, {hangs['timeouts']} of {hangs['count']} timed out, {hangs['workers_after']} workers left"
    )
  for name, found in result["programs"].items():
    rows[name] = found if isinstance(found, str) else f"{between(found, '.1f')} programs/s"
  print(lines(rows))
  write_json(flags.json, result)


if __name__ == "__main__":
  main(sys.argv[1:])
