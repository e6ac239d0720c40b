"""Templates render as in transformers, in a sandbox, and fail with one line."""

import json
import sys

import pytest

from jaxrl_llm.pretrained import chat_template
from jaxrl_llm.pretrained.chat_template import ChatTemplate, render, turn_end

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
