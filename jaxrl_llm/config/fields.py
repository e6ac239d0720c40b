"""Fields of a config: one table with the default, the check and the meaning of each.

A new field needs one row here and code that reads it. Defaults are those of the laptop job (two CPU
cores, minutes). Lengths are in tokens, times in seconds. A field that is None takes the default of
what it configures (for `objective.*`, the paper's). Config files import this module, so it never
imports jax.
"""

import contextlib
import difflib
import functools
import inspect
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FieldReference

from jaxrl_llm.config.conditions import (  # isort: skip
  ADAPTIVE_ENTROPY, ADAPTIVE_KL, CHECKPOINT_TEACHER, DIVERGENCE, ENVIRONMENT, FILE_OF_PAIRS, IN_FLIGHT, KEPT_WARM_START, KL_IN_REWARD,
  LAG, PRESET, PRIVILEGED, REWARD_MODEL, SAMPLERS, SELF_TEACHER, SHOTS, TEACHER, TEACHERS, TRACE, Condition,
)  # fmt: skip
from jaxrl_llm.settings.values import (  # isort: skip
  ABOVE_ZERO, AXIS, BRADLEY_TERRY, COLUMN, COUNT, COUNTS, DTYPE, FRACTION, INSIDE, LEVELS, LINES, NATURAL, NOT_NEGATIVE, NUMBER, OPTIONS,
  SCHEDULE, SEED, SHARE, SILENCE, SWITCH, TEXT, UNIT, WORKERS, Check, compiles, names_path, one_of, or_none, texts,
)  # fmt: skip
from jaxrl_llm.messages import Problem, did_you_mean, shown


class Field(NamedTuple):
  """A row of the table.

  Attributes:
    default: Value in the laptop job.
    check: Check of the legal values.
    sentence: Meaning, for `--help_fields`.
    read_if: Condition on which the field is read; None for a field that is always read, or whose
      readers are checked elsewhere. Otherwise it must have its default.
  """

  default: Any
  check: Check
  sentence: str
  read_if: Condition | None = None

  @property
  def takes_none(self) -> bool:
    """Whether None is legal, as the default or otherwise."""
    return self.default is None or self.check.optional


SECTIONS = {
  "objective": "The loss that is minimised.",
  "advantage": "How rewards become advantages.",
  "critic": "Read if advantage.estimator is 'gae'.",
  "kl": "An adaptive coefficient, of the KL penalty in the loss or in the reward.",
  "entropy": "An adaptive coefficient of the entropy bonus.",
  "correction": "For a sampler that differs from the learner, and for stale rollouts; see `objectives.corrections`.",
  "teacher": "A model with the same tokenizer, which the policy learns from; it can be the policy itself, with a longer prompt.",
  "model": "The decoder, and which of its weights are trained.",
  "numerics": "The order of sums.",
  "moe": "Read if the model is a mixture of experts.",
  "task": "Problems and prompts. Some fields are read by some tasks only.",
  "reward": "The reward of a response.",
  "environment": "A partner for conversations of several turns, such as a tool; without one a response is one turn.",
  "sandbox": "Where the programs that the policy writes are run.",
  "warm_start": "Supervised steps before RL.",
  "rollout": "Sampling of responses.",
  "learner": "Optimizer updates.",
  "mesh": "Sizes of the device mesh's axes.",
  "serving": "Layout of the weights while responses are drawn.",
  "eval": "Evaluation on held-out problems.",
  "checkpoint": "Saved states.",
  "alarms": "Rules that print a line and write `alarm/NAME` to the metrics, nothing else; None switches one off.",
  "watchdog": "Time limits of a phase.",
  "profile": "A trace of the devices.",
  "log": "Output of a run besides its metrics.",
}

OPEN = {
  "objective": "name", "advantage": "estimator", "correction": "terms", "task": "name", "environment": "name", "sandbox": "backend",
  "alarms": "",
}  # fmt: skip
"""Sections that also take the settings of the entry that one of their fields names; see `entries`.

No field chooses the rules of `alarms`, for which None is a value: it switches a rule off.
"""

# fmt: off
FIELDS: dict[str, Field] = {
  "seed": Field(0, SEED, "Seed of all random draws."),
  "memory_gb": Field(None, ABOVE_ZERO,
    "Memory of a device in GB. A run that is predicted not to fit does not start; a larger number starts it. None: what the device has."),
  "num_steps": Field(40, NATURAL, "RL steps, 0 for none; a step is a rollout batch and learner.updates_per_rollout optimizer updates."),

  "objective.name": Field("", TEXT, "A key of `objectives.OBJECTIVES`, or MODULE:FUNCTION, which makes an objective or is a gate."),

  "advantage.estimator": Field("group", TEXT, "A key of `advantages.estimators.ESTIMATORS`, or MODULE:FUNCTION."),
  "advantage.whiten": Field(False, SWITCH, "Mean 0 and deviation 1 over all tokens of the rollout batch."),

  "critic.init": Field(None, one_of("policy", "scratch"), "First weights: the policy's trunk after the warm start, or random."),
  "critic.learning_rate": Field(None, ABOVE_ZERO, "None: learner.learning_rate. Warm-up and schedule are the learner's."),
  "critic.value_warmup_steps": Field(None, NATURAL,
    "First RL steps, which train the critic alone; the policy's warm-up and schedule begin after them."),

  "kl.target": Field(None, ABOVE_ZERO, "Divergence from the reference to keep, in nats per token."),
  "kl.horizon": Field(None, COUNT, "Sequences over which the coefficient may change by its own size.", ADAPTIVE_KL),

  "entropy.target": Field(None, ABOVE_ZERO,
    "Entropy of the policy to keep, in nats per token; objective.entropy_coef is the first coefficient."),
  "entropy.step": Field(None, ABOVE_ZERO, "Change of the coefficient per RL step. None: 0.005.", ADAPTIVE_ENTROPY),

  "correction.terms": Field((), texts("a tuple of corrections, as in ('tis:cap=2.0&level=sequence', 'bypass')"),
    "Keys of `objectives.corrections.CORRECTIONS`, or MODULE:FUNCTION, with settings."),

  "teacher.path": Field(None, TEXT,
    "A checkpoint: the workdir of a run, WORKDIR@STEP, a folder or what else model.path takes; or 'self', the policy."),
  "teacher.paths": Field(None, texts("one or more NAME=PATH, as in ('math=runs/a', 'code=runs/b')", least=1, accepts=names_path),
    "Several teachers instead of one, as NAME=PATH; each scores the samples of problems that have its name in teacher.column."),
  "teacher.column": Field(None, COLUMN, "Column of the problems with the name of their teacher.", TEACHERS),
  "teacher.privileged": Field(None, LINES,
    "Prompt that the teacher reads in place of the policy's, with columns in braces: '{prompt}The answer is {answer}.\\n'.", TEACHER),
  "teacher.frozen": Field(None, SWITCH,
    "Whether the teacher stays as the policy is when RL begins, a second copy of the weights. None: False.", SELF_TEACHER),
  "teacher.row_tokens": Field(None, COUNT, "Slots of a row of the teacher's own pass. None: chosen from the data.", PRIVILEGED),
  "teacher.row_buckets": Field(None, COUNTS, "Numbers of those rows; the smallest that fits is used. None: from the data.", PRIVILEGED),
  "teacher.opd_coef": Field(0.0, NOT_NEGATIVE,
    "Advantage of a sampled token per nat by which the teacher finds it likelier than its policy did (on-policy distillation).", TEACHER),
  "teacher.advice": Field("opd", TEXT, "How teacher.opd_coef changes an advantage: a key of `distillation.ADVICE`.", TEACHER),
  "teacher.gkd_coef": Field(0.0, NOT_NEGATIVE,
    "Loss per nat of divergence from the teacher over the whole vocabulary, at the tokens that the policy drew.", TEACHER),
  "teacher.gkd_beta": Field(None, UNIT,
    "That divergence: 0 is the forward KL, 1 the reverse KL, in between the generalised Jensen-Shannon divergence. None: 1.", DIVERGENCE),
  "teacher.temperature": Field(1.0, ABOVE_ZERO,
    "Divisor of the teacher's logits, and with gkd_coef of the policy's beside them; with opd_coef, rollout.temperature.", TEACHER),
  "teacher.dtype": Field(None, DTYPE, "Type of the teacher's weights and products. None: model.dtype.", CHECKPOINT_TEACHER),

  "model.preset": Field("tiny", TEXT, "A key of `models.PRESETS`, with random weights.", PRESET),
  "model.path": Field(None, TEXT,
    "A checkpoint: a folder in Hugging Face's format, a .gguf file, package:NAME, or hub:OWNER/NAME[@REVISION]."),
  "model.dtype": Field("float32", DTYPE, "Type of activations and matrix products in the learner."),
  "model.param_dtype": Field("float32", DTYPE,
    "Type of the weights as they are held and trained; updates in bfloat16 are rounded at random, so that small ones are not lost."),
  "model.sampler_dtype": Field(None, DTYPE, "Type of the sampler's weights and products. None: model.dtype."),
  "model.attention": Field("auto", TEXT,
    "A key of `attention.BACKENDS`, or 'auto' for what suits the platform, the heads and the length of rows."),
  "model.remat": Field("none", TEXT, "What the backward pass recomputes to save memory: a key of `remat.POLICIES`, "
    "or 'auto' for the cheapest that fits the devices, as far as their memory is known; on CPUs 'none'."),
  "model.head_tokens": Field(None, COUNT,
    "Tokens whose logits are in a device's memory at once. None: a number that suits the device."),
  "model.train_tower": Field(False, SWITCH,
    "Train the vision tower too. False: it is frozen, and sees each picture once."),
  "model.image_tokens": Field(None, COUNT,
    "Image tokens that a picture has room for; a larger one is reduced. None: as many as the data need."),
  "model.lora_rank": Field(None, COUNT,
    "Train only low-rank adapters of this rank; the reference of a KL penalty is the model under them. None: train all weights."),
  "model.lora_alpha": Field(None, ABOVE_ZERO, "An adapter is scaled by alpha / rank. None: alpha = 2 * rank."),
  "model.lora_targets": Field(None,
    texts("one or more regular expressions of linear maps, as in ('attention/.*', 'mlp/down')", least=1, accepts=compiles),
    "Linear maps with an adapter. None: ('attention/.*', 'mlp/.*')."),

  "numerics.exact": Field(False, SWITCH,
    "Have sampler and learner add in one order, on CPUs, so that their log-probabilities are the same to the last bit "
    "(rollout_corr/bits_equal is 1). Costs time; see docs/sampler.md."),

  "moe.replay": Field(None, one_of("R2", "R3"), "Routes to replay in updates: R2, the learner's own at the old policy; R3, the sampler's."),
  "moe.balance_coef": Field(0.0, NOT_NEGATIVE, "Weight of the load-balancing loss, a mean over tokens whatever objective.weights."),
  "moe.z_coef": Field(0.0, NOT_NEGATIVE, "Weight of the router's z-loss, a mean over tokens whatever objective.weights."),
  "moe.measure_every": Field(0, NATURAL, "RL steps between measurements of expert changes (two more passes per update); 0: never."),

  "task.name": Field("arithmetic", TEXT, "A name that `tasks.names()` gives, gym:NAME, file, environment or mixture."),
  "task.levels": Field((1, 2), or_none(LEVELS), "Difficulties, 1 to 3; an arithmetic problem of level n takes n steps (n + 1 terms)."),
  "task.data_dir": Field(None, TEXT, "Folder that datasets are built in. None: ~/.cache/jaxrl_llm/data."),
  "task.bad_rows": Field("drop", one_of("drop", "error"), "Leave unusable problems out, counted by reason, or stop at the first."),
  "task.curriculum": Field(None, TEXT,
    "Draws problems with intermediate pass rates more often. Pass rates are kept for each 'problem', or for "
    "each value of a column, such as 'level'. None: a fixed order."),
  "task.test_name": Field(None, TEXT, "Another task, whose test problems replace this one's."),
  "task.test_source": Field(None, TEXT, "task.source of that task."),
  "task.test_levels": Field(None, LEVELS, "Difficulties of the test problems. None: task.levels, or all of task.test_name."),
  "task.shots": Field(0, NATURAL, "Solved training problems in front of every prompt."),
  "task.vary_shots": Field(False, SWITCH,
    "Draws the solved problems for each prompt, from the training problems of its level. "
    "False: every prompt has the same ones, and they are not trained on.", SHOTS),
  "task.shot_template": Field("{prompt}{solution}\n", LINES,
    "Text of a solved problem, with columns in braces; {solution} is its demonstration, or its answer if there is none.", SHOTS),

  "reward.terms": Field((), texts("a tuple of rewards with weights, as in ('tags=0.1',)"),
    "Rewards with weights, beside the task's own; one of weight 0 is only logged."),
  "reward.settings": Field((), texts("a tuple of settings, as in ('pattern.regex=[0-9]+',)"),
    "Settings of rewards, as NAME.SETTING=VALUE."),
  "reward.verifier_weight": Field(1.0, NOT_NEGATIVE, "Weight of the task's own verifier; at 0 it is logged, and evaluations still use it."),
  "reward.at_random": Field(None, UNIT,
    "A control from which nothing can be learned: the reward of each sample is random, 1 with this probability, "
    "else 0. All other rewards are only logged."),
  "reward.form_weight": Field(0.0, NOT_NEGATIVE, "Weight of a reward for the form of an answer, right or wrong, if the task has one."),
  "reward.overlong_filter": Field(False, SWITCH,
    "Learn nothing from responses cut at the budget; their rewards, and what they lose by reward.kl_coef, stay in all statistics."),
  "reward.overlong_buffer": Field(0, NATURAL, "Tokens below the budget over which DAPO's soft penalty grows; 0: no penalty."),
  "reward.kl_coef": Field(0.0, NOT_NEGATIVE,
    "Reward subtracted per nat of divergence from the reference; objective.kl_coef is the one in the loss."),
  "reward.kl_estimator": Field(None, TEXT, "A key of `penalties.KL_VALUES`. None: k1.", KL_IN_REWARD),
  "reward.model_path": Field(None, TEXT,
    "Folder of a reward model, whose output is a term of the reward. None: no reward model."),
  "reward.model_weight": Field(1.0, ABOVE_ZERO, "Weight of that term, beside the task's own verifier with weight 1.", REWARD_MODEL),
  "reward.model_only": Field(False, SWITCH,
    "Learn from the reward model alone: the verifier has weight 0, and evaluations still use it.", REWARD_MODEL),
  "reward.workers": Field(None, WORKERS, "Processes for rewards that may hang or crash. None: one per processor."),
  "reward.timeout_s": Field(10.0, ABOVE_ZERO, "Limit on one such call; a response beyond it has no reward and is not learned from."),
  "reward.max_chars": Field(20_000, COUNT, "Characters at the end of a response that such a reward sees."),
  "reward.worker_memory_gb": Field(4.0, ABOVE_ZERO, "Memory of such a process."),
  "reward.max_failed_fraction": Field(0.5, UNIT,
    "Stop if more of a step's responses have no reward: the verifier is broken, not the policy."),

  "environment.name": Field(None, TEXT, "A key of `environments.ENVIRONMENTS`, openenv:URL, verifiers:ID, or MODULE:FUNCTION."),
  "environment.weight": Field(1.0, NOT_NEGATIVE,
    "Weight of the environment's rewards for turns, beside the task's; 0 leaves them out.", ENVIRONMENT),

  "sandbox.backend": Field("off", TEXT, "A key of `sandbox.BACKENDS`, 'auto', or 'off': refuse to run programs."),

  "warm_start.num_steps": Field(450, NATURAL, "Optimizer updates, 0 for none."),
  "warm_start.batch_size": Field(80, COUNT, "Demonstrations per update."),
  "warm_start.row_buckets": Field(None, COUNTS, "learner.row_buckets of the warm start."),
  "warm_start.learning_rate": Field(3e-3, ABOVE_ZERO, "AdamW's largest learning rate."),
  "warm_start.warmup_steps": Field(20, NATURAL, "Updates over which the learning rate rises."),
  "warm_start.schedule": Field("linear", SCHEDULE, "Learning rate after warm-up: constant, or linear down to 0 at the last step."),
  "warm_start.cache": Field(True, SWITCH, "Take the weights of an equal earlier run, and keep those of this one for later runs."),
  "warm_start.cache_dir": Field(None, TEXT,
    "Folder of kept warm starts. None: $JAXRL_LLM_WARM_STARTS, or jaxrl_llm/warm_starts in $XDG_CACHE_HOME or ~/.cache.", KEPT_WARM_START),
  "warm_start.cache_gb": Field(10.0, ABOVE_ZERO,
    "Size of that folder; the weights that were used least recently are deleted first.", KEPT_WARM_START),

  "rollout.num_prompts": Field(64, COUNT, "Prompts per RL step."),
  "rollout.group_size": Field(8, COUNT, "Samples per prompt."),
  "rollout.temperature": Field(1.0, ABOVE_ZERO, "Temperature of the samples."),
  "rollout.top_k": Field(0, NATURAL, "Most likely tokens to sample from, at most the vocabulary; 0 keeps every token."),
  "rollout.top_p": Field(1.0, SHARE, "Probability mass to sample from; 1 keeps every token."),
  "rollout.prompt_buckets": Field(None, COUNTS,
    "Prompt slots; a batch takes the smallest that holds its longest prompt. None, here and for rows: chosen for "
    "data and devices."),
  "rollout.prompt_images": Field(None, COUNT,
    "Pictures that a prompt has room for; problems with more are left out. None: as many as the data need."),
  "rollout.max_new_tokens": Field(32, COUNT, "Budget of a response."),
  "rollout.stop_strings": Field((), texts("a tuple of texts, as in ('</answer>',)"), "Texts that end a response, besides stop tokens."),
  "rollout.slots": Field(None, COUNT,
    "Sequences decoded at once; the others wait. None: a number that suits the devices, and fits an accelerator's memory."),
  "rollout.cache_dtype": Field(None, one_of("float32", "bfloat16", "int8"), "Type of the cache. None: the sampler's."),
  "rollout.cache_blocks": Field(None, COUNTS,
    "Tokens that the cache grows by. None: 1/4, 1/4 and 1/2 of the budget, or all of it if a GPU's kernel reads it."),
  "rollout.staleness": Field(0, NATURAL,
    "RL steps by which the weights that draw a token may lag; above 0, the next rollouts are drawn while this step "
    "learns. The step after a checkpoint has no lag, so that a resumed run equals an unbroken one."),
  "rollout.driver": Field("auto", one_of("auto", "drain", "loop"),
    "drain: one program draws a whole batch, on any mesh; loop: the decoding engine draws request by request, and responses are graded as "
    "they finish. auto: the loop for conversations, and with update_in_flight or samplers; else the drain."),
  "rollout.update_in_flight": Field(None, one_of("wait", "keep", "recompute"),
    "What new weights do to responses in progress: wait for their end, or go on with their keys and values, kept or recomputed. None: they "
    "wait for whole batches, so that each is drawn by the weights that it was begun with.", LAG),
  "rollout.window": Field(0.0, FRACTION,
    "Part f of the (staleness + 1) * num_prompts groups of a lag, as 0.3: a step learns from the first that finish among so many "
    "consecutive ones, however late the oldest is. 0: each step learns from its own groups.", IN_FLIGHT),
  "rollout.samplers": Field(0, NATURAL,
    "Samplers apart, each of one or several processes (python -m jaxrl_llm.cli.join WORKDIR); a run starts once so many have joined, and "
    "goes on with fewer or more. 0: the run itself draws."),
  "rollout.sampler_timeout_s": Field(60.0, SILENCE,
    "Seconds after which a silent sampler process is lost; others redo its requests.", SAMPLERS),
  "rollout.sampler_host": Field("127.0.0.1", TEXT,
    "Address on which the learner waits for sampler processes. 127.0.0.1 lets in those of this machine alone, 0.0.0.0 those of others, "
    "all of which must know the secret in WORKDIR/samplers.json.", SAMPLERS),
  "rollout.spare_prompts": Field(0, NATURAL,
    "Prompts in the sampler beyond num_prompts. A step ends once num_prompts groups are complete; the others continue in the next."),
  "rollout.max_refills": Field(0, NATURAL,
    "Dynamic sampling: how often a step may draw again, with new prompts, to fill its batch with groups that the estimator "
    "gives advantages, penalties for length left out. Other groups then fill the rest."),

  "learner.updates_per_rollout": Field(4, COUNT, "Optimizer updates per rollout batch, each on a mini-batch of whole groups."),
  "learner.rows_per_device": Field(None, COUNT,
    "Rows that a device takes at a time; the gradient accumulates over the others, with the same loss. None: all rows."),
  "learner.row_tokens": Field(None, COUNT, "Slots of a packed row."),
  "learner.row_images": Field(None, COUNT, "Pictures that a packed row has room for. None: chosen from the data."),
  "learner.share_prompts": Field(True, SWITCH,
    "Store a prompt once for all its responses in a row; loss and gradient stay the same."),
  "learner.skip_zero_advantages": Field(False, SWITCH,
    "Leave responses whose advantages are all zero out of the updates: the same loss and gradient for less work. "
    "Token metrics then cover only the other responses."),
  "learner.echo_coef": Field(0.0, NOT_NEGATIVE,
    "Weight of the cross-entropy of an environment's replies (ECHO), in the mean over the tokens of all replies; 0: none.", ENVIRONMENT),
  "learner.row_buckets": Field(None, COUNTS,
    "Rows of a packed mini-batch, which takes the smallest number that holds its sequences."),
  "learner.old_logprobs": Field("sampler", one_of("sampler", "learner", "interpolated"),
    "Source of the old policy's log-probabilities: the sampler, a pass of the learner, or (A-3PO) an interpolation between "
    "the sampler and the current policy."),
  "learner.learning_rate": Field(2e-4, ABOVE_ZERO, "AdamW's largest learning rate."),
  "learner.warmup_steps": Field(10, NATURAL, "Updates over which the learning rate rises."),
  "learner.schedule": Field("linear", SCHEDULE, "Learning rate after warm-up: constant, or linear down to 0 at the last step."),
  "learner.weight_decay": Field(0.0, NOT_NEGATIVE, "AdamW's weight decay."),
  "learner.b1": Field(0.9, FRACTION, "AdamW's decay of the first moment."),
  "learner.b2": Field(0.99, FRACTION, "AdamW's decay of the second moment."),
  "learner.max_grad_norm": Field(1.0, ABOVE_ZERO, "Norm that gradients are clipped to."),
  "learner.moments_dtype": Field("float32", DTYPE, "Type of AdamW's first moment; the second has that of the weights."),
  "learner.offload_optimizer": Field(False, SWITCH,
    "Keep moments in host memory, at the cost of a transfer in every update."),
  "learner.max_skipped": Field(10, COUNT, "Stop after this many updates in a row with a non-finite loss or gradient."),

  "mesh.data": Field(-1, AXIS, "Data parallelism; -1 takes all remaining devices."),
  "mesh.fsdp": Field(1, AXIS, "Fully sharded data parallelism."),
  "mesh.expert": Field(1, AXIS, "Expert parallelism."),
  "mesh.context": Field(1, AXIS, "Deals stripes of packed rows to devices, for responses too long for one device."),
  "mesh.tensor": Field(1, AXIS, "Tensor parallelism."),
  "mesh.slices": Field(None, COUNT,
    "TPU slices, joined by a network that only the data axis crosses. None: all that are present."),
  "mesh.sampler": Field(0, NATURAL,
    "Devices that only sample, the last ones; the axes above describe the others. 0: all devices do both."),
  "mesh.sampler_expert": Field(1, COUNT,
    "Expert parallelism of those devices, or of those of sampler processes (rollout.samplers): a mixture's experts and vocabulary are "
    "spread over so many, and prompts split."),
  "mesh.sampler_tensor": Field(1, COUNT,
    "Tensor parallelism of those devices, or of the devices of sampler processes (rollout.samplers): so many draw the same prompts. With "
    "sampler_expert, they share one copy of the weights."),

  "serving.layout": Field(None, one_of("learner", "spread"),
    "Where weights lie while decoding: as the learner's, or experts and vocabulary spread over all devices, so that no step gathers them. "
    "None: spread, if a mixture's devices are split by fsdp or expert."),
  "serving.attention": Field("auto", one_of("auto", "xla", "ragged"),
    "Attention of a decoding step: xla reads all columns of the cache; ragged, a kernel for TPUs and GPUs, reads the tokens of rows. "
    "auto: ragged on TPUs, xla elsewhere, because the kernel for GPUs has not run on one yet."),
  "serving.weights": Field(None, one_of("int8", "float8"),
    "Format in which a decoding step reads the weights of linear maps, half of bfloat16's bytes. The learner's stay exact, so that "
    "responses are drawn from a slightly other policy; see rollout_corr/* and config.correction. None: the sampler's type."),

  "eval.every": Field(10, COUNT, "RL steps between evaluations."),
  "eval.num_prompts": Field(256, COUNT, "Held-out problems per evaluation."),
  "eval.samples": Field(4, COUNT, "Samples per problem, for avg@4 and pass@4."),
  "eval.batch_prompts": Field(128, COUNT, "Problems sampled at once."),
  "eval.metrics": Field((), texts("names of metrics, as in ('maj@n:n=8', 'pass@k:k=1&n=8')"),
    "Further metrics with intervals, by lighteval's names."),
  "eval.save_samples": Field(False, SWITCH, "Write every sample to WORKDIR/evaluations/step-N.jsonl."),
  "eval.temperature": Field(1.0, NOT_NEGATIVE,
    "Temperature of the samples; 0 is greedy, and needs samples=1."),

  "checkpoint.every": Field(10, COUNT, "RL steps between checkpoints."),
  "checkpoint.warm_start_every": Field(200, COUNT, "Warm-start steps between checkpoints."),
  "checkpoint.keep": Field(2, COUNT, "Newest checkpoints to keep."),
  "checkpoint.keep_best": Field(0, NATURAL, "Checkpoints to keep by held-out accuracy, measured at their own step."),
  "checkpoint.keep_every_hours": Field(None, ABOVE_ZERO, "Interval of which one checkpoint is kept for good."),
  "checkpoint.every_minutes": Field(None, ABOVE_ZERO,
    "Minutes since the last save after which a step that saves nothing makes a temporary checkpoint; a newer one replaces it."),
  "checkpoint.asynchronous": Field(None, SWITCH,
    "Write while the run continues. None: yes on accelerators, no on CPU, where the two share the cores."),


  "watchdog.seconds": Field(3600.0, ABOVE_ZERO,
    "Limit on a phase; beyond it the run is stalled, and the process writes its stacks and exits with status 42."),
  "watchdog.stop_seconds": Field(25.0, ABOVE_ZERO,
    "Time from SIGTERM until the process ends in any phase but a save; pods get 30 s."),

  "profile.start": Field(None, COUNT, "First RL step of a trace in WORKDIR/profile, from 1. None: no trace."),
  "profile.num_steps": Field(1, COUNT, "Number of RL steps to trace.", TRACE),

  "log.samples_every": Field(10, COUNT, "RL steps between tables of sample rollouts."),
  "log.num_samples": Field(16, NATURAL, "Rollouts written to samples.jsonl each time."),
  "log.num_table_rows": Field(4, NATURAL, "Number of these rollouts that are shown on the screen."),
  "log.gradient_noise_every": Field(0, NATURAL,
    "RL steps between measurements of the noise of an update's gradient (two backward passes per response, one device); 0: never."),
  "log.tensorboard": Field(True, SWITCH, "Also write the metrics for TensorBoard."),
  "log.trackers": Field((), texts("a tuple of trackers, as in ('wandb', 'mlflow')"),
    "Trackers that show the run too: wandb, mlflow, trackio. Local files, unless their own environment variables name a server."),
}
"""Every field of an experiment (`configs/common.py`)."""

_SHARED = """
seed model.preset model.dtype model.param_dtype model.attention model.remat task.levels
task.bad_rows task.data_dir
learner.rows_per_device learner.schedule learner.weight_decay learner.b1 learner.b2
learner.max_grad_norm learner.moments_dtype learner.offload_optimizer learner.max_skipped
mesh.data mesh.fsdp mesh.expert mesh.context mesh.tensor mesh.slices checkpoint.keep
checkpoint.keep_best checkpoint.keep_every_hours checkpoint.every_minutes checkpoint.asynchronous
watchdog.seconds watchdog.stop_seconds log.tensorboard log.trackers
""".split()

REWARD_MODEL_FIELDS: dict[str, Field] = {path: FIELDS[path] for path in _SHARED} | {
  "num_steps": Field(400, COUNT, "Updates, each on learner.batch_pairs pairs."),
  "objective.name": Field("bradley_terry", BRADLEY_TERRY, "The loss of a pair."),
  "objective.margin": Field(0.0, NUMBER,
    "Reward by which a chosen response should exceed the rejected one, unless the pair has its own margin."),
  "objective.center_coef": Field(0.0, NOT_NEGATIVE,
    "Weight of a penalty that keeps rewards around 0, which pairs do not determine; 0.01 is usual."),
  "model.path": Field(None, TEXT, "A language model, whose head is dropped, or a reward model to train further."),
  "model.tokenizer": Field(None, TEXT, "'bytes' for an exported policy of this package. None: the folder's own."),
  "task.name": Field("arithmetic", TEXT, "arithmetic or file."),
  "task.path": Field(None, TEXT, "Task file: pairs as JSON lines, JSON, CSV or Parquet."),
  "task.prompt_column": Field("prompt", TEXT,
    "Task file: column of prompts; '' if chosen and rejected are whole conversations.", FILE_OF_PAIRS),
  "task.chosen_column": Field("chosen", COLUMN, "Task file: column of the better responses.", FILE_OF_PAIRS),
  "task.rejected_column": Field("rejected", COLUMN, "Task file: column of the worse responses.", FILE_OF_PAIRS),
  "task.margin_column": Field(None, TEXT, "Task file: column of a number for each pair, which replaces objective.margin."),
  "task.test_path": Field(None, TEXT, "Task file: pairs to test on. None: test_fraction of task.path is held out."),
  "task.test_fraction": Field(None, INSIDE, "Task file: share of the pairs that is held out."),
  "task.chat": Field(None, SWITCH, "Write prompts with the checkpoint's chat template. None: True if there is one."),
  "task.system": Field(None, LINES, "System message of the chat."),
  "task.chat_options": Field(None, OPTIONS, "Options of the chat template, as NAME=VALUE."),
  "task.special_tokens": Field(None, one_of("text", "tokens"),
    "What the name of a special token in a prompt or a reply is: text, or the token, which can end a turn. None: text."),
  "task.pad_token": Field(None, TEXT, "Padding token, from the checkpoint's vocabulary. None: its own, or an unused special token."),
  "task.max_tokens": Field(30, COUNT, "Tokens of a prompt with its response; longer ones are bad rows."),
  "learner.batch_pairs": Field(64, COUNT, "Pairs per update."),
  "learner.row_tokens": Field(120, COUNT, "Slots of a packed row; a pair lies in one row."),
  "learner.row_buckets": FIELDS["learner.row_buckets"]._replace(default=(24, 32)),
  "learner.learning_rate": FIELDS["learner.learning_rate"]._replace(default=2e-3),
  "learner.warmup_steps": FIELDS["learner.warmup_steps"]._replace(default=20),
  "eval.every": Field(100, COUNT, "Updates between evaluations."),
  "eval.num_pairs": Field(512, COUNT, "Held-out pairs."),
  "checkpoint.every": Field(100, COUNT, "Updates between checkpoints."),
}
"""Every field of a reward model's training (`configs/reward_model.py`)."""
# fmt: on


def check_argument(arg: str, known: Sequence[str]) -> None:
  """Checks the argument of a config file, the part after the colon of `--config=FILE:ARG`.

  Raises:
    ValueError: If it is not one of the known arguments. One line, with the fix.

  Example:
    >>> check_argument("tny", ["", "tiny"])
    Traceback (most recent call last):
    ...
    ValueError: unknown argument 'tny', expected one of '', 'tiny'; did you mean 'tiny'?
  """
  if arg not in known:
    expected = ", ".join(map(repr, known))
    raise ValueError(f"unknown argument {arg!r}, expected one of {expected}{did_you_mean(arg, known)}")


def base(table: Mapping[str, Field] = FIELDS) -> ConfigDict:
  """Builds a config in which every field has its default.

  The config is locked, so that a misspelt field is an error instead of a new field. Open sections
  take any setting, which `config.check` compares with their entry.

  Example:
    >>> base().rollout.group_size
    8
  """
  fields: dict[str, Any] = {section: {} for section in open_sections(table)}
  for path, field in table.items():
    section, _, name = path.rpartition(".")
    # A plain None would not tell the type to which the command line converts text.
    value = FieldReference(field.default, field_type=field.check.type) if field.takes_none else field.default
    (fields.setdefault(section, {}) if section else fields)[name] = value
  config = ConfigDict(fields).lock()
  for section in open_sections(table):
    config[section].unlock()
  return config


def open_sections(table: Mapping[str, Field]) -> dict[str, str]:
  """Returns the sections of `OPEN` of a table; a reward model's has none."""
  return OPEN if table is FIELDS else {}


def is_open(path: str, table: Mapping[str, Field] = FIELDS) -> bool:
  """Returns whether a path is that of a setting in an open section, and of no field of the table.

  Example:
    >>> is_open("objective.tau_pos"), is_open("objective.name"), is_open("rollout.slots")
    (True, False, False)
  """
  return path not in table and path.count(".") == 1 and path.partition(".")[0] in open_sections(table)


def table_of(config: Mapping[str, Any] | ConfigDict) -> Mapping[str, Field]:
  """Returns the table of a config: a reward model's, or that of all other experiments."""
  return REWARD_MODEL_FIELDS if is_reward_model(config) else FIELDS


def is_reward_model(config: Mapping[str, Any] | ConfigDict) -> bool:
  """Returns whether a config trains a reward model, as configs/reward_model.py does."""
  return flatten(config).get("objective.name") == REWARD_MODEL_FIELDS["objective.name"].default


def describe_fields(prefix: str = "", table: Mapping[str, Field] = FIELDS) -> str:
  """Describes the fields with a prefix, by section: path, default, legal values and meaning.

  Raises:
    ValueError: If no field has the prefix. One line.

  Example:
    >>> print(describe_fields("profile.num"))
    profile: A trace of the devices.
      config.profile.num_steps = 1; expects a whole number of at least 1, below 2**31
          Number of RL steps to trace. Read only if profile.start is set.
  """
  prefix = prefix.removeprefix("config.")
  lines = []
  for section in ("", *SECTIONS):
    rows = [path for path in table if path.rpartition(".")[0] == section and path.startswith(prefix)]
    if rows and section:
      lines.append(f"{section}: {SECTIONS[section]}")
    for path in rows:
      default, check, sentence, read_if = table[path]
      sentence += "" if read_if is None else f" Read only if {read_if.words}."
      value = "(required)" if default is inspect.Parameter.empty else repr(default)
      none = ", or None" if table[path].takes_none and "None" not in check.words else ""
      lines.append(f"  config.{path} = {value}; expects {check.words}{none}")
      lines += textwrap.wrap(sentence, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
  if not lines:
    near = did_you_mean(prefix, [*SECTIONS, *table])
    raise ValueError(f"--help_fields: found {prefix!r}, expected the beginning of a field, such as 'rollout'{near}")
  return "\n".join(lines)


def unknown(path: str, known: Iterable[str], otherwise: str) -> str:
  """Returns a message that a field does not exist, with the likely intended field.

  The same name in another section is preferred over a similar path, and a similar path over a
  similar name in any section.

  Args:
    path: Path that the user wrote.
    known: Paths of the existing fields.
    otherwise: Advice if no field is close.

  Example:
    >>> unknown("rollout.grup_size", FIELDS, "see --help_fields")
    'unknown field config.rollout.grup_size; did you mean config.rollout.group_size?'
  """
  known = list(known)
  leaves = {name: name.rpartition(".")[2] for name in known}
  leaf = path.rpartition(".")[2]
  alike = difflib.get_close_matches(leaf, leaves.values(), n=1)
  near = [name for name in known if leaves[name] == leaf] or difflib.get_close_matches(path, known, n=1)
  near = near or [name for name in known if leaves[name] in alike]
  hint = f"did you mean {' or '.join(f'config.{name}' for name in near[:3])}?" if near else otherwise
  return f"unknown field config.{shown(path)[1:-1]}; {hint}"


def flatten(config: Mapping[str, Any] | ConfigDict, prefix: str = "") -> dict[str, Any]:
  """Returns the values of a config by dotted path.

  Example:
    >>> flatten({"seed": 0, "mesh": {"data": -1}})
    {'seed': 0, 'mesh.data': -1}
  """
  fields = {}
  for name, value in config.items():
    if isinstance(value, Mapping | ConfigDict):
      fields |= flatten(value, f"{prefix}{name}.")
    else:
      fields[f"{prefix}{name}"] = value
  return fields


def nested(fields: Mapping[str, Any]) -> ConfigDict:
  """Returns the config of values by dotted path, the inverse of `flatten`.

  Example:
    >>> nested({"seed": 0, "mesh.data": -1}).mesh.data
    -1
  """
  config: dict[str, Any] = {}
  for path, value in fields.items():
    *sections, name = path.split(".")
    functools.reduce(lambda inner, section: inner.setdefault(section, {}), sections, config)[name] = value
  return ConfigDict(config)


def given(section: ConfigDict, *without: str) -> dict[str, Any]:
  """Returns the fields of a section that are set.

  The others take the defaults of what they configure.
  """
  return {name: value for name, value in section.items() if name not in without and value is not None}


def unused(config: ConfigDict, paths: Mapping[str, Any] | Iterable[str], why: str) -> list[Problem]:
  """Returns a problem for each field that is set although nothing reads it.

  Args:
    config: Config that holds the fields.
    paths: Paths of the fields, as a mapping to the values that count as unset; without values, None
      counts as unset.
    why: Reason that nothing reads them.

  Example:
    >>> str(unused(base(), ["kl.target", "eval.every"], "nothing reads it")[0])
    'config.eval.every: found 10, expected None, because nothing reads it'
  """
  values, unset = flatten(config), paths if isinstance(paths, Mapping) else dict.fromkeys(paths)
  return [Problem(f"config.{path}", repr(value), f"{x!r}, because {why}") for path, x in unset.items() if (value := values.get(path)) != x]


def unread(config: Mapping[str, Any] | ConfigDict, table: Mapping[str, Field] = FIELDS) -> dict[str, str]:
  """Returns the fields whose condition does not hold, with the reason that nothing reads them.

  Args:
    config: Config, by section or by path; missing fields have their defaults.
    table: Fields of the config.

  Example:
    >>> config = base()
    >>> config.model.path, config.model.preset = "a folder", "nano"
    >>> unread(config)["model.preset"]
    'it is read only if model.path is None'
  """
  values, reasons = {path: field.default for path, field in table.items()} | flatten(config), {}
  for path, field in table.items():
    with contextlib.suppress(TypeError):  # A value of another type, which its own check reports.
      if field.read_if is not None and not field.read_if.holds(values):
        reasons[path] = f"it is read only if {field.read_if.words}"
  return reasons


def unread_problems(config: ConfigDict, table: Mapping[str, Field] = FIELDS) -> list[Problem]:
  """Returns a problem for each field of `unread` that is set."""
  return [problem for path, why in unread(config, table).items() for problem in unused(config, {path: table[path].default}, why)]


def unread_defaults(config: Mapping[str, Any] | ConfigDict, table: Mapping[str, Field] = FIELDS) -> dict[str, Any]:
  """Returns the defaults of the fields of `unread` that have another value.

  Example:
    >>> unread_defaults({"model": {"path": "a folder", "preset": "nano"}})
    {'model.preset': 'tiny'}
  """
  values = flatten(config)
  return {path: table[path].default for path in unread(config, table) if path in values and values[path] != table[path].default}
