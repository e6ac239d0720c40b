"""Rewards from a config: further terms with weights, their settings, and messages for mistakes."""

import re

import pytest

from jaxrl_llm.config import check
from jaxrl_llm.rewards import grade
from jaxrl_llm.rewards.from_config import make_rewards
from jaxrl_llm.rewards.grader import Grader
from jaxrl_llm.run.setup.data import load_task
from jaxrl_llm.text_types import Completion
from tests.runs import quick, rows, run_here, tiny_config

TERMS = {"reward.terms": ("pattern=0.25", "length_target=-0.5"), "reward.settings": (
  "pattern.regex=^#", "length_target.target_tokens=4", "length_target.tolerance_tokens=2",
)}  # fmt: skip


def terms_of(config):
  with quick():
    return make_rewards(load_task(config), config)


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_each_term_is_weighted_and_graded_separately(weight):
  """A verifier without weight is logged and teaches nothing."""
  terms = terms_of(tiny_config(overrides=TERMS | {"reward.verifier_weight": weight}))
  assert [(term.name, term.weight) for term in terms] == [("final_answer", weight), ("pattern", 0.25), ("length_target", -0.5)]
  with Grader(terms, num_workers=1) as call:
    graded = grade(terms, [Completion("#7", (1,) * 4, 4, True)], [{"answer": "7"}], call=call)
  parts = {name: part[0] for name, part in graded.parts.items()}
  assert parts["final_answer"] == parts["pattern"] == 1
  assert graded.totals[0] == pytest.approx(weight + 0.25 - 0.5 * parts["length_target"])


@pytest.mark.exhaustive
def test_a_run_logs_each_term(tmp_path):
  """`tests/rewards/model/test_reward_term.py` has a run with two terms."""
  short = {"warm_start.num_steps": 2, "num_steps": 1, "reward.workers": 1, "log.tensorboard": False}
  run_here(tiny_config(overrides=TERMS | short), tmp_path / "run")
  assert {"reward/pattern/mean", "reward/length_target/mean"} <= set(rows(tmp_path / "run", "rl")[0])


@pytest.mark.exhaustive
def test_random_rewards_hide_the_verdicts_and_are_reproducible(tmp_path):
  """Random rewards, a control, may depend only on the seed and the step."""
  short = {"warm_start.num_steps": 2, "num_steps": 2, "log.tensorboard": False, "rollout.group_size": 16, "learner.row_buckets": (64,)}
  runs = []
  for name in ("first", "again"):
    run_here(tiny_config(overrides=short | {"reward.at_random": 0.25, "checkpoint.every": 1}), tmp_path / name)
    steps = rows(tmp_path / name, "rl")
    runs.append(
      [(row["critic/rewards/mean"], row["actor/grad_norm"], row["reward/final_answer/mean"]) for row in steps]
    )
  assert runs[0] == runs[1]
  means, norms, verdicts = zip(*runs[0], strict=True)
  assert all(0.1 < mean < 0.4 for mean in means) and means[0] != means[1] and min(norms) > 0 and max(verdicts) < 0.1


@pytest.mark.parametrize(
  ("changes", "line"),
  [
    ({"reward.terms": ("tgas=0.1",)}, "config.reward.terms: reward: found 'tgas', expected one of .*did you mean 'tags'"),
    ({"reward.terms": ("tags=much",)}, "config.reward.terms: found 'tags=much', expected a reward and its weight"),
    ({"reward.terms": ("tags=1", "tags=2")}, "config.reward.terms: found 'tags' twice"),
    ({"reward.terms": ("pattern",)}, r"config.reward.terms: reward 'pattern': found settings \[\], expected .*reward.settings"),
    ({"reward.terms": ("pattern",), "reward.settings": ("pattern.regxe=x",)}, "did you mean 'regex'"),
    ({"reward.terms": ("pattern",), "reward.settings": ("pattern.regex=(",)}, "config.reward.terms: .*regular expression"),
    ({"reward.settings": ("regex",)}, "config.reward.settings: found 'regex', expected REWARD.SETTING=VALUE"),
    ({"reward.terms": ("tags",), "reward.settings": ("tags.alone=1", "tags.alone=2")}, "found 'tags.alone' twice"),
  ],
)  # fmt: skip
def test_a_mistake_is_reported_in_one_line(changes, line):
  (message,) = check.config_problems(tiny_config(overrides=changes))
  assert re.search(line, message), message


@pytest.mark.parametrize("overrides, message", [
  ({"reward.settings": ("tags.alone=True",)}, "settings: found settings of 'tags', which is not a reward of this run"),
  ({"reward.terms": ("final_answer",)}, "terms: found 'final_answer', which is a reward of task arithmetic already"),
])  # fmt: skip
def test_unused_settings_and_repeated_terms_are_refused(overrides, message):
  with pytest.raises(ValueError, match=f"config.reward.{message}"):
    terms_of(tiny_config(overrides=overrides))
