"""On-policy distillation: a teacher scores every token that the student draws.

The teacher is a checkpoint that reinforcement learning has trained. The student is the policy after
the warm start. It draws its own responses, and the teacher says of each token how much likelier it
finds it. No reward is read: the verifier is only logged.

With `:self` the teacher is the policy itself, which then reads the answer in front of the problem.
No other run is needed.

Papers: On-policy distillation of language models (GKD), arXiv:2306.13649, 2023; On-policy
distillation, Thinking Machines Lab, 2025; On-policy self-distillation (OPSD), arXiv:2601.18734,
2026.

Command: python -m jaxrl_llm.main --config=configs/gspo.py && python -m jaxrl_llm.main \
--config=configs/opd.py

Hardware: 2 CPU cores.

Score: `:exact`, held-out avg@4 48.5% to 92.9%, 44.1% to 95.2% and 44.9% to 93.0% (seeds 0, 1 and 2)
with 34 thousand generated tokens, and 90% with 17 thousand; configs/gspo.py takes 172 thousand. The
default ends at 83.7%, 86.7% and 82.2%. `:self` goes from 45.9% to 80.6% in four steps and ends at
76.2%, `:smollm2` from 15.6% to 86.7%, where its teacher has 90.6% (seed 1). More in
experiments/log/distillation.md. Published models (`:qwen3-30b-a3b` and others): not yet measured.
"""

from configs import common

# A policy that sees cannot be its own teacher yet.
PODS = tuple(name for name in common.PUBLISHED if "-vl-" not in name)


def get_config(arg: str = ""):
  """Returns the config of the experiment.

  Args:
    arg: "" (the teacher's advantage of each sampled token), "exact" (the divergence over the whole
      vocabulary instead), "mixed" (both the teacher's advantages and the task's reward), "self"
      (the policy itself with a hint is the teacher; needs no other run), "smollm2" (a real model),
      "tiny" (a smoke run), or a published model for a pod, such as "qwen3-30b-a3b", which learns
      from itself too.
  """
  config = common.laptop("dapo", arg, variants=("exact", "mixed", "self", "smollm2", *PODS))
  config.teacher.path = "runs/gspo-tiny" if arg == "tiny" else "runs/gspo"
  config.reward.verifier_weight = 0.0
  config.teacher.opd_coef = 1.0
  if arg == "exact":
    config.teacher.opd_coef, config.teacher.gkd_coef, config.teacher.gkd_beta = 0.0, 1.0, 0.5
  if arg in PODS:
    # The same weights read the right answer beside the problem (OPSD): no second model is needed.
    config.teacher.path, config.teacher.privileged = "self", "{prompt}\n\nThe right answer is {answer}. Work it out."
    config.teacher.row_tokens, config.rollout.group_size = config.rollout.get_ref("max_new_tokens") + 2176, 2
    config.rollout.num_prompts = 1024
    return config
  if arg == "smollm2":
    # The policy of configs/sapo.py:smollm2 teaches the model that it began as.
    config.teacher.path = "runs/sapo-smollm2"
    config.teacher.opd_coef, config.teacher.gkd_coef, config.teacher.gkd_beta = 0.0, 1.0, 0.5
    config.learner.skip_zero_advantages, config.learner.updates_per_rollout = False, 4
    # Prompts are several times as long as answers here, and a group computes its prompt once.
    config.rollout.num_prompts, config.rollout.group_size = 32, 4
    config.num_steps, config.eval.every, config.checkpoint.every = 10, 10, 10
    return config
  if arg != "tiny":
    # A fifth of the tokens with which configs/gspo.py gets to 90%. No advantage compares the
    # samples of a prompt here, so more prompts teach more than more samples of each.
    config.num_steps = 16
    config.rollout.num_prompts, config.rollout.group_size = 128, 1
    config.learner.updates_per_rollout = 8
    config.learner.row_buckets = (6,)
    config.learner.learning_rate = 3e-4
    config.eval.every = 4
  if arg == "self":
    config.task.name = "hinted_arithmetic"
    config.teacher.path, config.teacher.privileged = "self", "{answer} is {prompt}"
    config.warm_start.row_buckets = None  # The hinted demonstrations are longer.
  if arg == "mixed":
    config.reward.verifier_weight = 1.0
    config.rollout.num_prompts, config.rollout.group_size = 16, 8
  return config
