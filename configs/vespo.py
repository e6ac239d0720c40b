"""VESPO: a smooth function of a response's true importance weight.

Paper: VESPO, arXiv:2602.10693, 2026.

Exponent and rate are (2, 3) for positive and (3, 2) for negative advantages, as in the authors'
code: a response counts most if its importance weight is 2/3 or 3/2, respectively. The weight is a
product over all tokens. It stays closer to 1 than in the paper, because the responses of the laptop
job are short.

Command: python -m jaxrl_llm.main --config=configs/vespo.py

Hardware: 2 CPU cores.

Score: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  return common.laptop("vespo", arg)
