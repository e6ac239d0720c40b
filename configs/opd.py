"""On-policy distillation: a teacher scores every token that the student draws.

The teacher is a checkpoint that reinforcement learning has trained. The student is the policy after
the warm start. It draws its own responses, and the teacher says of each token how much likelier it
finds it. No reward is read: the verifier is only logged.

Papers: On-policy distillation of language models (GKD), arXiv:2306.13649, 2023; On-policy
distillation, Thinking Machines Lab, 2025.

Command: python -m jaxrl_llm.main --config=configs/gspo.py && python -m jaxrl_llm.main \
--config=configs/opd.py

Hardware: 2 CPU cores.

Score: not yet measured.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config of the experiment.

  Args:
    arg: "" (the teacher's advantage of each sampled token), "exact" (the divergence over the whole
      vocabulary instead), "mixed" (both the teacher's advantages and the task's reward) or "tiny"
      (a smoke run).
  """
  config = common.laptop("dapo", arg, variants=("exact", "mixed"))
  config.teacher.path = "runs/gspo-tiny" if arg == "tiny" else "runs/gspo"
  config.reward.verifier_weight = 0.0
  config.alarms.no_signal_above = None  # Without a reward, no group has a signal.
  config.teacher.opd_coef = 1.0
  if arg == "exact":
    config.teacher.opd_coef, config.teacher.gkd_coef = 0.0, 1.0
  elif arg == "mixed":
    config.reward.verifier_weight = 1.0
  if arg != "tiny":
    config.num_steps = 12
    config.rollout.num_prompts = 16
    config.learner.row_buckets = (6, 8, 12)
    config.learner.learning_rate = 1e-3
    config.learner.warmup_steps = 4
    config.eval.every = 3
  return config
