"""An environment of verifiers that is loaded and served: a thread with an event loop."""

import asyncio
import atexit
import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from jaxrl_llm.messages import Problem, one_line
from jaxrl_llm.rollouts.environments.hub import program
from jaxrl_llm.rollouts.environments.hub.client import MODEL, make_client
from jaxrl_llm.rollouts.environments.hub.conversation import ProgramConversation
from jaxrl_llm.rollouts.environments.hub.names import module_name

_BEAT_S = 0.2


class Hub:
  """One environment, with its servers, in an event loop of its own.

  Args:
    name: Id of the environment.
    harness: Id of the harness; None for that of the environment, or the chat program.
    settings: Settings of the environment's config.

  Attributes:
    conversations: Conversations in progress by the id of their trace.

  Raises:
    ValueError: If the environment cannot be loaded or served. One line.
  """

  def __init__(self, name: str, harness: str | None, settings: Mapping[str, Any]):
    self.name, self.conversations = name, {}
    # Whatever fails is counted by cause.
    logging.getLogger("verifiers").setLevel(logging.CRITICAL)
    self.loop, self.beat = asyncio.new_event_loop(), time.monotonic()
    self._tasks, self._stream = [], None
    self._closing = asyncio.Event()
    threading.Thread(target=self.loop.run_forever, name=f"verifiers:{name}", daemon=True).start()
    try:
      self.env = _load(name, harness, settings)
      started: Future[None] = Future()
      self._serving = asyncio.run_coroutine_threadsafe(self._serve(started), self.loop)
      self._serving.add_done_callback(lambda done: started.done() or started.set_exception(done.exception() or RuntimeError("it ended")))
      started.result(timeout=300)
    # Environments are foreign code, and so may raise anything.
    except Exception as error:
      self.loop.call_soon_threadsafe(self.loop.stop)
      raise error if isinstance(error, ValueError) and isinstance(error.args[0] if error.args else None, Problem) else ValueError(
        f"environment.name: verifiers:{name} cannot be loaded: {one_line(error)}"
      ) from error

  async def _serve(self, started: "Future[None]") -> None:
    from verifiers.v1.clients import ModelContext, TrainClientConfig

    # Its streams are answered whole, as in training. Nothing connects to the address.
    config = TrainClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="JAXRL_LLM_NO_KEY")
    self.context = ModelContext(MODEL, config)
    async with self.env.serving():
      # The server makes a client for each endpoint's config; this one needs no endpoint.
      self.env._interception.clients[config.model_dump_json()] = make_client(self.conversations)
      started.set_result(None)
      while not self._closing.is_set():
        self.beat = time.monotonic()
        with contextlib.suppress(TimeoutError):
          await asyncio.wait_for(self._closing.wait(), _BEAT_S)

  def task(self, index: int) -> Any:
    """Returns a task of the environment, by its number.

    Raises:
      ValueError: If there are not as many. One line.
    """
    if self._stream is None:
      self._stream = iter(self.env.taskset)
    while len(self._tasks) <= index:
      task = next(self._stream, None)
      if task is None:
        raise ValueError(f"task.size: found problem {index}, expected at most {len(self._tasks)} problems, those of verifiers:{self.name}")
      self._tasks.append(task)
    return self._tasks[index]

  async def play(self, conversation: ProgramConversation, index: int, timeout_s: float) -> Any:
    """Plays a task to its end. Returns the episode; None if its program was given up."""

    def begun(trace: Any) -> None:
      conversation.traces.append(trace)
      self.conversations[trace.id] = conversation

    conversation.idle_since = time.monotonic()
    episode = asyncio.create_task(self.env.run_episode(self.task(index), self.context, on_trace=begun))
    try:
      while not episode.done():
        await asyncio.wait({episode}, timeout=min(_BEAT_S, timeout_s / 4))
        if not conversation.draft.is_open and time.monotonic() - conversation.idle_since > timeout_s:
          conversation.fail("timeout", f"nothing happened for {timeout_s:g} s")
        if (conversation.draft.failed or conversation.broken or conversation.draft.ended) and not episode.done():
          episode.cancel()
          await asyncio.wait({episode}, timeout=5)
          return None
      return episode.result()
    finally:
      if not episode.done():
        episode.cancel()
      for trace in conversation.traces:
        self.conversations.pop(trace.id, None)

  def close(self) -> None:
    """Ends the servers and the loop."""
    with contextlib.suppress(Exception):
      self.loop.call_soon_threadsafe(self._closing.set)
      self._serving.result(timeout=10)
      self.loop.call_soon_threadsafe(self.loop.stop)


_hubs: dict[tuple[Any, ...], Hub] = {}


def open_hub(name: str, harness: str | None, settings: str) -> Hub:
  """Returns the environment, loaded once in this process; `settings` is a JSON object."""
  key = name, harness, settings
  if key not in _hubs:
    hub = _hubs[key] = Hub(name, harness, json.loads(settings))
    atexit.register(hub.close)
  return _hubs[key]


def abandon(hub: Hub) -> None:
  """Forgets an environment whose loop is held up. The next call of `open_hub` loads it again."""
  for key in [key for key, own in _hubs.items() if own is hub]:
    del _hubs[key]


def _load(name: str, harness: str | None, settings: Mapping[str, Any]) -> Any:
  """Loads an environment as a run of this package needs it.

  Raises:
    ValueError: If its config is wrong, or several policies play in it. One line.
  """
  program.register()
  from verifiers.v1.configs.agent import agent_config_fields
  from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment, resolve_env_config

  ident = module_name(name)
  data = {**settings, "taskset": {**settings.get("taskset", {}), "id": ident}}
  roles = [
    field for field, info in env_config_type(ident, data.get("id", "")).model_fields.items() if type(info.default).__name__ == "AgentConfig"
  ]
  if len(roles) != 1:
    players = f"'verifiers:{name}', in which {', '.join(roles) or 'none'} play"
    raise ValueError(Problem("environment.name", players, "an environment in which one policy plays"))
  role = roles[0]
  declared = agent_config_fields(resolve_env_config({**data}))[role]
  own = dict(data.get(role, {}))
  own.setdefault("runtime", {"type": "subprocess"})
  pinned = declared.harness.id if declared.harness is not None else default_harness_id(ident)
  if harness is not None:
    own["harness"] = {"id": harness}
  elif pinned == "null" or (declared.harness is None and pinned == "bash"):
    own["harness"] = {"id": program.HARNESS}
  return load_environment(resolve_env_config({**data, role: own, "interception": {"type": "server"}}))
