"""Error rates of the rewards on real responses that others have judged.

  python -m experiments.verdicts.measure --gsm8k=DIR --math=DIR --mathvision=DIR --json=experiments/verdicts/results.json

Each folder is a checkout of a public repository (`SETS`). A disagreement is an error of either
side; --show prints each, to be read.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from experiments.benchmarks.reporting import report
from jaxrl_llm import rewards
from jaxrl_llm.rewards.outcome import attempt
from jaxrl_llm.text_types import Completion


class Judged(NamedTuple):
  """A response with its publishers' verdict.

  Attributes:
    reward: Name of the reward that judges it here.
    response: Text of the response.
    example: Row of the problem, as the reward reads it.
    right: The publishers' verdict.
    source: Model or file, and number of the row.
  """

  reward: str
  response: str
  example: dict
  right: bool
  source: str


def gsm8k(folder: pathlib.Path) -> Iterator[Judged]:
  """Reads the solutions of four models with `is_correct` from openai/grade-school-math."""
  for i, row in enumerate(_rows(folder / "grade_school_math/data/example_model_solutions.jsonl")):
    answer = row["ground_truth"].rpartition("A:")[2].strip()
    for model, solution in row.items():
      if isinstance(solution, dict):
        example = {"question": row["question"], "answer": answer}
        yield Judged("final_number", solution["solution"], example, solution["is_correct"], f"{model} {i}")


def math(folder: pathlib.Path) -> Iterator[Judged]:
  """Reads eight responses to each of 100 MATH problems with verdicts from QwenLM/Qwen2.5-Math."""
  for row in _rows(folder / "evaluation/data/eval_rm_maj_example/math_cot_100.jsonl"):
    for i, (response, right) in enumerate(zip(row["code"], row["score"], strict=True)):
      yield Judged(
        "maths", response, {"question": row["question"], "answer": row["gt"]}, right, f"{row['idx']}, {i}"
      )


def mathvision(folder: pathlib.Path) -> Iterator[Judged]:
  """Reads the responses of two models to 3,040 problems with verdicts from mathllm/MATH-V."""
  problems = {row["id"]: row for row in _rows(folder / "data/test.jsonl")}
  for path in ("Gemini/Gemini-Pro-CoT", "Qwen/Qwen-VL-Max-CoT"):
    for row in _rows(folder / f"outputs/closed-source/{path}.jsonl"):
      problem = problems[row["id"]]
      reward = "choice" if problem["options"] else "maths"
      example = {"question": problem["question"], "answer": problem["answer"], "options": problem["options"]}
      yield Judged(
        reward, row["response"] or "", example, row["correct"], f"{path.partition('/')[2]} {row['id']}"
      )


SETS: dict[str, Callable[[pathlib.Path], Iterator[Judged]]] = {
  "gsm8k": gsm8k,
  "math": math,
  "mathvision": mathvision,
}
"""Readers of the published verdicts; each takes a checkout of the repository that it names."""


def _rows(path: pathlib.Path) -> Iterator[dict]:
  if not path.is_file():
    raise ValueError(f"found no file {path}, expected a checkout of the repository that --help names")
  with path.open(encoding="utf-8") as lines:
    yield from map(json.loads, lines)


@functools.cache
def _reward(name: str):
  return rewards.make(name)


def judge(items: Iterator[Judged], *, show: Callable[[str], None] | None = None) -> dict[str, dict[str, int]]:
  """Counts agreements and disagreements by reward.

  Args:
    items: Responses with verdicts.
    show: Function that is called with a line for each disagreement.

  Returns:
    By reward: `right` and `wrong`, the publishers' verdicts; `only_here` and `only_there`, the
    responses that one side alone accepts; `failed`, those that the reward cannot judge.
  """
  counts: dict[str, dict[str, int]] = {}
  for item in items:
    count = counts.setdefault(item.reward, dict(right=0, wrong=0, only_here=0, only_there=0, failed=0))
    outcome = attempt(
      _reward(item.reward), Completion(item.response, (), len(item.response), True), item.example
    )
    here = bool(outcome.value)
    count["right" if item.right else "wrong"] += 1
    count["failed"] += outcome.value is None
    count["only_here"] += here and not item.right
    count["only_there"] += item.right and not here
    if here != item.right and show is not None:
      side = "here" if here else "there"
      show(
        json.dumps(
          [item.reward, f"right {side} only", item.source, item.example["answer"], item.response[-300:]],
          ensure_ascii=False,
        )
      )
  return counts


def table(result: dict) -> str:
  """Formats the counts as a Markdown table."""
  rows = [
    "| set | reward | responses | right | right here only | right there only |",
    "| --- | --- | --- | --- | --- | --- |",
  ]
  for name, by_reward in result["sets"].items():
    for reward, x in by_reward.items():
      rows.append(
        f"| {name} | `{reward}` | {x['right'] + x['wrong']:,} | {x['right']:,} | "
        f"{x['only_here']} ({100 * x['only_here'] / max(x['wrong'], 1):.2f} % of the wrong) | "
        f"{x['only_there']} ({100 * x['only_there'] / max(x['right'], 1):.2f} % of the right) |"
      )
  return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
  """Judges the sets whose folders are given, prints the table, and writes the counts."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  for name, read in SETS.items():
    parser.add_argument(f"--{name}", type=pathlib.Path, help=(read.__doc__ or "").partition("\n")[0])
  parser.add_argument("--show", action="store_true", help="print each disagreement")
  parser.add_argument("--json", type=pathlib.Path, default=None, help="file for the counts")
  flags = parser.parse_args(argv)

  def measure() -> dict:
    folders = {name: getattr(flags, name) for name in SETS if getattr(flags, name) is not None}
    if not folders:
      raise ValueError(f"found no folder, expected one of {', '.join(f'--{name}' for name in SETS)}")
    versions = {name: importlib.metadata.version(name) for name in ("math-verify", "sympy")}
    sets = {
      name: judge(SETS[name](folder), show=print if flags.show else None) for name, folder in folders.items()
    }
    return dict(date=datetime.date.today().isoformat(), versions=versions, sets=sets)

  return report(measure, table, flags.json)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
