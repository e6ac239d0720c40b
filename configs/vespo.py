"""VESPO: a smooth function of a response's true importance weight.

Paper: VESPO, arXiv:2602.10693, 2026.

Exponent and rate (2, 3) for positive and (3, 2) for negative advantages, as in the authors' code: a response counts most where its
importance weight is 2/3 or 3/2. That weight is a product over all tokens, and the responses of the laptop job are short: it stays closer
to 1 than in the paper.
Command: python -m jaxrl_llm.main --config=configs/vespo.py
Hardware: 2 CPU cores.
Score: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """The experiment; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  return common.laptop("vespo", arg)
