"""GRPO: token ratios, a hard clip, a mean over each sequence, and a k3 penalty.

Paper: DeepSeekMath: pushing the limits of mathematical reasoning in open language models,
arXiv:2402.03300, 2024.

The penalty is relative to the frozen policy after the warm start; with adapters, to the model under
them (docs/models.md). The clip range of 0.2 and the KL coefficient of 0.04 are the paper's. The
paper makes one update per rollout batch, so that its clip never binds. The laptop job makes four,
like every config here. `:paper` makes one, with 64 samples per prompt.

Command: python -m jaxrl_llm.main --config=configs/grpo.py

Hardware: 2 CPU cores. `:vl` needs the extra `[vision]`.

Score: held-out avg@4 46.5% after the warm start, 95.9% at the end (seed 0; time: see
docs/results.md). The paper's constants, `:moe`, `:vl` and `:smollm2`: not yet measured. Published
models (`:qwen3-30b-a3b` and others): compiled for pods (docs/pod_plans.md), not yet trained.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config of the experiment.

  Args:
    arg: "" (the laptop job), "tiny" (a smoke run), "moe" (the laptop job with experts), "vl" (a
      policy that sees, on drawn figures), "smollm2" or another key of `common.SMOLLM2` (a real
      model), "paper" (the paper's constants), or a published model for a pod, such as
      "qwen3-30b-a3b".
  """
  config = common.laptop("grpo", arg, variants=("paper", "vl", *common.MODELS))
  if arg == "paper":
    common.paper_scale(config, updates_per_rollout=1, group_size=64, num_prompts=16)
  if arg in (*common.SMOLLM2, "vl"):
    # The default of verl and TRL, with which a group without a signal costs no update.
    config.objective.kl_coef = 0.0
  return config
