"""Questions and answers of the user: a file of JSON lines, JSON, CSV or Parquet, and no code.

Command: python -m jaxrl_llm.main --config=configs/own_data.py --config.task.path=FILE --pilot

The columns are `question` and `answer` or those of a published format (verl, TRL, MMLU and others;
docs/data.md), unless `--config.task.question_column=...` and `answer_column` name others. The
verifier follows from the answers (numbers, letters of options, formulas, other text), and the
sizes of all programs follow from the lengths of the texts. `--pilot` measures in two minutes how
well the model solves the problems and how long the run would take. Without it, the run starts.

The model is SmolLM2-135M-Instruct with adapters, or another checkpoint:
`--config.model.path=FOLDER`. Three solved problems precede each question, as plain text, and the
answer is one line. A model that reasons first, in its chat template, needs
`--config.task.chat=True --config.task.shots=0 --config.task.vary_shots=False
"--config.rollout.stop_strings=()"`, a larger `--config.rollout.max_new_tokens`, and
`--config.learner.rows_per_device=2` to fit into memory. The argument
`:scratch` selects the laptop job's small model instead, which must imitate first. It needs a column
of solutions, `--config.task.response_column=...`, and `--config.warm_start.num_steps=...`.

Paper: the objective is SAPO, arXiv:2511.20347, 2025. A tenth of the problems is held out for
evaluation.

Hardware: 2 CPU cores, for short problems.

Score: depends on the data. After 16 steps: past tenses of verbs 77% to 95% of 22 held out, unit
conversions 3% to 44% of 34. No public data set has been measured yet.
"""

from configs import common


def get_config(arg: str = ""):
  """Returns the config of the experiment.

  Args:
    arg: "" (a pretrained model), "scratch" (the laptop job's model) or "tiny" (a smoke run, on the
      arithmetic task unless `task.path` names a file).
  """
  config = common.laptop("sapo", arg, variants=("scratch",))
  if arg == "tiny":
    return config
  config.task.name, config.task.levels = "file", None
  config.warm_start.num_steps = 0
  # None means sizes that follow from the lengths of the data.
  config.rollout.prompt_buckets = config.learner.row_tokens = None
  config.learner.row_buckets = config.warm_start.row_buckets = None
  config.rollout.num_prompts = 16
  config.rollout.max_new_tokens = 64
  if not arg:
    common.pretrained(config)
    # A small model continues a pattern of plain text well. In a chat its answers were long and
    # hardly ever right.
    config.task.chat, config.task.shots, config.task.vary_shots = False, 3, True
    config.task.prompt_template, config.task.shot_template = "Question: {question}\nAnswer:", "{prompt} {answer}\n\n"
    config.rollout.stop_strings = ("\n",)
  return config
