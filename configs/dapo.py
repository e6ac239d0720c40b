"""DAPO: token-level loss, a higher upper clip, a soft length penalty, and dynamic sampling.

Paper: DAPO: an open-source LLM reinforcement learning system at scale, arXiv:2503.14476, 2025.

The recipe has five switches. Each is a field of its own, so that an ablation can turn them one by
one. The value in brackets switches a part off.

  objective.weights         "token_mean": every token of the batch weighs the same, as in verl;
                            "prompt_mean" is the paper's equation, in which every prompt does
                            ["sequence_mean"]
  objective.clip_high       0.28, with a lower clip of 0.2 [0.2]
  reward.overlong_buffer    a penalty that grows over the last fifth of the token budget, as in the
                            paper (4096 of 20480) [0]
  rollout.max_refills       maximum number of times that more prompts are drawn until the batch is
                            full of groups whose verdicts differ; the rest is filled up with
                            others, which learn from the length penalty alone [0]
  reward.overlong_filter    off here; on in the paper's ladder before the soft penalty, so that
                            nothing is learned from truncated responses [False]

Command: python -m jaxrl_llm.main --config=configs/dapo.py

Hardware: 2 CPU cores.

Score: held-out avg@4 49.5% after the warm start, 96.4% at the end (seed 0, beside other work);
before dynamic sampling was added, 46.5% and 97.5%. The paper's constants: not yet measured. On a
shorter and harder job (24 steps, five seeds: experiments/ablations/dapo_ladder), accuracy rises
from 14.4% to 22.7% with all switches, and to 19.5% with GRPO without them. The difference is 3.2
points, 95% [-0.2, 6.5] over the seeds. Dynamic sampling drew 2.03 times the tokens there; at equal
tokens it added nothing.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config of the experiment.

  Args:
    arg: "" (the laptop job), "tiny" (a smoke run), "paper" (the paper's constants), or "smollm2" or
      another key of `common.SMOLLM2` (a real model).
  """
  config = common.laptop("dapo", arg, variants=("paper", *common.SMOLLM2))
  if arg == "paper":
    common.paper_scale(config, updates_per_rollout=16)
  config.objective.weights = "token_mean"
  config.objective.clip_low, config.objective.clip_high = 0.2, 0.28
  config.reward.overlong_buffer = config.rollout.get_ref("max_new_tokens") // 5
  config.rollout.max_refills = 2
  return config
