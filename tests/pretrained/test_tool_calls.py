"""Calls of tools in several forms, their values, and texts that are no calls."""

import json

import numpy as np
import pytest

from jaxrl_llm.pretrained.chat_template import ChatTemplate, render
from jaxrl_llm.pretrained.tool_calls import FORMS, HERMES, find_calls, form_of, shows_tools
from tests.pretrained.chats import REPLIES, SOURCES

XML, BARE = FORMS[1:]
TYPES = {
  "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"}, "flag": {"type": "boolean"},
  "items": {"type": "array"}, "map": {"type": "object"}, "maybe": {"type": ["integer", "null"]}, "any": {"$ref": "#/x"},
  "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": TYPES}}}]


def arguments(text, form, tools=TOOLS):
  return [json.loads(call.arguments) for _, call in find_calls(text, tools, form)]


def xml(**values):
  parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
  return f"<tool_call>\n<function=add>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize("family", SOURCES)
def test_forms_of_published_templates(family):
  template = ChatTemplate(SOURCES[family][0], family, {"bos_token": "<s>"})
  expected = {"llama3": BARE, "qwen2.5": HERMES, "qwen3": HERMES, "qwen3.5": XML, "smollm2": None}[family]
  assert (form_of(template), shows_tools(template)) == (expected, family != "smollm2")


def write_calls(call):
  return ChatTemplate(
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<u>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% set c = call.function %}" + call + "{% endfor %}</u>\n{% endfor %}", "f", {},
  )  # fmt: skip


@pytest.mark.parametrize(
  ("call", "text"),
  [
    ("[CALL]{{ c.name }}[ARGS]{{ c.arguments | tojson }}", '[CALL]add[ARGS]{"count": 1, "text": "x"}'),
    ("<function={{ c.name }}>{{ c.arguments | tojson }}</function>", 'So: <function=add>{"count": 1, "text": "x"}</function>'),
    ("[CALLS][{{ c | tojson }}]", '[CALLS][{"name": "add", "arguments": {"count": 1, "text": "x"}}]'),
    ("{{ call | tojson }}", '{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"count": 1, "text": "x"}}}'),
    ("{{ {'tool': c.name, 'with': c.arguments} | tojson }}", '{"tool": "add", "with": {"count": 1, "text": "x"}}'),
    (
      "<c>{{ c.name }}\n{% for k, v in c.arguments.items() %}<k>{{ k }}</k>\n<v>{{ v if v is string else v | tojson }}</v>\n"
      "{% endfor %}</c>",
      "<c>add\n<k>count</k>\n<v>1</v>\n<k>text</k>\n<v>x</v>\n</c>",
    ),
  ],
)
def test_forms_that_other_templates_write(call, text):
  form = form_of(write_calls(call))
  assert arguments(text, form) == [{"count": 1, "text": "x"}]
  assert arguments(text.replace("add", "sub"), form) == []


@pytest.mark.parametrize("call", ["", "{{ c.name }}", "<c>{{ c.name }} {{ c.arguments | length }}</c>", "{{ c.name }}({{ c.arguments }})"])
def test_forms_that_do_not_come_back_are_not_used(call):
  assert shows_tools(write_calls(call)) and form_of(write_calls(call)) is None


def test_values_have_the_types_of_the_schema():
  code = "def f():\n    return '<b> & \"c\"'\n"
  values = dict(text="7", count=" 7 ", share="0.5", flag="True", items='[1, "a"]', map="{'a': None}")
  values |= dict(maybe="null", any="[1]", either="7", other="7")
  expected = {"text": "7", "count": 7, "share": 0.5, "flag": True, "items": [1, "a"], "map": {"a": None}, "maybe": None, "any": [1]}
  assert arguments(xml(**values), XML) == [expected | {"either": "7", "other": "7"}]
  assert arguments(xml(text=code, flag="false", count="seven", any="word"), XML) == [
    {"text": code, "flag": False, "count": "seven", "any": "word"}
  ]
  assert arguments(xml(), XML) == [{}] and arguments(xml() + "\n" + xml(count="2"), XML) == [{}, {"count": 2}]
  assert arguments(xml(text="").replace("\n", ""), XML) == [{"text": ""}]


@pytest.mark.parametrize(
  ("text", "form", "expected"),
  [
    ('<tool_call>{"name": "add", "arguments": "{\\"count\\": 1}"}</tool_call>', HERMES, [{"count": 1}]),
    ('<tool_call>{"name": "add", "arguments": {"text": "</tool_call> }"}}</tool_call>', HERMES, [{"text": "</tool_call> }"}]),
    ('<tool_call>{"name": "add", "parameters": {"count": 1}}</tool_call>', HERMES, [{"count": 1}]),
    ('<tool_call>{"name": "add", "arguments": null}</tool_call><tool_call>{"name": "add"}</tool_call>', HERMES, [{}, {}]),
    ('<think><tool_call>{"name": "add"}</tool_call></think> No.', HERMES, []),
    ('<think>Yes.</think><tool_call>{"name": "add"}</tool_call>', HERMES, [{}]),
    ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', HERMES, []),
    ('<tool_call>{"name": "add", "arguments": "x"}</tool_call>', HERMES, []),
    ('<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', HERMES, []),
    ('<tool_call>{"name": "add", "arguments": {}}', HERMES, []),
    ("<tool_call>[]</tool_call><tool_call>7</tool_call><tool_call>", HERMES, []),
    ('<|python_tag|>{"name": "add", "parameters": {"count": 1}}; {"name": "add", "parameters": {}}', BARE, [{"count": 1}, {}]),
    ('It is {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}, or {"name": "add"}.', BARE, []),
    ('{"answer": {"name": "add", "parameters": {}}} {{{"name"', BARE, []),
    ('<tool_call><function=add><parameter=count>1</parameter>', XML, []),
  ],
)  # fmt: skip
def test_what_is_a_call(text, form, expected):
  assert arguments(text, form) == expected


def test_hostile_texts_and_schemas_are_read():
  for depth in (50, 500, 995, 5000):
    deep = '{"name": "add", "arguments": {"items": ' + "[" * depth + "]" * depth + "}}"
    assert len(find_calls(f"<tool_call>{deep}</tool_call>", TOOLS, HERMES)) <= 1
  for form in FORMS:
    for text in ("{" * 20_000, "<tool_call>" * 2000, "<tool_call><function=add><parameter=" * 500, '{"a":' * 3000):
      assert find_calls(text, TOOLS, form) == []
  for schema in (None, [], "x", {"properties": []}, {"properties": {"count": 7}}, {"properties": {"count": {"type": 7}}}):
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    assert len(arguments(xml(count="1"), XML, tools)) == 1


@pytest.mark.parametrize("family", [family for family in SOURCES if family != "smollm2"])
def test_a_hundred_planted_calls_come_back(family):
  """Written by the published template, with texts that are hard to quote, between other words."""
  rng, names = np.random.default_rng(0), ("add", "add_all", "find-it")
  tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": TYPES}}} for name in names]
  template = ChatTemplate(SOURCES[family][0], family, {"bos_token": "<s>", "tools": tools})
  form, asked = form_of(template), {"role": "user", "content": "What is it?"}
  hard = [*REPLIES, "</tool_call>", "</parameter>\n</function>", '{"name": "add"}', "\\", "\t", "}}", "a\r\nb", "7", "null", "1e3"]
  values = {
    "text": lambda: "".join(hard[i] for i in rng.integers(len(hard), size=rng.integers(1, 3))),
    "count": lambda: int(rng.integers(-(10**9), 10**9)),
    "share": lambda: float(rng.normal()), "flag": lambda: bool(rng.integers(2)), "items": lambda: [1, "a]", [None, {"b": True}]],
    "map": lambda: {"a b": "}", "c": [1.5, {}]},
  }  # fmt: skip
  start = len(render(template, [asked], add_generation_prompt=False))
  returned = 0
  for i in range(100):
    wanted = names[i % 3], {name: draw() for name, draw in values.items() if rng.integers(3)}
    call = {"id": "call00000", "type": "function", "function": {"name": wanted[0], "arguments": wanted[1]}}
    written = render(template, [asked, {"role": "assistant", "content": "", "tool_calls": [call]}], add_generation_prompt=False)[start:]
    returned += [(call.name, json.loads(call.arguments)) for _, call in find_calls(written, tools, form)] == [wanted]
  assert returned == 100
