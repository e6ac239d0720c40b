"""Texts for the environment reverse_text, in the place of its published data set.

Command: python -m experiments.verifiers.words runs/verifiers/words
"""

import json
import pathlib
import random
import sys


def write_words(folder: pathlib.Path, *, count: int = 400, length: int = 3) -> None:
  """Writes texts of random letters from a to h as a data set."""
  draw = random.Random(0)
  folder.mkdir(parents=True, exist_ok=True)
  texts = ["".join(draw.choice("abcdefgh") for _ in range(length)) for _ in range(count)]
  (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


if __name__ == "__main__":
  write_words(pathlib.Path(sys.argv[1]))
