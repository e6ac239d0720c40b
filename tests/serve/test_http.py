"""The routes of the service: formats, streams, and refusals of what a client asks."""

import json
import threading

import pytest

from jaxrl_llm.decoding.engine.requests import Decoded, EngineLimits, Request
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.chat_template import ChatTemplate
from jaxrl_llm.serve import shell
from tests.runs import wait_for
from tests.serve.fake_engine import CHAT, COMPLETION, EOS, GENERATE, ChatBytes, FakeEngine, ask, events_of, serving

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine():
  return FakeEngine("hello, wörld")


@pytest.fixture(scope="module")
def service(engine):
  with serving(engine) as service:
    yield service


def error(service, path, value=None, **options):
  """Returns status, message and field of a refusal."""
  status, _, answer = ask(service, path, value, **options)
  assert set(answer["error"]) == {"message", "type", "param", "code"} and "\n" not in answer["error"]["message"]
  return status, answer["error"]["message"], answer["error"]["param"]


def test_models_and_health(service):
  status, _, answer = ask(service, "/v1/models")
  (card,) = answer["data"]
  assert status == 200 and (card["id"], card["object"], card["max_model_len"], card["has_chat_template"]) == ("toy", "model", 256, True)
  assert ask(service, "/health")[2]["status"] == "ok"


def test_token_ids_in_and_out(service, engine):
  """The wire of verifiers' and renderers' training clients."""
  sampling = {"stop_token_ids": [44], "logprobs": 1, "skip_special_tokens": False, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9}
  value = {"model": "toy", "token_ids": [1, 2, 3], "sampling_params": {**sampling, "seed": 2**64 - 1, "top_k": -1}}
  value |= {"cache_salt": "v1", "priority": 0}
  status, _, answer = ask(service, GENERATE, value)
  (choice,) = answer["choices"]
  ids = list(b"hello,")
  assert status == 200 and answer["request_id"]
  assert choice["token_ids"] == ids and choice["finish_reason"] == "stop"
  assert choice["logprobs"]["content"] == [{"token": f"token_id:{x}", "logprob": -(i + 1) / 8} for i, x in enumerate(ids)]
  request = engine.requests[-1]
  asked = dict(tokens=[1, 2, 3], max_tokens=9, temperature=0.5, top_k=0, top_p=0.9, stop_ids=(EOS, 44), stops=(), seed=2**64 - 1, salt="v1")
  assert request == Request(**asked)


def test_without_a_budget_the_context_is_filled(service, engine):
  ask(service, GENERATE, {"token_ids": [1, 2, 3]})
  ask(service, CHAT, {"messages": HI})
  ask(service, COMPLETION, {"prompt": "hi"})
  assert [request.max_tokens for request in engine.requests[-3:]] == [253, 256 - len("<user>hi<assistant>"), 16]


def test_seeds_differ_by_call_and_by_choice(service, engine):
  for seed in (None, None, 5, 5, 0):
    ask(service, COMPLETION, {"prompt": "hi", "n": 3, "seed": seed})
  seeds = [tuple(request.seed for request in engine.requests[-15:][3 * i : 3 * i + 3]) for i in range(5)]
  assert seeds[2] == seeds[3] and seeds[2][0] == 5 and seeds[4][0] == 0
  assert len({seed for group in (seeds[0], seeds[1], seeds[2], seeds[4]) for seed in group}) == 12


def test_a_chat(service, engine):
  messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hé"}]}]
  value = {"messages": messages, "max_completion_tokens": 50, "logprobs": True, "return_token_ids": True, "n": 2, "user": "x"}
  status, _, answer = ask(service, CHAT, value)
  assert status == 200 and answer["object"] == "chat.completion" and answer["model"] == "toy"
  assert answer["prompt_token_ids"] == engine.requests[-1].tokens == list("<system>be brief<user>hé<assistant>".encode())
  for i, choice in enumerate(answer["choices"]):
    assert choice["index"] == i and choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "hello, wörld"}
    assert choice["token_ids"] == [*"hello, wörld".encode(), EOS]
    content = choice["logprobs"]["content"]
    assert [x["bytes"] for x in content[:-1]] == [[byte] for byte in "hello, wörld".encode()] and content[0]["token"] == "h"
    assert [x["logprob"] for x in content] == [-(i + 1) / 8 for i in range(14)]
  prompt = len(answer["prompt_token_ids"])
  assert answer["usage"] == {
    "prompt_tokens": prompt, "completion_tokens": 28, "total_tokens": prompt + 28, "prompt_tokens_details": {"cached_tokens": 0},
  }  # fmt: skip


def test_options_reach_the_template(service, engine):
  ask(service, CHAT, {"messages": HI, "chat_template_kwargs": {"shout": True}})
  assert bytes(engine.requests[-1].tokens) == b"<user>hi!<assistant>"


def test_a_clients_option_replaces_that_of_the_checkpoint():
  engine = FakeEngine("x")

  class Loud(ChatBytes):
    chat_template = ChatBytes.chat_template._replace(variables={"shout": True})

  with serving(engine, tokenizer=Loud()) as service:
    for options, end in ((None, b"hi!"), ({"shout": False, "others": 1}, b"hi")):
      ask(service, CHAT, {"messages": HI, "chat_template_kwargs": options})
      assert bytes(engine.requests[-1].tokens) == b"<user>" + end + b"<assistant>"


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]
CALLED = {  # What the policy writes, and the message, by the form of the template.
  '{"name": "add", "parameters": {"a": 1}}': "{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' + c.arguments | tojson + '}' }}",
  'Hm.<call>\n<f=add>\n<a=a>\n1\n</a>\n</f></call>': (
    "<call>{{ '\n<f=' + c.name + '>' }}{% for k, v in c.arguments | items %}"
    "{{ '\n<a=' + k + '>\n' + (v if v is string else v | tojson) + '\n</a>' }}"
    "{% endfor %}{{ '\n</f>' }}</call>"
  ),
}


@pytest.mark.parametrize("text", CALLED)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_in_the_form_of_the_template(text, stream):
  class Tools(ChatBytes):
    chat_template = ChatTemplate(
      "{{ tools | tojson if tools else '' }}{% for m in messages %}<{{ m.role }}>"
      "{{ m.content | tojson if m.role == 'tool' else m.content }}"
      "{% for call in m.tool_calls or [] %}{% set c = call.function %}" + CALLED[text] + "{% endfor %};{% endfor %}<assistant>",
      "example", {},
    )  # fmt: skip

  engine = FakeEngine(text, limits=EngineLimits(context=4096, requests=64))
  with serving(engine, tokenizer=Tools()) as service:
    request = {"messages": HI, "tools": TOOLS, "stream": stream}
    if stream:
      choices = [choice for event in events_of(ask(service, CHAT, request)[2]) for choice in event["choices"]]
      assert not any(choice["delta"].get("content") for choice in choices[:-1])
      message, reason = choices[-1]["delta"], choices[-1]["finish_reason"]
      assert message["tool_calls"][0].pop("index") == 0
    else:
      choice = ask(service, CHAT, request)[2]["choices"][0]
      message, reason = choice["message"], choice["finish_reason"]
    (call,) = message["tool_calls"]
    assert (message["content"], reason) == ("Hm." if text.startswith("Hm") else None, "tool_calls")
    assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": '{"a": 1}'})
    history = [*HI, {"role": "assistant", **message}, {"role": "tool", "tool_call_id": call["id"], "content": 'say "2"\n'}]
    ask(service, CHAT, {"messages": history, "tools": TOOLS})
    prompt = bytes(engine.requests[-1].tokens).decode()
    assert prompt.startswith('[{"type": "function"') and prompt.endswith(f'<user>hi;<assistant>{text};<tool>"say \\"2\\"\\n";<assistant>')
    answer = ask(service, CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": "none"})[2]["choices"][0]
    assert answer["message"] == {"role": "assistant", "content": text} and answer["finish_reason"] == "stop"
    assert bytes(engine.requests[-1].tokens).decode() == "<user>hi;<assistant>"


def test_completions_of_several_prompts(service, engine):
  value = {"prompt": ["a", [98, 99]], "n": 2, "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True, "max_tokens": 2}
  status, _, answer = ask(service, COMPLETION, value)
  assert status == 200 and answer["object"] == "text_completion" and answer["usage"]["prompt_tokens"] == 4
  assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[257, 97], [257, 97], [98, 99], [98, 99]]
  assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
  for choice in answer["choices"]:
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("he", [104, 101], "length")
    assert choice["logprobs"]["tokens"] == ["token_id:104", "token_id:101"]
    assert choice["logprobs"]["token_logprobs"] == [-0.125, -0.25]


def test_a_prompt_of_a_checkpoint_without_template_begins_as_in_training(engine):
  with serving(FakeEngine("x"), tokenizer=ByteTokenizer()) as service:
    value = {"prompt": "hi", "return_token_ids": True}
    assert ask(service, COMPLETION, value)[2]["choices"][0]["prompt_token_ids"] == ByteTokenizer().encode_prompt("hi")
    status, message, _ = error(service, CHAT, {"messages": HI})
    assert status == 400 and "no chat template" in message and "/v1/completions" in message
    assert ask(service, "/v1/models")[2]["data"][0]["has_chat_template"] is False


def joined(events, index=0):
  """Joins the chunks of one choice."""
  choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
  text = "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)
  ids = [token for choice in choices for token in choice.get("token_ids", [])]
  reasons = [choice["finish_reason"] for choice in choices]
  assert set(reasons[:-1]) <= {None}
  return text, ids, reasons[-1], choices


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("stop", [None, "wö", ["xyz", "o, w"]])
def test_a_stream_equals_the_whole_answer(path, stop):
  with serving(FakeEngine("hello, wörld", delay=0.002)) as service:
    value = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    value |= {"stop": stop, "max_tokens": 60, "return_token_ids": True, "n": 2}
    value |= {"logprobs": True, "top_logprobs": 3} if path == CHAT else {"logprobs": 3}
    _, _, whole = ask(service, path, value)
    status, headers, text = ask(service, path, {**value, "stream": True, "stream_options": {"include_usage": True}})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    *events, last = events_of(text)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert {event["id"] for event in events} == {last["id"]}
    for i, choice in enumerate(whole["choices"]):
      expected = choice["message"]["content"] if path == CHAT else choice["text"]
      text, ids, reason, chunks = joined(events, i)
      assert text == expected == {None: "hello, wörld", "wö": "hello, "}.get(stop if stop is None else str(stop), "hell")
      assert (ids, reason) == (choice["token_ids"], choice["finish_reason"]) and len(chunks) > 2
      numbers = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
      if path == CHAT:
        assert [x for part in numbers for x in part["content"]] == choice["logprobs"]["content"]
        assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
        assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
      else:
        for name in ("tokens", "token_logprobs", "top_logprobs"):
          assert [x for part in numbers for x in part[name]] == choice["logprobs"][name]
        assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [choice["prompt_token_ids"]]


def test_the_stop_token_is_an_id_and_no_text(service):
  value = {"prompt": "hi", "return_token_ids": True, "stop_token_ids": [101], "skip_special_tokens": False, "max_tokens": 50}
  (choice,) = ask(service, COMPLETION, value)[2]["choices"]
  assert (choice["text"], choice["token_ids"]) == ("h", [104, 101])


def test_ignore_eos_leaves_the_stop_tokens_of_the_checkpoint_out(service, engine):
  ask(service, COMPLETION, {"prompt": "hi", "ignore_eos": True, "stop_token_ids": [1, 1]})
  assert engine.requests[-1].stop_ids == (1,)


REFUSED = [
  (GENERATE, {"token_ids": [1], "sampling_params": {"temprature": 1}}, "sampling_params.temprature", "did you mean 'temperature'"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"min_p": 0.1}}, "sampling_params.min_p", "expected 0 or no such field"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"repetition_penalty": 1.1}}, "sampling_params.repetition_penalty", "not support"),
  (GENERATE, {"token_ids": [1], "sampling_params": []}, "sampling_params", "an object"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"logprobs": 21}}, "sampling_params.logprobs", "from 0 to 20"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"prompt_logprobs": -1}}, "sampling_params.prompt_logprobs", "from 0 to 20"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"prompt_logprobs": False}}, "sampling_params.prompt_logprobs", "from 0 to 20"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"min_tokens": 3, "max_tokens": 2}}, "sampling_params.min_tokens", "at most 2"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"min_tokens": 3, "stop": "x"}}, "sampling_params.min_tokens", "stop ids"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"temperature": True}}, "sampling_params.temperature", "a number"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params.temperature", "a number"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"temperature": 10**400}}, "sampling_params.temperature", "a number"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"top_p": 0}}, "sampling_params.top_p", "above 0"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"top_k": 1.5}}, "sampling_params.top_k", "whole number"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"seed": -1}}, "sampling_params.seed", "whole number"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"n": 65}}, "sampling_params.n", "from 1 to 64"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens", "whole number"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"min_p": False}}, "sampling_params.min_p", "expected 0 or no such field"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"output_kind": 3}}, "sampling_params.output_kind", "not support"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"stop_token_ids": [264]}}, "sampling_params.stop_token_ids[0]", "from 0 to 263"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"stop": [""]}}, "sampling_params.stop", "1 to 128 characters"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"stop": ["a"] * 33}}, "sampling_params.stop", "at most 32 texts"),
  (GENERATE, {"token_ids": [1], "stream": True}, "stream", "the other routes"),
  (GENERATE, {"token_ids": [1], "features": {"a": 1}}, "features", "not support"),
  (GENERATE, {"token_ids": [1], "content_parts": [{"type": "image_url", "url": "file:///etc/passwd"}]}, "content_parts", "not support"),
  (GENERATE, {"token_ids": [1], "cache_salt": "x" * 257}, "cache_salt", "256 characters"),
  (GENERATE, {"token_ids": []}, "token_ids", "a list of token ids"),
  (GENERATE, {"token_ids": "1"}, "token_ids", "a list of token ids"),
  (GENERATE, {}, "token_ids", "a list of token ids"),
  (GENERATE, {"token_ids": [1, -1]}, "token_ids[1]", "from 0 to 263"),
  (GENERATE, {"token_ids": [1, True]}, "token_ids[1]", "from 0 to 263"),
  (GENERATE, {"token_ids": [1, 1.0]}, "token_ids[1]", "from 0 to 263"),
  (GENERATE, {"token_ids": [1] * 256}, "token_ids", "maximum context length is 256"),
  (COMPLETION, {"prompt": "hi", "max_token": 3}, "max_token", "did you mean 'max_tokens'"),
  (COMPLETION, {"prompt": "hi", "x" * 10**5: 3}, None, "unknown field"),
  (COMPLETION, {"prompt": "hi", "best_of": 2}, "best_of", "expected 1"),
  (COMPLETION, {"prompt": "hi", "best_of": True}, "best_of", "expected 1"),
  (COMPLETION, {"prompt": "hi", "use_beam_search": 0}, "use_beam_search", "expected False"),
  (COMPLETION, {"prompt": "hi", "add_special_tokens": False}, "add_special_tokens", "expected True"),
  (COMPLETION, {"prompt": "hi", "prompt_logprobs": False}, "prompt_logprobs", "expected no such field"),
  (CHAT, {"messages": HI, "add_generation_prompt": 1}, "add_generation_prompt", "expected True"),
  (CHAT, {"messages": HI, "add_special_tokens": True}, "add_special_tokens", "expected False"),
  (CHAT, {"messages": HI, "continue_final_message": 0.0}, "continue_final_message", "expected False"),
  (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "a text"),
  (CHAT, {"messages": [{"role": "user", "content": "x", "annotations": [1]}]}, "messages[0].annotations", "not support"),
  (COMPLETION, {"prompt": "hi", "echo": 0}, "echo", "true or false"),
  (COMPLETION, {"prompt": "hi", "echo": True, "stream": True}, "stream", "false with echo"),
  (COMPLETION, {"prompt": "hi", "max_tokens": 0}, "max_tokens", "from 1"),
  (COMPLETION, {"prompt": "hi", "logprobs": 21}, "logprobs", "from 0 to 20"),
  (COMPLETION, {"prompt": "x" * 300}, "prompt", "maximum context length"),
  (COMPLETION, {"prompt": ["x"] * 65}, "prompt", "at most 64"),
  (COMPLETION, {"prompt": ["x"] * 33, "n": 2}, "prompt", "at most 64"),
  (COMPLETION, {"prompt": []}, "prompt", "a list of token ids"),
  (COMPLETION, {"prompt": None}, "prompt", "a text, a list"),
  (COMPLETION, {"prompt": "hi", "stream": "yes"}, "stream", "true or false"),
  (COMPLETION, {"prompt": "hi", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
  (CHAT, {"messages": []}, "messages", "a list of messages"),
  (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "a text"),
  (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "user or assistant"),
  (CHAT, {"messages": ["hi"]}, "messages[0]", "role and content"),
  (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]", "a call"),
  (CHAT, {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
   "messages[0].tool_calls", "another role than assistant"),
  (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools[0].function.name", "a name"),
  (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]},
   "tools[0].function.parameters", "a JSON schema"),
  (CHAT, {"messages": HI, "tool_choice": "required"}, "tools", "one or more, because tool_choice asks for a call"),
  (CHAT, {"messages": HI, "tool_choice": "any"}, "tool_choice", '"required"'),
  (CHAT, {"messages": [{"role": "user", "contents": "x"}]}, "messages[0].contents", "did you mean 'content'"),
  (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
   "messages[0].content[0].type", "no pictures"),
  (CHAT, {"messages": [{"role": "odd", "content": "x"}]}, "messages", "refuses the conversation (no odd roles)"),
  (CHAT, {"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template", "not support"),
  (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", "an option"),
  (CHAT, {"messages": HI, "chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token", "an option"),
  (CHAT, {"messages": HI, "chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs.__class__", "an option"),
  (CHAT, {"messages": HI, "chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs.x", "short text"),
  (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools[0]", "a function"),
  (CHAT, {"messages": HI, "response_format": {"type": "json"}}, "response_format", "json_schema"),
  (GENERATE, {"token_ids": [1], "sampling_params": {"response_format": {"type": "json_object"}}},
   "sampling_params.response_format", "not support"),
  (CHAT, {"messages": HI, "top_logprobs": 3}, "top_logprobs", "without logprobs"),
  (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
  (CHAT, {"messages": HI, "logprobs": 1}, "logprobs", "true or false"),
  (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens", "whole number from 1"),
  (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "maximum context length is 256 tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "field", "words"), REFUSED)
def test_what_would_change_the_result_is_refused(service, engine, path, value, field, words):
  before = len(engine.requests)
  status, message, param = error(service, path, value)
  assert status == 400 and words in message and len(message) < 500
  assert (param == field or field is None) and param is not None
  assert len(engine.requests) == before and "secret" not in message


NEUTRAL = {"presence_penalty": 0.0, "min_p": 0, "repetition_penalty": 1.0, "logit_bias": None, "response_format": {"type": "text"}}


# As published, read in September 2026: fields of vLLM's and OpenAI's requests at their defaults.
SAYS_NOTHING = {
  "unknown": None, "kv_transfer_params": None, "include_reasoning": True, "vllm_xargs": {}, "session_id": "x",
  "prompt_cache_retention": "24h", "verbosity": "medium", "stop": "", "truncate_prompt_tokens": None, "echo": False,
}  # fmt: skip


def test_fields_that_change_nothing_are_taken(service):
  value = {"messages": HI, "tools": [], "tool_choice": "auto", "top_logprobs": 0, "chat_template": None, "store": False}
  assert ask(service, CHAT, {**value, **NEUTRAL, **SAYS_NOTHING, "add_special_tokens": False})[0] == 200
  assert ask(service, COMPLETION, {"prompt": "hi", **NEUTRAL, **SAYS_NOTHING, "add_special_tokens": True})[0] == 200
  assert ask(service, GENERATE, {"token_ids": [1], "sampling_params": {**NEUTRAL, "min_tokens": 0, "detokenize": True}})[0] == 200
  skyrl = {"include_stop_str_in_output": True, "output_kind": 2, "stop": "zz"}
  assert ask(service, GENERATE, {"token_ids": [1], "sampling_params": skyrl})[0] == 200


def test_a_message_comes_back_with_its_empty_fields(service, engine):
  """As `model_dump()` of OpenAI's client writes an answer."""
  empty = dict.fromkeys(("annotations", "audio", "function_call", "refusal", "tool_calls", "reasoning_content", "unknown"))
  messages = [*HI, {"role": "assistant", "content": "hello", **empty}, {"role": "assistant", "content": None, "id": "msg_1"}]
  assert ask(service, CHAT, {"messages": messages})[0] == 200
  assert bytes(engine.requests[-1].tokens) == b"<user>hi<assistant>hello<assistant><assistant>"


def test_a_budget_beyond_the_context_ends_with_it(service, engine):
  ask(service, GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 10**9}})
  ask(service, CHAT, {"messages": HI, "max_completion_tokens": 10**9})
  ask(service, COMPLETION, {"prompt": [1, 2], "max_tokens": 255})
  assert [request.max_tokens for request in engine.requests[-3:]] == [255, 256 - len("<user>hi<assistant>"), 254]


KNOWN_ROLES = "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant', 'tool') %}<{{ m.role }}>{{ m.content | upper }}"
KNOWN_ROLES += "{% endif %}{% endfor %}<assistant>"  # As in the templates of Qwen2.5 and Qwen3.


@pytest.mark.parametrize("source", [KNOWN_ROLES, ChatBytes.chat_template.source.replace("== 'odd'", "not in ('system', 'user')")])
def test_no_message_is_lost_by_its_role(source):
  class Known(ChatBytes):
    chat_template = ChatTemplate(source, "example", {})

  engine = FakeEngine("x")
  with serving(engine, tokenizer=Known()) as service:
    for role in ("developer", "assistnat", "USER"):
      messages = [{"role": role, "content": "never say x"}, *HI]
      status, _, answer = ask(service, CHAT, {"messages": messages})
      if role == "developer":
        assert status == 200 and bytes(engine.requests[-1].tokens).lower() == b"<system>never say x<user>hi<assistant>"
      else:
        assert status == 400 and (source != KNOWN_ROLES or answer["error"]["param"] == "messages[0].role")
    assert len(engine.requests) == 1


def test_a_role_that_the_template_has_stays(service, engine):
  ask(service, CHAT, {"messages": [{"role": "developer", "content": "x"}, *HI]})
  assert bytes(engine.requests[-1].tokens) == b"<developer>x<user>hi<assistant>"


def test_an_answer_has_the_name_of_its_call(service):
  calls = ((GENERATE, {"token_ids": [1]}, ""), (CHAT, {"messages": HI}, "chatcmpl-"), (COMPLETION, {"prompt": "x"}, "cmpl-"))
  for path, value, prefix in calls:
    name = "request_id" if path == GENERATE else "id"
    _, headers, answer = ask(service, path, value)
    assert answer[name] == prefix + headers["x-request-id"] and len(headers["x-request-id"]) == 32
    assert ask(service, path, {**value, "request_id": "mine"})[2][name] == f"{prefix}mine"
    _, headers, answer = ask(service, path, value, headers={"x-request-id": "theirs"})
    assert (answer[name], headers["x-request-id"]) == (f"{prefix}theirs", "theirs")
  for odd in ("", "a b", "x" * 129, "\xe9"):
    status, headers, _ = ask(service, "/v1/none", headers={"x-request-id": odd})
    assert status == 404 and len(headers["x-request-id"]) == 32


@pytest.mark.parametrize(("asked", "count"), [({}, 2), ({"parallel_tool_calls": True}, 2), ({"parallel_tool_calls": False}, 1)])
def test_one_tool_at_a_time_is_the_first(asked, count):
  text = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {i}}}}}</tool_call>' for i in range(2))
  with serving(FakeEngine(text, limits=EngineLimits(context=4096, requests=64))) as service:
    (choice,) = ask(service, CHAT, {"messages": HI, "tools": TOOLS, **asked})[2]["choices"]
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"a": 0}', '{"a": 1}'][:count]


def test_trainers_get_the_drawn_tokens_alone(service, engine):
  """And the engine scores nothing for them, also at temperature 0."""
  for asked in ({"logprobs": 1}, {"logprobs": 0, "temperature": 0}, {"min_tokens": 3}):
    answer = ask(service, GENERATE, {"token_ids": [1], "sampling_params": asked})[2]
    assert engine.requests[-1].likeliest is engine.requests[-1].prompt_likeliest is answer["prompt_logprobs"] is None
    assert not asked.get("logprobs") or set(answer["choices"][0]["logprobs"]["content"][0]) == {"token", "logprob"}
  assert engine.requests[-1].min_tokens == 3


def test_an_engine_without_scores_gives_what_it_has():
  with serving(FakeEngine("hi", limits=EngineLimits(context=256, requests=64))) as service:
    (choice,) = ask(service, COMPLETION, {"prompt": "x", "logprobs": 1, "temperature": 0})[2]["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-1 / 8, -2 / 8, -3 / 8] and choice["logprobs"]["top_logprobs"] is None
    asked = [(COMPLETION, {"prompt": "x", "logprobs": 2}), (COMPLETION, {"prompt": "x", "logprobs": 0, "echo": True})]
    asked += [(CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 1})]
    asked += [(GENERATE, {"token_ids": [1], "sampling_params": {name: n}}) for name, n in (("prompt_logprobs", 0), ("logprobs", 2))]
    for path, value in asked:
      assert error(service, path, value)[0] == 400


def test_tokens_of_texts_and_texts_of_tokens(service):
  """In vLLM's form; what is tokenized is what a completion is drawn after."""
  ids = [257, *"hé".encode()]
  whole = {"count": 4, "max_model_len": 256, "tokens": ids, "token_strs": None}
  assert ask(service, "/tokenize", {"prompt": "hé", "model": "toy"})[2] == whole
  assert ask(service, "/tokenize", {"prompt": "h", "return_token_strs": True})[2]["token_strs"] == ["<257>", "h"]
  chat = ask(service, "/tokenize", {"messages": HI, "add_generation_prompt": True})[2]
  assert chat["tokens"] == ask(service, CHAT, {"messages": HI, "return_token_ids": True})[2]["prompt_token_ids"]
  assert ask(service, "/detokenize", {"tokens": ids[1:]})[2] == {"prompt": "hé"} and ask(service, "/detokenize", {"tokens": []})[0] == 200
  for path, value, field in (
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "x" * 300}, "prompt"), ("/tokenize", {"prompt": "x", "n": 2}, "n"),
    ("/tokenize", {"messages": HI, "add_generation_prompt": False}, "add_generation_prompt"),
    ("/detokenize", {"tokens": [264]}, "tokens[0]"), ("/detokenize", {"tokens": "x"}, "tokens"),
    ("/detokenize", {"tokens": [1], "model": "x"}, "model"),
  ):  # fmt: skip
    status, _, param = error(service, path, value)
    assert (status, param) == (404 if field == "model" else 400, field)


def test_one_model(service):
  assert ask(service, "/v1/models/toy")[2] == ask(service, "/v1/models")[2]["data"][0]
  status, message, _ = error(service, "/v1/models/tay")
  assert status == 404 and "did you mean 'toy'" in message


@pytest.mark.parametrize("path", [GENERATE, CHAT, COMPLETION])
@pytest.mark.parametrize(
  ("asked", "reason"), [({"stop": ["zz", "wö"]}, "wö"), ({"stop_token_ids": [119]}, 119), ({}, None), ({"max_tokens": 3}, None)]
)
def test_what_ended_a_completion(service, path, asked, reason):
  value = {GENERATE: {"token_ids": [1], "sampling_params": asked}, CHAT: {"messages": HI, **asked}}.get(path, {"prompt": "hi", **asked})
  assert ask(service, path, value)[2]["choices"][0]["stop_reason"] == reason
  if path != GENERATE:
    choices = [x for event in events_of(ask(service, path, {**value, "stream": True})[2]) for x in event["choices"]]
    assert choices[-1]["stop_reason"] == reason and not any("stop_reason" in choice for choice in choices[:-1])


def test_an_answer_says_which_weights_drew_it():
  class Two(FakeEngine):
    def _end(self, x, reason):
      with self._changed:
        self.open.remove(x)
      x.future.set_result(Decoded(x.drawn, [-1.0] * len(x.drawn), reason, 0, 1, 4, parts=((4, 2), (7, len(x.drawn) - 2))))

  with serving(Two("hello")) as service:
    asked = {GENERATE: {"token_ids": [1]}, CHAT: {"messages": HI}, COMPLETION: {"prompt": "x"}}
    for path, value in asked.items():
      _, headers, answer = ask(service, path, value)
      assert headers["x-weight-versions"] == "4,7" and answer["choices"][0]["weight_versions"] == [[4, 2], [7, 4]]
    events = events_of(ask(service, COMPLETION, {"prompt": "x", "stream": True})[2])
    assert events[-1]["choices"][0]["weight_versions"] == [[4, 2], [7, 4]]


def test_each_chunk_has_the_numbers_of_tokens_so_far():
  """As guidellm asks for them by default."""
  with serving(FakeEngine("hello", delay=0.01)) as service:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, value in ((CHAT, {"messages": HI}), (COMPLETION, {"prompt": "hi"})):
      *events, last = events_of(ask(service, path, {**value, "stream": True, "stream_options": options})[2])
      counts = [event["usage"]["completion_tokens"] for event in events]
      assert counts == sorted(counts) and counts[0] < counts[-1] == last["usage"]["completion_tokens"] == 6
      # A chat begins with the chunk of the role.
      assert path != CHAT or counts[0] == 0 == len(events[0]["choices"][0]["delta"]["content"])
      prompt = last["usage"]["prompt_tokens"]
      assert all(event["usage"]["total_tokens"] == prompt + n for event, n in zip(events, counts, strict=True))


@pytest.mark.parametrize(("options", "tells"), [({}, True), ({"api_key": "x"}, False), ({"api_key": "x", "tells_cached": True}, True)])
def test_cached_tokens_tell_others_nothing(options, tells):
  with serving(FakeEngine(), **options) as service:
    answer = ask(service, COMPLETION, {"prompt": "hi"}, headers={"authorization": "Bearer x"})[2]
    assert answer["usage"]["prompt_tokens_details"] == ({"cached_tokens": 0} if tells else None)


@pytest.mark.parametrize(
  ("body", "words"),
  [
    (b"", "not JSON"), (b"{", "not JSON"), (b"[1]", "expected an object"), (b"null", "expected an object"),
    (b'{"prompt": "\xff"}', "UnicodeDecodeError"), (b'{"prompt": "a", "temperature": NaN}', "NaN is no number"),
    (b'{"prompt": "a", "temperature": 1e999}', "a number from 0 to 100"), (b"[" * 100_000, "not JSON"),
    (b'{"prompt":' + b"[" * 64 + b"1" + b"]" * 64 + b"}", "nested more than 64 deep"),
    (b'{"prompt":' + b'{"a":[' * 490 + b"1" + b"]}" * 490 + b"}", "nested more than 64 deep"),
    (b'{"prompt":' + b"[" * 63 + b"1" + b"]" * 63 + b"}", "a token id"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not JSON"), (b'\xef\xbb\xbf{"prompt": "a"}', "not JSON"),
  ],
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused(service, body, words):
  status, message, _ = error(service, COMPLETION, body=body)
  assert status == 400 and words in message


def test_a_lone_surrogate_breaks_nothing(service):
  status, _, answer = ask(service, COMPLETION, body=rb'{"prompt": "\ud800", "return_token_ids": true}')
  assert status == 200 and answer["choices"][0]["prompt_token_ids"][-1] == ord("?")
  assert error(service, COMPLETION, body=rb'{"prompt": "a", "\ud800": 1}')[0] == 400
  assert error(service, COMPLETION, body=rb'{"prompt": "a", "model": "\ud800"}')[0] == 404


def test_an_unknown_model_is_not_found(service):
  status, message, field = error(service, GENERATE, {"model": "toyy", "token_ids": [1]})
  assert (status, field) == (404, "model") and "did you mean 'toy'" in message


@pytest.mark.parametrize("path", [GENERATE, CHAT, COMPLETION])
def test_a_body_of_another_type_is_refused(service, path):
  """A page of another site can send text without asking, but not JSON."""
  status, message, _ = error(service, path, body=b"{}", headers={"content-type": "text/plain"})
  assert status == 415 and "application/json" in message


def test_unknown_paths_and_methods(service):
  assert error(service, "/v1/%FF%00", {})[0] == 404
  status, message, _ = error(service, "/v1/completion", {})
  assert status == 404 and "did you mean '/v1/completions'" in message
  assert error(service, "/../../etc/passwd")[0] == 404
  status, headers, _ = ask(service, CHAT)
  assert status == 405 and headers["allow"] == "POST"
  assert ask(service, "/v1/models", {}, method="OPTIONS")[0] == 405
  assert ask(service, "/", method="HEAD")[0] == 200


def test_a_body_that_is_too_large_is_refused(service):
  """The limit is 1 MiB and 16 bytes for each token of context."""
  limit = 2**20 + 16 * 256
  pad = lambda size: json.dumps({"prompt": "hi"}).ljust(size)
  assert ask(service, COMPLETION, body=pad(limit))[0] == 200
  for size in (limit + 1, 3 * limit):
    status, message, _ = error(service, COMPLETION, body=pad(size))
    assert status == 413 and f"{limit:,} bytes" in message


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:1", "localhost:8000", "[::1]:8000", "LOCALHOST"])
def test_own_names_are_served(service, host):
  assert ask(service, "/v1/models", headers={"host": host})[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "localhost@evil.example"])
def test_a_page_of_another_site_cannot_read_an_answer(service, host):
  """Its name may be made to point to this machine; then the browser takes both for one site."""
  for path in ("/", "/v1/models"):
    status, message, _ = error(service, path, headers={"host": host})
    assert status == 403 and "API key" in message


def test_every_call_needs_the_key():
  with serving(api_key="s3cret") as service:
    for path, value in (("/v1/models", None), (GENERATE, {"token_ids": [1]}), (CHAT, {"messages": HI}), ("/v1/none", None)):
      for given in (None, "", "s3cret", "Bearer", "Bearer s3cre", "Bearer s3crett", "bearer s3cre", "Basic s3cret", "Bearer \xe9"):
        status, message, _ = error(service, path, value, headers={} if given is None else {"authorization": given})
        assert status == 401 and ("a wrong API key" if given else "no API key") in message and "s3cret" not in message
      for scheme in ("Bearer", "bearer", "BEARER"):
        assert ask(service, path, value, headers={"authorization": f"{scheme} s3cret"})[0] in (200, 404)
    assert ask(service, "/", headers={"host": "evil.example"})[0] == ask(service, "/health")[0] == 200


def test_keys_are_compared_in_constant_time(monkeypatch):
  compared = []
  monkeypatch.setattr(shell.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
  with serving(api_key="s3cret") as service:
    assert ask(service, "/v1/models", headers={"authorization": "Bearer x"})[0] == 401
  assert compared == [(b"x", b"s3cret")]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_another_host_needs_a_key(host):
  with pytest.raises(ValueError, match="--host: found .* without an API key"), serving(host=host):
    raise AssertionError


def test_a_short_key_opens_no_other_host():
  with pytest.raises(ValueError, match="--api_key: found 15 characters, expected 16 or more"), serving(host="0.0.0.0", api_key="x" * 15):
    raise AssertionError


@pytest.mark.parametrize("key", ["", " x", "é", "a\nb"])
def test_a_key_that_no_header_carries_is_refused(key):
  with pytest.raises(ValueError, match="--api_key"), serving(api_key=key):
    raise AssertionError


def test_a_full_queue_says_when_to_come_back():
  engine = FakeEngine(limits=EngineLimits(context=256, requests=4))
  engine.running.clear()
  with serving(engine) as service:
    handles = [engine.submit(Request([1], 10)) for _ in range(3)]
    status, headers, answer = ask(service, COMPLETION, {"prompt": "hi", "n": 2})
    assert status == 429 and headers["retry-after"] == "1" and answer["error"]["code"] == "rate_limit_exceeded"
    # The choice that had a place has given it back.
    wait_for(lambda: len(engine.open) == 3)
    handles[0].abort()
    wait_for(lambda: len(engine.open) == 2)
    engine.running.set()
    assert ask(service, COMPLETION, {"prompt": "hi", "n": 2})[0] == 200


def test_what_the_engine_refuses_is_the_clients_fault():
  engine = FakeEngine()
  engine.fail(ValueError("stops: found 3, expected at most 2"))
  with serving(engine) as service:
    assert error(service, COMPLETION, {"prompt": "hi"})[:2] == (400, "stops: found 3, expected at most 2")


def test_a_broken_engine_is_unavailable_and_tells_the_log(capfd):
  engine = FakeEngine("hello", delay=0.01)
  with serving(engine) as service:
    engine.running.clear()
    waiting = [Request([1], 10, seed=i) for i in range(2)]
    for request in waiting:
      engine.submit(request)
    engine.fail(RuntimeError("the device at /secret/path is lost"))
    asked = {GENERATE: {"token_ids": [1]}, CHAT: {"messages": HI}, COMPLETION: {"prompt": "x", "stream": True}, "/health": None}
    for path, value in asked.items():
      status, message, _ = error(service, path, value)
      assert status == 503 and "secret" not in message
    engine.error = None
    engine.running.set()
    assert ask(service, COMPLETION, {"prompt": "x"})[0] == ask(service, "/health")[0] == 200
  log = capfd.readouterr().err
  assert log.count("the device at /secret/path is lost") == 1 and log.count("\n") == 1


def test_an_engine_that_breaks_in_a_stream_says_so_in_it():
  engine = FakeEngine("x" * 200, delay=0.01)
  with serving(engine) as service:
    threading.Timer(0.3, lambda: engine.fail(RuntimeError("lost"))).start()
    status, _, text = ask(service, COMPLETION, {"prompt": "hi", "max_tokens": 250, "stream": True})
    *chunks, last = events_of(text)
    assert status == 200 and 1 <= len(chunks) < 200 and last["error"]["code"] == "engine_broken"
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


