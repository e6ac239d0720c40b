"""Dr. GRPO: GRPO without its biased divisions by response length and by standard deviation.

Paper: Understanding R1-Zero-like training: a critical perspective, arXiv:2503.20783, 2025.

Token losses are divided by the generation budget, which is a setting and not a shape:
`objective.max_tokens` is `rollout.max_new_tokens` here and 3000 in the paper.

Command: python -m jaxrl_llm.main --config=configs/dr_grpo.py

Hardware: 2 CPU cores.

Score: held-out avg@4 46.5% after the warm start, 97.4% at the end (seed 0; time: see
docs/results.md). The paper's constants: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config; `arg` is "", "tiny" (a smoke run) or "paper" (the paper's constants)."""
  config = common.laptop("dr_grpo", arg, variants=("paper",))
  config.advantage.normalize_std = False
  if arg == "paper":
    common.paper_scale(config, updates_per_rollout=1)
  else:
    config.objective.max_tokens = config.rollout.get_ref("max_new_tokens") * 1
  return config
