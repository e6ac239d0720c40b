"""ScaleRL's recipe: CISPO, means over prompts, and advantages on the scale of the batch.

Paper: The art of scaling reinforcement learning compute for LLMs (ScaleRL), arXiv:2510.13786, 2025.

  objective.name            "cispo": an importance weight capped at 5, without a lower bound
  objective.weights         "prompt_mean": every prompt weighs the same, whatever its lengths
  advantage.estimator       "batch_scaled": the group's mean, the whole batch's deviation
  learner.skip_zero_advantages
                            True: groups of equal rewards are left out of the updates. The paper
                            also takes them out of the denominators; here they stay, which only
                            scales the gradient
  task.curriculum           "problem": the paper drops prompts once 90 % of their samples are right;
                            here such prompts are drawn seldom
  rollout.staleness         1: the next rollouts are drawn while the learner updates
  learner.old_logprobs      "sampler": the importance weight is π/μ, for mismatch and lag together

The output head computes in float32, as in the paper, since model.dtype is "float32" here; with
"bfloat16" its products are only summed in float32.

Not available: a lag of 8 steps with weights that change within a response (PipelineRL), and the
interruption of long responses by a forced end of thinking. Responses are cut at the budget.

Command: python -m jaxrl_llm.main --config=configs/scale_rl.py

Hardware: 2 CPU cores.

Score: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  config = common.laptop("cispo", arg)
  config.objective.weights = "prompt_mean"
  config.advantage.estimator = "batch_scaled"
  config.learner.skip_zero_advantages = True
  config.task.curriculum = "problem"
  config.rollout.staleness = 1
  return config
