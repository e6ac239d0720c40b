"""A chat in a column is a question, a conversation before it, and perhaps its answer."""

import json
import pathlib

import pytest

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.chat_template import ChatTemplate
from jaxrl_llm.pretrained.tokenizer import load_tokenizer
from jaxrl_llm.tasks.files import chats
from jaxrl_llm.tasks.files.chats import Asked
from jaxrl_llm.tasks.files.values import Unusable
from jaxrl_llm.tasks.image_prompts import prompt_ids

USER, SYSTEM, ANSWER = ({"role": role, "content": text} for role, text in (("user", "1+1?"), ("system", "Add."), ("assistant", "2")))
PARTS = {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?", "image": None}]}


@pytest.mark.parametrize("value", ["1+1?", USER, [USER], [PARTS], json.dumps([USER]), json.dumps(PARTS), [{**USER, "tool_calls": None}]])
def test_one_question_in_many_forms(value):
  assert chats.asked({"q": value}, "q") == Asked("1+1?")


def test_earlier_messages_and_a_reply_are_kept():
  whole = [SYSTEM, USER, ANSWER, {"role": "user", "content": "Sure?"}]
  for value in (whole, [*whole, ANSWER], json.dumps([*whole, ANSWER])):
    asked = chats.asked({"q": value}, "q")
    assert asked.question == "Sure?" and json.loads(asked.conversation) == whole
  assert asked.reply == "2"
  picture = [SYSTEM, {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
  assert chats.asked({"q": picture}, "q").question == "<image>What?"


@pytest.mark.parametrize(
  ("value", "reason"),
  [
    ([SYSTEM], "q does not end with the user"),
    ([ANSWER], "q does not end with the user"),
    ([{"role": "user", "content": " "}], "q is empty"),
    ([{"role": "user"}], "q is no list of messages"),
    ([USER, "text"], "q is no list of messages"),
    ([{"from": "human", "value": "1+1?"}], "q is no list of messages"),
    ([{"role": "user", "content": [{"type": "audio"}]}], "q is no list of messages"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "q holds pictures"),
    ([USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}, USER], "q has calls of tools"),
    (str([USER]), "q is a chat in Python's spelling"),
    ([], "q is empty"),
    ([["a"], ["b"]], "q is a list of several"),
    ({"text": "1+1?"}, "q is an object"),
  ],
)
def test_what_is_no_chat_has_a_reason(value, reason):
  with pytest.raises(Unusable) as caught:
    chats.asked({"q": value}, "q")
  assert caught.value.reason == reason


def test_texts_that_only_look_like_chats_are_texts():
  for text in ('[{"a": 1}] What is this?', '{"role": "user"}', "[1, 2]", '[{"role": 1}', "{role} and content"):
    assert chats.asked({"q": text}, "q") == Asked(text)


class Templated(ByteTokenizer):
  """A tokenizer with a chat template that names each role, and refuses two systems."""

  chat_template = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<{{ m.role[0] }}>{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}", "test", {},
  )  # fmt: skip
  system = None


def test_a_chat_is_encoded_with_its_roles_and_the_prompt_in_place_of_its_last_message():
  row = {"prompt": "1+1=", "conversation": json.dumps([SYSTEM, USER, ANSWER, USER])}
  plain, tokenizer = ByteTokenizer(), Templated()
  assert plain.decode(prompt_ids(row, plain)) == "Add.\n1+1?\n2\n1+1="
  assert plain.decode(prompt_ids(row, tokenizer)) == "<s>Add.<u>1+1?<a>2<u>1+1=<a>"
  tokenizer.system = "Think."  # For chats without a system message of their own.
  assert plain.decode(prompt_ids(row, tokenizer)) == "<s>Add.<u>1+1?<a>2<u>1+1=<a>"
  own = {"prompt": "1+1=", "conversation": json.dumps([USER, ANSWER, USER])}
  assert plain.decode(prompt_ids(own, tokenizer)) == "<s>Think.<u>1+1?<a>2<u>1+1=<a>"
  with pytest.raises(Unusable, match="messages that the chat template refuses"):
    prompt_ids({"prompt": "?", "conversation": json.dumps([{"role": "tool", "content": "4"}, USER])}, tokenizer)


def test_a_chat_with_a_system_message_is_a_question_under_the_same_setting():
  folder = pathlib.Path(__file__).parents[2] / "pretrained" / "tokenizers" / "qwen3"
  row = {"prompt": "1+1?", "conversation": json.dumps([SYSTEM, USER])}
  assert prompt_ids(row, load_tokenizer(folder)) == load_tokenizer(folder, system="Add.").encode_prompt("1+1?")
  assert prompt_ids({"prompt": "1+1?"}, load_tokenizer(folder)) == load_tokenizer(folder).encode_prompt("1+1?")
