"""The learner of a trial: `python -m experiments.studies.asynchrony.learner POLICY FLAG ...`

It is `jaxrl_llm.main` with two differences: the run begins with given weights, and a lag that
nothing corrects is not refused, because one of the arms has it.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.studies.asynchrony.bed import begin_with
from jaxrl_llm import main as command
from jaxrl_llm import train


def allowing_any_lag(check: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
  """Returns a check of configs that refuses no lag for the want of a correction."""
  return lambda config: [line for line in check(config) if not line.startswith("config.learner.old_logprobs")]


def main(argv: list[str]) -> int:
  """Runs the learner."""
  policy, start = Path(argv[1]), train.start_run
  train.start_run = lambda *args, **options: begin_with(start(*args, **options), policy)
  command.config_problems = allowing_any_lag(command.config_problems)
  return command.main([argv[0], *argv[2:]])


if __name__ == "__main__":
  sys.exit(main(sys.argv))
