"""DAPO: token-level loss, a higher upper clip and a soft penalty on overlong responses.

Paper: DAPO: an open-source LLM reinforcement learning system at scale, arXiv:2503.14476, 2025.

Clip 0.2 below and 0.28 above. The penalty grows over the last fifth of the token budget, as in the paper (4096 of 20480). Of the recipe,
dynamic sampling is not here yet: groups that are all right or all wrong stay in the batch, with advantage 0.
Command: python -m jaxrl_llm.main --config=configs/dapo.py
Hardware: 2 CPU cores.
Score: held-out avg@4 46.5% after the warm start, 97.5% at the end (seed 0; time: see README.md). The paper's constants: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """The experiment; `arg` is "" (the laptop job), "tiny" (a smoke run) or "paper" (the paper's constants)."""
  config = common.laptop("dapo", arg, variants=("paper",))
  if arg == "paper":
    common.paper_scale(config, updates_per_rollout=16)
    config.reward.overlong_buffer = config.rollout.max_new_tokens // 5
  else:
    config.reward.overlong_buffer = config.rollout.max_new_tokens // 5
  return config
