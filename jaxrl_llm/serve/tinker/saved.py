"""Routes for what clients have saved: what it is, a list of it, and its end."""

import asyncio
import datetime
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.serve.exchange import reply
from jaxrl_llm.serve.refusals import Refusal
from jaxrl_llm.serve.shell import Handler
from jaxrl_llm.serve.tinker import states
from jaxrl_llm.serve.tinker.sessions import Sessions
from jaxrl_llm.serve.tinker.training import TARGETS

_RUNS = "/api/v1/training_runs/"


def saved_routes(
  sessions: Sessions, folder: Path, answering: Callable[[Callable[[dict[str, Any]], Any]], Handler]
) -> dict[tuple[str, str], Handler]:
  """Returns handlers by method and path.

  Args:
    sessions: Sessions, which know adapters that are not saved.
    folder: Folder of all checkpoints.
    answering: Function that makes a handler of one that takes and returns a JSON value.
  """

  async def weights_info(values: dict[str, Any]) -> dict[str, Any]:
    record = await asyncio.to_thread(
      lambda: states.read_record(folder, states.place_of(values.get("tinker_path"), "tinker_path"))
    )
    flags = {name: target in record["targets"] for name, target in TARGETS.items()}
    return {"base_model": record["base_model"], "is_lora": True, "lora_rank": record["rank"], **flags}

  async def run_or_checkpoints(scope: Any, receive: Any, send: Any) -> None:
    run, _, rest = scope["path"].removeprefix(_RUNS).partition("/")
    if rest not in ("", "checkpoints"):
      raise Refusal(404, "no such path", code="not_found")
    saved = await asyncio.to_thread(
      lambda: [(place, states.read_record(folder, place)) for place in states.places(folder, run)]
    )
    cards = [_card(*each) for each in saved]
    if rest:
      await reply(send, 200, {"checkpoints": cards})
      return
    about = sessions.adapter(run)[1].about if not saved else saved[-1][1]
    last = {
      kind: next((card for card in reversed(cards) if card["checkpoint_type"] == kind), None)
      for kind in states.KINDS.values()
    }
    card = {
      "training_run_id": run,
      "base_model": about["base_model"],
      "model_owner": "local",
      "is_lora": True,
      "lora_rank": about["rank"],
    }
    when = max((card["time"] for card in cards), default=_time(time.time()))
    more = {
      "last_request_time": when,
      "last_checkpoint": last["training"],
      "last_sampler_checkpoint": last["sampler"],
    }
    await reply(send, 200, card | more | {"user_metadata": about.get("user_metadata")})

  async def delete(scope: Any, receive: Any, send: Any) -> None:
    run, _, rest = scope["path"].removeprefix(_RUNS).partition("/checkpoints/")
    place = states.place_of(f"tinker://{run}/{rest}", "checkpoint_id")
    await asyncio.to_thread(lambda: states.delete(folder, place))
    await reply(send, 200, {})

  return {
    ("POST", "/api/v1/weights_info"): answering(weights_info),
    ("GET", _RUNS): run_or_checkpoints,
    ("DELETE", _RUNS): delete,
  }


def _card(place: states.Place, record: Mapping[str, Any]) -> dict[str, Any]:
  card = {
    "checkpoint_id": f"{place.kind}/{place.name}",
    "checkpoint_type": states.KINDS[place.kind],
    "time": _time(record["time"]),
  }
  expires = None if record["expires"] is None else _time(record["expires"])
  return card | {"tinker_path": place.path, "user_metadata": record["user_metadata"], "expires_at": expires}


def _time(seconds: float) -> str:
  return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
