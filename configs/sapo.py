"""SAPO: a smooth, temperature-controlled gate on the token ratio instead of the clip.

Paper: Soft adaptive policy optimization, arXiv:2511.20347, 2025.

The gate's temperatures are 1.0 for positive and 1.05 for negative advantages, as in the paper. With
them the gate stays above 0.99 while a ratio is within 0.2 of 1, so that it acts on outliers.

Command: python -m jaxrl_llm.main --config=configs/sapo.py

Hardware: 2 CPU cores. `:vl` needs the extra `[vision]`.

Score: held-out avg@4 46.5% after the warm start, 97.1% at the end (seed 0; time: see
docs/results.md). `:smollm2`: seeds 1, 2 and 3 rise from 15.6%, 12.5% and 18.0% untrained to 90.6%,
93.8% and 92.2% of 128 held-out problems, each in less than three minutes. `:smollm2-steps`: seeds
4, 5 and 6 rise from 2.3%, 0.8% and 2.3% to 72.7%, 64.8% and 62.5%, each in less than 45 minutes
beside other work, with up to 12.7 GB. `:vl`: seeds 0 and 1 rise from 42.7% and 40.6% after the warm
start to 86.0% and 86.1% of 256 held-out drawings, where chance is 12.5% (seed 0: 320 s and 1.06 GB
on two idle cores of an AMD EPYC, 2026-11-26). `:vl-blank`: 11.4%, 11.5% (seed 0). The paper's
constants and `:moe`: not yet measured. Published models (`:qwen3-30b-a3b` and others): compiled for
pods (docs/pod_plans.md), not yet trained.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config of the experiment.

  Args:
    arg: "" (the laptop job), "tiny" (a smoke run), "moe" (the laptop job with experts), "vl" (a
      policy that sees, on drawn figures) or its control "vl-blank", "smollm2" or another key of
      `common.SMOLLM2` (a real model), "paper" (the paper's constants), or a published model for a
      pod, such as "qwen3-30b-a3b".
  """
  config = common.laptop("sapo", arg, variants=("paper", *common.PICTURES, *common.MODELS))
  if arg == "paper":
    common.paper_scale(config, updates_per_rollout=4)
  return config
