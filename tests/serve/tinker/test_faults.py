"""What clients of the Tinker API do wrong: one clear error to each, and nothing to others."""

import contextlib
import gc
import http.client
import json
import threading

import numpy as np
import pytest

from jaxrl_llm.serve import server
from jaxrl_llm.serve.tinker import start
from jaxrl_llm.serve.tinker.app import make_app
from jaxrl_llm.serve.tinker.sessions import Sessions
from tests.serve.fake_engine import port_of
from tests.serve.tinker.client import Client, Failed, wait_until
from tests.serve.tinker.test_training import SEEN, TEXT

ONES = np.ones(15)
GOOD = {"target_tokens": TEXT[1:], "weights": ONES}
RL = {"target_tokens": TEXT[1:], "logprobs": -ONES, "advantages": ONES}


@pytest.fixture(scope="module")
def trained(service):
  client = Client(service)
  model = client.create()
  return client, model


@pytest.mark.parametrize(
  ("tokens", "inputs", "loss", "config", "words"),
  [
    (TEXT[:-1], GOOD, "cross_entrophy", {}, "loss_fn: found 'cross_entrophy'.*did you mean 'cross_entropy'"),
    (TEXT[:-1], RL, "ppo", {"objective": "gsop"}, "loss_fn_config.objective: found 'gsop'.*did you mean 'gspo'"),
    (TEXT[:-1], RL, "ppo", {"clip_low": 0.1}, "loss_fn_config.clip_low: found 0.1, expected one of clip_low_threshold"),
    (TEXT[:-1], RL, "ppo", {"clip_low_threshold": "a"}, "found 'a', expected a number"),
    (TEXT[:-1], RL | {"mask": ONES}, "gspo", {"objective": "gspo", "clip_low": 2.0}, "clip_low: found 2, expected a number from 0 to 1"),
    (TEXT[:-1], RL | {"mask": ONES}, "fipo", {"half_life": 0.0}, "half_life: found 0"),
    (TEXT[:-1], RL, "clip_cov", {}, "found no 'mask', which the loss 'clip_cov' reads"),
    (TEXT[:-1], GOOD | {"weights": np.full(15, np.nan)}, "cross_entropy", {}, r"data\[0\].loss_fn_inputs.weights: found NaN"),
    (TEXT[:-1], GOOD | {"weights": ONES[:3]}, "cross_entropy", {}, r"weights \[3\], expected \[15\] each"),
    (TEXT[:-2], GOOD, "cross_entropy", {}, r"target_tokens \[15\].* expected \[14\] each"),
    (TEXT[:-1], {"target_tokens": TEXT[1:]}, "cross_entropy", {}, "found no 'weights'"),
    (TEXT[:-1], GOOD | {"mask": ONES}, "cross_entropy", {}, "found 'mask', which the loss 'cross_entropy' does not read"),
    (TEXT[:-1], GOOD | {"target_tokens": TEXT[1:] + 300}, "cross_entropy", {}, "target_tokens: found an id that is none"),
    (TEXT[:-1] - 100, GOOD, "cross_entropy", {}, "model_input: found an id that is none"),
    ([], {"target_tokens": TEXT[:0], "weights": ONES[:0]}, "cross_entropy", {}, "found 0 tokens, expected 1 to 64"),
    (np.zeros(65, int), {}, "cross_entropy", {}, "found 65 tokens, expected 1 to 64"),
    (TEXT[:-1], RL | {"logprobs": -1e38 * ONES, "advantages": 3e38 * ONES}, "importance_sampling", {}, "is not finite"),
  ],
)  # fmt: skip
def test_data_that_are_wrong(trained, tokens, inputs, loss, config, words):
  client, model = trained
  before = client.compute(model, [SEEN], forward_only=True).logprobs[0]
  with pytest.raises(Failed, match=words) as caught:
    client.compute(model, [(tokens, inputs)], loss, config)
  assert caught.value.category == "user" and "\n" not in str(caught.value)
  with pytest.raises(Failed, match="found no gradient"):
    client.step(model)
  np.testing.assert_array_equal(client.compute(model, [SEEN], forward_only=True).logprobs[0], before)


@pytest.mark.parametrize(
  ("path", "value", "words"),
  [
    ("optim_step", {"adam_params": {"learning_rate": -1}}, "adam_params.learning_rate: found -1"),
    ("optim_step", {"adam_params": {"lr": 1}}, "adam_params.lr: found an unknown field"),
    ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "the only optimizer of this server"),
    ("save_weights", {"path": "../../x"}, "expected a name of at most 128 letters"),
    ("save_weights", {"path": ".hidden"}, "does not begin with"),
    ("save_weights", {"path": "a" * 200}, "expected a name"),
    ("save_weights", {"path": "a", "ttl_seconds": 1}, "ttl_seconds: found 1"),
    ("load_weights", {"path": "tinker://../weights/x", "optimizer": False}, "expected tinker://RUN/weights/NAME"),
    ("load_weights", {"path": f"tinker://{'0' * 32}:train:0/weights/..", "optimizer": False}, "expected tinker://RUN"),
    ("load_weights", {"path": f"tinker://{'0' * 32}:train:0/weights/x", "optimizer": False}, "found no checkpoint"),
    ("load_weights", {"path": f"tinker://{'0' * 32}:train:0/weights/x", "weights_access_token": "t"}, "one account"),
  ],
)  # fmt: skip
def test_calls_on_an_adapter_that_are_wrong(trained, path, value, words):
  client, model = trained
  if path == "optim_step":
    client.compute(model, [SEEN])
  with pytest.raises(Failed, match=words) as caught:
    client.on(path, model, **value)
  assert caught.value.category == "user"
  if path == "optim_step":
    client.step(model, learning_rate=0.0)


def test_a_name_is_taken_once_unless_asked(trained):
  client, model = trained
  client.on("save_weights", model, path="taken")
  with pytest.raises(Failed, match="overwrite=True"):
    client.on("save_weights", model, path="taken")
  client.on("save_weights", model, path="taken", overwrite=True)


@pytest.mark.parametrize(
  ("path", "value", "status", "words"),
  [
    ("create_model", {"base_model": "nanoo", "model_seq_id": 9}, 404, "found 'nanoo', expected one of nano; did you mean 'nano'"),
    ("create_model", {"base_model": "nano"}, 400, "model_seq_id"),
    ("create_model", {"base_model": "nano", "model_seq_id": 9, "rank": 3}, 400, "rank: found an unknown field"),
    ("create_sampling_session", {"sampling_session_seq_id": 99, "model_path": "/etc/passwd"}, 400, "model_path: found"),
    ("create_sampling_session", {"sampling_session_seq_id": 99, "base_model": "x"}, 404, "base_model"),
    ("session_heartbeat", {"session_id": "gone"}, 410, "its session has ended"),
    ("retrieve_future", {"request_id": "gone:1"}, 404, "request_id"),
    ("optim_step", {"model_id": "gone:train:0", "session_id": None}, 404, "model_id"),
    ("get_info", {"model_id": 3, "session_id": None}, 404, "model_id"),
    ("create_custom_loss", {}, 404, "no such path"),
  ],
)  # fmt: skip
def test_requests_that_are_wrong(trained, path, value, status, words):
  client, _ = trained
  value = {"session_id": client.session} | value
  assert words in client.ask(path, {key: x for key, x in value.items() if x is not None}, status=status)


@pytest.mark.parametrize(
  ("value", "words"),
  [
    ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "reads tokens alone"),
    ({"prompt": {"chunks": []}}, "prompt: found 0 tokens"),
    ({"prompt": {"chunks": [{"tokens": [999]}]}}, "a token id from 0 to 263"),
    ({"num_samples": 17}, "num_samples: found 17"),
    ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p: found an unknown field"),
    ({"prompt_alt_tokens_k": 2}, "does not support it"),
    ({"record_stability_info": True}, "does not support it"),
    ({"prompt_logprobs_last_n": 1}, "without prompt_logprobs"),
  ],
)
def test_samples_that_are_wrong(trained, value, words):
  client, _ = trained
  sampler = client.sampler(base_model="nano")
  asked = {
    "sampling_session_id": sampler,
    "seq_id": 0,
    "prompt": {"chunks": [{"tokens": [1, 2]}]},
    "sampling_params": {"max_tokens": 1},
  }
  assert words in client.ask("asample", asked | value, status=400)
  assert client.fetch(client.ask("asample", asked))


def test_bodies_that_are_no_messages(trained):
  client, _ = trained
  for body in (b"\xff" * 9, b"\x1a\x7f", b"{}"):
    status, _, answer = client.send("forward_backward", body, "application/x-protobuf")
    assert status in (400, 404) and "message" in answer["error"]
  assert client.send("forward_backward", b"{}")[0] == 415
  assert client.send("optim_step", b"[" * 900)[0] == 400
  with contextlib.closing(
    http.client.HTTPConnection("127.0.0.1", port_of(client.service), timeout=20)
  ) as connection:
    connection.putrequest("POST", "/api/v1/forward_backward")
    connection.putheader("content-type", "application/x-protobuf")
    connection.putheader("content-length", str(2**30))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413 and b"67,108,864 bytes" in response.read()


def test_a_call_that_is_sent_again_is_done_once(service):
  client = Client(service)
  model = client.create()
  first = [client.submit(model, [SEEN], seq_id=1) for _ in range(2)]
  assert first[0] == first[1] and client.fetch(first[0]) == client.fetch(first[1])
  other = client.create()
  client.submit(other, [SEEN], seq_id=1)
  steps = [client.ask("optim_step", {"model_id": each, "adam_params": {}}) for each in (model, other)]
  once, twice = (client.fetch(step)["metrics"]["grad_norm"] for step in steps)
  assert once == twice


def test_two_clients_of_one_adapter_are_ordered(service):
  """Their numbers may not mix; without numbers each call is whole, in the order of arrival."""
  client = Client(service)
  model = client.create()
  client.submit(model, [SEEN], seq_id=5)
  value = {"model_id": model, "seq_id": 5, "adam_params": {}}
  assert "another call" in client.ask("optim_step", value, status=400)
  assert "more than 5" in client.ask("optim_step", value | {"seq_id": 3}, status=400)
  del value["seq_id"]
  errors, futures, lock = [], [], threading.Lock()

  def train():
    try:
      for _ in range(5):
        future = client.ask("save_weights_for_sampler", {"model_id": model, "path": "a"})
        with lock:
          futures.append(future)
    except AssertionError as error:
      errors.append(error)

  threads = [threading.Thread(target=train) for _ in range(3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not errors and len({future["request_id"] for future in futures}) == 15
  assert all("path" in client.fetch(future) for future in futures)


def test_clients_that_leave_hold_nothing(tinker_bases, tmp_path):
  now = 0.0
  sessions = Sessions(patience_s=1.5, clock=lambda: now)
  app = make_app(tinker_bases, tmp_path, rules=server.rules_of("127.0.0.1", None), sessions=sessions)
  service = server.listen(app, host="127.0.0.1", port=0)
  try:
    gone, stays = Client(service), Client(service)
    model = gone.create()
    sampler = gone.sampler(base_model="nano")
    long = [gone.submit_sample(sampler, TEXT[:4], params={"max_tokens": 60, "stop": []}) for _ in range(12)]
    for _ in range(200):  # Requests whose answer is never read.
      connection = http.client.HTTPConnection("127.0.0.1", port_of(service))
      body = json.dumps({"request_id": long[-1]["request_id"]})
      connection.request("POST", "/api/v1/retrieve_future", body, {"content-type": "application/json"})
      connection.close()

    def is_gone():
      nonlocal now  # A slow machine must not end the session of the client that stays.
      stays.ask("session_heartbeat", {"session_id": stays.session})
      now += 1.0
      return sessions.num_adapters() == 0

    wait_until(is_gone, seconds=20)
    assert "its session has ended" in stays.ask("get_info", {"model_id": model}, status=404)
    wait_until(lambda: service.open_requests() == 0)
    gc.collect()
    assert stays.sample(stays.sampler(base_model="nano"), TEXT[:4], params={"max_tokens": 2}).sequences
    stays.ask(f"sessions/{stays.session}/finish", {"reason": {"type": "success"}, "detail": None})
    assert "has ended" in stays.ask("session_heartbeat", {"session_id": stays.session}, status=410)
  finally:
    service.close()


def test_a_key_comes_in_the_header_of_the_sdk(tinker_bases, tmp_path):
  key = "tml-0123456789abcdef"
  app = make_app(tinker_bases, tmp_path, rules=server.rules_of("127.0.0.1", key))
  service = server.listen(app, host="127.0.0.1", port=0)
  try:
    assert Client(service, headers={"x-api-key": key}).session
    for headers in ({}, {"x-api-key": "tml-x"}):
      with pytest.raises(AssertionError, match="401"):
        Client(service, headers=headers)
  finally:
    service.close()


@pytest.mark.parametrize(
  ("models", "key", "words"),
  [
    (["nano"], None, "--model: found 'nano', expected NAME=WHERE"),
    (["a=nowhere", "a=nowhere"], None, "found the name 'a' twice"),
    (["a=nowhere"], None, "--model=a: found 'nowhere'"),
    (["a=nowhere"], "sk-0123456789abcdef", "--api_key: found another beginning, expected 'tml-'"),
  ],
)
def test_what_cannot_start_says_why(models, key, words, tmp_path):
  with pytest.raises(ValueError, match=words):
    start.make(models, tmp_path, rules=server.rules_of("127.0.0.1", key), context=64, slots=2, max_requests=8)
