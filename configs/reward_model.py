"""A reward model: a trunk and one number, trained on pairs of a chosen and a rejected response.

Papers: Training language models to follow instructions with human feedback, arXiv:2203.02155, 2022, section 3.5 (the loss); Llama 2,
arXiv:2307.09288, 2023 (margins); arXiv:2312.09244, 2023 (the centre).
The pairs are right and wrong workings of the same arithmetic problem. One's own: --config.task.name=file --config.task.path=PAIRS.jsonl,
with columns prompt, chosen and rejected, as texts or as lists of messages; --config.model.path=FOLDER begins with a language model.
Command: python -m jaxrl_llm.main --config=configs/reward_model.py
It leaves WORKDIR/reward_model, which AutoModelForSequenceClassification opens, and RL: --config.reward.model_path=WORKDIR/reward_model
Hardware: 2 CPU cores.
Score: 75.4% of 410 held-out pairs (71.0% to 79.8%) from scratch, in 260 s of processor time. A policy that already writes such workings
is a better start: the one of configs/sft.py, saved by jaxrl_llm.export, gives 83.2% (79.5% to 86.6%) after half as many steps, 144 s, with
--config.model.path=FOLDER --config.model.tokenizer=bytes --config.learner.learning_rate=1e-3 --config.num_steps=200. Seed 0.
"""

from ml_collections import ConfigDict, config_dict


def get_config(arg: str = ""):
  """The experiment; `arg` is "" (the laptop job) or "tiny" (a smoke run)."""
  if arg not in ("", "tiny"):
    raise ValueError(f"unknown argument {arg!r}, expected one of '', 'tiny'")
  config = base()
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


def base() -> ConfigDict:
  """Every field of a reward model's training, at the laptop job's value. Names mean what they mean in `fields.py`."""
  config = ConfigDict()
  config.seed = 0
  config.num_steps = 400  # Updates, each on `learner.batch_pairs` pairs.

  config.objective = ConfigDict()
  config.objective.name = "bradley_terry"
  config.objective.margin = 0.0  # By how much a chosen response is to be rewarded more, where the pair does not say.
  config.objective.center_coef = 0.0  # Keeps rewards around 0, which pairs leave open; 0.01 is usual.

  config.model = ConfigDict()
  config.model.preset = "tiny"
  config.model.path = config_dict.placeholder(str)  # A language model, whose head is left away, or a reward model to go on with.
  config.model.tokenizer = config_dict.placeholder(str)  # "bytes" for a policy of ours that was exported; None is what the folder holds.
  config.model.dtype = "float32"
  config.model.param_dtype = "float32"
  config.model.attention = "auto"
  config.model.remat = "none"

  config.task = ConfigDict()
  config.task.name = "arithmetic"  # Or "file".
  config.task.levels = (1, 2)  # Of "arithmetic".
  config.task.path = config_dict.placeholder(str)  # Of "file", as all that follows: JSON lines, JSON, CSV or Parquet.
  config.task.test_path = config_dict.placeholder(str)
  config.task.test_fraction = config_dict.placeholder(float)  # Of the prompts of `path`; None is 0.1.
  config.task.prompt_column = "prompt"  # "" where `chosen` and `rejected` are whole conversations.
  config.task.chosen_column = "chosen"
  config.task.rejected_column = "rejected"
  config.task.margin_column = config_dict.placeholder(str)  # A number for each pair, in the place of `objective.margin`.
  config.task.bad_rows = "drop"
  config.task.max_tokens = 30  # Of a prompt with its response; longer ones are bad rows.
  config.task.chat = config_dict.placeholder(bool)
  config.task.system = config_dict.placeholder(str)
  config.task.pad_token = config_dict.placeholder(str)
  config.task.data_dir = config_dict.placeholder(str)

  config.learner = ConfigDict()
  config.learner.batch_pairs = 64
  config.learner.row_tokens = 120  # Slots of a row; a pair lies in one row.
  config.learner.row_buckets = (24, 32)
  config.learner.micro_batches = 1
  config.learner.learning_rate = 2e-3
  config.learner.warmup_steps = 20
  config.learner.schedule = "linear"
  config.learner.weight_decay = 0.0
  config.learner.b1 = 0.9
  config.learner.b2 = 0.99
  config.learner.max_grad_norm = 1.0
  config.learner.moments_dtype = "float32"
  config.learner.offload_optimizer = False
  config.learner.max_skipped = 10

  config.mesh = ConfigDict()
  config.mesh.data = -1
  config.mesh.fsdp = 1
  config.mesh.expert = 1
  config.mesh.context = 1
  config.mesh.tensor = 1
  config.mesh.slices = config_dict.placeholder(int)

  config.eval = ConfigDict()
  config.eval.every = 100  # Steps.
  config.eval.num_pairs = 512

  config.checkpoint = ConfigDict()
  config.checkpoint.every = 100  # Steps.
  config.checkpoint.keep = 2
  config.checkpoint.keep_best = 0
  config.checkpoint.keep_every_hours = config_dict.placeholder(float)
  config.checkpoint.every_minutes = config_dict.placeholder(float)
  config.checkpoint.asynchronous = config_dict.placeholder(bool)

  config.watchdog = ConfigDict()
  config.watchdog.seconds = 3600.0
  config.watchdog.stop_seconds = 25.0

  config.log = ConfigDict()
  config.log.tensorboard = True
  return config.lock()
