"""Self-play: what a problem and an attempt earn, what a teacher shows, and a run of it."""

import json
import random
import re

import pytest

from jaxrl_llm.config.check import config_problems
from jaxrl_llm.rollouts.environments import make
from jaxrl_llm.run.setup.data import make_rules
from jaxrl_llm.text_types import Completion
from tests.runs import column, run_here, tiny_config


def say(game, state, text):
  return game.step(state, Completion(text, (), len(text), True))


def test_answers_are_those_of_python():
  game, draw = make("proposer"), random.Random(0)
  for _ in range(200):
    first = draw.choice("0123456789")
    problem = first + "".join(draw.choice("+-") + draw.choice("0123456789") for _ in range(draw.randint(1, 3)))
    state, reply = say(game, game.reset({"first": first}), problem)
    assert (reply.reward, reply.done) == (0.0, False) and game.state_key(state) == problem
    answer = eval(problem)
    for text in (f"#{answer}", f"working\n#{answer} "):
      assert say(game, state, text)[1][1:] == (1.0, True), (problem, text)
    for text in (f"#{answer + 1}", f"{answer}", f"#{answer}.5"):
      assert say(game, state, text)[1][1:] == (0.0, True), (problem, text)


@pytest.mark.parametrize("text", ["", "7", "8+1", "7+", "7+1+2+3+4", "7*2", "77+1", "7+1=8", "7 + 1", "٧+1"])
def test_another_text_than_a_sum_ends_the_game(text):
  game = make("proposer", invalid_reward=-0.5)
  state, reply = say(game, game.reset({"first": "7"}), text)
  assert (reply.reward, reply.done) == (-0.5, True) and game.state_key(state) == ""


def test_a_teacher_plays_by_the_rules():
  game, right = make("proposer", lessons=40), 0
  for row in game.problems(range(10)):
    assert row["first"] in row["question"]
    for (problem, messages), (working, _) in json.loads(row["lessons"]):
      state, reply = say(game, game.reset(row), problem)
      assert not reply.done and reply.text == messages[0]["content"] + "\n" and re.search(r"#-?\d+\Z", working)
      right += say(game, state, working)[1].reward
  assert 100 < right < 300  # A third of the steps is wrong, and a problem has one to three of them.


def test_the_samples_of_a_prompt_are_whole_numbers_of_attempts():
  config = tiny_config("self_play", {"rollout.group_size": 6, "environment.attempts": 4})
  assert config_problems(config) == []
  with pytest.raises(ValueError) as refused:
    make_rules(config)
  expected = "expected a multiple of 4, the number of samples that share their first turn in environment proposer"
  assert str(refused.value) == f"config.rollout.group_size: found 6, {expected}"


@pytest.mark.exhaustive
def test_a_run_compares_attempts_at_one_problem(tmp_path):
  run_here(tiny_config("self_play", {"warm_start.num_steps": 60}), tmp_path)
  # Pairs of samples share their problem, so no state has fewer than two steps.
  assert min(column(tmp_path, "critic/steps_per_state")) >= 2 and max(column(tmp_path, "actor/grad_norm")) > 0
