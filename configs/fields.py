"""The fields every experiment has, with their defaults: the laptop job (two CPU cores, minutes).

Lengths are in tokens, times in seconds. A field that reads None takes the default of what it configures (for `objective.*`, the paper's).
A config file imports `ml_collections` only, so that it opens without jax.
"""

from ml_collections import ConfigDict, config_dict


def base() -> ConfigDict:
  """Every field of an experiment, at the laptop job's value."""
  config = ConfigDict()
  config.seed = 0
  config.num_steps = 40  # RL steps, 0 for none; each is one rollout batch and `learner.updates_per_rollout` optimizer updates.

  config.objective = ConfigDict()
  config.objective.name = ""  # A key of `objectives.OBJECTIVES`.
  config.objective.clip_low = config_dict.placeholder(float)
  config.objective.clip_high = config_dict.placeholder(float)
  config.objective.dual_clip = config_dict.placeholder(float)
  config.objective.tau_pos = config_dict.placeholder(float)
  config.objective.tau_neg = config_dict.placeholder(float)
  config.objective.log_clip_low = config_dict.placeholder(float)
  config.objective.log_clip_high = config_dict.placeholder(float)
  config.objective.sigma = config_dict.placeholder(float)
  config.objective.alpha = config_dict.placeholder(float)
  config.objective.beta = config_dict.placeholder(float)
  config.objective.k_pos = config_dict.placeholder(float)
  config.objective.lambda_pos = config_dict.placeholder(float)
  config.objective.k_neg = config_dict.placeholder(float)
  config.objective.lambda_neg = config_dict.placeholder(float)
  config.objective.delta_low = config_dict.placeholder(float)
  config.objective.delta_high = config_dict.placeholder(float)
  config.objective.ratio_cap = config_dict.placeholder(float)
  config.objective.delta = config_dict.placeholder(float)
  config.objective.w_min = config_dict.placeholder(float)
  config.objective.budget = config_dict.placeholder(float)
  config.objective.tis_cap = config_dict.placeholder(float)
  config.objective.anchor = config_dict.placeholder(str)  # "old" | "sampler".
  config.objective.ratio = config_dict.placeholder(str)  # Of `custom`: a key of `ratios.RATIOS`.
  config.objective.gate = config_dict.placeholder(str)  # Of `custom`: a key of `gates.GATES`; the settings above are those of its gates.
  config.objective.value_coef = config_dict.placeholder(float)
  config.objective.value_clip = config_dict.placeholder(float)
  config.objective.kl_coef = config_dict.placeholder(float)
  config.objective.kl_estimator = config_dict.placeholder(str)
  config.objective.entropy_coef = config_dict.placeholder(float)
  config.objective.weights = config_dict.placeholder(str)
  config.objective.max_tokens = config_dict.placeholder(int)

  config.advantage = ConfigDict()
  config.advantage.estimator = "group"  # A key of `advantages.estimators.ESTIMATORS`; the next fields are settings of some of them.
  config.advantage.normalize_std = config_dict.placeholder(bool)  # Divide by the group's standard deviation; False is Dr. GRPO's.
  config.advantage.pass_k = config_dict.placeholder(int)
  config.advantage.gamma = config_dict.placeholder(float)
  config.advantage.lam = config_dict.placeholder(float)  # GAE's λ for the policy's advantages.
  config.advantage.critic_lam = config_dict.placeholder(float)  # GAE's λ for the critic's targets.
  config.advantage.length_alpha = config_dict.placeholder(float)  # VAPO's: λ = 1 − 1/(length_alpha·|y|) for the policy.
  config.advantage.whiten = False  # Mean 0 and deviation 1 over all tokens of the rollout batch.

  config.critic = ConfigDict()  # Read where the estimator is "gae".
  config.critic.init = config_dict.placeholder(str)  # "policy": a copy of the policy's trunk after the warm start | "scratch".
  config.critic.learning_rate = config_dict.placeholder(float)  # None is `learner.learning_rate`; same warm-up and schedule.
  config.critic.value_warmup_steps = config_dict.placeholder(int)  # RL steps that train the critic alone.

  config.kl = ConfigDict()  # An adaptive coefficient, in the loss or in the reward, whichever has one.
  config.kl.target = config_dict.placeholder(float)  # Divergence from the reference to keep, in nats a token.
  config.kl.horizon = config_dict.placeholder(int)  # Sequences over which the coefficient may change by its own size.

  config.correction = ConfigDict()  # For a sampler that differs from the learner, and for stale rollouts; see `objectives.corrections`.
  config.correction.tis = config_dict.placeholder(float)  # Cap of the truncated importance weights.
  config.correction.mis = config_dict.placeholder(float)  # Above it weights are 0.
  config.correction.level = config_dict.placeholder(str)  # Of tis and mis: "token" | "sequence".
  config.correction.icepop = config_dict.placeholder(tuple)  # (low, high): weights outside are 0.
  config.correction.geometric_rejection = config_dict.placeholder(tuple)  # (low, high) for a sequence's geometric mean.
  config.correction.off_policy_mask = config_dict.placeholder(float)  # Nats a token; drops stale sequences with A < 0.
  config.correction.off_policy_anchor = config_dict.placeholder(str)  # "old" | "sampler": from whom staleness is measured.
  config.correction.bypass = False  # Take the sampler's log-probabilities for log π_old.

  config.model = ConfigDict()
  config.model.preset = "tiny"  # A key of `models.PRESETS`, initialised at random; read where `path` is None.
  config.model.path = config_dict.placeholder(str)  # A checkpoint: a folder of Hugging Face's format, a .gguf file, or "package:NAME".
  config.model.dtype = "float32"  # Of activations and matrix products in the learner.
  config.model.param_dtype = "float32"  # Of the weights as they are held and trained.
  config.model.sampler_dtype = config_dict.placeholder(str)  # Of the sampler; None is `dtype`.
  config.model.attention = "auto"  # A key of `attention.BACKENDS`, or "auto" for what suits the platform.
  config.model.remat = "none"  # What the backward pass computes again to save memory; a key of `remat.POLICIES`.
  config.model.head_tokens = config_dict.placeholder(int)  # Tokens whose logits exist at a time on a device; None is what suits it.
  config.model.lora_rank = config_dict.placeholder(int)  # Train low-rank adapters of this width and nothing else; None trains all weights.
  config.model.lora_alpha = config_dict.placeholder(float)  # An adapter counts alpha / rank; None is alpha = 2·rank.
  config.model.lora_targets = config_dict.placeholder(tuple)  # Patterns of linear maps; None is ("attention/.*", "mlp/.*").

  config.moe = ConfigDict()  # Read where the model is a mixture of experts.
  config.moe.replay = config_dict.placeholder(str)  # Routes to replay in updates: "R2", the learner's own at π_old | "R3", the sampler's.
  config.moe.balance_coef = 0.0
  config.moe.z_coef = 0.0
  config.moe.measure_every = 0  # RL steps between measurements of how the experts change, with two more passes an update; 0 is never.

  config.task = ConfigDict()
  config.task.name = "arithmetic"
  config.task.levels = (1, 2)  # Of 1 to 3; an arithmetic problem of level n takes n steps (n + 1 terms).
  config.task.chat = config_dict.placeholder(bool)  # Prompts go through the checkpoint's chat template; None is True where there is one.
  config.task.system = config_dict.placeholder(str)  # The system message of the chat.
  config.task.pad_token = config_dict.placeholder(str)  # Of the checkpoint's vocabulary; None is its own, or a special one that is free.
  config.task.data_dir = config_dict.placeholder(str)  # Where the dataset is built; None is ~/.cache/jaxrl_llm/data.
  config.task.bad_rows = "drop"  # "drop" leaves out problems that cannot be used, and counts them by reason | "error" stops at the first.
  # Draws prompts by what the policy has shown: those it now and then gets right more often than those it always or never does. Pass rates
  # are kept for each "problem", or for each value of a column of the rows, such as "level". None is a fixed order.
  config.task.curriculum = config_dict.placeholder(str)
  config.task.test_name = config_dict.placeholder(str)  # Another task, whose test problems take the place of this one's.
  config.task.test_source = config_dict.placeholder(str)  # As `source`, of that task.
  # What follows is read by some tasks only; None is the task's own default. Of "file", one's own problems:
  config.task.path = config_dict.placeholder(str)  # A .jsonl, .json, .csv, .tsv (or .gz of these) or .parquet file.
  config.task.test_path = config_dict.placeholder(str)  # Problems to test on; None holds out `test_fraction` of `path`.
  config.task.test_fraction = config_dict.placeholder(float)
  config.task.question_column = config_dict.placeholder(str)
  config.task.answer_column = config_dict.placeholder(str)
  config.task.level_column = config_dict.placeholder(str)
  config.task.response_column = config_dict.placeholder(str)  # A solution to imitate in the warm start.
  config.task.id_column = config_dict.placeholder(str)
  config.task.prompt_template = config_dict.placeholder(str)  # The prompt, with columns in braces, as in "{question}\nAnswer:".
  config.task.reward = config_dict.placeholder(str)  # A key of `rewards.REWARDS`.
  # Of published sets:
  config.task.source = config_dict.placeholder(str)  # The file or folder that holds the set as it was published; None downloads it.
  config.task.config = config_dict.placeholder(str)  # Which of its variants.
  config.task.mode = config_dict.placeholder(str)  # Of zebralogic.
  config.task.after = config_dict.placeholder(str)  # Problems published after this date, as in "2024-08-01" ...
  config.task.before = config_dict.placeholder(str)  # ... and before this one.
  # Of "gym:NAME", a task of reasoning-gym:
  config.task.size = config_dict.placeholder(int)  # Problems to generate.
  config.task.seed = config_dict.placeholder(int)
  # Of "mixture":
  config.task.parts = config_dict.placeholder(tuple)  # Tasks with weights, as in ("gsm8k=0.7", "gym:countdown=0.3").

  config.reward = ConfigDict()
  config.reward.terms = ()  # Further rewards with weights, beside the task's own: ("tags=0.1", "my_module:my_function=0.5").
  config.reward.settings = ()  # Of rewards: ("pattern.regex=[0-9]+", "tags.names=('plan', 'answer')").
  config.reward.form_weight = 0.0  # Weight of a reward for the form of an answer, right or wrong, where the task has one.
  config.reward.overlong_filter = False  # Learn nothing from responses cut at the budget; their rewards stay in their groups' statistics.
  config.reward.overlong_buffer = 0  # DAPO's soft penalty grows over this many tokens below the budget; 0 is no penalty.
  config.reward.kl_coef = 0.0  # Reward per nat of divergence from the reference, taken away; `objective.kl_coef` is the one in the loss.
  config.reward.kl_estimator = config_dict.placeholder(str)  # "k1" | "k2" | "k3".

  config.reward.model_path = config_dict.placeholder(str)  # A reward model's folder, whose judgement is a term of the reward; None is none.
  config.reward.model_weight = 1.0  # Of that term, beside the task's own verifier with weight 1.
  config.reward.model_only = False  # Learn from it alone: the verifier has weight 0, and evaluations still ask it.
  config.reward.workers = config_dict.placeholder(int)  # Processes for rewards that may hang or crash; None is one for each processor.
  config.reward.timeout_s = 10.0  # Of one call there. What takes longer has no reward, and nothing is learned from it.
  config.reward.max_chars = 20_000  # Of a response that such a reward sees: its end.
  config.reward.worker_memory_gb = 4.0
  config.reward.max_failed_fraction = 0.5  # Stop when more of a step's responses have no reward: the verifier is broken, not the policy.

  config.environment = ConfigDict()  # A partner for conversations of several turns, such as a tool; without one a response is one turn.
  config.environment.name = config_dict.placeholder(str)  # A key of `environments.ENVIRONMENTS`, or MODULE:FUNCTION.
  config.environment.max_turns = 4  # Of the policy. A conversation that is not done by then counts as cut short.
  config.environment.max_turn_tokens = config_dict.placeholder(int)  # That the policy may write in a turn; None is what is left.
  config.environment.timeout_s = 60.0  # Of one of its replies. What takes longer has no reward, and nothing is learned from it.
  config.environment.weight = 1.0  # Of the rewards that it gives for turns, beside the task's; 0 leaves them out.
  config.environment.call_reward = config_dict.placeholder(float)  # Of "calculator", for a turn whose result is the right answer.

  config.sandbox = ConfigDict()  # Where programs run that the policy writes.
  config.sandbox.backend = "off"  # "auto", "namespaces", "bubblewrap", "docker", "sandbox_fusion", "piston" | "unsafe" | "off": refuse.
  config.sandbox.timeout_s = 10.0  # Of one test, where its problem names no limit.
  config.sandbox.total_s = 60.0  # Of all tests of a program.
  config.sandbox.memory_gb = 1.0
  config.sandbox.time_scale = 2.0  # How many times a problem's own time limit a program is given.
  config.sandbox.image = "python:3.12-slim"  # For "docker".
  config.sandbox.url = ""  # For "sandbox_fusion" and "piston".

  config.warm_start = ConfigDict()
  config.warm_start.num_steps = 450
  config.warm_start.batch_size = 80  # Demonstrations.
  config.warm_start.row_buckets = (16, 32)  # As `learner.row_buckets`.
  config.warm_start.learning_rate = 3e-3
  config.warm_start.warmup_steps = 20
  config.warm_start.schedule = "linear"  # After warm-up: "constant", or "linear" down to 0 at the last step.

  config.rollout = ConfigDict()
  config.rollout.num_prompts = 64
  config.rollout.group_size = 8
  config.rollout.temperature = 1.0
  config.rollout.top_k = 0  # 0 keeps every token.
  config.rollout.top_p = 1.0  # 1 keeps every token.
  config.rollout.prompt_buckets = (8,)  # Prompt slots; a batch takes the smallest that holds its longest prompt.
  config.rollout.max_new_tokens = 32
  config.rollout.stop_strings = ()  # Texts that end a response, besides the tokenizer's stop tokens.
  config.rollout.slots = config_dict.placeholder(int)  # Sequences decoded at once, the others wait in line; None is what suits the devices.
  config.rollout.cache_dtype = config_dict.placeholder(str)  # "float32" | "bfloat16" | "int8"; None is what the sampler computes in.
  config.rollout.cache_blocks = config_dict.placeholder(tuple)  # Tokens that the cache grows by; None is 1/4, 1/4, 1/2 of the budget.
  # RL steps by which the sampler's weights may lag: 0, or 1 to draw the next rollouts while this step learns. The step after a checkpoint
  # has no lag, so that a resumed run equals an unbroken one.
  config.rollout.staleness = 0
  # Prompts in the sampler beyond `num_prompts`. A step ends once `num_prompts` groups are complete; the others go on in the next one.
  config.rollout.spare_prompts = 0
  # Dynamic sampling: how often a step may draw again, with new prompts, to fill its batch with groups whose samples differ in reward.
  # Groups that do not take the places that are still empty then.
  config.rollout.max_refills = 0
  config.rollout.report_every = 0  # Decoding steps between two looks at what has finished, to grade it meanwhile; 0: once, at the end.

  config.learner = ConfigDict()
  config.learner.updates_per_rollout = 4
  config.learner.micro_batches = 1  # Gradient accumulation: smaller pieces, the same loss.
  config.learner.row_tokens = 144  # Slots of a packed row.
  config.learner.share_prompts = True  # A prompt lies in a row once for all of its responses; the loss and its gradient stay the same.
  config.learner.row_buckets = (24, 32, 48)  # Rows of a packed mini-batch; it takes the smallest that holds its sequences.
  config.learner.old_logprobs = "sampler"  # "sampler" | "learner": who says log π_old.
  config.learner.learning_rate = 2e-4
  config.learner.warmup_steps = 10  # Optimizer updates.
  config.learner.schedule = "linear"  # As `warm_start.schedule`.
  config.learner.weight_decay = 0.0
  config.learner.b1 = 0.9
  config.learner.b2 = 0.99
  config.learner.max_grad_norm = 1.0
  config.learner.moments_dtype = "float32"  # "float32" | "bfloat16": of AdamW's first moment; the second has that of the weights.
  config.learner.offload_optimizer = False  # Keep moments in the memory of the hosts, and pay with their transfer in every update.
  config.learner.max_skipped = 10  # Stop after this many updates in a row with a loss or gradient that is not finite.

  config.mesh = ConfigDict()
  config.mesh.data = -1  # -1 takes the devices that the others leave.
  config.mesh.fsdp = 1
  config.mesh.expert = 1
  config.mesh.context = 1  # Splits the slots of packed rows, for responses too long for one device.
  config.mesh.tensor = 1
  config.mesh.slices = config_dict.placeholder(int)  # Of TPUs joined by a network, which only data crosses; None is what there is.
  config.mesh.sampler = 0  # Devices that only sample, the last ones; the axes above are of the others. 0: all devices do both.
  config.mesh.sampler_tensor = 1  # How many of them share one copy of the weights; prompts are split over the copies.

  config.eval = ConfigDict()
  config.eval.every = 10  # RL steps.
  config.eval.num_prompts = 256
  config.eval.samples = 4  # avg@4, pass@4.
  config.eval.batch_prompts = 128  # Problems sampled at once.
  config.eval.metrics = ()  # Further ones by lighteval's names, as in ("maj@n:n=4", "pass@k:k=1&n=4"), with intervals.
  config.eval.save_samples = False  # Write every sample to WORKDIR/evaluations/step-N.jsonl.
  config.eval.temperature = 1.0  # 0 is greedy: the samples of a problem then begin with its likeliest first tokens (the n-best list).

  config.checkpoint = ConfigDict()
  config.checkpoint.every = 10  # RL steps.
  config.checkpoint.warm_start_every = 200  # Warm-start steps.
  config.checkpoint.keep = 2  # Of the newest.
  config.checkpoint.keep_best = 0  # Of those with the best held-out accuracy, measured at their own step.
  config.checkpoint.keep_every_hours = config_dict.placeholder(float)  # One for each such stretch of time stays for good.
  # Minutes since the last save after which a temporary one is made, where a step ends that saves none; it goes once there is a newer one.
  config.checkpoint.every_minutes = config_dict.placeholder(float)
  # Whether checkpoints are written while the run goes on; None is yes on accelerators, no on CPU, where the two share the cores.
  config.checkpoint.asynchronous = config_dict.placeholder(bool)

  config.alarms = ConfigDict()  # Rules that leave a line and `alarm/NAME` in the metrics, and change nothing; None switches one off.
  config.alarms.window = 128  # RL steps that a spike is measured against.
  config.alarms.spike_sigmas = config_dict.placeholder(float)  # Of a loss, a gradient norm or a fall of the reward, by median and MAD.
  config.alarms.spike_sigmas = 6.0
  config.alarms.entropy_below = config_dict.placeholder(float)  # Nats a token.
  config.alarms.entropy_fraction = config_dict.placeholder(float)  # Of the run's first entropy.
  config.alarms.entropy_fraction = 0.1
  config.alarms.truncation_above = config_dict.placeholder(float)  # Share of responses cut at their budget.
  config.alarms.truncation_above = 0.8
  config.alarms.no_signal_above = config_dict.placeholder(float)  # Share of groups whose samples have equal rewards.
  config.alarms.no_signal_above = 0.95

  config.watchdog = ConfigDict()
  config.watchdog.seconds = 3600.0  # A phase that takes longer is stuck: the process writes its stacks and exits 42.
  config.watchdog.stop_seconds = 25.0  # After SIGTERM, until the process ends wherever it is; pods get 30 s. A save is waited for.

  config.profile = ConfigDict()
  config.profile.start = config_dict.placeholder(int)  # First RL step of a trace in WORKDIR/profile, from 1; None is no trace.
  config.profile.num_steps = 1  # RL steps that it covers.

  config.log = ConfigDict()
  config.log.samples_every = 10  # RL steps between tables of sample rollouts.
  config.log.num_samples = 16  # Rollouts written to samples.jsonl each time.
  config.log.num_table_rows = 4  # Of them, how many are shown on the screen.
  config.log.tensorboard = True
  return config.lock()  # A misspelt field of a config file is then an error, not a new field that nothing reads.
