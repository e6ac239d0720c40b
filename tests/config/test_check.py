"""Every problem of a config, as one line each."""

import struct
import sys

import pytest
from ml_collections import ConfigDict

from configs import common
from jaxrl_llm.config import check, command_line
from jaxrl_llm.config import fields as fields_lib
from jaxrl_llm.config.fields import FIELDS, REWARD_MODEL_FIELDS, Field
from jaxrl_llm.settings import values
from tests.runs import tiny_config

# Values outside each kind of range.
BAD = {
  values.COUNT: (0, -1),
  values.NATURAL: (-1,),
  values.ABOVE_ZERO: (0.0, -1.0, float("inf"), float("nan")),
  values.NOT_NEGATIVE: (-1e-9, float("inf"), float("nan")),
  values.FRACTION: (1.0, -0.1, float("nan")),
  values.UNIT: (1.1, -0.1, float("nan")),
  values.NUMBER: (float("inf"), float("nan")),
  values.COUNTS: ((), (0,), (8, -8), (1.5,)),
}
BAD_BY_FIELD = {
  "seed": (-1, 2**32),
  "rollout.top_p": (0.0, 1.1, float("nan")),
  "learner.old_logprobs": ("", "teacher"),
  "learner.schedule": ("", "cosine"),
  "warm_start.schedule": ("", "cosine"),
  "critic.init": ("", "teacher"),
  "reward.kl_estimator": ("", "k4", "k3+"),
  "model.dtype": ("float16", ""),
  "model.param_dtype": ("float16", ""),
  "model.sampler_dtype": ("float16", ""),
  "teacher.dtype": ("float16", ""),
  "learner.moments_dtype": ("float16", "int8"),
  "model.lora_targets": ((), ("(",), (3,)),
  "moe.replay": ("R1", "r2", ""),
  "rollout.update_in_flight": ("drop", ""),
  "rollout.sampler_timeout_s": (2.9, float("inf"), float("nan")),
  "task.bad_rows": ("", "skip"),
  "reward.terms": (("",), (3,)),
  "reward.settings": (("",), (3,)),
  "teacher.paths": ((), ("",), ("runs/a",)),
  "teacher.column": ("", "a\nb"),
  "rollout.stop_strings": (("",), ("a", "")),
  "rollout.cache_dtype": ("float16", ""),
  "rollout.driver": ("engine", ""),
  "serving.layout": ("sharded", ""),
  "serving.attention": ("flash", ""),
  "serving.weights": ("int4", ""),
  "eval.metrics": (("",), (3,)),
  "log.trackers": (("",), (3,)),
  "reward.workers": (0, 1025),
  "mesh.expert": (0, -2),
  "mesh.data": (0, -2),
  "mesh.fsdp": (0, -2),
  "mesh.context": (0, -2),
  "mesh.tensor": (0, -2),
}


# Fields that are checked by the objects that they configure.
JUDGED = {path for path in FIELDS if path.startswith(("objective.", "correction."))}
# Names (which are looked up), texts and switches have no range: only a wrong type is refused.
UNRANGED = (values.TEXT, values.LINES, values.SWITCH, values.LEVELS, values.or_none(values.LEVELS))
RANGED = [path for path, field in FIELDS.items() if path not in JUDGED and field.check not in UNRANGED]


@pytest.mark.parametrize("path", [*RANGED, "reward.kl_estimator"])
def test_values_outside_a_range_are_refused(path):
  for value in BAD_BY_FIELD.get(path) or BAD[FIELDS[path].check._replace(optional=False)]:
    (line,) = check.config_problems(tiny_config(overrides={path: value}))
    assert line.startswith(f"config.{path}: found {value!r}, expected "), line


SETTINGS = {
  "objective.clip_low": ({}, (-0.1, 1.1, "low")),
  "objective.weights": ({}, ("mean", 3)),
  "advantage.min_valid": ({"advantage.estimator": "rloo_n"}, (1, 2.5)),
  "advantage.critic_lam": ({"advantage.estimator": "gae"}, (1.1, -0.1)),
  "advantage.normalize_std": ({}, (1, "no")),
  "correction.tis": ({}, ("2", (1, 2))),
  "correction.icepop": ({}, (2.0, (1, 2, 3))),
  "task.chat_options": ({}, ((), ("",))),
  "task.special_tokens": ({}, ("", "Tokens")),
  "task.test_fraction": ({"task.name": "file"}, (0.0, 1.0)),
  "task.parts": ({"task.name": "mixture"}, ((), ("",))),
  "task.size": ({"task.name": "environment"}, (0, 2.5)),
  "environment.max_turns": ({"environment.name": "calculator"}, (0, 1.5)),
  "environment.call_reward": ({"environment.name": "calculator"}, (-1.0, "1")),
  "environment.max_chars": ({"environment.name": "python"}, (0,)),
  "sandbox.timeout_s": ({"sandbox.backend": "namespaces"}, (0.0, float("inf"))),
  "sandbox.url": ({"sandbox.backend": "piston"}, ("a\nb", 3)),
  "alarms.window": ({}, (0, 15, None)),
  "alarms.truncation_above": ({}, (1.1, -0.1)),
}


@pytest.mark.parametrize("path", SETTINGS)
def test_settings_of_entries_outside_a_range_are_refused(path):
  others, values = SETTINGS[path]
  for value in values:
    config = tiny_config(overrides=others)
    with config.ignore_type():
      config.update_from_flattened_dict({path: value})
    lines = [line for line in check.config_problems(config) if line.startswith(f"config.{path}: ")]
    assert [line.partition(", expected ")[0] for line in lines] == [f"config.{path}: found {value!r}"], lines


def test_the_table_stays_small():
  """A setting of one entry is a parameter of the entry, and no field."""
  assert len(FIELDS) <= 161


@pytest.mark.parametrize("table", [FIELDS, REWARD_MODEL_FIELDS])
def test_every_row_has_a_legal_default_and_a_sentence(table):
  for path, field in table.items():
    assert path.rpartition(".")[0] in ("", *fields_lib.SECTIONS), path
    assert (field.default is None and field.takes_none) or values.holds(field.check, field.default), path
    assert field.sentence.endswith((".", ")")) and len(field.sentence.splitlines()) == 1, path
  assert fields_lib.flatten(fields_lib.base(table)) == {path: field.default for path, field in table.items()}


def test_a_new_field_is_one_row(monkeypatch):
  """The default, the check, the command line and the help follow from the row."""
  row = Field(3, values.at_least(2, "one is none"), "Retries of a call.")
  monkeypatch.setitem(FIELDS, "rollout.retries", row)
  assert common.base().rollout.retries == tiny_config().rollout.retries == 3
  assert check.config_problems(tiny_config(overrides={"rollout.retries": 2})) == []
  expected = "a whole number of at least 2, below 2**31: one is none"
  assert check.config_problems(tiny_config(overrides={"rollout.retries": 1})) == [
    f"config.rollout.retries: found 1, expected {expected}"
  ]
  with pytest.raises(command_line.UsageError) as refused:
    command_line.override(tiny_config(), {"rollout.retrys": ["3"], "rollout.retries": ["x"]})
  assert str(refused.value).splitlines() == [
    "unknown field config.rollout.retrys; did you mean config.rollout.retries?",
    f"config.rollout.retries: found 'x', expected {expected}; the file has 3",
  ]
  assert command_line.override(tiny_config(), {"rollout.retries": ["5"]}).rollout.retries == 5
  assert fields_lib.describe_fields("rollout.retries").splitlines()[1:] == [
    f"  config.rollout.retries = 3; expects {expected}",
    "      Retries of a call.",
  ]
  without = tiny_config()
  with without.unlocked():
    del without.rollout.retries
  (line,) = check.config_problems(without)
  assert line == "config: found 1 missing field(s), such as rollout.retries, expected a config made by configs.common"


def test_values_of_the_wrong_type_are_refused():
  """A config file in Python can switch off the type checks and write any value."""
  wrong = {"learner.b1": "0.9", "seed": 0.5, "learner.row_buckets": {8}, "log.tensorboard": "1", "task.name": b"x", "kl.horizon": 10**5000}
  for path, value in wrong.items():
    config = tiny_config()
    with config.ignore_type():
      config.update_from_flattened_dict({path: value})
    (line,) = check.config_problems(config)
    assert line.startswith(f"config.{path}: found ") and "expected" in line and len(line) < 300, line
  one_line = "text on one line"
  for value, kind in (("no", "True or False"), ("a\nb", one_line), ("\udc80", one_line), ("x" * 5000, one_line)):
    path = "task.chat" if value == "no" else "task.name"
    config = tiny_config()
    with config.ignore_type():
      config.update_from_flattened_dict({path: value})
    (line,) = check.config_problems(config)
    assert kind in line and len(line.splitlines()) == 1 and line.isascii(), line


@pytest.mark.parametrize(
  ("name", "field"), [("arithmetik", "task.test_name"), ("file", "task.path"), ("mixture", "task.parts")]
)
def test_problems_of_the_test_task_name_existing_fields(name, field):
  (line,) = check.config_problems(tiny_config(overrides={"task.test_name": name}))
  assert line.startswith(f"config.{field}: found ")


def test_mistakes_in_the_objective_hide_no_others():
  lines = check.config_problems(
    tiny_config(overrides={"objective.clip_low": -1.0, "sandbox.backend": "nome", "eval.metrics": ("pass@0",)})
  )
  assert [line.partition(":")[0] for line in lines] == ["config.objective.clip_low", "config.sandbox.backend", "config.eval.metrics"]


def test_fields_that_nothing_reads_are_reported():
  config = tiny_config()
  with config.unlocked():
    config.learner.learning_rat = 1.0
    del config.correction.terms
  lines = check.config_problems(config)
  assert lines == [
    "config: found 1 missing field(s), such as correction.terms, expected a config made by configs.common",
    "unknown field config.learner.learning_rat; did you mean config.learner.learning_rate?",
  ]


def test_the_command_line_can_set_none_where_none_is_legal():
  config = command_line.override(tiny_config(), {"alarms.spike_sigmas": ["None"]})
  assert config.alarms.spike_sigmas is None and check.config_problems(config) == []


RELATIONS = {
  "prompts and updates": ({"rollout.num_prompts": 8, "learner.updates_per_rollout": 3}, ["num_prompts=8", "updates_per_rollout=3"]),
  "devices": (
    {"mesh.data": 3, "rollout.num_prompts": 6, "eval.batch_prompts": 6, "learner.row_buckets": (9,)},
    ["config.warm_start.row_buckets: 16", "3 devices", "the next multiple is 18"],
  ),
  "the sampler's devices": (
    {"mesh.sampler": 3, "rollout.num_prompts": 8, "eval.batch_prompts": 9},
    [
      "config.rollout.num_prompts: 8 is not a multiple of 3 parts of the sampler (mesh.sampler / mesh.sampler_tensor)",
      "the next multiple is 9",
    ],
  ),
  "the slots of a row": ({"mesh.context": 7}, ["config.learner.row_tokens: ", "is not a multiple of 7 devices (mesh.context)"]),
  "a copy of the weights": ({"mesh.sampler": 4, "mesh.sampler_tensor": 3}, ["config.mesh.sampler_tensor: found 3", "mesh.sampler=4"]),
  "copies without a sampler": ({"mesh.sampler_tensor": 2}, ["config.mesh.sampler_tensor: found 2, expected 1", "mesh.sampler is 0"]),
  "experts and tensor of a sampler": (
    {"model.preset": "nano-moe", "mesh.sampler": 4, "mesh.sampler_tensor": 2, "mesh.sampler_expert": 4},
    ["config.mesh.sampler_expert: found 4, expected a divisor of 2 (mesh.sampler / mesh.sampler_tensor)"],
  ),
  "experts without a sampler": (
    {"model.preset": "nano-moe", "mesh.sampler_expert": 2},
    ["config.mesh.sampler_expert: found 2, expected 1, because mesh.sampler is 0: no devices are reserved for sampling"],
  ),
  "a row too short": ({"learner.row_tokens": 31}, ["config.learner.row_tokens=31", "the longest sequence", "raise it to at least 32"]),
  "too few rows": ({"learner.row_buckets": (2, 4)}, ["config.learner.row_buckets=(2, 4)", "can need 8 rows", "add a bucket of at least 8"]),
  "too few rows to imitate": ({"warm_start.batch_size": 64}, ["config.warm_start.row_buckets=(16,)", "add a bucket of at least 32"]),
  "no such tracker": ({"log.trackers": ("wand",)}, ["config.log.trackers: found 'wand'", "did you mean 'wandb'?"]),
  "no such metric": ({"eval.metrics": ("maj@8",)}, ["config.eval.metrics: found 'maj@8'", "did you mean 'maj@n'?"]),
  "more samples than there are": ({"eval.metrics": ("avg@n:n=4", "maj@n:n=8")}, ["config.eval.metrics: found 'maj@n:n=8'", "at most 4"]),
  "penalty for all": ({"reward.overlong_buffer": 25}, ["overlong_buffer=25", "max_new_tokens=24"]),
  "nothing to do": ({"num_steps": 0, "warm_start.num_steps": 0}, ["nothing to train"]),
}


MODELS = {
  "no such folder": (
    {"model.path": "no/such"},
    ["config.model.path: found 'no/such', which does not exist", "expected hub:no/such"],
  ),
  "no such package": (
    {"model.path": "package:llm-smollm3"},
    ["'package:llm-smollm3', which is not installed; install it with: pip install llm-smollm3"],
  ),
  "unknown backend": (
    {"model.attention": "flsh"},
    ["config.model.attention: found 'flsh'", "did you mean 'flash'?"],
  ),
  "targets of nothing": (
    {"model.lora_rank": 2, "model.lora_targets": ("attn/.*",)},
    ["config.model.lora", "('attn/.*',), which match no linear map"],
  ),
  "alpha alone": ({"model.lora_alpha": 2.0}, ["config.model.lora_alpha: found 2.0, expected None", "no adapters"]),
  "chat of bytes": (
    {"task.chat": True},
    ["config.task.chat: found True, expected None", "there is no tokenizer to configure"],
  ),
  "replay without experts": (
    {"moe.replay": "R3"},
    ["config.moe.replay: found 'R3', expected None", "the model is dense"],
  ),
  "experts that do not divide": (
    {"model.preset": "nano-moe", "mesh.sampler": 3, "mesh.sampler_expert": 3},
    ["config.mesh.sampler_expert: found 3, expected a divisor of 8, the number of the model's experts"],
  ),
  "no experts to spread": (
    {"mesh.sampler": 2, "mesh.sampler_expert": 2},
    ["config.mesh.sampler_expert: found 2, expected 1, because the model is dense: it has no experts"],
  ),
  "no such number of experts": (
    {"model.preset": "nano-moe", "mesh.sampler": 2, "mesh.sampler_expert": 0},
    ["config.mesh.sampler_expert: found 0, expected"],
  ),
  "balance without experts": (
    {"moe.balance_coef": 0.1},
    ["config.moe.balance_coef: found 0.1, expected 0", "the model is dense"],
  ),
}


@pytest.mark.parametrize("case", RELATIONS | MODELS)
def test_relations_and_models(case):
  overrides, parts = (RELATIONS | MODELS)[case]
  (line,) = check.config_problems(tiny_config(overrides=overrides))
  for part in parts:
    assert part in line, line


def test_sft_takes_no_rl_steps():
  (line,) = check.config_problems(tiny_config("sft", {"num_steps": 3}))
  assert line.startswith("config.num_steps: found 3, expected 0, because this objective reads no reward")


def test_all_problems_in_one_message():
  overrides = {"seed": -1, "rollout.group_size": 0, "rollout.top_p": 2.0, "objective.name": "x", "task.name": "y", "model.preset": "z"}
  assert len(check.config_problems(tiny_config(overrides=overrides))) == len(overrides)
  overrides = {"learner.updates_per_rollout": 3, "learner.rows_per_device": 3, "learner.row_tokens": 30}
  assert len(check.config_problems(tiny_config(overrides=overrides))) == 4


def test_a_config_that_lacks_fields_is_refused_in_one_line():
  (line,) = check.config_problems(ConfigDict({"seed": 0}))
  assert "missing" in line and "configs.common" in line


@pytest.mark.parametrize(
  ("path", "hint"),
  [
    ("learner.learning_rat", "did you mean config.learner.learning_rate?"),
    ("rollout.rows_per_device", "did you mean config.learner.rows_per_device?"),
    ("group_size", "did you mean config.rollout.group_size?"),
    ("rollout.grop_size", "did you mean config.rollout.group_size?"),
    ("lerner.b1", "did you mean config.learner.b1?"),
    ("qqqq", "--help_fields lists all fields"),
    ("mesh",
     "config.mesh is a section and cannot be set; set one of its fields: mesh.context, mesh.data, mesh.expert, mesh.fsdp, mesh.sampler, "
     "mesh.sampler_expert, mesh.sampler_tensor, mesh.slices, mesh.tensor"),
  ],
)
def test_unknown_fields(path, hint):
  (line,) = check.unknown_fields([path], common.base())
  assert path in line and hint in line


def test_known_fields_are_fine():
  config = common.base()
  assert check.unknown_fields(fields_lib.flatten(config), config) == []


def test_a_package_that_a_checkpoint_needs_is_named_in_one_line(tmp_path, monkeypatch):
  path = tmp_path / "model.gguf"
  path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))
  monkeypatch.setitem(sys.modules, "gguf", None)  # As where it is not installed.
  (line,) = check.config_problems(tiny_config("gspo", {"model.path": str(path)}))
  expected = "but GGUF checkpoints need the package gguf: pip install 'jaxrl-llm[hf]'"
  assert line == f"config.model.path: found {str(path)!r}, {expected}"
