"""Your own questions and answers: a file of JSON lines, JSON, CSV or Parquet, and no code.

Command: python -m jaxrl_llm.main --config=configs/own_data.py --config.task.path=FILE --pilot
The columns are `question` and `answer` unless `--config.task.question_column=...` and `answer_column` say otherwise. The verifier follows
from the answers (numbers, letters of options, other text), the sizes of all programs from the lengths of the texts. `--pilot` says in two
minutes what the model makes of the problems and how long the run would take; without it, the run begins.
The model is SmolLM2-135M-Instruct with adapters, or another checkpoint: `--config.model.path=FOLDER`. Three solved problems stand in front
of each question, as plain text, and the answer is one line. A model that is to reason first, in its chat template, wants
`--config.task.chat=True --config.task.shots=0 --config.task.vary_shots=False "--config.rollout.stop_strings=()"` and a larger
`--config.rollout.max_new_tokens`. The argument `:scratch` takes the laptop job's small model instead, which has to imitate first: a column
of solutions, `--config.task.response_column=...`, and `--config.warm_start.num_steps=...`.
Paper: the objective is SAPO, arXiv:2511.20347, 2025. A tenth of the problems is held out for evaluation.
Hardware: 2 CPU cores, for short problems.
Score: depends on the data. After 16 steps: past tenses of verbs 77% to 95% of 22 held out, unit conversions 3% to 44% of 34; no set that
others have is measured yet.
"""

from configs import common


def get_config(arg: str = ""):
  """The experiment; `arg` is "" (a pretrained model), "scratch" (the laptop job's model) or "tiny" (a smoke run, on the arithmetic task
  until `task.path` names a file)."""
  config = common.laptop("sapo", arg, variants=("scratch",))
  if arg == "tiny":
    return config
  config.task.name, config.task.levels = "file", None
  config.warm_start.num_steps = 0
  config.rollout.prompt_buckets = config.learner.row_tokens = None  # Sizes follow from the lengths of the data.
  config.learner.row_buckets = config.warm_start.row_buckets = None
  config.rollout.num_prompts = 16
  config.rollout.max_new_tokens = 64
  if not arg:
    common.pretrained(config)
    # A small model continues a pattern in plain text; in a chat it answered at length, and hardly ever right.
    config.task.chat, config.task.shots, config.task.vary_shots = False, 3, True
    config.task.prompt_template, config.task.shot_template = "Question: {question}\nAnswer:", "{prompt} {answer}\n\n"
    config.rollout.stop_strings = ("\n",)
  return config
