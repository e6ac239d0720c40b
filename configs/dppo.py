"""DPPO: a trust region in the probability of the sampled token instead of its ratio.

Paper: Rethinking the trust region in LLM reinforcement learning, arXiv:2602.04879, 2026.

A token has no gradient if its probability has moved by more than 0.15 and the update would move it
further. Importance weights are capped at 20. Both are the objective's own defaults, relative to the
sampler's policy, as in the paper. `--config.objective.name=dppo_kl` limits the KL divergence of the
token instead, to 0.05 nats.

Command: python -m jaxrl_llm.main --config=configs/dppo.py

Hardware: 2 CPU cores.

Score: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  return common.laptop("dppo_tv", arg)
