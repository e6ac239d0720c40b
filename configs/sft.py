"""SFT: the supervised warm start alone, which is what imitating the careless teacher reaches and what RL starts from.

Paper: Training language models to follow instructions with human feedback, arXiv:2203.02155, 2022, section 3.
The loss is minus the log-probability, the mean over tokens. The teacher gets each step wrong with probability 1/3: its answers are right in
64 %, 46 % and 32 % of the problems of one, two and three steps, and a perfect imitator's would be too.
Command: python -m jaxrl_llm.main --config=configs/sft.py
Hardware: 2 CPU cores.
Measured: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """The experiment; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  config = common.laptop("sft", arg)
  config.num_steps = 0
  return config
