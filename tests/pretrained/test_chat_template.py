"""Templates render as in transformers, in a sandbox, and fail with one line."""

import json
import sys

import pytest

from jaxrl_llm.pretrained import chat_template
from jaxrl_llm.pretrained.chat_options import parse_options, standalone, with_options
from jaxrl_llm.pretrained.chat_template import ChatTemplate, next_messages, render, turn_end
from tests.pretrained.chats import REPLIES, SOURCES, TOOLS

USER = [{"role": "user", "content": "2 < 3 & é?"}]


def write(source, messages=USER, *, add_generation_prompt=True, **variables):
  return render(ChatTemplate(source, "some/folder", variables), messages, add_generation_prompt=add_generation_prompt)


def test_blocks_leave_no_lines():
  source = "{% for m in messages %}\n  {% if m.role == 'user' %}\n<u>{{ m['content'] }}</u>\n  {% endif %}\n{% endfor %}\nend"
  assert write(source) == "<u>2 < 3 & é?</u>\nend"


def test_generation_prompt_and_variables():
  source = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}{% if deep is defined %}!{% endif %}"
  assert write(source, bos_token="<s>") == "<s>2 < 3 & é?>"
  assert write(source, bos_token="<s>", deep=False, add_generation_prompt=False) == "<s>2 < 3 & é?!"
  assert write("{{ tools is none }} {{ documents is none }}") == "True True"
  assert write("{{ tools }}", tools="t") == "t"


def test_tojson_escapes_nothing():
  assert write("{{ messages[0] | tojson }}") == json.dumps(USER[0], ensure_ascii=False)
  assert write("{{ {'b': 1, 'a': '<'} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": "<",\n "b": 1\n}'


def test_functions_that_templates_may_call():
  assert write("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}") == "3"
  assert write("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
  assert write("{{ dict(a=1).a }}{% generation %}x{% endgeneration %}") == "1x"
  assert len(write("{{ strftime_now('%Y') }}")) == 4


@pytest.mark.parametrize(
  "source",
  [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ raise_exception.__globals__.keys() }}",
    "{{ range(10**9) | list | length }}",
  ],
)
def test_the_sandbox(source):
  with pytest.raises(ValueError, match=r"^some/folder: the chat template fails on a conversation of user \((Security|Overflow)Error: "):
    write(source)
  assert USER == [{"role": "user", "content": "2 < 3 & é?"}]


@pytest.mark.parametrize(
  ("source", "messages", "message"),
  [
    (
      "{{ raise_exception('Roles\n must alternate') }}",
      USER,
      r"user \(TemplateError: Roles must alternate\); set config\.task\.chat=False",
    ),
    (
      "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
      [{"role": "system", "content": "s"}, *USER],
      r"of system, user \(TemplateError: System role not supported\); leave config\.task\.system unset",
    ),
    ("{% if %}", USER, r"user \(TemplateSyntaxError: Expected an expression"),
    ("{{ 'a' + messages }}", USER, r"user \(TypeError: can only concatenate str"),
    ("{{ nothing.at.all }}", USER, r"user \(UndefinedError: 'nothing' is undefined"),
  ],
)
def test_failures_are_one_line(source, messages, message):
  with pytest.raises(ValueError, match=message) as error:
    write(source, messages)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("tail", "expected"),
  [("<|end|>\n", "<|end|>"), (" </s>", "</s>"), ("<|end|>er", "<|end|>er"), ("\nUSER:", None), ("", None)],
)
def test_turn_end(tail, expected):
  source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + tail + "{% endfor %}"
  assert turn_end(ChatTemplate(source, "f", {}), ["<|end|>", "<|end|>er", "</s>", "", "<|user|>"]) == expected


def test_turn_end_of_a_template_that_refuses_assistants():
  source = "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}</s>{% endfor %}"
  assert turn_end(ChatTemplate(source, "f", {}), ["</s>"]) is None


def test_without_the_package(monkeypatch):
  chat_template._compile.cache_clear()
  monkeypatch.setitem(sys.modules, "jinja2", None)
  with pytest.raises(
    ImportError, match=r"chat templates need the package jinja2: pip install 'jaxrl-llm\[hf\]'; or set config\.task\.chat"
  ):
    write("{{ messages }}")


@pytest.mark.parametrize(
  ("family", "options"),
  [
    ("qwen3", {"enable_thinking": False}),
    ("llama3", {"date_string": "27 Nov 2026", "tools_in_user_message": False}),
    ("llama3", {"strftime_now": "2026-11-27"}),
    ("llama3", {}),
    ("qwen2.5", {}),
  ],
)
def test_a_template_for_others_has_the_options_in_it(family, options):
  template = ChatTemplate(SOURCES[family][0], "f", {"bos_token": "<s>", "tools": TOOLS})
  own = with_options(template, options)
  source = standalone(own)
  assert render(template._replace(source=source), USER) == render(own, USER)
  assert (source == template.source) == (family == "qwen2.5")
  # A clock of another day changes nothing.
  assert render(template._replace(source=source, variables={**template.variables, "strftime_now": "2030-01-01"}), USER) == render(own, USER)
  if "date_string" in options:
    assert "1 Jan 2030" in render(template._replace(source=source, variables={**template.variables, "date_string": "1 Jan 2030"}), USER)


@pytest.mark.parametrize(
  ("texts", "options"),
  [
    (("a=1", "b=x=y", "c=true", "d='2024'", "e=None"), {"a": 1, "b": "x=y", "c": True, "d": "2024", "e": None}),
    (("today=26 Jul 2024", "f=['x', 1]", "g="), {"today": "26 Jul 2024", "f": ["x", 1], "g": ""}),
    (("x",), r"task\.chat_options: found 'x', expected NAME=VALUE"),
    (("a b=1",), r"found 'a b=1', expected NAME=VALUE"),
    (("a=1", "a=2"), r"found 'a' twice, expected each option once"),
  ],
)
def test_options_as_text(texts, options):
  if isinstance(options, dict):
    assert parse_options(texts) == options
  else:
    with pytest.raises(ValueError, match=options):
      parse_options(texts)


SPELLINGS = ["TEXT", "TEXT | tojson", "TEXT | trim", "TEXT | e", "TEXT | replace('a', 'b')", "{'output': TEXT} | tojson", "TEXT | upper"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_in_any_spelling_of_the_template(spelling, reply):
  written = spelling.replace("TEXT", "m.content")
  source = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' %}{{ " + written + " }}{% else %}{{ m.content }}{% endif %}<end>"
  template = ChatTemplate(source + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}", "f", {})
  messages = [{"role": "tool", "content": reply}, {"role": "tool", "content": "2"}, {"role": "user", "content": reply}]
  said = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "What?"}]
  assert f"<user>1<end><assistant>What?<end>{next_messages(template, messages, '<end>')}" == render(template, [*said, *messages])


@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_reply_that_the_template_leaves_out(role):
  source = "{% for m in messages %}{% if m.role != 'ROLE' or loop.first %}{{ m.content }}{% endif %}{% endfor %}".replace("ROLE", role)
  with pytest.raises(ValueError, match=rf"f: the chat template leaves out a message \({role}\); set config\.task\.chat=False"):
    next_messages(ChatTemplate(source, "f", {}), [{"role": role, "content": "Twelve."}], None)
