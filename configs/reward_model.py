"""A reward model: a trunk with a scalar head, trained on pairs of a chosen and a rejected response.

Papers: Training language models to follow instructions with human feedback, arXiv:2203.02155, 2022,
section 3.5 (the loss); Llama 2, arXiv:2307.09288, 2023 (margins); arXiv:2312.09244, 2023
(centring).

The pairs are right and wrong workings of the same arithmetic problem. Other pairs come from
--config.task.name=file --config.task.path=PAIRS.jsonl, with the columns prompt, chosen and
rejected, as texts or as lists of messages. --config.model.path=FOLDER starts from a language model.

Command: python -m jaxrl_llm.main --config=configs/reward_model.py

The run writes WORKDIR/reward_model, which AutoModelForSequenceClassification opens. RL uses it with
--config.reward.model_path=WORKDIR/reward_model.

Hardware: 2 CPU cores.

Score: 75.4% of 410 held-out pairs (71.0% to 79.8%) from scratch, in 260 s of processor time. A
policy that already writes such workings is a better start. The policy of configs/sft.py, saved by
jaxrl_llm.export, gives 83.2% (79.5% to 86.6%) after half as many steps, 144 s, with
--config.model.path=FOLDER --config.model.tokenizer=bytes --config.learner.learning_rate=1e-3
--config.num_steps=200. Seed 0.
"""

from jaxrl_llm.config.fields import REWARD_MODEL_FIELDS, base, check_argument


def get_config(arg: str = ""):
  """Returns the config; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  check_argument(arg, ("", "tiny"))
  config = base(REWARD_MODEL_FIELDS)
  if arg == "tiny":
    config.num_steps = 6
    config.model.preset = "nano"
    config.task.levels = (1,)
    config.task.max_tokens = 24
    config.learner.batch_pairs = 16
    config.learner.row_buckets = (8,)
    config.eval.every = 3
    config.eval.num_pairs = 16
    config.checkpoint.every = 3
  return config
