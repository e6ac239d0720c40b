"""Environments of the package verifiers, held by their own programs and drawn by an engine."""

import importlib.metadata
import importlib.util
import json
import math
import sys

import numpy as np
import pytest

from jaxrl_llm.config import check, command_line
from jaxrl_llm.messages import MissingPackageError
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.chat_messages import following_ids, opening_ids, split_calls
from jaxrl_llm.pretrained.chat_template import ChatTemplate
from jaxrl_llm.rollouts import carried as carried_lib
from jaxrl_llm.rollouts.environments import check_environment, make
from jaxrl_llm.rollouts.environments.hub.names import check_installed
from jaxrl_llm.rollouts.jobs import Draws, EngineError, Job, to_rollouts, turn_seed
from jaxrl_llm.rollouts.rules import Rules
from jaxrl_llm.tasks.problem_set import Setup
from jaxrl_llm.tasks.sets.environment import environment_task
from jaxrl_llm.types import StopReason
from tests.rollouts.environments.scripted import Scripted
from tests.runs import ROOT, column, run_here, tiny_config

TOKENIZER = ByteTokenizer()
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
PACKAGE = '''
import asyncio, time
import verifiers.v1 as vf

KINDS = ("one", "two", "three", "raises", "nan", "hangs", "twice", "blocks", "rewrites", "fails")

class Data(vf.TaskData):
  kind: str

class OurTask(vf.Task[Data]):
  @vf.reward(weight=0.5)
  async def right(self, trace: vf.Trace) -> float:
    if self.data.kind == "raises":
      raise RuntimeError("no reward\\ntoday")
    return float("nan") if self.data.kind == "nan" else float("yes" in trace.last_reply)

  @vf.intercept
  def replace(self, response: vf.Response) -> vf.Response | None:
    if self.data.kind == "rewrites":
      return response.model_copy(update={"message": vf.AssistantMessage(content="another one")})

class OurEnv(vf.SingleAgentEnv):
  async def run(self, task, agents):
    kind = task.data.kind
    if kind == "fails":
      raise KeyError("no run")
    if kind in ("one", "raises", "nan", "twice", "rewrites"):
      for _ in range(1 + (kind == "twice")):
        await agents.agent.run(task)
      return
    async with agents.agent.interaction(task) as talk:
      await talk.turn()
      if kind == "hangs":
        await asyncio.sleep(60)
      if kind == "blocks":
        time.sleep(6)
      for number in range({"two": 1, "three": 2}[kind]):
        if (await talk.turn(f"again {number}")).terminated:
          break

class Config(vf.TasksetConfig):
  kinds: list[str] = list(KINDS)

class OurTaskset(vf.Taskset[OurTask, Config]):
  def load(self):
    return [OurTask(Data(prompt=f"say {kind}", system_prompt="Be brief.", kind=kind)) for kind in self.config.kinds]

__all__ = ["OurEnv", "OurTaskset"]
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory):
  """Installs an environment, and says how to name it."""
  try:
    check_installed("textarena")
  except MissingPackageError as error:
    pytest.skip(str(error))
  folder = tmp_path_factory.mktemp("site")
  (folder / "little_talk.py").write_text(PACKAGE)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(folder)
    yield lambda *kinds: json.dumps({"taskset": {"kinds": kinds}})


def play(settings, say=lambda text: "yes", *, num=1, group_size=2, timeout_s=20.0, max_turns=4, **draws):
  environment = make("verifiers:little-talk", reply_timeout_s=timeout_s, settings=settings)
  rows, engine = environment.problems(range(num)), Scripted(say, TOKENIZER)
  draws = Draws(**({"max_new_tokens": 64, "prompt_tokens": 64, "stop_ids": TOKENIZER.stop_ids} | draws))
  job = Job(rows, group_size, list(range(7, 7 + num * group_size)), "salt", draws)
  playing = environment.player(Rules(environment, max_turns=max_turns), TOKENIZER)(engine, job)
  return sorted((talk for part in playing for talk in part), key=lambda talk: talk.sequence), engine, job


def test_a_conversation_is_the_ids_that_were_read_and_drawn(package):
  talks, engine, job = play(package("three"), lambda text: f"n{len(text)}" + "yes" * ("again 1" in text))
  for talk in talks:
    own = [request for request in engine.requests if request.seed in [turn_seed(job.seeds[talk.sequence], turn) for turn in range(3)]]
    assert TOKENIZER.decode(talk.prompt) == "Be brief.\nsay three\n" and [len(x.tokens) for x in own] == sorted(len(x.tokens) for x in own)
    ids = [*talk.prompt, *talk.tokens]
    assert all(list(request.tokens) == ids[: len(request.tokens)] and request.salt == "salt" for request in own)
    replies = [ids[start:stop] for start, stop in ((len(own[i].tokens), len(own[i + 1].tokens)) for i in range(2))]
    assert [TOKENIZER.decode(reply).endswith(f"again {i}\n") for i, reply in enumerate(replies)] == [True, True]
    assert [turn.reward for turn in talk.turns] == [0, 0, 0.5] and talk.reason == StopReason.TOKEN and talk.failed is None
    written = np.array(talk.written)
    assert written.sum() == sum(len(x.text) + 1 for x in talk.turns) and [talk.tokens[x.end] for x in talk.turns] == [TOKENIZER.eos_id] * 3
    assert (np.array(talk.logprobs)[written] < 0).all() and not np.array(talk.logprobs)[~written].any()
  rollouts, completions = to_rollouts(talks, job.examples, TOKENIZER, draws=job.draws, prompt_buckets=(32,))
  assert rollouts.written.sum() == sum(x.num_tokens for x in completions)


@pytest.mark.parametrize(
  ("kind", "cause", "line"),
  [
    ("raises", "raised", "no reward today"),
    ("nan", "not_finite", "found the reward nan"),
    ("hangs", "timeout", "nothing happened for 1 s"),
    ("twice", "rewritten", "turn 2 does not continue the conversation"),
    ("rewrites", "rewritten", "are not the same"),
  ],
)
def test_what_an_environment_does_wrong_costs_its_own_conversation(package, kind, cause, line):
  talks, *_ = play(package(kind, "one"), num=2, group_size=1, timeout_s=1.0)
  assert [talk.failed and talk.failed[0] for talk in talks] == [cause, None] and line in talks[0].failed[1]
  assert talks[0].reason == StopReason.ABORTED and talks[1].turns[-1].reward == 0.5


def test_conversations_that_are_cut_go_on_in_the_next_step(package):
  kinds = ("three", "one", "two", "three", "one", "two", "three")
  settings, say = package(*kinds), lambda text: "ab" * (len(text) % 9) + "yes" * (len(text) % 2)
  reference = play(settings, say, num=len(kinds), group_size=1, max_new_tokens=96)[0]
  environment = make("verifiers:little-talk", settings=settings)
  rows, engine, learned, in_midst = environment.problems(range(len(kinds))), Scripted(say, TOKENIZER), [], 0
  player = environment.player(Rules(environment), TOKENIZER)
  draws, carried, new = Draws(96, 64, stop_ids=TOKENIZER.stop_ids), carried_lib.NO_GROUPS, iter(rows)
  for step in range(5):
    examples = [next(new) for _ in range(3 - len(carried.examples))]
    groups = carried_lib.join(carried, examples, [7 + row["seed"] for row in examples], step=step)
    ends = [sum(reference[x["seed"]].written) - sum(talk.written) for x, talk in zip(groups.examples, groups.conversations, strict=True)]
    job = Job(groups.examples, 1, groups.seeds, "salt", draws, None, groups.conversations, 1)
    played = sorted((talk for part in player(engine, job) for talk in part), key=lambda talk: talk.sequence)
    for talk, before, end, example in zip(played, groups.conversations, ends, groups.examples, strict=True):
      one = reference[example["seed"]]
      assert sum(talk.written) == sum(before.written) + min(end, min(ends)) and talk.failed is None
      assert talk.tokens == one.tokens[: len(talk.tokens)] and talk.logprobs == one.logprobs[: len(talk.tokens)]
      if end <= min(ends):
        assert (talk.turns, talk.reason, talk.prompt) == (one.turns, one.reason, one.prompt)
      else:
        assert talk.reason == StopReason.UNFINISHED and [x.text for x in talk.turns] == [x.text for x in one.turns[: len(talk.turns)]]
        in_midst += bool(talk.turns) and talk.written[-1]
    rows_learned, carried = carried_lib.take(groups, played, num_groups=1)
    learned += [groups.examples[i]["seed"] for i in rows_learned]
    carried = carried_lib.from_json(json.loads(json.dumps(carried_lib.to_json(carried))))
  assert len(set(learned)) == 5 and in_midst
  (talk,) = [talk for talk in carried.conversations if talk.turns][:1]
  at = carried.conversations.index(talk)
  other = talk._replace(sequence=0, tokens=[*talk.tokens[: talk.turns[0].end + 1], 65, *talk.tokens[talk.turns[0].end + 2 :]])
  job = Job([carried.examples[at]], 1, carried.seeds[at : at + 1], "salt", draws, None, [other], 1)
  (talk,) = [talk for part in player(engine, job) for talk in part]
  assert talk.failed == ("rewritten", "the environment: asked again, it replied to turn 1 in another way")


def test_a_problem_that_does_not_begin(package):
  with pytest.raises(ValueError, match=r"environment.name: verifiers:little-talk, problem 0: the policy was asked nothing .*no run"):
    play(package("fails"))


def test_an_environment_that_holds_up_all_others_is_given_up(package):
  talks, *_ = play(package("blocks", "two"), num=2, group_size=1, timeout_s=1.0)
  assert talks[0].failed[0] == "timeout"
  assert play(package("two", "blocks"), num=1)[0][0].failed is None


def test_limits_cut_conversations_which_keep_their_reward(package):
  (talk,), engine, _ = play(package("three"), group_size=1, max_turns=2)
  assert len(talk.turns) == len(engine.requests) == 2 and talk.reason == StopReason.LENGTH and talk.turns[-1].reward == 0.5
  (talk,), *_ = play(package("three"), group_size=1, max_new_tokens=12)
  assert len(talk.turns) == 1 and talk.reason == StopReason.LENGTH and len(talk.tokens) == 4 and talk.failed is None
  (talk,), *_ = play(package("three"), lambda text: "no" * 40, group_size=1, max_new_tokens=15)
  assert len(talk.turns) == 1 and talk.reason == StopReason.LENGTH and len(talk.tokens) == 15
  (talk,), *_ = play(package("three"), group_size=1, prompt_tokens=8)
  assert talk.failed[0] == "too_long" and not talk.tokens


def test_an_error_of_the_engine_reaches_the_caller(package):
  def say(text):
    raise OverflowError("no engine")

  with pytest.raises(EngineError, match="OverflowError: no engine"):
    play(package("one"), say)


def test_lessons_are_a_teachers_conversations(package, tmp_path, monkeypatch):
  (tmp_path / "our_teacher.py").write_text("def teach(messages, tools, seed):\n  return f'{messages[-1][\"content\"]}? {seed}'\n")
  monkeypatch.syspath_prepend(tmp_path)
  environment = make("verifiers:little-talk", settings=package("two", "two", "two"), teacher="our_teacher:teach", lessons=2)
  task = environment_task(Setup(problems=environment.problems), size=3)
  row, other = task.demonstrations[:2]
  text, again = (TOKENIZER.decode([i for i, _ in x["lesson_ids"]]) for x in (row, other))
  assert text.replace("\ufffd", "|").startswith("say two? 0") and "again 0\nagain 0? 0" in text
  assert again == text.replace("? 0", f"? {1 << 32}")
  assert len(task.demonstrations) == 4 and sum(own for _, own in row["lesson_ids"]) == len("say two? 0") + len("again 0? 0") + 2


def test_names_that_are_not_installed(package):
  with pytest.raises(ValueError, match=r"found 'verifiers:litle-talk', which is not installed, .* pip install litle-talk"):
    check_environment("verifiers:litle-talk", {})
  with pytest.raises(ValueError, match="did you mean 'textarena'"):
    check_environment("verifiers:textarean", {})
  with pytest.raises(ValueError, match=r"environment.settings: found 'x', expected an object in JSON"):
    check_environment("verifiers:little-talk", {"settings": "x"})
  with pytest.raises(ValueError, match=r"environment.lessons: found 2, expected None, because environment.teacher is None"):
    check_environment("verifiers:little-talk", {"lessons": 2})
  with pytest.raises(ValueError, match=r"cannot be loaded: .*colour"):
    make("verifiers:little-talk", settings='{"taskset": {"colour": 1}}').problems([0])


def test_a_missing_package(monkeypatch):
  find = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "verifiers" else find(name, *rest))
  with pytest.raises(MissingPackageError, match=r"pip install 'jaxrl-llm\[verifiers\]'"):
    check_environment("verifiers:anything", {})


def test_a_folder_of_its_name_is_not_the_package(monkeypatch, tmp_path):
  """Such as `experiments/verifiers`, which a config in it must not offer as the package either."""
  (tmp_path / "verifiers").mkdir()
  (tmp_path / "verifiers" / "__init__.py").touch()
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(importlib.metadata, "packages_distributions", dict)
  with pytest.raises(MissingPackageError, match="need the package verifiers"):
    check_environment("verifiers:anything", {})
  monkeypatch.setattr(sys, "path", [])
  command_line.make_importable(f"{ROOT}/experiments/verifiers/config.py")
  command_line.make_importable(f"{ROOT}/configs/gspo.py")
  command_line.make_importable(f"{tmp_path}/configs/own.py")
  assert sys.path == [str(ROOT), str(tmp_path)]


def test_the_problems_must_be_its_own(package):
  (line,) = check.config_problems(tiny_config(overrides={"environment.name": "verifiers:little-talk"}))
  assert "config.task.name: found 'arithmetic', expected 'environment', because verifiers:little-talk has problems" in line


def test_messages_without_a_template():
  messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "1+1"}]}]
  ids = opening_ids(messages, TOOLS, TOKENIZER)
  text = TOKENIZER.decode(ids)
  assert ids[0] == TOKENIZER.bos_id and text.startswith("Be brief.\n\nCall a tool") and text.endswith("1+1\n") and '"name": "add"' in text
  assert following_ids([{"role": "tool", "content": "2"}], TOKENIZER, is_ended=False) == [TOKENIZER.eos_id, *b"2\n"]
  with pytest.raises(ValueError, match="expected text alone"):
    opening_ids([{"role": "user", "content": [{"type": "image_url"}]}], [], TOKENIZER)


@pytest.mark.parametrize("reads_tools", [True, False])
def test_messages_with_a_template(reads_tools):
  class Chat(ByteTokenizer):
    chat_template = ChatTemplate(
      ("{% if tools %}{{ tools | tojson }}{% endif %}" if reads_tools else "")
      + "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
      "example",
      {},
    )
    backend = type("Backend", (), {"id_to_token": staticmethod(lambda i: ";")})

  chat = Chat()
  text = chat.decode(opening_ids([{"role": "user", "content": "1+1"}], TOOLS, chat))
  assert text.endswith("<user>1+1;<assistant>") and text.count('"add"') == 1
  assert text.startswith("[" if reads_tools else "<system>Call a tool")
  assert chat.decode(following_ids([{"role": "tool", "content": "2"}], chat, is_ended=True)) == "<tool>2;<assistant>"


def test_calls_of_tools():
  text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "add", "arguments": [1]}</tool_call>'
  assert split_calls(text, TOOLS) == ("", [("add", '{"a": 1}')])
  assert split_calls("<tool_call>{no}</tool_call>", TOOLS) == ("<tool_call>{no}</tool_call>", [])


@pytest.mark.slow
def test_a_run_learns_from_an_environment(package, tmp_path):
  config = tiny_config()
  config.task.name, config.task.levels, config.task.size = "environment", None, 8
  config.environment.name = "verifiers:little-talk"
  config.environment.settings = package(*["one", "two"] * 4)
  config.warm_start.num_steps, config.num_steps, config.eval.every = 0, 3, 3
  config.rollout.num_prompts, config.rollout.spare_prompts = 4, 2
  config.rollout.stop_strings = tuple("abcdefghijklmnopqrstuvwxyz")
  config.rollout.max_new_tokens = 32
  config.rollout.prompt_buckets = config.learner.row_tokens = config.learner.row_buckets = None
  run_here(config, tmp_path)
  assert not any(column(tmp_path, "conversation/failed")) and max(column(tmp_path, "conversation/turns/max")) == 2
  assert math.isfinite(column(tmp_path, "actor/loss")[-1]) and max(column(tmp_path, "rollout/carried_tokens")) > 0
