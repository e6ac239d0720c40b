"""Time per 10,000 answers of each reward, here and in another checkout, in turns.

  python -m experiments.benchmarks.graders --against=../other_checkout

Each checkout has a process of its own, which grades the same synthetic responses. This file is also
the program of these processes, so that the other checkout need not have it.
"""

import json
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]
REWARDS = ("maths", "final_number", "final_text", "exact_match", "choice")
_REASONING = "We start from what is given and simplify step by step, keeping both sides equal. "
_FORMS = ("So the answer is $\\boxed{{{}}}$.", "#### {}", "**Answer:** {}", "The answer is {}.")


def number(draw: random.Random) -> tuple[str, str]:
  """Draws a number as the right answer, and a response's answer in one of several spellings."""
  value = draw.choice([draw.randrange(100), draw.randrange(-(10**6), 10**6)])
  other = value + draw.choice([0, 0, 1])
  return str(value), draw.choice(
    [f"{other:,}", f"{other}", f"{other}.0", f"{2 * other}/2", rf"\frac{{{3 * other}}}{{3}}"]
  )


def formula(draw: random.Random) -> tuple[str, str]:
  """Draws a right answer that takes algebra to compare, and a response's answer."""
  a, b, c, off = (
    draw.randrange(2, 10**4),
    draw.randrange(2, 10**4),
    draw.randrange(2, 50),
    draw.choice([0, 0, 1]),
  )
  pairs = [
    (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b + off}}}"), (f"(x+{a})(x-{c})", f"x^2+{a - c + off}x-{a * c}"),
    (f"({a},{a + b}]", f"({a},{a + b + off}]"), (rf"\frac{{\pi}}{{{a}}}", rf"\frac{{{c}\pi}}{{{a * c + off}}}"),
    (rf"\{{{a}, {c}\}}", rf"\{{{c}, {a + off}\}}"), (f"x = {a}", f"{a + off}"), (f"2^{{-{c}}}", rf"\frac{{1}}{{2^{{{c + off}}}}}"),
    (f"{a}+{b}i", f"{b}i+{a + off}"),
  ]  # fmt: skip
  return draw.choice(pairs)


def letter(draw: random.Random) -> tuple[str, str]:
  """Draws a letter as the right answer, and a response's choice."""
  right, chosen = draw.choice("ABCDE"), draw.choice("ABCDE")
  return right, draw.choice(
    [chosen, f"({chosen})", f"({chosen}) {draw.randrange(100)} cm", rf"\text{{{chosen}}}"]
  )


def responses(reward: str, count: int, *, seed: int) -> list[tuple[str, str]]:
  """Makes right answers with responses of about a thousand characters.

  Args:
    reward: Reward that will judge them. `maths` gets formulas for a third of them, about as in the
      MATH data set, `choice` letters, and the others numbers.
    count: Number of responses, all of them different.
    seed: Seed of the answers.
  """
  draw, made = random.Random(f"{reward} {seed}"), []
  for i in range(count):
    kinds = {"maths": [number, number, formula], "choice": [letter]}.get(reward, [number])
    gold, answer = draw.choice(kinds)(draw)
    made.append((gold, f"{_REASONING * 12}Case {i} of {seed}.\n" + draw.choice(_FORMS).format(answer)))
  return made


def serve() -> None:
  """Grades what each line of stdin asks for, `[reward, count, seed]`, and writes seconds and rewards."""
  from jaxrl_llm import rewards
  from jaxrl_llm.text_types import Completion

  for line in sys.stdin:
    reward, count, seed = json.loads(line)
    fn = rewards.make(reward)
    jobs = [
      (Completion(text, (), 250, True), {"answer": gold, "question": "?"})
      for gold, text in responses(reward, count, seed=seed)
    ]
    started = time.process_time()
    values = [fn(*job) for job in jobs]
    print(json.dumps([time.process_time() - started, sum(values)]), flush=True)


def compare(
  checkouts: Sequence[pathlib.Path], *, count: int, repeats: int
) -> dict[str, list[dict[str, list[float]]]]:
  """Measures the rewards in each checkout, in turns.

  Args:
    checkouts: Roots of the checkouts.
    count: Number of responses of one round.
    repeats: Number of timed rounds, after one that warms up.

  Returns:
    By reward, for each checkout: `seconds`, CPU seconds per 10,000 responses, and `accepted`, the
    share of accepted responses, each with one entry per round.
  """
  for root in checkouts:
    if not (root / "jaxrl_llm").is_dir():
      raise ValueError(f"--against: found {str(root)!r}, expected a checkout of this repository")
  command = [sys.executable, str(pathlib.Path(__file__).resolve())]
  workers = [
    subprocess.Popen(
      command,
      cwd=root,
      env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    for root in checkouts
  ]
  try:
    results = {}
    for reward in REWARDS:
      results[reward] = [dict(seconds=[], accepted=[]) for _ in workers]
      for repeat in range(repeats + 1):
        order = range(len(workers)) if repeat % 2 else reversed(range(len(workers)))
        for i in order:
          print(json.dumps([reward, count, repeat]), file=workers[i].stdin, flush=True)
          seconds, accepted = json.loads(workers[i].stdout.readline())
          if repeat:
            results[reward][i]["seconds"].append(seconds / count * 10_000)
            results[reward][i]["accepted"].append(accepted / count)
    return results
  finally:
    for worker in workers:
      worker.stdin.close()
      worker.wait()


if __name__ == "__main__":
  serve()
