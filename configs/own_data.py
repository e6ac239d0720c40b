"""Your own questions and answers: a file of JSON lines, JSON, CSV or Parquet, and no code.

Command: python -m jaxrl_llm.main --config=configs/own_data.py --config.task.path=FILE
The columns are `question` and `answer` unless `--config.task.question_column=...` and `answer_column` say otherwise. A column of solutions,
`--config.task.response_column=...`, is imitated first (`--config.warm_start.num_steps=...`): a policy that is never right learns nothing
from RL. One that starts from a checkpoint (`--config.model.path=...`) may not need it.
Paper: the objective is SAPO, arXiv:2511.20347, 2025. A tenth of the problems is held out for evaluation.
Hardware: 2 CPU cores, for short problems.
Score: depends on the data; not yet measured on a set that others have.
"""

from configs import common


def get_config(arg: str = ""):
  """The experiment; `arg` is "" or "tiny" (a smoke run, on the arithmetic task until `task.path` names a file)."""
  config = common.laptop("sapo", arg)
  if arg == "tiny":
    return config
  config.task.name, config.task.levels = "file", None
  config.task.prompt_template = "{question}\nAnswer with a number after ####.\n"
  config.warm_start.num_steps = 0
  config.rollout.prompt_buckets = config.learner.row_tokens = None  # Sizes follow from the lengths of the data.
  config.learner.row_buckets = config.warm_start.row_buckets = None
  config.rollout.max_new_tokens = 64
  config.rollout.num_prompts = 16
  return config
