"""GRPO: token ratios, a hard clip, the mean over each sequence, and a k3 penalty against the frozen warm start.

Paper: DeepSeekMath: pushing the limits of mathematical reasoning in open language models, arXiv:2402.03300, 2024.

Clip range 0.2 and KL coefficient 0.04 are the paper's. The paper makes one update per rollout batch, so that its clip never binds; the
laptop job makes four, as every config here does. `:paper` makes one, with 64 samples for each prompt.
Command: python -m jaxrl_llm.main --config=configs/grpo.py
Hardware: 2 CPU cores.
Score: held-out avg@4 46.5% after the warm start, 95.9% at the end (seed 0; time: see docs/results.md). The paper's constants, `:moe` and
`:smollm2`: not yet measured. Published models (`:qwen3-30b-a3b` and others): compiled for
pods (docs/pod_plans.md), not yet trained.
"""

from configs import common


def get_config(arg: str = ""):
  """The experiment; `arg` is "" (the laptop job), "tiny" (a smoke run), "moe" (the laptop job with experts), "smollm2" (a real model; its
  other tasks are keys of `common.SMOLLM2`), "paper" (the paper's constants) or a published model for a pod, such as "qwen3-30b-a3b"."""
  config = common.laptop("grpo", arg, variants=("paper", *common.MODELS))
  if arg == "paper":
    common.paper_scale(config, updates_per_rollout=1, group_size=64, num_prompts=16)
  if arg in common.SMOLLM2:
    config.objective.kl_coef = 0.0  # As in verl's and TRL's defaults: a group without a signal then costs no update.
  return config
