"""A new reward: it needs a file and a registry row, which votes, workers and settings read."""

import os

import numpy as np
import pytest

from jaxrl_llm.config import check
from jaxrl_llm.evaluation.held_out import check_metrics, eval_metrics
from jaxrl_llm.evaluation.held_out.evaluated import evaluated
from jaxrl_llm.rewards import REWARDS, Reward, RewardSpec, grade, make, weighted
from jaxrl_llm.rewards.from_config import make_rewards
from jaxrl_llm.rewards.grader import Grader
from jaxrl_llm.run.setup.data import load_task
from jaxrl_llm.text_types import Completion
from tests.rewards.spelling import process_id, spelling, word_behind
from tests.rewards.test_from_config import terms_of
from tests.runs import quick, tiny_config


def completion(text):
  return Completion(text, (1,), 1, stopped=True)


def test_its_answers_vote(monkeypatch):
  """Two spellings of one answer outvote the third, which is right.

  They do so only under the reward's own key for votes, and only with its own settings.
  """
  texts = ["so = Yes", "= YES", "= no", ": yes"]
  accuracies = {}
  for name, vote in (("loose", str.lower), ("strict", str)):
    monkeypatch.setitem(REWARDS, name, Reward(spelling, extract=word_behind, vote=vote))
    verifier = weighted(name, RewardSpec(name, {"marker": "="}))
    check_metrics(["maj@n:n=4"], verifier)
    responses, problem = [completion(text) for text in texts], {"answer": "no"}
    graded = grade([verifier], responses, [problem] * 4)
    held_out = evaluated([problem], [()], responses, graded, verifier)
    assert [answer and answer.text for answer in held_out.answers] == ["Yes", "YES", "no", None]
    accuracies[name] = eval_metrics(held_out, ["maj@n:n=4"])["eval/maj@4"]
  assert accuracies["loose"] == 0 and accuracies["strict"] == pytest.approx(1 / 3)


def test_without_an_answer_there_is_no_majority(monkeypatch):
  monkeypatch.setitem(REWARDS, "spelling", Reward(spelling))
  with pytest.raises(ValueError, match="the reward 'spelling' reads no answers"):
    check_metrics(["maj@n:n=4"], weighted("spelling", RewardSpec("spelling")))


def test_a_safe_one_is_called_here_and_any_other_in_a_worker(monkeypatch):
  for is_safe in (True, False):
    monkeypatch.setitem(REWARDS, "where", Reward(process_id, is_factory=False, is_safe=is_safe))
    term = weighted("where", RewardSpec("where"))
    with Grader([term], num_workers=1) as grader:
      graded = grade([term], [completion("")], [{}], call=grader)
      assert (grader.pool is None) == is_safe
    assert graded.valid.all() and (graded.totals.tolist() == [np.float32(os.getpid())]) == is_safe


def test_a_worker_has_its_imports_and_its_deadline(monkeypatch):
  monkeypatch.setitem(REWARDS, "spelling", Reward(spelling, imports=("no_such_module",)))
  with pytest.raises(ValueError, match="no_such_module"):
    Grader([weighted("spelling", RewardSpec("spelling"))], num_workers=1)
  monkeypatch.setitem(REWARDS, "spelling", Reward(spelling, deadline_s=lambda settings: -len(settings["marker"])))
  with pytest.raises(ValueError, match="timeout_s of 'spelling'=-2"):
    Grader([weighted("spelling", RewardSpec("spelling", {"marker": "=="}))], num_workers=1)


def test_a_config_names_it_and_its_settings_are_checked(monkeypatch):
  monkeypatch.setitem(REWARDS, "spelling", Reward(spelling, extract=word_behind))
  config = lambda *settings: tiny_config(overrides={"reward.terms": ("spelling=0.5",), "reward.settings": settings})
  with pytest.raises(ValueError, match="did you mean 'marker'"):
    make("spelling", markr="=")
  (line,) = check.config_problems(config("spelling.markr=#"))
  assert "reward.terms" in line and "did you mean 'marker'" in line
  assert list(check.config_problems(config("spelling.marker=#"))) == []
  term = terms_of(config("spelling.marker=#"))[-1]
  assert (term.name, term.weight, term.spec) == ("spelling", 0.5, RewardSpec("spelling", {"marker": "#"}))
  assert term.fn(completion("a # b"), {"answer": "b"}) == 1


def test_settings_of_a_section_come_from_there():
  with quick():
    task = load_task(tiny_config())._replace(rewards=("code_tests",))
    with pytest.raises(ValueError, match="^config.sandbox: reward 'code_tests' of task arithmetic: sandbox 'off': .*choose a back end"):
      make_rewards(task, tiny_config())
    (term,) = make_rewards(task, tiny_config(overrides={"sandbox.backend": "unsafe", "sandbox.total_s": 7.0}))
  assert (term.spec.settings["backend"], term.spec.settings["total_s"]) == ("unsafe", 7.0)
  assert REWARDS["code_tests"].deadline_s(term.spec.settings) == 37.0
