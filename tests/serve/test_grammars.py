"""Answers in JSON and forced calls of tools, through HTTP with a model of random weights."""

import importlib.util
import json
from types import SimpleNamespace

import jax
import jsonschema
import pytest

from jaxrl_llm.decoding.engine.make import make_engine
from jaxrl_llm.decoding.engine.requests import EngineLimits, GrammarError
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.pretrained.chat_template import ChatTemplate
from jaxrl_llm.serve import grammars, server
from tests.serve.fake_engine import CHAT, COMPLETION, ChatBytes, FakeEngine, ask, events_of, serving

HI = [{"role": "user", "content": "hi"}]
LONG = EngineLimits(context=4096, requests=64)
SCHEMAS = {
  "record": {
    "type": "object",
    "properties": {
      "name": {"type": "string", "maxLength": 12},
      "age": {"type": "integer", "minimum": 0, "maximum": 150},
      "kind": {"enum": ["cat", "dog", 'a "quoted"\n one', None]},
      "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-f]{1,5}$"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
  },
  "tree": {
    "$ref": "#/$defs/node",
    "$defs": {
      "node": {
        "type": "object",
        "properties": {"é": {"type": ["boolean", "null"]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["é", "next"],
        "additionalProperties": False,
      }
    },
  },
  "choice": {
    "oneOf": [
      {"type": "array", "prefixItems": [{"const": 1}, {"type": "number", "minimum": -2, "maximum": 2.5}], "items": False, "minItems": 2},
      {"type": "string", "format": "date"},
      {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 700},
    ]
  },
}
TOOLS = [
  {"type": "function", "function": {"name": "add", "parameters": {
    "properties": {"a": {"$ref": "#/$defs/number"}, "b": {"enum": ["</tool>", "é"]}}, "required": ["a", "b"], "additionalProperties": False,
    "$defs": {"number": {"type": "integer", "minimum": -99, "maximum": 99}}}}},
  {"type": "function", "function": {"name": "stop-it"}},
]  # fmt: skip
START = "{{ tools | tojson if tools else '' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
START += "{% for call in m.tool_calls or [] %}{% set c = call.function %}"
FORMS = {
  "hermes": "<tool_call>\n{{ {'name': c.name, 'arguments': c.arguments} | tojson }}\n</tool_call>",
  "llama": "{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' + c.arguments | tojson + '}' }}",
  "list": "[TOOL_CALLS] [{{ {'name': c.name, 'arguments': c.arguments, 'id': call.id} | tojson }}]",
  "named": "<call id={{ call.id }} {{ c.name }}>{{ c.arguments | tojson }}</call>",
  "plain": None,
}


def tokenizer_of(form):
  """Returns the byte tokenizer with a template that writes calls in a form."""

  class Tools(ChatBytes):
    if FORMS[form] is not None:
      chat_template = ChatTemplate(START + FORMS[form] + "{% endfor %};{% endfor %}<assistant>", form, {})

  return Tools()


@pytest.fixture(scope="module")
def service_of():
  """Returns a function from a tokenizer to a service, all of them of one engine."""
  pytest.importorskip("llguidance")
  model = make_model(preset("nano", vocab_size=320))
  options = dict(slots=16, context=1024, max_requests=256, likeliest=2, tokenizer=ChatBytes())
  engine = make_engine(model, model.init(jax.random.key(0)), **options)
  services = []

  def start(tokenizer):
    services.append(server.start(engine, tokenizer, name="toy", vocab_size=320))
    return services[-1]

  yield start
  for service in services:
    service.close()
  engine.close()


@pytest.fixture(scope="module")
def service(service_of):
  return service_of(ChatBytes())


def check(answers, schema=None):
  """Checks answers that have ended, and returns how many have."""
  ended = [answer for answer, reason in answers if reason == "stop"]
  for answer in ended:
    value = json.loads(answer)
    if schema is not None:
      jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
  return len(ended)


def chats(service, count, **value):
  choices = ask(service, CHAT, {"messages": HI, "n": count, **value}, timeout=200)[2]["choices"]
  return [(choice["message"]["content"], choice["finish_reason"]) for choice in choices]


def of_schema(name):
  return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": SCHEMAS[name]}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_obey_the_schema(service, name):
  answers = chats(service, 10, response_format=of_schema(name), temperature=20, seed=3)
  assert check(answers, SCHEMAS[name]) == 10 and len(set(answers)) > 1


def test_an_object_is_an_object(service):
  answers = chats(service, 10, response_format={"type": "json_object"}, temperature=1, seed=1, max_tokens=200)
  assert {reason for _, reason in answers} == {"stop", "length"}
  check(answers, {"type": "object"})
  value = {"prompt": "hi", "response_format": {"type": "json_object"}, "max_tokens": 3, "seed": 1}
  choice = ask(service, COMPLETION, value)[2]["choices"][0]
  assert choice["finish_reason"] == "length" and choice["text"].startswith("{")


def test_answers_depend_on_the_seed_and_other_calls_do_not_change(service):
  asked = {"response_format": of_schema("record"), "temperature": 5, "seed": 7}
  free = {"temperature": 1, "seed": 7, "max_tokens": 30}
  assert chats(service, 3, **asked) == chats(service, 3, **asked) != chats(service, 3, **{**asked, "seed": 8})
  assert chats(service, 3, **free) == chats(service, 3, **free, response_format={"type": "text"})


def test_stops_of_the_client_end_an_answer_before_its_grammar_does(service):
  """As agents ask for by default, such as those of smolagents beside a forced call."""
  asked = {"messages": HI, "response_format": of_schema("record"), "temperature": 5, "seed": 7}
  (whole,) = ask(service, CHAT, asked)[2]["choices"]
  text = whole["message"]["content"]
  (cut,) = ask(service, CHAT, {**asked, "stop": [":"]})[2]["choices"]
  assert whole["stop_reason"] is None and cut["message"]["content"] == text[: text.index(":")]
  assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", ":")
  (cut,) = ask(service, CHAT, {**asked, "stop_token_ids": [ord(":")]})[2]["choices"]
  assert cut["message"]["content"].startswith(text[: text.index(":")]) and cut["stop_reason"] == ord(":")
  calling = {"messages": HI, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 20, "seed": 3}
  answers = [ask(service, CHAT, calling | stops)[2]["choices"][0] for stops in ({}, {"stop": ["Observation:", "Calling tools:"]})]
  calls = [[call["function"] for call in choice["message"]["tool_calls"]] for choice in answers]
  assert calls[0] == calls[1] and len(calls[0]) == 1


@pytest.mark.parametrize("greedy", [False, True])
def test_a_stream_has_the_text_and_the_numbers_of_the_whole_answer(service, greedy):
  asked = {"messages": HI, "response_format": of_schema("record"), "temperature": 0 if greedy else 9, "seed": 2, "logprobs": True, "n": 2}
  asked |= {"max_tokens": 60}
  whole = ask(service, CHAT, asked)[2]["choices"]
  events = [choice for event in events_of(ask(service, CHAT, {**asked, "stream": True})[2]) for choice in event["choices"]]
  for choice in whole:
    own = [event for event in events if event["index"] == choice["index"]]
    assert "".join(event["delta"].get("content") or "" for event in own) == choice["message"]["content"]
    assert own[-1]["finish_reason"] == choice["finish_reason"]
    logprobs = [x for event in own if event["logprobs"] for x in event["logprobs"]["content"]]
    assert logprobs == choice["logprobs"]["content"] and len(own) > 3
    assert all(x["logprob"] < 0 for x in logprobs) if greedy else {x["logprob"] == 0 for x in logprobs} == {True, False}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("choice", ["required", "stop-it"])
def test_forced_calls_in_the_form_of_the_template(service_of, form, choice):
  service, forced = service_of(tokenizer_of(form)), choice if choice == "required" else {"type": "function", "function": {"name": choice}}
  value = {"messages": HI, "tools": TOOLS, "tool_choice": forced, "temperature": 3, "seed": 1, "n": 8, "parallel_tool_calls": False}
  answer = ask(service, CHAT, value, timeout=200)[2]["choices"]
  names = set()
  for own in answer:
    assert own["finish_reason"] == "tool_calls" and own["message"]["content"] is None
    (call,) = own["message"]["tool_calls"]
    names.add(call["function"]["name"])
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "add":
      jsonschema.validate(arguments, TOOLS[0]["function"]["parameters"])
    else:
      assert arguments == {}
  assert names == ({"add", "stop-it"} if choice == "required" else {"stop-it"})
  streamed = events_of(ask(service, CHAT, {**value, "n": 1, "stream": True})[2])[-1]["choices"][0]
  assert streamed["delta"]["tool_calls"][0]["function"] == answer[0]["message"]["tool_calls"][0]["function"]
  several = ask(service, CHAT, {**value, "n": 12, "parallel_tool_calls": True}, timeout=200)[2]["choices"]
  counts = [len(own["message"]["tool_calls"]) for own in several if own["finish_reason"] != "length"]
  assert max(counts) > 1 if choice == "required" else set(counts) == {1}


def test_calls_that_are_not_json_are_not_forced():
  class Tags(ChatBytes):
    chat_template = ChatTemplate(
      START + "<call>{{ '\n<f=' + c.name + '>' }}{% for k, v in c.arguments | items %}{{ '\n<a=' + k + '>\n' + "
      "(v if v is string else v | tojson) + '\n</a>' }}{% endfor %}{{ '\n</f>' }}</call>{% endfor %};{% endfor %}<assistant>", "tags", {},
    )  # fmt: skip

  pytest.importorskip("llguidance")
  with serving(FakeEngine(limits=LONG), tokenizer=Tags()) as service:
    assert ask(service, CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": "auto"})[0] == 200
    status, _, answer = ask(service, CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": "required"})
    assert status == 400 and "only calls in JSON are forced" in answer["error"]["message"]


SCHEMA = "response_format.json_schema.schema"


def schema(value):
  return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}


BAD = [
  ({"response_format": "json"}, "response_format", "json_schema"),
  ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "unknown field"),
  ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object"),
  (schema(None), SCHEMA, "a JSON schema"),
  (schema([]), SCHEMA, "a JSON schema"),
  (schema({"type": "strng"}), SCHEMA, "strng"),
  (schema({"type": "array", "uniqueItems": True}), SCHEMA, "uniqueItems"),
  (schema({"not": {}, "x-guidance": {"lenient": True}}), SCHEMA, "not"),
  (schema({"type": "string", "pattern": "(?=a)\n("}), SCHEMA, "cannot obey"),
  (schema({"$ref": "http://127.0.0.1/schema"}), SCHEMA, "cannot obey"),
  (schema({"enum": ["\ud800"]}), SCHEMA, "cannot obey"),
  (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}), SCHEMA, "nothing can follow"),
  ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "response_format"),
  ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens", "response_format"),
  ({"response_format": {"type": "json_object"}, "tools": TOOLS}, "response_format", "text with tools"),
  ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "tool_choice"),
  ({"tools": TOOLS, "tool_choice": "add"}, "tool_choice", '"required"'),
  ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "ad"}}}, "tool_choice.function.name", "did you mean 'add'"),
  ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "NAME"),
  ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}], "tool_choice": "required"},
   "tools[0].function.parameters.type", "'object'"),
  ({"tools": [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": {"if": {}}}}], "tool_choice": "required"},
   "tools[2].function.parameters", "if"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "field", "words"), BAD)
def test_what_cannot_be_obeyed_is_refused_in_one_line(service, value, field, words):
  status, _, answer = ask(service, CHAT, {"messages": HI, **value})
  assert status == 400 and answer["error"]["param"] == field
  message = answer["error"]["message"]
  assert message.startswith(f"{field}: ") and words in message and "\n" not in message and len(message) < 500


@pytest.mark.parametrize("value", [{"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}])
def test_without_the_package_the_message_names_the_extra(value, monkeypatch):
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "llguidance" else find_spec(name, *args))
  with serving(FakeEngine(limits=LONG)) as service:
    status, _, answer = ask(service, CHAT, {"messages": HI, **value})
    assert status == 400 and "pip install 'jaxrl-llm[grammar]'" in answer["error"]["message"]
    assert ask(service, CHAT, {"messages": HI, "response_format": {"type": "text"}})[0] == 200


def test_a_grammar_that_fails_is_a_refusal_of_its_call():
  engine = FakeEngine()
  with serving(engine) as service:
    engine.fail(None)
    submit = engine.submit

    def failing(request, on_piece=None):
      handle = submit(request, on_piece)
      failed = type(handle.completion)()
      failed.set_exception(GrammarError("grammar: too complex"))
      return handle._replace(completion=failed)

    engine.submit = failing
    status, _, answer = ask(service, CHAT, {"messages": HI})
    assert (status, answer["error"]["message"]) == (400, "grammar: too complex")
    assert ask(service, "/health")[0] == 200


def test_a_matcher_that_fails_allows_nothing():
  """Else its stop tokens would end an answer that is not whole."""
  pytest.importorskip("llguidance")
  grammar = grammars.read_format({"response_format": {"type": "json_object"}}, ChatBytes(), 264)
  first, second = grammar.begin(), grammar.begin()
  first.advance(ord("{"))
  with pytest.raises(GrammarError, match="^grammar: nothing can follow"):
    first.advance(ord("x"))
  with pytest.raises(GrammarError):
    first.mask()
  assert second.mask().tolist() == [0, 0, 0, 1 << (ord("{") - 96), 0, 0, 0, 0, 0]


def test_tokens_without_bytes_of_their_own_are_refused():
  pytest.importorskip("llguidance")

  class Pieces(ChatBytes):
    def token_bytes(self):
      raise ValueError("rollout.stop_strings: no")

  with serving(tokenizer=Pieces()) as service:
    status, _, answer = ask(service, CHAT, {"messages": HI, "response_format": {"type": "json_object"}})
    assert status == 400 and "depend on their neighbours" in answer["error"]["message"]
    assert SimpleNamespace(**answer["error"]).param == "response_format"
