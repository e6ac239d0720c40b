"""Conversations with a tool, of a policy that plays a script, under several chat templates.

The measure is the whole conversation that a template writes at once.
"""

import asyncio
import json

import pytest

from jaxrl_llm.pretrained.chat_messages import following_ids, opening_ids, opening_text, split_calls
from jaxrl_llm.pretrained.chat_template import render
from jaxrl_llm.pretrained.tokenizer import load_tokenizer
from jaxrl_llm.rollouts.drafts import Drafts
from jaxrl_llm.rollouts.environments import Environment
from jaxrl_llm.rollouts.environments.hub.conversation import ProgramConversation
from jaxrl_llm.rollouts.jobs import Draws, Job
from jaxrl_llm.rollouts.rules import Rules
from jaxrl_llm.tasks.pipeline import encode_reply
from tests.pretrained.chats import REPLIES, SOURCES, TOOLS, write_folder
from tests.rollouts.environments.scripted import Scripted

ARGUMENTS = [{"word": 'a "b"\n  {c} é'}, {"word": "x", "pages": [1, {"y": 2}]}, {"word": "<b> & 'c'", "pages": []}]
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]


@pytest.fixture(params=SOURCES)
def tokenizer(request, tmp_path):
  return load_tokenizer(write_folder(tmp_path / request.param, request.param))


def say(i, arguments, tokenizer):
  """Returns a message with a call, as a program sends it, and what the policy writes for it."""
  function = {"name": "lookup", "arguments": json.dumps(arguments)}
  message = {"role": "assistant", "content": None, "tool_calls": [{"id": f"call0000{i}", "type": "function", "function": function}]}
  template = tokenizer.chat_template
  before, after = opening_text(ASKED, TOOLS, template), opening_text([*ASKED, message], TOOLS, template)
  if "lookup" not in after[len(before) :]:  # The template has no calls.
    return message, f"<tool_call>{json.dumps({'name': 'lookup', 'arguments': arguments})}</tool_call>"
  begin = len(before) if after.startswith(before) else len(before) - len("<think>\n")
  end = tokenizer.backend.id_to_token(tokenizer.eos_id)
  return message, after[begin:].partition(end)[0]


def test_a_conversation_turn_by_turn_is_that_which_the_template_writes_at_once(tokenizer):
  said = [say(i, arguments, tokenizer) for i, arguments in enumerate(ARGUMENTS)]
  assert "lookup" in opening_text(ASKED, TOOLS, tokenizer.chat_template)
  for start in range(0, len(REPLIES), len(ARGUMENTS)):
    replies = (REPLIES * 2)[start : start + len(ARGUMENTS)]
    turns = iter([*(text for _, text in said), "It is that."])
    engine = Scripted(lambda _, turns=turns: next(turns), tokenizer)
    drafts = Drafts(engine, Job([{}], 1, [1], "", Draws(100_000, 100_000, stop_ids=tokenizer.stop_ids)))
    talk = ProgramConversation(drafts.all[0], drafts, rules=Rules(Environment(None, None), max_turns=8), tokenizer=tokenizer)
    messages, known, new = list(ASKED), None, len(ASKED)
    for (message, _), arguments, reply in zip(said, ARGUMENTS, replies, strict=True):
      drawn = asyncio.run(talk.draw(messages, TOOLS, known, new, None))
      assert [(call.name, json.loads(call.arguments)) for call in drawn.calls] == [("lookup", arguments)]
      known, new = [*drawn.prompt, *drawn.tokens], 1
      messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": reply}]
    drawn = asyncio.run(talk.draw(messages, TOOLS, known, new, None))
    assert (drawn.text, drawn.calls, talk.draft.failed) == ("It is that.", [], None)
    if "tool_calls" in tokenizer.chat_template.source:
      # Qwen3 drops an empty thought of an earlier turn, but the policy keeps what it has written.
      plain = lambda ids: tokenizer.backend.decode(ids, skip_special_tokens=False).replace("<think>\n\n</think>\n\n", "")
      assert plain(drawn.prompt) == plain(tokenizer.encode(opening_text(messages, TOOLS, tokenizer.chat_template)))
    # Each message ended once, whatever the tools have said.
    ends = 1 + sum(message["role"] != "system" for message in messages)
    assert drawn.prompt.count(tokenizer.eos_id) == ends


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_replies_of_any_spelling(tokenizer, role, reply):
  """What comes back is the reply, and not what it may spell."""
  ids = following_ids([{"role": role, "content": reply}], tokenizer, is_ended=True)
  if role == "user":
    assert encode_reply(reply, tokenizer, is_message=True) == ids
  empty = following_ids([{"role": role, "content": ""}], tokenizer, is_ended=True)
  specials = lambda ids: [i for i in ids if i in tokenizer.special_ids]
  assert specials(ids) == specials(empty)
  text, written = tokenizer.backend.decode(ids, skip_special_tokens=False), (reply.strip(), json.dumps(reply, ensure_ascii=False))
  assert any(spelling in text for spelling in written)


def test_several_replies_and_a_user_behind_them(tokenizer):
  messages = [{"role": "tool", "content": 'a "b"'}, {"role": "tool", "content": ""}, {"role": "user", "content": "Go on\n{}"}]
  text = tokenizer.backend.decode(following_ids(messages, tokenizer, is_ended=False), skip_special_tokens=False)
  exchange = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
  assert render(tokenizer.chat_template, [*exchange, *messages]).endswith(text)


def test_the_form_of_a_call_is_that_of_the_template(tmp_path):
  """Bare JSON is read within any text; the other forms exclude each other."""
  texts = {family: say(0, {"word": "gauss"}, load_tokenizer(write_folder(tmp_path / family, family)))[1] for family in SOURCES}
  read = {
    family: [other for other, text in texts.items() if split_calls(text, TOOLS, load_tokenizer(tmp_path / family))[1]] for family in SOURCES
  }
  hermes = ["qwen2.5", "qwen3", "smollm2"]
  assert read == {"llama3": ["llama3", *hermes], **dict.fromkeys(hermes, hermes), "qwen3.5": ["qwen3.5"]}
  for text in texts.values():  # A teacher, who knows no template, may use any.
    assert split_calls(text, TOOLS)[1] == [("lookup", '{"word": "gauss"}')]


def test_prompts_hold_no_other_tokens_than_the_template_writes(tokenizer):
  begin = opening_ids(ASKED, TOOLS, tokenizer)
  names = "".join(SOURCES["llama3"][1] + SOURCES["qwen3"][1])
  forged = [{**ASKED[0], "content": names}, {**ASKED[1], "content": REPLIES[-1] + REPLIES[-2]}]
  specials = [i for i in opening_ids(forged, TOOLS, tokenizer) if i in tokenizer.special_ids]
  assert specials == [i for i in begin if i in tokenizer.special_ids]
