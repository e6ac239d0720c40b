"""The pilot: its measurements and its advice, and that it leaves nothing behind."""

import re

import pytest

from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.run.jobs import pilot
from jaxrl_llm.run.setup import experiment
from tests.runs import call, quick, tiny_config

SHORT = {
  "warm_start.num_steps": 3, "rollout.num_prompts": 32, "learner.row_buckets": None, "learner.row_tokens": None,
  "warm_start.row_buckets": None,
}  # fmt: skip
GOOD = pilot.Findings(
  passed=(0.4, 0.3, 0.5), num_groups=64, mixed=0.9, solved=0.02, hopeless=0.08, stated=0.99, truncated=0.01, failed=0.0,
  response_tokens=9.0, sampling=2.0, learning=3.0, compiling=10.0, decoding=100.0, memory_gb=1.5,
)  # fmt: skip


@pytest.mark.exhaustive
def test_it_measures_a_step_and_counts_the_groups(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with quick():
    text = pilot.describe_pilot(tiny_config("sapo", SHORT))
  assert re.search(r"pass rate of the untouched model: 0\.0 % \[0\.0 %, 0\.0 %\] on 64 training problems x 4 samples", text)
  assert re.search(r"groups: 0\.0 % mixed, which RL learns from; 0\.0 % all right, 100\.0 % all wrong", text)
  assert re.search(
    r"a step: \d+\.\d s to draw and grade \([\d,]+ tokens/s\), \d+\.\d s to learn; peak memory \d+\.\d GB", text
  )
  assert "for 4 steps with their evaluations; a warm start of 3 updates comes first" in text
  assert "what to change first:" in text and "most groups are all wrong" in text
  assert text.count("  response ") == 4 and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_findings_are_those_of_the_batches(monkeypatch):
  """With a reward for even lengths, about half of the samples of most groups are right."""
  even = WeightedReward("even", lambda completion, example: float(completion.num_tokens % 2 == 0))
  monkeypatch.setattr(experiment, "make_rewards", lambda task, config: [even])
  seen = []
  measured = pilot.compute_findings
  monkeypatch.setattr(
    pilot, "compute_findings", lambda run, batches, **times: seen.extend(batches) or measured(run, batches, **times)
  )
  with quick():
    text = pilot.describe_pilot(tiny_config("sapo", SHORT))
  verdicts = [completion.num_tokens % 2 == 0 for batch in seen for completion in batch.completions]
  groups = [verdicts[i : i + 4] for i in range(0, len(verdicts), 4)]
  mixed = sum(len(set(group)) == 2 for group in groups) / len(groups)
  right = sum(verdicts) / len(verdicts)
  assert f"pass rate of the untouched model: {100 * right:.1f} %" in text and f"groups: {100 * mixed:.1f} % mixed" in text and mixed > 0


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({}, []),
    ({"failed": 0.5}, ["have no reward"]),
    ({"truncated": 0.5}, ["raise rollout.max_new_tokens=24"]),
    ({"stated": 0.2}, ["state no answer"]),
    ({"passed": (0.0, 0.0, 0.0), "mixed": 0.0}, ["all wrong", "raise rollout.group_size=4"]),
    ({"passed": (0.99, 0.9, 1.0), "mixed": 0.1}, ["all right"]),
    ({"mixed": 0.4}, ["many groups carry no signal"]),
  ],
)
def test_the_advice_follows_from_the_findings(changes, expected):
  lines = list(pilot.advice(GOOD._replace(**changes), tiny_config()))
  assert len(lines) == len(expected) and all(text in line for text, line in zip(expected, lines, strict=True))
  assert (
    pilot.findings_lines(GOOD._replace(**changes), tiny_config())[-1] == "nothing stands in the way of learning"
  ) == (not expected)


@pytest.mark.parametrize(("shots", "chat", "advised"), [(2, None, True), (2, True, True), (2, False, False), (0, None, False)])
def test_solved_problems_in_a_chat_are_advised_against(shots, chat, advised):
  config = tiny_config("sapo", {"task.shots": shots, "task.chat": chat})
  assert any("--config.task.chat=False" in line for line in pilot.advice(GOOD._replace(stated=0.2), config)) == advised


def test_the_predicted_time_adds_steps_and_evaluations():
  config = tiny_config("sapo", {"num_steps": 10, "eval.every": 5, "eval.num_prompts": 16, "eval.samples": 4})
  samples = config.rollout.num_prompts * config.rollout.group_size
  assert pilot.predicted_seconds(GOOD, config) == 10 + 10 * (2 + 3) + 3 * 2 * 16 * 4 / samples


@pytest.mark.slow
def test_the_command_line():
  done = call("--config=configs/reward_model.py:tiny", "--pilot")
  assert done.returncode == 2 and "--pilot: found the training of a reward model" in done.stderr
  done = call("--config=configs/sapo.py:tiny", "--pilot", "--config.rollout.num_prompts=3")
  assert done.returncode == 2 and "updates_per_rollout" in done.stderr
