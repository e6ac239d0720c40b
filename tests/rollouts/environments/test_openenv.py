"""OpenEnv environments: episodes over a pool of sessions, and servers that misbehave."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import websockets.exceptions

from jaxrl_llm.config import check
from jaxrl_llm.messages import MissingPackageError
from jaxrl_llm.rollouts.environments import check_environment, make
from jaxrl_llm.rollouts.rules import checked, raised, timed_out
from jaxrl_llm.run.setup.data import load_task
from jaxrl_llm.text_types import Completion
from tests.rollouts.environments.openenv_server import serving
from tests.runs import column, run_here, tiny_config


def turn(text):
  return Completion(text, (), len(text), True)


def opened(server, **settings):
  return make(f"openenv:{server.url}", **settings)


def test_an_episode_of_several_turns():
  with serving() as server:
    env = opened(server)
    state = env.reset({"prompt": "?", "seed": 3, "opening": "at 3"})
    assert env.state_key(state) == "at 3" and env.state_key(env.reset({"prompt": "?"})) == ""
    state, first = env.step(state, turn("4"))
    assert env.state_key(state) == "now 7"
    state, second = env.step(state, turn(" 5\n"))
  assert first == ("now 7", 0.7, False) and second == ("now 12", 1.2, True)
  assert ("reset", {"seed": 3}) in server.log and ("step", {"message": "5"}) in server.log


@pytest.mark.parametrize("capacity", [1, 2, 8])
def test_episodes_share_the_sessions_that_the_server_allows(capacity):
  with serving(capacity=capacity) as server:
    env = opened(server)
    assert env.concurrency == capacity == server.num_sessions
    states = [env.reset({"seed": i}) for i in range(4)]
    seen = [[], [], [], []]
    for number in (1, 2, 1):
      for i in range(4):
        states[i], reply = env.step(states[i], turn(str(number)))
        seen[i].append(reply.text)
  assert seen == [[f"now {i + 1}", f"now {i + 3}", f"now {i + 4}"] for i in range(4)]
  assert server.num_sessions == capacity
  # One session each: every action is sent once. Otherwise episodes are played again.
  assert (sum(kind == "step" for kind, _ in server.log) == 12) == (capacity == 8)


def test_an_episode_goes_on_after_the_server_has_ended_its_session():
  with serving() as server:
    env = opened(server)
    state, _ = env.step(env.reset({"seed": 1}), turn("1"))
    for socket in list(server.open):
      socket.close()
    time.sleep(0.2)
    assert env.step(state, turn("1"))[1].text == "now 3"


def test_an_environment_that_does_not_repeat_itself_is_noticed():
  with serving(capacity=1, first=lambda seed, n: f"{'a long beginning ' * 9}, reset {n}") as server:
    env = opened(server)
    with pytest.raises(RuntimeError, match="another observation"):
      env.step(env.reset({"seed": 1, "opening": "a long beginning"}), turn("1"))
    with pytest.raises(ValueError, match="seed 0, 'g , reset 3' and 'g , reset 5', expected one"):
      env.problems(range(2))


def test_actions_and_observations_are_chosen_by_the_config():
  action = json.dumps({"tool": "add", "message": "{text}"})
  with serving() as server:
    env = opened(server, action=action, reset='{"level": 2}', observation_field="message", sessions=1)
    env.step(env.reset({"seed": 1}), turn("1"))
    assert server.log[-2:] == [("reset", {"level": 2, "seed": 1}), ("step", {"tool": "add", "message": "1"})]
  with serving(schema={"action": {"properties": {"message": {}, "row": {}}}}) as server:
    env = opened(server)
    state = env.reset({})
    assert env.step(state, turn("I say 1"))[1] == ("invalid action: expected a JSON object with message, row", 0.0, False)
    assert env.step(state, turn('I say {"row": 1}'))[1] == ("invalid action: message: Field required", 0.0, False)
    assert env.step(state, turn('I say {"message": "1"}!'))[1].text == "now 1"
  with serving(schema=None) as server:
    env = opened(server)
    assert env.step(env.reset({}), turn("1"))[1].text == "invalid action: expected a JSON object"


OBSERVATION = '{"type": "observation", "data": {"observation": {"message": "hi"}, "reward": %s, "done": %s}}'

FAILURES = [
  ("raise", "raised", "EXECUTION_ERROR: division by zero"),
  ("hang", "timeout", "no reply within 1 s"),
  ("hang up", "raised", "ConnectionClosed"),
  ("utf-8", "raised", ""),
  ("no JSON", "raised", "JSONDecodeError"),
  ("[]", "raised", "found [], expected an object 'observation'"),
  ('{"type": "observation", "data": {"observation": "hi"}}', "raised", "expected an object 'observation'"),
  (OBSERVATION % ('"1"', "false"), "raised", "a number 'reward'"),
  (OBSERVATION % ("NaN", "false"), "not_finite", "nan"),
  (OBSERVATION % ("1" + "0" * 400, "false"), "raised", "OverflowError"),
  (OBSERVATION % ("1", '"no"'), "raised", "a flag 'done'"),
  ("long", "raised", "ConnectionClosed"),
]


def failure(step, limit):
  """Returns how a step failed, as a conversation takes it."""
  try:
    return checked(step.result(limit)[1])[1]
  except TimeoutError:
    return timed_out(limit)
  except Exception as error:
    return raised(error)


@pytest.mark.parametrize(("said", "cause", "text"), FAILURES, ids=[str(i) for i in range(len(FAILURES))])
def test_a_server_that_misbehaves_costs_one_sample(said, cause, text):
  with serving(capacity=2) as server:
    limit = 1.0 if said == "hang" else 10.0
    env = opened(server, reply_timeout_s=limit)
    states = [env.reset({"seed": i}) for i in range(3)]
    with ThreadPoolExecutor() as threads:
      steps = [threads.submit(env.step, state, turn(text)) for state, text in zip(states, (said, "1", "2"), strict=True)]
      assert [step.result()[1].text for step in steps[1:]] == ["now 2", "now 4"]
      failed = failure(steps[0], limit)
      server.hang.set()
    assert failed[0] == cause and text in failed[1] and "\n" not in failed[1]


def test_a_session_that_was_cut_off_is_replaced_once_the_server_has_noticed():
  with serving(capacity=1) as server:
    env = opened(server)
    server.linger_s = 0.5
    with pytest.raises(websockets.exceptions.ConnectionClosed):
      env.step(env.reset({"seed": 1}), turn("utf-8"))
    assert env.step(env.reset({"seed": 1}), turn("1"))[1].text == "now 2"


def test_odd_but_legal_replies():
  with serving() as server:
    env = opened(server)
    assert env.step(env.reset({}), turn("surrogate"))[1] == ("?!", 1.0, False)
    assert env.step(env.reset({}), turn(OBSERVATION % ("null", "null")))[1] == ("hi", 0.0, False)
    assert env.step(env.reset({}), turn('{"type": "observation", "data": {"observation": {}}}'))[1].text == "{}"


def test_a_server_that_cannot_be_used_is_one_line():
  with serving() as server:
    url = server.url
  with pytest.raises(ValueError, match=r"^environment.name: the OpenEnv server at http://127.* could not be reset: ConnectionRefused.*$"):
    make(f"openenv:{url}")
  with serving(capacity=2) as server, pytest.raises(ValueError, match=r"^environment.sessions: found 3, expected at most 2, .*$"):
    opened(server, sessions=3)
  with serving(capacity=0) as server, pytest.raises(ValueError, match="CAPACITY_REACHED: Server at capacity"):
    opened(server)


@pytest.mark.parametrize(
  ("name", "settings", "line"),
  [
    ("openenv:127.0.0.1:8000", {}, "environment.name: found 'openenv:127.0.0.1:8000', expected an address"),
    ("openenv:", {}, "environment.name: found 'openenv:', expected an address"),
    ("openenv:http://h", {"action": "hi"}, "environment.action: found 'hi', expected an object in JSON"),
    ("openenv:http://h", {"action": "{}"}, "environment.action: found '{}', expected {text} in it"),
    ("openenv:http://h", {"reset": "[]"}, "environment.reset: found '[]', expected an object in JSON"),
    ("openenv:http://h", {"call_reward": 1.0}, "environment.call_reward: found 1.0, expected None, because environment "),
    ("calculator", {"sessions": 1}, "environment.sessions: found 1, expected None, because environment "),
  ],
)
def test_wrong_settings_are_one_line(name, settings, line):
  with pytest.raises(ValueError) as error:
    check_environment(name, settings)
  assert str(error.value).startswith(line)


def test_a_missing_package_is_one_line(monkeypatch):
  monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
  with pytest.raises(MissingPackageError, match=r"^environments openenv:URL need .* websockets: pip install 'jaxrl-llm\[openenv\]'$"):
    check_environment("openenv:http://127.0.0.1:1", {})
  (line,) = check.config_problems(tiny_config(overrides={"environment.name": "openenv:http://h"}))
  assert "need the package websockets" in line


OWN = {"task.name": "environment", "task.levels": None, "warm_start.num_steps": 0}


def test_the_problems_of_an_environment_are_its_seeds():
  with serving(capacity=2) as server:
    given = OWN | {"environment.name": f"openenv:{server.url}", "task.size": 8, "task.seed": 5, "task.prompt_template": "{question}\n"}
    task = load_task(tiny_config(overrides=given))
    assert [row["prompt"] for row in (*task.train, *task.test)] == [f"at {seed}\n" for seed in range(5, 13)]
    assert len(task.test) == 2 and not server.open
    again = load_task(tiny_config(overrides=given | {"task.seed": 6}))
    assert load_task(tiny_config(overrides=given)).fingerprint == task.fingerprint != again.fingerprint
    for changes, line in (
      ({"environment.name": "calculator"}, "has no problems of its own"), ({"task.size": 1}, "task.size: found 1"),
      ({"task.levels": (1,)}, "task.levels: found (1,), expected None"),
    ):  # fmt: skip
      with pytest.raises(ValueError) as error:
        load_task(tiny_config(overrides=given | changes))
      assert line in str(error.value) and "\n" not in str(error.value)
    env = opened(server)
    assert env.step(env.reset(task.test[0]), turn("1"))[1].text == "now 12"


@pytest.mark.exhaustive
def test_a_run_learns_from_the_rewards_of_a_server(tmp_path):
  """The policy has learned long answers, and is rewarded for short ones instead."""
  with serving(judge=lambda said: 1 - min(len(said), 20) / 20) as server:
    given = {
      "environment.name": f"openenv:{server.url}", "environment.call_reward": None, "reward.verifier_weight": 0.0, "num_steps": 8,
      "warm_start.num_steps": 60, "learner.learning_rate": 3e-3, "eval.every": 8, "log.samples_every": 1, "log.tensorboard": False,
    }  # fmt: skip
    assert run_here(tiny_config("tools", given), tmp_path)["status"] == "finished"
  rewards, failed = (column(tmp_path, f"{name}") for name in ("reward/environment/mean", "conversation/failed"))
  assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2 and not any(failed), rewards
  for line in (tmp_path / "samples.jsonl").read_text().splitlines():
    row = json.loads(line)
    length = len(row["response"].strip())
    assert row["reward"] == pytest.approx(1 - min(length, 20) / 20 if row["stopped"] else 0, abs=1e-6)
