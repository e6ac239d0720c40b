"""GSPO: ratio and clip at the sequence.

Paper: Group Sequence Policy Optimization, arXiv:2507.18071 (2025). The paper clips to [1 - 3e-4, 1 + 4e-4] on responses of thousands of tokens. A
length-normalised ratio spreads as 1/sqrt(length), so at the 10 to 35 tokens of the laptop job that band would clip nearly every sequence
that has moved; the band here is scaled to 6e-3 and 8e-3. `:paper` keeps the paper's band, for long responses.
Command: python -m jaxrl_llm.main --config=configs/gspo.py
Hardware: 2 CPU cores.
Measured: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """The experiment; `arg` is "", "tiny" (a smoke run) or "paper" (the paper's band)."""
  config = common.laptop("gspo", arg, variants=("paper",))
  if arg != "paper":
    config.objective.clip_low = 6e-3
    config.objective.clip_high = 8e-3
  return config
