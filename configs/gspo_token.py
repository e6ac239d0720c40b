"""GSPO-token: the value and clip of GSPO, with a gradient for each token.

Paper: Group sequence policy optimization, arXiv:2507.18071, 2025, section 4.3.

With one advantage per sequence it equals GSPO in value, clip and gradient. Its purpose is
advantages that differ from token to token. The band is scaled as in `configs/gspo.py`; `:paper`
keeps the paper's 3e-4 and 4e-4.

Command: python -m jaxrl_llm.main --config=configs/gspo_token.py

Hardware: 2 CPU cores.

Score: held-out avg@4 46.3% after the warm start, 96.2% at the end (seed 0); 223 s. The paper's
constants: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config; `arg` is "", "tiny" (a smoke run) or "paper" (the paper's constants)."""
  config = common.laptop("gspo_token", arg, variants=("paper",))
  if arg == "paper":
    common.paper_scale(config, updates_per_rollout=4)
  else:
    config.objective.clip_low = 6e-3
    config.objective.clip_high = 8e-3
  return config
