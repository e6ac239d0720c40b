"""DPPO: a trust region in the probability of the sampled token, in the place of one in its ratio.

Paper: Rethinking the trust region in LLM reinforcement learning, arXiv:2602.04879, 2026.

A token that has moved by more than 0.15 in probability and would go on has no gradient; importance weights are capped at 20. Both are the
objective's own defaults and are measured from the sampler's policy, as in the paper. `--config.objective.name=dppo_kl` takes the KL
divergence of the token, up to 0.05 nats.
Command: python -m jaxrl_llm.main --config=configs/dppo.py
Hardware: 2 CPU cores.
Score: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """The experiment; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  return common.laptop("dppo_tv", arg)
