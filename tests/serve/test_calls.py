"""Calls of clients, read without a service."""

import base64
import json

import numpy as np
import pytest

from jaxrl_llm.decoding.engine.requests import Decoded, EngineLimits
from jaxrl_llm.serve import answers, calls, fields
from jaxrl_llm.serve.calls import Served
from jaxrl_llm.serve.exchange import encode
from jaxrl_llm.serve.refusals import Refusal
from tests.serve.fake_engine import ChatBytes


class Counted(ChatBytes):
  """Tokenizer that counts the characters that it encodes."""

  characters = []  # noqa: RUF012

  def encode(self, text, **options):
    self.characters.append(len(text))
    return super().encode(text, **options)


SERVED = Served("toy", Counted(), EngineLimits(context=64, requests=8), 300)


@pytest.mark.parametrize("call", [calls.chat, calls.completion])
def test_of_a_text_that_is_far_too_long_only_the_beginning_is_encoded(call):
  Counted.characters.clear()
  text = "1" * 10**6
  with pytest.raises(Refusal, match="found more than 1,024 tokens; this model's maximum context length is 64"):
    call({"prompt": text} if call is calls.completion else {"messages": [{"role": "user", "content": text}]}, SERVED)
  assert Counted.characters == [16 * 64]


def test_a_text_of_long_tokens_is_read_in_parts_until_it_is_too_long():
  class Wide(Counted):
    def encode(self, text, **options):
      return super().encode(text)[::32]

  Wide.characters.clear()
  with pytest.raises(Refusal, match="found more than 160 tokens"):
    calls.completion({"prompt": " " * 10**6}, SERVED._replace(tokenizer=Wide()))
  assert Wide.characters == [16 * 64] * 5  # 32 tokens each, until there are more than 128.


def test_a_text_of_long_tokens_is_encoded_as_a_whole():
  class Long(Counted):
    def encode(self, text, **options):
      return super().encode(text[::100], **options)

  served = SERVED._replace(tokenizer=Long())
  (prompt,) = calls.completion({"prompt": "x" * 6000, "max_tokens": 1}, served).prompts
  assert prompt == [257, *b"x" * 60]


def test_ids_of_the_model_beyond_the_tokenizer_may_come_back():
  """A policy draws them too, and its next turn begins with what it has drawn."""
  assert calls.generate({"token_ids": [299]}, SERVED).prompts == [[299]]
  with pytest.raises(Refusal, match="from 0 to 299"):
    calls.generate({"token_ids": [300]}, SERVED)


def test_a_budget_fills_what_is_left():
  (request,) = calls.generate({"token_ids": [1] * 63}, SERVED).requests
  assert request.max_tokens == 1
  (request,) = calls.completion({"prompt": [1] * 60}, SERVED).requests
  assert request.max_tokens == 4


ODD = [
  None, True, False, 0, 1, -1, 10**30, -(10**30), 0.5, 1e308, float("inf"), "", "x", "\ud800", "x" * 999, [], [[]], [None], [1], [10**30],
  ["x"], ["x", 1], [["x"]], [{}], {}, {"x": 1}, {"x": None}, {"type": "text"}, {"": []}, [{"role": 1, "content": 1}],
  [{"role": "user", "content": [1]}], [{"role": "user", "content": [{"type": "text", "text": None}]}], [{"role": "x" * 99, "content": "x"}],
  [{"role": "user", "content": "\ud800"}],
]  # fmt: skip
BASES = {
  calls.generate: {"token_ids": [1]},
  calls.completion: {"prompt": "x"},
  calls.chat: {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.mark.parametrize("call", BASES)
def test_no_value_of_any_field_raises_anything_but_a_refusal(call):
  names = {*calls._GENERATE, *calls._CHAT, *calls._COMPLETION, *fields.NEUTRAL, *fields.IGNORED, "x", "", "\ud800"}
  outcomes = set()
  for name in sorted(names):
    for value in ODD[:: 1 if name in calls._CHAT or not name.isidentifier() else 5]:
      inside = [{**BASES[call], name: value}]
      inside += [{**BASES[call], "sampling_params": {name: value}}] if call is calls.generate else []
      for values in inside:
        try:
          made = call(values, SERVED)
        except Refusal as refusal:
          outcomes.add("refused")
          assert refusal.status in (400, 404) and len(refusal.message) < 600 and refusal.message.isprintable()
        else:
          outcomes.add("made")
          for request in made.requests:
            assert 1 <= request.max_tokens <= 64 - len(request.tokens) and 0 < request.top_p <= 1 and request.temperature >= 0
            assert all(type(token) is int and 0 <= token < 300 for token in (*request.tokens, *request.stop_ids))
  assert outcomes == {"refused", "made"}


@pytest.mark.parametrize("start", [0, 2, 9])
def test_routes_are_sent_as_clients_read_them(start):
  """Of the prompt too, from the token on that a client has no routes for."""
  body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "routed_experts_prompt_start": min(start, 3)}}
  call = calls.generate(body, SERVED)
  routes = np.arange(6 * 2 * 3, dtype=np.int16).reshape(6, 2, 3) - 1
  completion = Decoded([1, 2, 3, 4], [0.0] * 4, "length", 0, 6, 0, routes=routes)
  answer = encode(answers.generated(call._replace(routes_from=start), SERVED, [completion], [None]))
  # Clients cut the text out of the answer before they parse it.
  assert answer.count(b'"routed_experts":{"data":"') == 1
  sent = json.loads(answer)["choices"][0]["routed_experts"]
  received = np.frombuffer(base64.b64decode(sent["data"]), sent["dtype"]).reshape(sent["shape"])
  assert sent["start"] == min(start, 6)
  np.testing.assert_array_equal(received, routes[start:])


def test_routes_cannot_start_behind_the_prompt():
  body = {"token_ids": [5, 6, 7], "sampling_params": {"routed_experts_prompt_start": 4}}
  with pytest.raises(Refusal, match="sampling_params.routed_experts_prompt_start: found 4, expected a whole number from 0 to 3"):
    calls.generate(body, SERVED)
