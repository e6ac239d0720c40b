"""GSPO: ratio and clip at the level of sequences.

Paper: Group sequence policy optimization, arXiv:2507.18071, 2025.

The paper clips the length-normalised ratio to [1 - 3e-4, 1 + 4e-4] on responses of thousands of
tokens. The spread of this ratio is proportional to 1/sqrt(length). With the 10 to 35 tokens of the
laptop job, that band would clip nearly every sequence that has moved in the direction of its
advantage. The band is therefore scaled to 6e-3 and 8e-3; `:paper` keeps the paper's.

Command: python -m jaxrl_llm.main --config=configs/gspo.py

Hardware: 2 CPU cores. `:vl` needs the extra `[vision]`.

Score: held-out avg@4 48.1% after the warm start, 94.2% at the end (seed 0; 125 s, AMD EPYC,
2026-11-25). On another machine, 2026-11-22: 49.5%, 93.8%, 240 s. Before the sampler of 2026-11-22:
46.3%, 96.2%, 245 s; seeds 0 to 4, pinned to one core each, end at 95.2% to 96.9%. `:moe`, `:vl`,
`:smollm2` and the paper's constants: not yet measured. Published models (`:qwen3-30b-a3b` and
others), and `:qwen3-30b-a3b-apart` with samplers on a slice of their own: compiled for pods
(docs/pod_plans.md), not yet trained.
"""

from configs import common

APART = "qwen3-30b-a3b-apart"
"""Argument for a published model whose samplers have a slice of their own."""


def get_config(arg: str = ""):
  """Returns the config of the experiment.

  Args:
    arg: "" (the laptop job), "tiny" (a smoke run), "moe" (the laptop job with experts), "vl" (a
      policy that sees, on drawn figures), "smollm2" or another key of `common.SMOLLM2` (a real
      model), "paper" (the paper's constants), or a published model for a pod, such as
      "qwen3-30b-a3b", or `APART`.
  """
  if arg == APART:
    config = get_config(arg.removesuffix("-apart"))
    common.draw_apart(config)
    return config
  config = common.laptop("gspo", arg, variants=("paper", "vl", APART, *common.MODELS))
  if arg == "paper":
    common.paper_scale(config, updates_per_rollout=4)
  elif arg in common.SMOLLM2:
    # The ratio spreads more, because responses have a few tokens only.
    config.objective.clip_low, config.objective.clip_high = 1e-2, 1.3e-2
  elif arg not in common.PUBLISHED:
    config.objective.clip_low, config.objective.clip_high = 6e-3, 8e-3
  # The paper's constants and pods keep the objective's own default, which is the paper's band.
  return config
