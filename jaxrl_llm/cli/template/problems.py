"""The task: four digits, of which the largest is asked for.

Command: python problems.py

It writes `problems.jsonl`, one problem a line. To train on your own questions, write such a file
in its place. The config names its columns: `question` and `answer`, and `solution`, which the
policy imitates before it learns from rewards. A fifth of the solutions here are wrong, so that
imitation alone cannot reach the top.
"""

import json
import random
from pathlib import Path


def problems(*, count: int = 2000, seed: int = 0) -> list[dict[str, object]]:
  """Draws problems, the same ones for the same seed."""
  draw, rows = random.Random(seed), {}
  while len(rows) < count:
    digits = "".join(draw.choices("0123456789", k=4))
    largest = max(digits)
    solution = largest if draw.random() < 0.7 else draw.choice(digits)
    rows[digits] = {"question": digits, "answer": int(largest), "solution": solution}
  return list(rows.values())


def write(path: Path) -> None:
  """Writes the problems to a file of JSON lines."""
  path.write_text("".join(json.dumps(row) + "\n" for row in problems()), encoding="utf-8")


if __name__ == "__main__":
  write(Path(__file__).resolve().with_name("problems.jsonl"))
