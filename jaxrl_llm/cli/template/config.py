"""my_project: GSPO on a task of the project, with a small model that is trained from nothing.

Command: jaxrl-llm train --config=configs/my_project.py

Every field has a default, which `jaxrl-llm train --help_fields` lists. Here are those that differ.
"""

from jaxrl_llm.config.fields import base, check_argument


def get_config(arg: str = ""):
  """Returns the config; `arg`, after the colon of the command, is "" or "tiny" (a smoke run)."""
  check_argument(arg, ("", "tiny"))
  config = base()
  config.num_steps = 20
  config.objective.name = "gspo"
  config.objective.clip_low, config.objective.clip_high = 6e-3, 8e-3
  # Another model: "tiny" is larger, and `config.model.path` names a published checkpoint.
  config.model.preset = "nano"
  config.task.name, config.task.levels = "file", None
  config.task.path = "problems.jsonl"
  config.task.prompt_template = "{question}="
  config.task.response_column = "solution"
  config.reward.terms = ("rewards:brief=0.1",)
  config.warm_start.num_steps = 120
  config.warm_start.learning_rate = 1e-2
  config.rollout.num_prompts = 32
  config.rollout.max_new_tokens = 4
  config.learner.learning_rate = 1e-3
  config.eval.num_prompts = 128
  config.eval.batch_prompts = 64
  if arg == "tiny":
    config.num_steps = 2
    config.warm_start.num_steps = 20
    config.eval.num_prompts = 64
  return config
