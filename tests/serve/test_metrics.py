"""Numbers of the service for Prometheus, of a fleet of engines."""

import pytest

from jaxrl_llm.decoding.engine import programs as programs_lib
from jaxrl_llm.decoding.engine.fleet import Fleet, make_engines
from jaxrl_llm.decoding.engine.requests import Request
from tests.decoding.engine.engines import VOCAB, WAIT, built
from tests.serve.fake_engine import COMPLETION, ChatBytes, ask, serving


def read(service, **options):
  """Returns the numbers by name and reason, and the types by name."""
  status, headers, text = ask(service, "/metrics", **options)
  assert status == 200 and headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8" and text.endswith("\n")
  numbers, types = {}, {}
  for line in text.splitlines():
    if line.startswith("# TYPE "):
      name, kind = line.removeprefix("# TYPE ").split()
      types[name] = kind
    elif not line.startswith("#"):
      key, value = line.rsplit(" ", 1)
      assert key.count('{model_name="toy"') == 1
      numbers[key.replace('{model_name="toy"}', "").replace('{model_name="toy",finished_reason=', "").replace("}", "")] = float(value)
  return numbers, types


@pytest.fixture
def engine(monkeypatch):
  monkeypatch.setattr(programs_lib, "_WIDTHS", (4, 4))
  model, params, _ = built("dense")
  engine = make_engines(model, params, slots=8, context=64, max_requests=16, num_cores=2)
  assert isinstance(engine, Fleet)
  return engine


def test_the_numbers_are_those_of_all_calls(engine):
  with serving(engine, vocab_size=VOCAB, tokenizer=ChatBytes()) as service:
    numbers, types = read(service)
    assert set(numbers.values()) == {0} and types["vllm:num_requests_running"] == "gauge"
    assert {kind for name, kind in types.items() if name.endswith("_total")} == {"counter"}
    usage = [ask(service, COMPLETION, {"prompt": [1, 2, 3, 4 + i], "max_tokens": 3 + i, "ignore_eos": True})[2]["usage"] for i in range(4)]
    ask(service, COMPLETION, {"prompt": [1, 2, 3, 4], "max_tokens": 5, "stop_token_ids": list(range(64)), "temperature": 5})
    numbers, _ = read(service)
    assert numbers["vllm:prompt_tokens_total"] == sum(own["prompt_tokens"] for own in usage) + 4
    assert numbers["vllm:generation_tokens_total"] >= sum(own["completion_tokens"] for own in usage) + 1
    ended = {reason: numbers[f'vllm:request_success_total"{reason}"'] for reason in ("stop", "length", "abort", "error")}
    assert sum(ended.values()) == 5 and ended["length"] >= 4 and ended["abort"] == ended["error"] == 0
    assert numbers["vllm:prefix_cache_queries_total"] == numbers["vllm:prompt_tokens_total"]
    assert numbers["vllm:prefix_cache_hits_total"] >= 3  # The last prompt has been there.
    assert numbers["vllm:num_requests_running"] == numbers["vllm:num_requests_waiting"] == numbers["vllm:kv_cache_usage_perc"] == 0
    assert ask(service, "/metrics", method="POST", body="{}")[0] == 405


def test_requests_run_wait_and_are_aborted(engine):
  counts = engine.counts()
  assert (counts.rows, counts.running, counts.waiting) == (8, 0, 0)
  handles = [engine.submit(Request([1, 2], 60, seed=seed)) for seed in range(16)]
  handles[0].abort()
  for handle in handles:
    now = engine.counts()
    assert now.running <= 8 and now.running + now.waiting <= 16
    handle.completion.result(WAIT)
  counts = engine.counts()
  assert counts.ended["aborted"] + counts.ended["length"] == 16 and counts.running == counts.waiting == 0
  assert counts.drawn_tokens >= 15 * 60
  engine.close()


def test_a_key_is_asked_for_and_cached_tokens_are_not_told(engine):
  key = "a key of sixteen"
  with serving(engine, vocab_size=VOCAB, tokenizer=ChatBytes(), api_key=key) as service:
    assert ask(service, "/metrics")[0] == 401
    numbers, _ = read(service, headers={"authorization": f"Bearer {key}"})
    assert "vllm:prompt_tokens_total" in numbers and not any("prefix_cache" in name for name in numbers)


def test_an_engine_that_counts_nothing_says_so():
  with serving() as service:
    assert ask(service, "/metrics")[0] == 501
