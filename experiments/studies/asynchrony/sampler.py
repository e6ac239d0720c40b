"""The sampler of a trial: `python -m experiments.studies.asynchrony.sampler WORKDIR`

It is `jaxrl_llm.cli.join`, except that a lag that nothing corrects is not refused.
"""

import sys

from experiments.studies.asynchrony.learner import allowing_any_lag
from jaxrl_llm.cli import join
from jaxrl_llm.config import check


def main(argv: list[str]) -> int:
  """Runs the sampler."""
  check.config_problems = allowing_any_lag(check.config_problems)
  return join.main(argv)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
