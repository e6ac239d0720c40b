"""A client of the Tinker API over plain HTTP, in the wire format of the SDK."""

import contextlib
import http.client
import json
import time
from types import SimpleNamespace

import numpy as np

from jaxrl_llm.serve.tinker import wire
from tests.serve.fake_engine import port_of

_NUMBERS = {np.dtype(np.float32): wire.FLOAT32, np.dtype(np.int64): wire.INT64}
_BATCHED = {
  1: ("data", wire.raw),
  2: ("offsets", wire.raw),
  3: ("dtype", int),
  4: ("trailing", wire.whole_numbers),
}
_RECORD = {2: ("fields*", wire.entry(wire.message(_BATCHED))), 3: ("count", int)}
_OUTPUT = {
  1: ("type", wire.text),
  2: ("records*", wire.message(_RECORD)),
  3: ("metrics*", wire.entry(wire.double)),
}
_TOPK = {1: ("ids", wire.raw), 2: ("logprobs", wire.raw), 3: ("k", int), 4: ("length", int)}
_SEQUENCE = {
  1: ("reason", int),
  2: ("tokens", wire.raw),
  3: ("logprobs", wire.raw),
  4: ("topk", wire.message(_TOPK)),
}
_SAMPLES = {
  1: ("sequences*", wire.message(_SEQUENCE)),
  2: ("prompt", wire.raw),
  3: ("topk", wire.message(_TOPK)),
}


class Failed(Exception):
  """A call whose outcome is an error of a category."""

  def __init__(self, message, category):
    super().__init__(message)
    self.category = category


class Client:
  """A session and its calls; `number` of the adapter and of the sampler count up by themselves."""

  def __init__(self, service, *, headers=None):
    self.service, self.headers, self.numbers = service, headers or {}, {}
    self.session = self.ask("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})[
      "session_id"
    ]

  def next(self, of):
    self.numbers[of] = self.numbers.get(of, -1) + 1
    return self.numbers[of]

  def send(self, path, body, kind="application/json", *, method="POST", accept="application/json"):
    """Sends a request; returns its status, the type of the answer and the answer."""
    with contextlib.closing(
      http.client.HTTPConnection("127.0.0.1", port_of(self.service), timeout=60)
    ) as connection:
      connection.request(
        method, f"/api/v1/{path}", body, {"content-type": kind, "accept": accept, **self.headers}
      )
      response = connection.getresponse()
      content, kind = response.read(), response.getheader("content-type")
    return response.status, kind, json.loads(content) if kind == "application/json" else content

  def ask(self, path, value=None, *, status=200, method=None):
    body = None if value is None else json.dumps(value)
    answered = self.send(path, body, method=method or ("GET" if value is None else "POST"))
    assert answered[0] == status, answered
    return answered[2] if status == 200 else answered[2]["error"]["message"]

  def fetch(self, future):
    """Waits for the outcome of a call."""
    while True:
      asked = json.dumps({"request_id": future["request_id"], "allow_metadata_only": True})
      status, kind, answer = self.send("retrieve_future", asked, accept="application/x-protobuf")
      assert status == 200, answer
      if kind != "application/json":
        return answer
      if "error" in answer:
        raise Failed(answer["error"], answer["category"])
      if answer.get("type") != "try_again":
        return answer

  def create(self, base="nano", *, rank=16, seed=1, **flags):
    config = {
      "rank": rank,
      "seed": seed,
      "train_unembed": True,
      "train_mlp": True,
      "train_attn": True,
    } | flags
    value = {
      "session_id": self.session,
      "model_seq_id": self.next("model"),
      "base_model": base,
      "lora_config": config,
    }
    return self.fetch(
      self.ask("create_model", value | {"optimizer_config": {"type": "adamw"}, "type": "create_model"})
    )["model_id"]

  def submit(self, model, data, loss="cross_entropy", config=None, *, forward_only=False, seq_id=None):
    """Sends a training call of data, each as tokens and arrays by name."""
    seq_id = self.next(model) + 1 if seq_id is None else seq_id
    fields = [
      (1, model),
      (2, seq_id),
      *((3, datum(*each)) for each in data),
      (4, loss),
      (6, int(forward_only)),
    ]
    for key, x in (config or {}).items():
      setting = (2, x) if isinstance(x, str) else (1, float(x))
      fields += [] if isinstance(x, str) else [(5, wire.encode((1, key), (2, float(x))))]
      fields.append((7, wire.encode((1, key), (2, wire.encode(setting)))))
    status, _, answer = self.send("forward_backward", wire.encode(*fields), "application/x-protobuf")
    assert status == 200, answer
    return answer

  def compute(self, *args, **options):
    """Sends a training call and waits for its log-probabilities and metrics."""
    output = wire.decode(memoryview(self.fetch(self.submit(*args, **options))), _OUTPUT)
    (record,) = output["records"]
    of_logprobs = dict(record["fields"])["logprobs"]
    data, offsets = (
      np.frombuffer(of_logprobs[name], of) for name, of in (("data", "<f4"), ("offsets", "<i8"))
    )
    parts = np.split(data, offsets[1:-1] // 4)
    assert len(parts) == record["count"] and of_logprobs["dtype"] == wire.FLOAT32
    return SimpleNamespace(
      logprobs=parts, metrics=dict(output["metrics"]), loss=dict(output["metrics"])["loss:sum"]
    )

  def on(self, call, model, **value):
    """Makes another call on an adapter and waits for its outcome."""
    return self.fetch(self.ask(call, {"model_id": model, "seq_id": self.next(model) + 1, **value}))

  def step(self, model, **settings):
    adam = {
      "learning_rate": 0.01,
      "beta1": 0.9,
      "beta2": 0.95,
      "eps": 1e-12,
      "weight_decay": 0.0,
      "grad_clip_norm": 0.0,
    } | settings
    return self.on("optim_step", model, adam_params=adam)

  def sampler(self, **where):
    value = {"session_id": self.session, "sampling_session_seq_id": self.next("sampler")} | where
    return self.ask("create_sampling_session", value)["sampling_session_id"]

  def publish(self, model, kind="snapshot"):
    answer = self.on(
      "save_weights_for_sampler", model, sampling_session_seq_id=self.next("sampler"), kind=kind
    )
    return answer["sampling_session_id"]

  def submit_sample(self, sampler, prompt, *, count=1, params=None, **more):
    value = {
      "sampling_session_id": sampler,
      "seq_id": self.next(sampler),
      "num_samples": count,
      "type": "sample",
    }
    params = {"temperature": 1, "top_k": -1, "top_p": 1} | (params or {})
    chunks = {"chunks": [{"type": "encoded_text", "tokens": [int(x) for x in prompt]}]}
    return self.ask("asample", value | {"prompt": chunks, "sampling_params": params} | more)

  def sample(self, *args, **options):
    """Draws samples, and returns them with what is known of the prompt."""
    return decode_samples(self.fetch(self.submit_sample(*args, **options)))

  def compute_logprobs(self, sampler, prompt):
    return self.sample(sampler, prompt, params={"max_tokens": 1}, prompt_logprobs=True).prompt


def decode_samples(content):
  answer = wire.decode(memoryview(content), _SAMPLES)
  floats = lambda x: np.frombuffer(x, "<f4")
  sequences = [
    (np.frombuffer(x["tokens"], "<i4").tolist(), floats(x["logprobs"]), x["reason"])
    for x in answer["sequences"]
  ]
  topk = answer["sequences"][0].get("topk"), answer.get("topk")
  topk = [
    x and (np.frombuffer(x["ids"], "<i4").reshape(-1, x["k"]), floats(x["logprobs"]).reshape(-1, x["k"]))
    for x in topk
  ]
  prompt = None if "prompt" not in answer else floats(answer["prompt"])
  return SimpleNamespace(sequences=sequences, prompt=prompt, topk=topk[0], topk_prompt=topk[1])


def datum(tokens, inputs):
  """Encodes a datum."""
  chunk = wire.encode((1, wire.encode((1, np.asarray(tokens, "<i4").tobytes()))))
  return wire.encode((1, chunk), *((2, wire.encode((1, name), (2, tensor(x)))) for name, x in inputs.items()))


def tensor(x):
  """Encodes an array: whole numbers as int64, others as float32."""
  x = np.asarray(x)
  x = x.astype(np.int64 if x.dtype.kind == "i" else np.float32)
  return wire.encode((1, x.tobytes()), (3, _NUMBERS[x.dtype]), (4, wire.packed(x.shape)))


def wait_until(condition, seconds=10):
  """Waits until a condition holds."""
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "it never held"
    time.sleep(0.01)
