"""What each field of a config may be by itself."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

Check = tuple[Callable[[Any], bool], str]

MAX_COUNT = 2**31 - 1
"""Of anything: sizes and steps are 32-bit numbers on the devices."""


def _count(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_COUNT


def _natural(value: Any) -> bool:
  return (isinstance(value, int) and not isinstance(value, bool) and value == 0) or _count(value)


def _number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _above_zero(value: Any) -> bool:
  return _number(value) and value > 0


def _not_negative(value: Any) -> bool:
  return _number(value) and value >= 0


def _compiles(pattern: str) -> bool:
  try:
    re.compile(pattern)
  except re.error:
    return False
  return True


def _fraction(value: Any) -> bool:
  return _number(value) and 0 <= value < 1


def _counts(value: Any) -> bool:
  return isinstance(value, tuple) and len(value) > 0 and all(_count(x) for x in value)


def _texts(value: Any) -> bool:
  return isinstance(value, tuple) and all(isinstance(x, str) and x for x in value)


COUNT: Check = (_count, "a whole number of at least 1, below 2**31")
NATURAL: Check = (_natural, "a whole number of at least 0, below 2**31")
ABOVE_ZERO: Check = (_above_zero, "a finite number above 0")
NOT_NEGATIVE: Check = (_not_negative, "a finite number of at least 0")
FRACTION: Check = (_fraction, "a number in [0, 1)")
UNIT: Check = (lambda x: _number(x) and 0 <= x <= 1, "a number from 0 to 1")
COUNTS: Check = (_counts, "one or more whole numbers of at least 1, below 2**31, as in (24, 32)")
SCHEDULE: Check = (lambda x: x in ("constant", "linear"), "'constant' or 'linear'")

# A field that reads None takes the default of what it configures.
OPTIONAL: dict[str, Check] = {
  "rollout.slots": COUNT,
  "rollout.cache_dtype": (lambda x: x in ("float32", "bfloat16", "int8"), "'float32', 'bfloat16' or 'int8'"),
  "rollout.cache_blocks": COUNTS,
  "advantage.pass_k": COUNT,
  "advantage.gamma": UNIT,
  "advantage.lam": UNIT,
  "advantage.critic_lam": UNIT,
  "advantage.length_alpha": ABOVE_ZERO,
  "critic.init": (lambda x: x in ("policy", "scratch"), "'policy' or 'scratch'"),
  "critic.learning_rate": ABOVE_ZERO,
  "critic.value_warmup_steps": NATURAL,
  "kl.target": ABOVE_ZERO,
  "kl.horizon": COUNT,
  "model.sampler_dtype": (lambda x: x in ("float32", "bfloat16"), "'float32' or 'bfloat16'"),
  "model.head_tokens": COUNT,
  "model.lora_rank": COUNT,
  "model.lora_alpha": ABOVE_ZERO,
  "model.lora_targets": (
    lambda x: isinstance(x, tuple) and len(x) > 0 and all(isinstance(p, str) and _compiles(p) for p in x),
    "one or more regular expressions of linear maps, as in ('attention/.*', 'mlp/down')",
  ),
  "mesh.slices": COUNT,
  "moe.replay": (lambda x: x in ("R2", "R3"), "'R2' or 'R3'"),
  "profile.start": COUNT,
  "checkpoint.keep_every_hours": ABOVE_ZERO,
  "checkpoint.every_minutes": ABOVE_ZERO,
  "reward.workers": (lambda x: _count(x) and x <= 1024, "a whole number of processes from 1 to 1024"),
  "alarms.spike_sigmas": ABOVE_ZERO,
  "alarms.entropy_below": ABOVE_ZERO,
  "alarms.entropy_fraction": ABOVE_ZERO,
  "alarms.truncation_above": UNIT,
  "alarms.no_signal_above": UNIT,
  "task.test_fraction": (lambda x: _number(x) and 0 < x < 1, "a number between 0 and 1"),
  "task.size": COUNT,
  "task.seed": NATURAL,
  "task.parts": (lambda x: _texts(x) and len(x) > 0, "tasks with weights, as in ('gsm8k=0.7', 'gym:countdown=0.3')"),
  "environment.max_turn_tokens": COUNT,
  "environment.call_reward": NOT_NEGATIVE,
  "reward.kl_estimator": (lambda x: x in ("k1", "k2", "k3"), "'k1', 'k2' or 'k3'"),
}

DTYPE: Check = (lambda x: x in ("float32", "bfloat16"), "one of float32, bfloat16")

RANGES: dict[str, Check] = {
  "reward.terms": (_texts, "a tuple of rewards with weights, as in ('tags=0.1',)"),
  "reward.settings": (_texts, "a tuple of settings, as in ('pattern.regex=[0-9]+',)"),
  "reward.timeout_s": ABOVE_ZERO,
  "environment.max_turns": COUNT,
  "environment.timeout_s": ABOVE_ZERO,
  "environment.weight": NOT_NEGATIVE,
  "reward.max_chars": COUNT,
  "reward.worker_memory_gb": ABOVE_ZERO,
  "reward.max_failed_fraction": UNIT,
  "sandbox.timeout_s": ABOVE_ZERO,
  "sandbox.total_s": ABOVE_ZERO,
  "sandbox.memory_gb": ABOVE_ZERO,
  "sandbox.time_scale": ABOVE_ZERO,
  "task.bad_rows": (lambda x: x in ("drop", "error"), "'drop' or 'error'"),
  "seed": (lambda x: isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**32, "a whole number from 0 to 2**32 - 1"),
  "num_steps": NATURAL,
  "model.dtype": DTYPE,
  "model.param_dtype": DTYPE,
  "moe.balance_coef": NOT_NEGATIVE,
  "moe.z_coef": NOT_NEGATIVE,
  "moe.measure_every": NATURAL,
  "reward.form_weight": NOT_NEGATIVE,
  "reward.model_weight": ABOVE_ZERO,
  "reward.overlong_buffer": NATURAL,
  "reward.kl_coef": NOT_NEGATIVE,
  "warm_start.num_steps": NATURAL,
  "warm_start.batch_size": COUNT,
  "warm_start.row_buckets": COUNTS,
  "warm_start.learning_rate": ABOVE_ZERO,
  "warm_start.warmup_steps": NATURAL,
  "warm_start.schedule": SCHEDULE,
  "rollout.num_prompts": COUNT,
  "rollout.group_size": (lambda x: _count(x) and x >= 2, "at least 2: an advantage compares the samples of one prompt"),
  "rollout.temperature": ABOVE_ZERO,
  "rollout.top_k": NATURAL,
  "rollout.top_p": (lambda x: _number(x) and 0 < x <= 1, "a number in (0, 1]"),
  "rollout.prompt_buckets": COUNTS,
  "rollout.max_new_tokens": COUNT,
  "rollout.stop_strings": (_texts, "a tuple of texts, as in ('</answer>',)"),
  "rollout.spare_prompts": NATURAL,
  "rollout.max_refills": NATURAL,
  "rollout.report_every": NATURAL,
  "rollout.staleness": (lambda x: isinstance(x, int) and not isinstance(x, bool) and x in (0, 1), "0 or 1 RL steps"),
  "learner.updates_per_rollout": COUNT,
  "learner.micro_batches": COUNT,
  "learner.row_tokens": COUNT,
  "learner.row_buckets": COUNTS,
  "learner.old_logprobs": (lambda x: x in ("sampler", "learner"), "'sampler' or 'learner'"),
  "learner.learning_rate": ABOVE_ZERO,
  "learner.warmup_steps": NATURAL,
  "learner.schedule": SCHEDULE,
  "learner.weight_decay": NOT_NEGATIVE,
  "learner.b1": FRACTION,
  "learner.b2": FRACTION,
  "learner.max_grad_norm": ABOVE_ZERO,
  "learner.moments_dtype": DTYPE,
  "learner.max_skipped": COUNT,
  "mesh.data": (lambda x: x == -1 or _count(x), "a whole number of at least 1, or -1 for the devices the others leave"),
  "mesh.fsdp": (lambda x: x == -1 or _count(x), "a whole number of at least 1, or -1 for the devices the others leave"),
  "mesh.expert": (lambda x: x == -1 or _count(x), "a whole number of at least 1, or -1 for the devices the others leave"),
  "mesh.context": (lambda x: x == -1 or _count(x), "a whole number of at least 1, or -1 for the devices the others leave"),
  "mesh.tensor": (lambda x: x == -1 or _count(x), "a whole number of at least 1, or -1 for the devices the others leave"),
  "mesh.sampler": NATURAL,
  "mesh.sampler_tensor": COUNT,
  "eval.every": COUNT,
  "eval.num_prompts": COUNT,
  "eval.samples": COUNT,
  "eval.batch_prompts": COUNT,
  "eval.metrics": (_texts, "names of metrics, as in ('maj@n:n=8', 'pass@k:k=1&n=8')"),
  "eval.temperature": NOT_NEGATIVE,  # 0 is greedy.
  "checkpoint.every": COUNT,
  "checkpoint.warm_start_every": COUNT,
  "checkpoint.keep": COUNT,
  "checkpoint.keep_best": NATURAL,
  "alarms.window": (lambda x: _count(x) and x >= 16, "at least 16: fewer steps say nothing of what is usual"),
  "watchdog.seconds": ABOVE_ZERO,
  "watchdog.stop_seconds": ABOVE_ZERO,
  "profile.num_steps": COUNT,
  "log.samples_every": COUNT,
  "log.num_samples": NATURAL,
  "log.num_table_rows": NATURAL,
}

UNRANGED = (
  "objective.name",
  "advantage.estimator",
  "advantage.normalize_std",
  "advantage.whiten",
  "model.preset",
  "model.path",
  "model.attention",
  "model.remat",
  "learner.offload_optimizer",
  "reward.overlong_filter",
  "reward.model_path",
  "reward.model_only",
  "learner.share_prompts",
  "environment.name",
  "task.name",
  "task.levels",
  "task.chat",
  "task.system",
  "task.pad_token",
  "task.data_dir",
  "sandbox.backend",
  "sandbox.image",
  "sandbox.url",
  "task.curriculum",
  "task.test_name",
  "task.test_source",
  "task.path",
  "task.test_path",
  "task.question_column",
  "task.answer_column",
  "task.level_column",
  "task.response_column",
  "task.id_column",
  "task.prompt_template",
  "task.reward",
  "task.source",
  "task.config",
  "task.mode",
  "task.after",
  "task.before",
  "log.tensorboard",
  "checkpoint.asynchronous",
  "eval.save_samples",
)
"""Fields with no range: names, which are looked up, and switches."""

SWITCHES = (
  "advantage.normalize_std",
  "advantage.whiten",
  "checkpoint.asynchronous",
  "correction.bypass",
  "eval.save_samples",
  "learner.offload_optimizer",
  "learner.share_prompts",
  "log.tensorboard",
  "reward.model_only",
  "reward.overlong_filter",
  "task.chat",
)
"""True or false."""

TUPLES = (
  "correction.geometric_rejection",
  "correction.icepop",
  "eval.metrics",
  "learner.row_buckets",
  "model.lora_targets",
  "reward.settings",
  "reward.terms",
  "rollout.cache_blocks",
  "rollout.prompt_buckets",
  "rollout.stop_strings",
  "task.levels",
  "task.parts",
  "warm_start.row_buckets",
)
"""Of several values."""

_SWITCH: Check = (lambda x: isinstance(x, bool), "True or False")
_TEXT: Check = (lambda x: isinstance(x, str) and x.isprintable() and len(x) <= 4096, "text on one line, of printable characters")
_LINES: Check = (lambda x: isinstance(x, str) and "".join(x.split()).isprintable(), "text of printable characters")
_LEVELS: Check = (
  lambda x: isinstance(x, tuple) and all(isinstance(level, int) and not isinstance(level, bool) for level in x),
  "whole numbers, as in (1, 2)",
)


def kind(path: str) -> Check:
  """What a field of `UNRANGED` holds, where it does not hold None.

  Args:
    path: of the field.

  Example:
    >>> kind("log.tensorboard")[1]
    'True or False'
  """
  if path in ("task.prompt_template", "task.system"):
    return _LINES
  return _SWITCH if path in SWITCHES else _LEVELS if path == "task.levels" else _TEXT


def holds(check: Check, value: Any) -> bool:
  """Whether a value, of whatever type, is what a check asks for.

  Args:
    check: of the field.
    value: found there.

  Example:
    >>> holds(ABOVE_ZERO, 0.1), holds(ABOVE_ZERO, "0.1"), holds(ABOVE_ZERO, 10**400)
    (True, False, False)
  """
  try:
    return bool(check[0](value))
  except (TypeError, ValueError, OverflowError):  # Of another type, or a whole number that no float holds.
    return False


def shown(value: Any, *, length: int = 120) -> str:
  """A value as a message shows it: on one line, and short.

  Args:
    value: anything.
    length: of the text.

  Example:
    >>> shown("x" * 8, length=8), shown(10**5000)
    ("'xxx...x'", 'a whole number of more than 4,300 digits')
  """
  try:
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
  except ValueError:  # Python refuses to write it.
    return "a whole number of more than 4,300 digits"
  text = " ".join(text.split())
  return text if len(text) <= length else f"{text[: length // 2]}...{text[-(length // 4):]}"


def flatten(config: Mapping[str, Any] | ConfigDict, prefix: str = "") -> dict[str, Any]:
  """Fields by dotted path.

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


def given(section: ConfigDict, *without: str) -> dict[str, Any]:
  """The fields of a section that are set; the others take the defaults of what they configure."""
  return {name: value for name, value in section.items() if name not in without and value is not None}
