"""Self-play: the policy sets sums that half of its own attempts solve, and learns to solve them.

Four samples of a prompt share the problem that they set. Attempts at one problem are compared with
each other, and problems with the other problems from the same prompt.

Paper: the objective is GSPO-token, arXiv:2507.18071, 2025; the roles are those of Absolute Zero,
arXiv:2505.03335, 2025, and the comparison that of prime-rl's hierarchical GRPO.

Command: python -m jaxrl_llm.main --config=configs/self_play.py

Hardware: 2 CPU cores.

Score: avg@4 of its own answers to its own problems 41.8% (37.0 to 46.6) after the warm start and
60.3% (55.1 to 65.5) at the end, while the problems grow from 2.0 to 2.9 steps, of 3 that are
possible (means of 16 logged ones), and responses from 23 to 30 tokens. Seed 0, 2026-11-29, one busy
core of an Intel Xeon.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  config = common.laptop("gspo_token", arg)
  config.task.name = "environment"
  config.task.levels = None
  # Enough games of the teacher that they are not learnt by heart.
  config.task.size = 64 if arg == "tiny" else 2048
  config.environment.name = "proposer"
  config.environment.max_turns = 2
  config.environment.attempts = 2 if arg == "tiny" else 4
  config.environment.request = "Solve."
  config.task.prompt_template = "{first}:"
  config.rollout.max_new_tokens = 48
  config.rollout.prompt_buckets = config.learner.row_tokens = None
  config.learner.row_buckets = config.warm_start.row_buckets = None
  config.advantage.estimator = "hierarchical"
  return config
