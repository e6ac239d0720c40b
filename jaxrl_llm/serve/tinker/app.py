"""The routes of the Tinker API, as an application that the service's server runs."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.decoding.engine.requests import Decoded
from jaxrl_llm.serve import calls, fields
from jaxrl_llm.serve.exchange import Gone, header, reply, send_bytes
from jaxrl_llm.serve.refusals import Refusal, hint, wrong
from jaxrl_llm.serve.shell import App, Handler, Intake, Rules, make_asgi
from jaxrl_llm.serve.tinker import sample_calls
from jaxrl_llm.serve.tinker.data import TrainingCall, read_call
from jaxrl_llm.serve.tinker.sampler import Weights
from jaxrl_llm.serve.tinker.saved import saved_routes
from jaxrl_llm.serve.tinker.sessions import (
  Adapter,
  Call,
  ClientSession,
  Outcome,
  Sessions,
  failure,
  outcome_of,
)
from jaxrl_llm.serve.tinker.training import Base, Trainer, check_adapters

_API, _RUNS, _SESSIONS, _SAMPLERS = (
  "/api/v1/",
  "/api/v1/training_runs/",
  "/api/v1/sessions/",
  "/api/v1/samplers/",
)
_MOST_BYTES = 64 * 2**20
_POLL_S = 30.0
_MESSAGE = "application/x-protobuf"
_CONFIG = {
  "pjwt_auth_enabled": False,
  "parallel_fwdbwd_chunks": False,
  "proto_compress_fwdbwd": False,
  "custom_loss_server_side": False,
  "use_pyqwest_transport": False,
  # All data of a call come in one request, as losses with means over the batch need them.
  "fwdbwd_max_chunk_len": 2**20,
  "fwdbwd_max_chunk_bytes_count": _MOST_BYTES * 3 // 4,
  # Each waits with a connection of its own.
  "sample_max_concurrent_requests": 256,
}
_DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


def make_app(
  bases: Mapping[str, Base], folder: Path, *, rules: Rules, sessions: Sessions | None = None
) -> App:
  """Makes the application.

  Args:
    bases: Models by name.
    folder: Folder of all checkpoints.
    rules: What clients may do.
    sessions: Sessions; None begins with none.
  """
  trainer, sessions = Trainer(bases, folder), Sessions() if sessions is None else sessions
  intake, counts = Intake(rules, _MOST_BYTES), {"open": 0}

  def answering(answer: Callable[[dict[str, Any]], Any]) -> Handler:
    """Returns the handler of a call whose answer is a JSON value, at once."""

    async def handle(scope: Any, receive: Any, send: Any) -> None:
      value = answer(await intake.parsed(calls.parse_json, scope, receive))
      await reply(send, 200, await value if asyncio.iscoroutine(value) else value)

    return handle

  def constant(value: Any) -> Handler:
    async def handle(scope: Any, receive: Any, send: Any) -> None:
      await reply(send, 200, value)

    return handle

  def create_session(values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "create_session", "session_id": sessions.begin().session_id}

  def heartbeat(values: dict[str, Any]) -> dict[str, Any]:
    sessions.of(values.get("session_id"), "session_id")
    return {"type": "session_heartbeat"}

  def create_model(values: dict[str, Any]) -> dict[str, Any]:
    names = ("session_id", "model_seq_id", "base_model", "lora_config", "optimizer_config")
    fields.check_names(values, names, neutral={}, ignored=("type", "user_metadata"))
    session, model_id = new_adapter(values)
    trainer.base(values.get("base_model"))
    return begun(session, f"{model_id}:create", values, lambda: trainer.create(session, model_id, values))

  def new_adapter(values: dict[str, Any]) -> tuple[ClientSession, str]:
    session = sessions.of(values.get("session_id"), "session_id")
    number = fields.whole(values, "model_seq_id", None, low=0, high=10**9 - 1)
    if number is None:
      raise wrong("model_seq_id", None, "a whole number")
    check_adapters(sessions.num_adapters())
    return session, f"{session.session_id}:train:{number}"

  def begun(
    session: ClientSession, request_id: str, values: Any, work: Callable[[], Outcome]
  ) -> dict[str, Any]:
    """Begins a training call, unless it is sent again; returns what its client asks with."""
    call, is_new = sessions.call(session, request_id, values if isinstance(values, str) else _digest(values))
    if is_new:
      sessions.train(session, call, work)
    return {"request_id": call.request_id}

  def on_adapter(
    values: Any, model_id: Any, seq_id: Any, work: Callable[[ClientSession, Adapter], Outcome]
  ) -> dict[str, Any]:
    """Begins a call on an adapter, after all that came before."""
    session, adapter = sessions.adapter(model_id)
    if seq_id is not None and not (type(seq_id) is int and 0 <= seq_id < 2**31):
      raise wrong("seq_id", seq_id, "a whole number")
    seq_id = adapter.last_seq + 1 if seq_id is None else seq_id
    request_id = f"{model_id}:{seq_id}"
    if seq_id <= adapter.last_seq and request_id not in session.calls:
      raise wrong(
        "seq_id",
        seq_id,
        f"more than {adapter.last_seq}, the last of this adapter; does another client train it?",
      )
    answer = begun(session, request_id, values, lambda: work(session, adapter))
    adapter.last_seq = max(adapter.last_seq, seq_id)
    return answer | {"model_id": model_id}

  def on_adapter_by_json(
    names: str, work: Callable[[ClientSession, Adapter, dict[str, Any]], Outcome]
  ) -> Handler:
    def answer(values: dict[str, Any]) -> dict[str, Any]:
      fields.check_names(values, ("model_id", "seq_id", *names.split()), neutral={}, ignored=("type",))
      return on_adapter(
        values, values.get("model_id"), values.get("seq_id"), lambda *args: work(*args, values)
      )

    return answering(answer)

  async def forward_backward(scope: Any, receive: Any, send: Any) -> None:
    call: TrainingCall = await intake.parsed(read_call, scope, receive, _MESSAGE)
    work = lambda session, adapter: trainer.compute(adapter, call)
    await reply(send, 200, on_adapter(call.digest, call.model_id, call.seq_id, work))

  def load(values: dict[str, Any]) -> dict[str, Any]:
    names = (
      "model_id",
      "seq_id",
      "session_id",
      "model_seq_id",
      "base_model",
      "path",
      "optimizer",
      "optimizer_config",
      "weights_access_token",
    )
    fields.check_names(values, names, neutral={}, ignored=("type", "user_metadata"))
    if values.get("model_id") is not None:
      return on_adapter(
        values,
        values["model_id"],
        values.get("seq_id"),
        lambda session, adapter: trainer.load(adapter, values),
      )
    session, model_id = new_adapter(values)
    return begun(
      session, f"{model_id}:create", values, lambda: trainer.create_from(session, model_id, values)
    )

  def get_info(values: dict[str, Any]) -> dict[str, Any]:
    _, adapter = sessions.adapter(values.get("model_id"))
    base, rank = bases[adapter.base], adapter.about["rank"]
    data = {"arch": "decoder", "model_name": base.name, "tokenizer_id": base.tokenizer_id}
    info = {
      "type": "get_info",
      "model_data": data,
      "model_id": adapter.model_id,
      "optimizer_config": {"type": "adamw"},
    }
    return info | {"is_lora": True, "lora_rank": rank, "model_name": base.name}

  async def create_sampling_session(values: dict[str, Any]) -> dict[str, Any]:
    names = ("session_id", "sampling_session_seq_id", "base_model", "model_path")
    fields.check_names(values, names, neutral={}, ignored=("type",))
    session = sessions.of(values.get("session_id"), "session_id")
    number = fields.whole(values, "sampling_session_seq_id", None, low=0, high=2**31)
    sampler_id, path = f"{session.session_id}:sample:{number}", values.get("model_path")
    if number is None:
      raise wrong("sampling_session_seq_id", None, "a whole number")
    known = session.samplers.get(sampler_id)
    if known is not None and known.path != path:
      raise wrong("sampling_session_seq_id", number, "the number of no other sampler")
    if known is None:
      session.samplers[sampler_id] = await sessions.run(
        lambda: trainer.sampler(values.get("base_model"), path, number)
      )
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

  def asample(values: dict[str, Any]) -> dict[str, Any]:
    sampler_id = values.get("sampling_session_id")
    session = sessions.of(sampler_id, "sampling_session_id")
    ref, seq_id = (
      session.samplers.get(sampler_id),
      fields.whole(values, "seq_id", None, low=0, high=2**63 - 1),
    )
    if ref is None or seq_id is None:
      raise Refusal(
        404, "sampling_session_id: found no such sampler, or no seq_id with it", field="sampling_session_id"
      )
    base, request_id = bases[ref.base], f"{sampler_id}:{seq_id}"
    asked = sample_calls.read(values, base, owner=request_id, number=ref.number)
    call, is_new = sessions.call(session, request_id, _digest(values))

    if is_new:
      weights = ref.weights()

      def done(completions: list[Decoded] | BaseException) -> None:
        work = lambda: _sampled(asked, completions, weights)
        if asked.scored_from is None or isinstance(completions, BaseException):
          call.outcome.set_result(outcome_of(work))
          return
        # The thread that trains scores the prompt, by the programs that train.
        queued = outcome_of(lambda: sessions.train(session, call, work) or Outcome())
        if queued.refusal is not None:
          session.calls[request_id] = call  # The client knows of it, and fetches the refusal.
          call.outcome.set_result(queued)

      try:
        call.abort = base.sampler.submit(weights, asked.requests, done)
      except Refusal:
        del session.calls[request_id]
        raise
    return {
      "request_id": request_id,
      "sample_sequence_ids": [f"{request_id}:{i}" for i in range(len(asked.requests))],
    }

  async def retrieve(scope: Any, receive: Any, send: Any) -> None:
    values = await intake.parsed(calls.parse_json, scope, receive)
    request_id = values.get("request_id")
    session = sessions.of(request_id, "request_id")
    call = session.calls.get(request_id)
    if call is None:
      raise Refusal(
        404,
        "request_id: found no such call; its outcome was fetched before, or it was never begun",
        field="request_id",
      )
    if not await _is_done(call, receive):
      await reply(send, 200, {"type": "try_again", "request_id": request_id, "queue_state": "active"})
      return
    outcome = call.outcome.result()
    call.fetched_at = sessions.clock()
    if outcome.refusal is not None:
      category = "user" if outcome.refusal.status < 500 else "server"
      await reply(send, 200, {"error": outcome.refusal.message, "category": category})
    elif outcome.message is not None:
      if _MESSAGE.encode() not in header(scope, b"accept"):
        raise Refusal(406, f"accept: expected {_MESSAGE}", code="not_acceptable")
      await send_bytes(
        send, 200, outcome.message, [("content-type", _MESSAGE), ("cache-control", "no-store")]
      )
    else:
      await reply(send, 200, outcome.value)

  def cancel(values: dict[str, Any]) -> dict[str, Any]:
    request_id = values.get("request_id")
    call = sessions.of(request_id, "request_id").calls.get(request_id)
    if call is not None and call.abort is not None:
      call.abort()
    return {}

  async def sampler(scope: Any, receive: Any, send: Any) -> None:
    sampler_id = scope["path"].removeprefix(_SAMPLERS)
    ref = sessions.of(sampler_id, "sampler_id").samplers.get(sampler_id)
    if ref is None:
      raise Refusal(404, "sampler_id: found no such sampler", field="sampler_id")
    await reply(send, 200, {"sampler_id": sampler_id, "base_model": ref.base, "model_path": ref.path})

  async def finish(scope: Any, receive: Any, send: Any) -> None:
    session_id, _, rest = scope["path"].removeprefix(_SESSIONS).partition("/")
    if rest != "finish":
      raise Refusal(404, f"no such path{hint(rest, ['finish'])}", code="not_found")
    sessions.end(sessions.of(session_id, "session_id"))
    await reply(send, 200, {})

  models = [
    {"model_name": base.name, "max_context_length": base.context, "trainable": True, "sampleable": True}
    for base in bases.values()
  ]
  save = "path ttl_seconds user_metadata "
  routes = {
    ("GET", "/health"): constant({"status": "ok"}),
    ("GET", f"{_API}healthz"): constant({"status": "ok"}),
    ("GET", f"{_API}get_server_capabilities"): constant({"supported_models": models}),
    ("POST", f"{_API}client/config"): answering(lambda values: _CONFIG),
    ("POST", f"{_API}client/dynamic_config"): answering(lambda values: _DYNAMIC_CONFIG),
    ("POST", f"{_API}telemetry"): answering(lambda values: {"status": "accepted"}),
    ("POST", f"{_API}create_session"): answering(create_session),
    ("POST", f"{_API}session_heartbeat"): answering(heartbeat),
    ("POST", _SESSIONS): finish,
    ("POST", f"{_API}create_model"): answering(create_model),
    ("POST", f"{_API}get_info"): answering(get_info),
    ("POST", f"{_API}forward_backward"): forward_backward,
    ("POST", f"{_API}optim_step"): on_adapter_by_json(
      "adam_params optimizer_params", lambda _, *args: trainer.step(*args)
    ),
    ("POST", f"{_API}save_weights"): on_adapter_by_json(
      f"{save} overwrite", lambda _, *args: trainer.save(*args)
    ),
    ("POST", f"{_API}save_weights_for_sampler"): on_adapter_by_json(
      f"{save} kind sampling_session_seq_id", trainer.save_for_sampler
    ),
    ("POST", f"{_API}load_weights"): answering(load),
    ("POST", f"{_API}create_sampling_session"): answering(create_sampling_session),
    ("POST", f"{_API}asample"): answering(asample),
    ("POST", f"{_API}retrieve_future"): retrieve,
    ("POST", f"{_API}cancel_future"): answering(cancel),
    ("GET", _SAMPLERS): sampler,
    **saved_routes(sessions, folder, answering),
  }

  def close() -> None:
    sessions.close()
    intake.close()

  return App(
    make_asgi(routes, rules, counts, keyless=("/health", f"{_API}healthz")),
    lambda: counts["open"],
    lambda: None,
    close,
  )


def _digest(values: Any) -> str:
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


async def _is_done(call: Call, receive: Any) -> bool:
  """Waits a while for the outcome of a call, or until the client leaves."""
  if call.outcome.done():
    return True
  ended, left = asyncio.wrap_future(call.outcome), asyncio.ensure_future(receive())
  try:
    await asyncio.wait((ended, left), timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
    if left.done() and left.result()["type"] == "http.disconnect" and not call.outcome.done():
      raise Gone
  finally:
    left.cancel()
  return call.outcome.done()


def _sampled(asked: sample_calls.SampleCall, completions: list[Decoded] | BaseException, weights: Weights) -> Outcome:
  if isinstance(completions, FloatingPointError):
    return Outcome(refusal=Refusal(400, f"asample: {completions}"))
  if isinstance(completions, BaseException):
    return Outcome(refusal=failure(completions))
  if any(completion.reason == "aborted" for completion in completions):
    return Outcome(refusal=Refusal(410, "asample: the call was ended before its samples were whole"))
  scores = None if asked.scored_from is None else weights.score(asked.prompt)
  return Outcome(message=sample_calls.encode(asked, completions, scores))
