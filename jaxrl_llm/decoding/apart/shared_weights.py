"""Weights that arrive at process 0 of a sampler of several processes."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from jaxrl_llm.decoding.apart.weights import HeldWeights, Offer, WeightsRefused, offers_of
from jaxrl_llm.decoding.engine.in_hand import Peers
from jaxrl_llm.decoding.engine.loop import DecodingEngine
from jaxrl_llm.decoding.engine.requests import Engine

_AHEAD = 2  # Number of blocks on their way to the devices while the next one arrives.


class SharedWeights:
  """The `HeldWeights` of an engine of several processes, as process 0 uses them.

  Whatever it does with devices, all processes do at the same turn of the engine's loop.

  Args:
    held: Weights of this process.
    engine: Engine of all processes, with its part in this one.
    peers: The `Peers` of the engine.
  """

  def __init__(self, held: HeldWeights, engine: DecodingEngine, peers: Peers):
    self._held, self._engine, self._placing = held, engine, deque()
    give = lambda version: held.give(engine, version)
    peers.calls |= {"lacking": self._lacking, "place": held.place, "wrong": held.wrong, "give": give}

  def _lacking(self, offered: Sequence[Sequence[Any]]) -> list[str] | WeightsRefused:
    try:
      return self._held.lacking(offers_of(offered))
    except WeightsRefused as error:
      return error

  def lacking(self, offered: Sequence[Offer]) -> list[str]:
    """Returns the names of weights that are lacking; see `HeldWeights`."""
    outcome = self._engine.call("lacking", list(offered)).result()
    if isinstance(outcome, WeightsRefused):
      raise outcome
    return outcome

  def add(self, name: str, start: int, data: UInt8[np.ndarray, " n"]) -> None:
    """Takes the next piece of a weight, and has whole blocks put on the devices.

    Raises:
      WeightsRefused: If it is not the next one.
    """
    for block in self._held.blocks(name, start, self._held.receive(name, start, data)):
      self._placing.append(self._engine.call("place", name, block))
      if len(self._placing) > _AHEAD:
        self._placing.popleft().result()

  def wrong(self, lacked: Sequence[str]) -> dict[str, str]:
    """Returns a line for each weight that has not arrived as it was offered, by name."""
    return self._engine.call("wrong", list(lacked)).result()

  def give(self, engine: Engine, version: int) -> None:
    """Gives the engine the whole tree with what has arrived."""
    self._engine.call("give", version).result()
