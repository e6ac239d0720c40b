"""GMPO: the geometric mean of a response's clipped token ratios weighs the whole response.

Paper: Geometric-mean policy optimization, arXiv:2507.20673, 2025.

Token log-ratios are clipped to [-0.4, 0.4] on the side of the advantage, as in the paper. The paper
makes 8 updates per rollout batch, the laptop job 4. Tokens are clipped before the mean is taken, so
that short responses need no wider band.

Command: python -m jaxrl_llm.main --config=configs/gmpo.py

Hardware: 2 CPU cores.

Score: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  return common.laptop("gmpo", arg)
