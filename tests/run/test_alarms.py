"""Alarms: which metrics raise one, which do not, and what is recorded of them."""

import json
import math

import numpy as np
import pytest

from jaxrl_llm.run.observe.alarms import CALM, WARM_UP, AlarmLimits, deviation, new_state, observe
from tests.runs import column, run_here, tiny_config

CALM_ROW = {
  "actor/loss": 0.01, "actor/grad_norm": 0.5, "critic/rewards/mean": 0.4, "actor/entropy": 1.0, "response_length/clip_ratio": 0.1,
  "group/frac_reward_zero_std": 0.5, "actor/ppo_kl_k3": 5e-4,
}  # fmt: skip

ALL_ON = AlarmLimits(spike_sigmas=6.0, reward_sigmas=6.0, entropy_fraction=0.1, truncation_above=0.8, no_signal_above=0.95)


def follow(rows, limits=None):
  """Returns the lines, the metrics of each step and the last state.

  The state is converted to JSON and back, as in a checkpoint.
  """
  state, lines, metrics = new_state(), [], []
  for step, row in enumerate(rows, 1):
    state, flags, new_lines = observe(json.loads(json.dumps(state)), row, step=step, limits=limits or ALL_ON)
    lines += new_lines
    metrics.append(flags)
  return lines, metrics, state


def noisy(rng, num_steps=200):
  return [
    {
      "actor/loss": rng.normal(0, 0.02), "actor/grad_norm": abs(rng.normal(0.5, 0.1)), "critic/rewards/mean": rng.normal(0.4, 0.05),
      "actor/entropy": 1 - i / 400, "response_length/clip_ratio": 0.1, "group/frac_reward_zero_std": 0.5,
      "actor/ppo_kl_k3": 5e-4,
    }
    for i in range(num_steps)
  ]  # fmt: skip


def test_a_healthy_run_is_left_alone(rng):
  lines, metrics, state = follow(noisy(rng))
  assert lines == [] and state["counts"] == {}
  assert set(metrics[-1]) == {f"alarm/{name}" for name in SICK} - {"alarm/nonfinite_logprobs"} and not any(metrics[-1].values())


SICK = {
  "loss_spike": {"actor/loss": -1.0},
  "grad_norm_spike": {"actor/grad_norm": 30.0},
  "reward_collapse": {"critic/rewards/mean": -1.0},
  "policy_kl": {"actor/ppo_kl_k3": 0.011},
  "entropy_collapse": {"actor/entropy": 0.05},
  "truncation": {"response_length/clip_ratio": 0.9},
  "no_signal": {"group/frac_reward_zero_std": 1.0},
  "nonfinite_logprobs": {"rollout/nonfinite_logprobs": 3},
}


@pytest.mark.parametrize("name", SICK)
def test_every_alarm_begins_once_and_is_over_later(name, rng):
  rows = noisy(rng, 60)
  for step in (30, 31, 34):
    rows[step - 1] |= SICK[name]
  lines, metrics, state = follow(rows)
  began, over = lines
  assert began.startswith(f"alarm {name} at RL step 30: ")
  assert over == f"alarm {name} is over at RL step {34 + CALM}; it lasted from step 30 to 34"
  assert [step for step, row in enumerate(metrics, 1) if row.get(f"alarm/{name}")] == [30, 31, 34]
  assert state["counts"] == {name: 1} and state["since"] == {}
  fields = {"truncation": "truncation_above", "no_signal": "no_signal_above", "entropy_collapse": "entropy_fraction"}
  fields |= {"reward_collapse": "reward_sigmas", "policy_kl": "policy_kl_above"}
  field = fields.get(name, "spike_sigmas")
  assert name == "nonfinite_logprobs" or f"config.alarms.{field}" in began
  assert name == "nonfinite_logprobs" or follow(rows, ALL_ON._replace(**{field: None}))[0] == []


def test_by_default_only_rules_that_separate_collapses_from_healthy_runs_are_on(rng):
  rows = noisy(rng, 60)
  for sick in SICK.values():
    rows[40] |= sick
  _, metrics, _ = follow(rows, AlarmLimits())
  held = {name.removeprefix("alarm/") for name, holds in metrics[40].items() if holds}
  assert held == {"reward_collapse", "policy_kl", "nonfinite_logprobs"}
  assert set(metrics[-1]) == {"alarm/reward_collapse", "alarm/policy_kl"}


def test_an_improvement_is_no_alarm(rng):
  rows = noisy(rng, 40)
  rows[30] |= {"critic/rewards/mean": 2.0, "actor/grad_norm": 0.0, "actor/entropy": 9.0, "response_length/clip_ratio": 0.0}
  assert follow(rows)[0] == []


def test_one_spike_does_not_hide_the_next(rng):
  """A standard deviation would hide it: 1000 at step 30 raises that of the window above 100."""
  rows = noisy(rng, 60)
  rows[29]["actor/loss"], rows[39]["actor/loss"] = 1000.0, 2.0
  _, metrics, _ = follow(rows)
  assert metrics[29]["alarm/loss_spike"] and metrics[39]["alarm/loss_spike"]
  past = [row["actor/loss"] for row in rows[:39]]
  assert (2.0 - np.mean(past)) / np.std(past) < 1 < 6 < deviation(2.0, past)


def test_a_lasting_change_of_level_is_over_by_itself():
  rows = [CALM_ROW | {"actor/grad_norm": (5.0 if step > 40 else 0.5) + 0.01 * (step % 7)} for step in range(1, 120)]
  lines, _, _ = follow(rows, ALL_ON._replace(window=32))
  assert len(lines) == 2 and "at RL step 41:" in lines[0] and "is over at RL step 6" in lines[1]


def test_a_short_or_constant_past_gives_no_deviation():
  assert deviation(9.0, [0.0, 1.0] * (WARM_UP // 2 - 1)) == 0.0 and deviation(9.0, [1.0] * 40) == 0.0
  assert math.isclose(deviation(3.0, list(np.random.default_rng(0).normal(size=10_000))), 3.0, rel_tol=0.05)


def test_missing_and_non_finite_numbers_raise_no_alarm_and_are_not_kept():
  rows = [CALM_ROW] * 20 + [dict.fromkeys(CALM_ROW, math.nan), {}, dict.fromkeys(CALM_ROW, math.inf), dict.fromkeys(CALM_ROW, None)]
  lines, metrics, state = follow(rows)
  assert lines == [] and metrics[-1] == {} and len(state["window"]["actor/loss"]) == 20
  json.dumps(state, allow_nan=False)


def test_the_window_stays_small(rng):
  _, _, state = follow(noisy(rng, 300), ALL_ON._replace(window=16))
  assert {len(x) for x in state["window"].values()} == {16}


@pytest.mark.exhaustive
def test_alarms_are_in_the_metrics_the_summary_and_the_report(tmp_path):
  """Nearly all responses of a policy with random weights reach the budget."""
  short = {"warm_start.num_steps": 0, "num_steps": 2, "eval.every": 2, "eval.num_prompts": 8, "checkpoint.every": 1}
  summary = run_here(tiny_config(overrides=short | {"alarms.truncation_above": 0.1}), tmp_path)
  assert column(tmp_path, "alarm/truncation") == [1, 1] and summary["alarms"]["truncation"] == 1
  assert set(summary["alarms"]) <= SICK.keys()
  page = (tmp_path / "report.html").read_text()
  assert '"alarm/truncation":[1.0,1.0]' in page and '"alarms":{' in page
