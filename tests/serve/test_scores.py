"""Log-probabilities through HTTP against the learner's own, with a small model."""

import json

import jax
import numpy as np
import pytest

from jaxrl_llm.decoding.engine.make import make_engine
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from tests.decoding.engine.engines import VOCAB, built, outputs_of
from tests.serve.fake_engine import CHAT, COMPLETION, GENERATE, ChatBytes, ask, events_of, serving

NAMES = [bytes([i]).decode("utf-8", "replace") if i < 256 else f"<{i}>" for i in range(VOCAB)]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def service():
  model, params, _ = built("dense")
  tokenizer = ChatBytes()
  options = dict(slots=4, context=128, max_requests=64, likeliest=20, tokenizer=tokenizer)
  with serving(make_engine(model, params, **options), tokenizer=tokenizer, vocab_size=VOCAB) as service:
    yield service


def learned(tokens):
  """Returns the learner's log-probabilities of all tokens after each one."""
  return np.asarray(jax.nn.log_softmax(outputs_of("dense", tokens, "logits")))[0, : len(tokens)]


def likelihood_of(choice, start):
  """Reads a choice as lm-evaluation-harness 0.4.13 does (`openai_completions.parse_logprobs`)."""
  logprobs, tops = choice["logprobs"]["token_logprobs"][start:-1], choice["logprobs"]["top_logprobs"][start:-1]
  return sum(logprobs), all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))


def test_the_harness_reads_the_likelihood_of_each_answer(service):
  """Its request for multiple choice and perplexity, several prompts at once, twice."""
  context = list(b"one and two are")
  best = int(np.argmax(learned(context)[-1]))
  prompts = [[*context, *answer] for answer in (b" three", b" 4", b" one", [best])] + [[1, 2]]
  starts = [len(context)] * 4 + [1]
  asked = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "model": "toy"}
  for _ in range(2):
    choices = ask(service, COMPLETION, asked)[2]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4]
    for choice, prompt, start in zip(choices, prompts, starts, strict=True):
      expected = learned(prompt)[start - 1 : -1]
      total, is_greedy = likelihood_of(choice, start)
      assert abs(total - sum(expected[i, token] for i, token in enumerate(prompt[start:]))) < 1e-5
      assert is_greedy == (np.argmax(expected, axis=-1).tolist() == prompt[start:])
  assert likelihood_of(choices[3], len(context))[1] and not likelihood_of(choices[0], len(context))[1]


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_is_the_prompt_and_the_completion(service, max_tokens, n):
  asked = {"prompt": ["abc", "de"], "echo": True, "logprobs": 3, "max_tokens": max_tokens, "n": n, "return_token_ids": True, "seed": 5}
  answer = ask(service, COMPLETION, asked)[2]
  assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])
  assert len(answer["choices"]) == 2 * n
  for choice in answer["choices"]:
    prompt, drawn, numbers = choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]
    text = ["abc", "de"][choice["index"] // n]
    tokens = [*prompt, *drawn]
    assert prompt == [257, *text.encode()] and len(drawn) <= max_tokens and (max_tokens == 0) == (not drawn)
    assert choice["text"].startswith(text) and (max_tokens or choice["text"] == text)
    assert numbers["tokens"] == [NAMES[token] for token in tokens]
    assert numbers["token_logprobs"][0] is numbers["top_logprobs"][0] is None
    expected = learned(tokens)[:-1]
    np.testing.assert_allclose(numbers["token_logprobs"][1:], expected[np.arange(len(tokens) - 1), tokens[1:]], atol=1e-5)
    for top, row in zip(numbers["top_logprobs"][1:], expected, strict=True):
      np.testing.assert_allclose(max(top.values()), row.max(), atol=1e-5)


def test_an_echo_without_log_probabilities_is_text(service):
  (choice,) = ask(service, COMPLETION, {"prompt": "abc", "echo": True, "max_tokens": 2})[2]["choices"]
  assert choice["text"].startswith("abc") and choice["logprobs"] is None


@pytest.mark.parametrize("count", [0, 3])
def test_prompt_log_probabilities_of_the_wire_of_ids(service, count):
  """In vLLM's format: 0 asks for those of the tokens themselves."""
  prompt = list(b"four and five")
  sampling = {"max_tokens": 2, "prompt_logprobs": count, "seed": 1}
  first, *rest = ask(service, GENERATE, {"token_ids": prompt, "sampling_params": sampling})[2]["prompt_logprobs"]
  assert first is None and len(rest) == len(prompt) - 1
  for own, token, expected in zip(rest, prompt[1:], learned(prompt), strict=False):
    ids = np.argsort(-expected, kind="stable")
    assert {int(i) for i in own} == {token, *ids[:count].tolist()}
    for i, score in own.items():
      assert abs(score["logprob"] - expected[int(i)]) < 1e-5 and score["rank"] == 1 + np.sum(expected > expected[int(i)])


@pytest.mark.parametrize("temperature", [0, 1, 0.5])
def test_alternatives_of_drawn_tokens(service, temperature):
  """At temperature 0 of the model itself; otherwise of what is drawn from, with the token's own."""
  settings = {"temperature": temperature, "max_tokens": 6, "seed": 3, "return_token_ids": True}
  asked = {"messages": HI, "logprobs": True, "top_logprobs": 4, **settings}
  answer = ask(service, CHAT, asked)[2]
  (choice,) = answer["choices"]
  tokens = [*answer["prompt_token_ids"], *choice["token_ids"]]
  logits = learned(tokens)[len(answer["prompt_token_ids"]) - 1 : -1].astype(np.float64) / (temperature or 1)
  expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  content = choice["logprobs"]["content"]
  for entry, token, row in zip(content, choice["token_ids"], expected, strict=True):
    assert abs(entry["logprob"] - row[token]) < 1e-5 and entry["logprob"] < -0.01
    ids = np.argsort(-row, kind="stable")[:4]
    assert [top["token"] for top in entry["top_logprobs"]] == [NAMES[i] for i in ids]
    np.testing.assert_allclose([top["logprob"] for top in entry["top_logprobs"]], row[ids], atol=1e-5)
  events = events_of(ask(service, CHAT, {**asked, "stream": True})[2])
  streamed = [x for event in events for part in event["choices"] if part["logprobs"] for x in part["logprobs"]["content"]]
  assert json.dumps(streamed) == json.dumps(content)
  sampling = {**{k: v for k, v in settings.items() if k != "return_token_ids"}, "logprobs": 4}
  (of_ids,) = ask(service, GENERATE, {"token_ids": answer["prompt_token_ids"], "sampling_params": sampling})[2]["choices"]
  assert [x["token"] for x in of_ids["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
  np.testing.assert_allclose([x["logprob"] for x in of_ids["logprobs"]["content"]], [x["logprob"] for x in content], atol=1e-6)
  assert [len(x["top_logprobs"]) for x in of_ids["logprobs"]["content"]] == [4] * len(content)


def test_log_probabilities_at_temperature_0_are_the_models(service):
  """Without alternatives too; on the wire of trainers those of the draw, which is certain."""
  asked = {"prompt": "abc", "temperature": 0, "max_tokens": 5, "logprobs": 0, "return_token_ids": True}
  (choice,) = ask(service, COMPLETION, asked)[2]["choices"]
  tokens = [*choice["prompt_token_ids"], *choice["token_ids"]]
  expected = learned(tokens)[np.arange(3, 8), tokens[4:]]
  np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected, atol=1e-5)
  assert choice["logprobs"]["top_logprobs"] is None and ByteTokenizer().bos_id == 257
  sampling = {"temperature": 0, "max_tokens": 5, "logprobs": 1}
  (drawn,) = ask(service, GENERATE, {"token_ids": choice["prompt_token_ids"], "sampling_params": sampling})[2]["choices"]
  assert [x["logprob"] for x in drawn["logprobs"]["content"]] == [0.0] * 5
