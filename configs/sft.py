"""Supervised warm start alone: what imitation of the careless teacher reaches, and RL starts from.

Paper: none; the loss is minus the log-probability, the mean over tokens (the objective `sft`), as in arXiv:2203.02155, 2022.

The teacher gets each step wrong with probability 1/3, so a perfect imitator is right on 0.64, 0.46 and 0.32 of the problems of one, two
and three steps. There is one RL step, since a run ends with RL; with a learning rate of nearly 0 it leaves the policy as it is.
Command: python -m jaxrl_llm.main --config=configs/sft.py
Hardware: 2 CPU cores.
Measured: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """The experiment; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  config = common.laptop("grpo", arg)
  return config
