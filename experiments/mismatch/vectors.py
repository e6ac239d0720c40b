"""Vectors that two programs of a model compute for the same tokens, compared in bits.

Sampler and learner have their tokens in other places: rows, slots, packed segments, shared prompts.
So a vector of the learner is not looked for in a place, but among all vectors that the sampler has
computed in the same layer. Vectors are kept as 64-bit sums of their bits.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, Num, UInt64

from jaxrl_llm.models.config import ModelConfig

PARTS = {
  "q in": "norm 1", "q": "q", "k": "k", "v": "v", "o in": "attention", "o": "o",
  "gate in": "norm 2", "gate": "gate", "up": "up", "down in": "SwiGLU", "down": "down",
  "router in": "norm 2", "router": "router", "experts": "experts",
}  # fmt: skip
"""Taps of a layer in the order of their computation, and what is computed up to there."""

SAMPLER, LEARNER = "sampler", "learner"
NORM, LOGITS = "last norm", "logits of equal states"
"""What is computed behind the layers. Of both programs' logits, those of equal states are compared:
some of the learner's belong to no token."""

_HEAD = ("head in", "head")
_STATES = "states"
_PLACES = ("segments", "prefixes", "counted")


def layers_with(config: ModelConfig) -> dict[str, list[int]]:
  """Returns the layers that have each tap."""
  dense, sparse = set(config.dense_layers), set(config.sparse_layers)
  some = dict.fromkeys(("gate in", "gate", "up", "down in", "down"), dense) | dict.fromkeys(("router in", "router", "experts"), sparse)
  layers = {name: sorted(some.get(name, range(config.num_layers))) for name in PARTS}
  return {name: own for name, own in layers.items() if own}


def sums(x: Num[np.ndarray, "N ..."]) -> UInt64[np.ndarray, " N"]:
  """Returns a number for each vector that depends on all of its bits.

  Example:
    >>> one, zero, minus_zero = sums(np.float32([[1, 2], [0, 0], [0, -0.0]]))
    >>> int(one) == int(sums(np.float32([[1, 2]]))[0]), int(zero) == int(minus_zero)
    (True, False)
  """
  x = np.ascontiguousarray(np.asarray(x).reshape(len(x), -1))
  bits = x.view(f"u{x.dtype.itemsize}").astype(np.uint64)
  factors = np.random.default_rng(0).integers(1, 2**63, bits.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
  return bits @ factors + np.uint64(1)


def scored(segments: Int[np.ndarray, "B T"], prefixes: Int[np.ndarray, "B T"]) -> Bool[np.ndarray, " N"]:
  """Returns at which slots the sampler has a vector, too: all but the last token of a sequence.

  Example:
    >>> segments, prefixes = np.array([[1, 1, 2, 2, 2, 0]]), np.array([[0, 0, 1, 1, 1, 0]])
    >>> scored(segments, prefixes).astype(int).tolist()
    [1, 1, 1, 1, 0, 0]
  """
  following = np.concatenate([segments[:, 1:], np.zeros_like(segments[:, :1])], axis=1)
  is_prompt = np.stack([np.isin(row, of_row[of_row > 0]) for row, of_row in zip(segments, prefixes, strict=True)])
  return ((segments > 0) & ((segments == following) | is_prompt)).reshape(-1)


class Share(NamedTuple):
  """How much of what the learner has computed the sampler has, too.

  Attributes:
    part: What was computed; see `PARTS`.
    layer: Layer, from 0; their number for what is behind them.
    equal: Share of the learner's vectors.
    count: Number of the learner's vectors.
  """

  part: str
  layer: int
  equal: float
  count: int


class Vectors:
  """Vectors of both programs; `take` is the function for `models.taps.tapped`.

  Args:
    config: Sizes of the model.
    ordered: Whether the values of a program arrive in the order of their computation by themselves.
      That is had on one device only; on several, layers of one step could change places.

  Attributes:
    side: Program whose vectors are kept now; None keeps none.
  """

  def __init__(self, config: ModelConfig, *, ordered: bool):
    self._layers, self._ordered = layers_with(config), ordered
    self.side: str | None = None
    self._kept: Mapping[str, dict[str, list[np.ndarray]]] = {SAMPLER: defaultdict(list), LEARNER: defaultdict(list)}
    self._state: Array | None = None

  def take(self, name: str, x: Array) -> None:
    """Adds to the program that is traced what keeps a value."""
    if name in _HEAD:
      # States and logits go together: a chunk of the learner also has those of no token.
      self._state, values = (x, ()) if name == "head in" else (None, (self._state, x))
    else:
      values = (x,) if name in (*PARTS, *_PLACES, _STATES) else ()
    if values:
      jax.debug.callback(partial(self._keep, name), *values, ordered=self._ordered)

  def _keep(self, name: str, *values: np.ndarray) -> None:
    if self.side is not None:
      kept = np.array(values[0]) if name in _PLACES else np.stack([sums(x) for x in values], axis=-1)
      self._kept[self.side][name].append(kept)

  def shares(self, row_tokens: int) -> list[Share]:
    """Compares the vectors, in the order of their computation.

    Args:
      row_tokens: Number of slots of the learner's rows.
    """
    jax.effects_barrier()
    sampler, learner = self._kept[SAMPLER], self._kept[LEARNER]
    places = [[x.reshape(-1, row_tokens) for x in learner[name]] for name in _PLACES]
    masks = [scored(*of_batch[:2]) for of_batch in zip(*places, strict=True)]
    shares = {}
    for order, (name, layers) in enumerate(self._layers.items()):
      for i, layer in enumerate(layers):
        theirs = np.concatenate([x[:, 0] for x in sampler[name][i :: len(layers)]])
        ours = np.concatenate([x[mask, 0] for x, mask in zip(learner[name][i :: len(layers)], masks, strict=True)])
        shares[layer, order] = Share(PARTS[name], layer, float(np.mean(np.isin(ours, theirs))), len(ours))
    theirs, ours = (np.concatenate(side["head"]) for side in (sampler, learner))
    predicting = np.concatenate([x[of_batch[2].reshape(-1), 0] for x, of_batch in zip(learner[_STATES], zip(*places), strict=True)])
    last = Share(NORM, len(self._layers["q"]), float(np.mean(np.isin(predicting, theirs[:, 0]))), len(predicting))
    states = np.isin(ours[:, 0], theirs[:, 0])
    pairs = lambda x: x[:, 0] * np.uint64(3) + x[:, 1]
    logits = np.isin(pairs(ours[states]), pairs(theirs))
    equal = float(np.mean(logits)) if len(logits) else math.nan
    return [*(shares[key] for key in sorted(shares)), last, Share(LOGITS, len(self._layers["q"]), equal, len(logits))]
