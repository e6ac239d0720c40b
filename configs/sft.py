"""SFT: the supervised warm start alone, from which RL starts.

Paper: Training language models to follow instructions with human feedback, arXiv:2203.02155, 2022,
section 3.

The loss is the negative log-probability, averaged over tokens. The careless teacher gets each step
wrong with probability 1/3. Its answers, and those of a perfect imitator, are right in 64 %, 46 %
and 32 % of the problems of one, two and three steps.

Command: python -m jaxrl_llm.main --config=configs/sft.py

Hardware: 2 CPU cores.

Score: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  config = common.laptop("sft", arg)
  config.num_steps = 0
  return config
