"""CISPO: the importance weight of a token is capped, and no token loses its gradient.

Paper: MiniMax-M1, arXiv:2506.13585, 2025. Its cap is not published; the cap of 5 is from ScaleRL,
arXiv:2510.13786, 2025.

The cap is `1 + clip_high`, the objective's own default. As in the paper, the weight has no lower
bound. Of the rest of the recipe, the config has DAPO's length penalty over the last fifth of the
token budget.

Command: python -m jaxrl_llm.main --config=configs/cispo.py

Hardware: 2 CPU cores.

Score: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  config = common.laptop("cispo", arg)
  config.reward.overlong_buffer = config.rollout.get_ref("max_new_tokens") // 5
  return config
