"""A calculator in the loop: the policy learns to call it with the right question.

Its replies are read and not learned.

Paper: the objective is GSPO-token, arXiv:2507.18071, 2025, with advantages for single turns. A call
is judged by its result and by the answer after it, the answer by itself (DeepSeekMath's process
supervision, arXiv:2402.03300, 2024).

Command: python -m jaxrl_llm.main --config=configs/tools.py

Hardware: 2 CPU cores.

Score: held-out avg@4 53.7% (50.7 to 56.8) after the warm start, 95.5% (94.0 to 96.7) at the end
(seed 0); 190 s of processor time, programs not cached.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  config = common.laptop("gspo_token", arg)
  config.task.name = "products"
  config.task.levels = (1, 2)
  config.environment.name = "calculator"
  config.environment.max_turns = 3
  config.environment.call_reward = 0.5
  config.advantage.estimator = "steps"
  if arg != "tiny":
    config.num_steps = 12
    config.warm_start.num_steps = 150
    config.rollout.num_prompts = 32
    config.learner.row_buckets = (16, 24)
    config.eval.every = 4
  # With a row per conversation, all of them are prefilled for their next turn, and none is read
  # token by token.
  config.rollout.slots = config.rollout.get_ref("num_prompts") * config.rollout.get_ref("group_size")
  return config
