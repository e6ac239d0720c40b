"""The decoding engine of a run: made at its first use, with the weights of the step that draws."""

import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.engine.requests import Engine, ReplayLost
from jaxrl_llm.messages import one_line
from jaxrl_llm.rollouts.playing import Job, PlayFn, Playing
from jaxrl_llm.types import Params


class EngineError(RuntimeError):
  """The decoding engine has failed, so nothing can be drawn. The message is one line."""


class RunEngine:
  """An engine that a run makes once, updates for each step, and closes at its end.

  Conversations in flight are drawn to their end with the weights that they began with: other
  weights wait for them.

  Args:
    make: Function `(params, version) -> engine`, which compiles it.
  """

  def __init__(self, make: Callable[[Params, int], Engine]):
    self._make, self._engine, self._version = make, None, None
    self._playing: Playing | None = None
    self._lock = threading.Lock()

  def play(self, play: PlayFn, job: Job, params: Params, version: int) -> Playing:
    """Begins the conversations of a batch with the given weights.

    Args:
      play: What plays them.
      job: Conversations to play.
      params: Weights on the engine's devices, read before this returns.
      version: Number that no other weights of the run have.

    Raises:
      EngineError: If the engine has failed.
    """
    with self._lock:
      engine = self._with(params, version)
      self._playing = play(engine, job)
      return self._playing

  def _with(self, params: Params, version: int) -> Engine:
    if self._engine is None:
      self._engine = self._make(params, version)
    elif version != self._version:
      if self._playing is not None:
        self._playing.wait()
      try:
        self._engine.update(params, version)
      except Exception as error:
        raise as_engine_error(error) from error
    self._version = version
    return self._engine

  def close(self) -> None:
    """Gives up what is in flight, and ends the engine; a later use makes a new one."""
    playing, engine, self._playing, self._engine = self._playing, self._engine, None, None
    if playing is not None:
      playing.close()
    if engine is not None:
      engine.close()

  def __enter__(self) -> "RunEngine":
    """Returns itself."""
    return self

  def __exit__(self, *error: Any) -> None:
    """Closes the engine."""
    self.close()


def as_engine_error(error: BaseException) -> BaseException:
  """Returns what a run raises for an error of the engine's thread.

  Errors of the device stay what they are, because a run explains those of its memory.
  """
  if isinstance(error, EngineError | ReplayLost | jax.errors.JaxRuntimeError | MemoryError) or not isinstance(error, Exception):
    return error
  return EngineError(f"the decoding engine: {one_line(error)}")
