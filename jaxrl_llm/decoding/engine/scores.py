"""Scores of tokens: their log-probabilities and ranks, and the likeliest tokens beside them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.decoding.engine.requests import Score
from jaxrl_llm.decoding.filters import REMOVED


class Scores(NamedTuple):
  """Scores of tokens as arrays.

  Attributes:
    logprobs: Log-probability of each token.
    ranks: Number of tokens that are likelier, plus 1.
    ids: Likeliest ids, in descending order.
    of_ids: Log-probabilities of the likeliest ids, infinite or near `REMOVED` for removed ones.
  """

  logprobs: Float[Array, "*batch"]
  ranks: Int[Array, "*batch"]
  ids: Int[Array, "*batch k"]
  of_ids: Float[Array, "*batch k"]


def score(logits: Float[Array, "*batch V"], tokens: Int[Array, "*batch"], count: int) -> Scores:
  """Scores tokens under softmax(logits), with the `count` likeliest ones.

  Example:
    >>> logits = jnp.log(jnp.array([[0.2, 0.5, 0.3]]))
    >>> scores = score(logits, jnp.array([2]), 2)
    >>> jnp.exp(scores.logprobs).round(3).tolist(), scores.ranks.tolist(), scores.ids.tolist()
    ([0.3], [2], [[1, 2]])
  """
  shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
  total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))
  own = jnp.take_along_axis(shifted, tokens[..., None], axis=-1)
  # Of a softmax only, since clients ask whether a token is the likeliest by comparing the numbers.
  of_ids, ids = jax.lax.top_k(shifted, min(count, logits.shape[-1]))
  return Scores((own - total)[..., 0], 1 + jnp.sum(shifted > own, axis=-1), ids, of_ids - total)


def no_scores(shape: tuple[int, ...], count: int) -> Scores:
  """Returns NumPy arrays for the scores of tokens in an array of some shape."""
  numbers, ids = np.zeros(shape, np.float32), np.zeros((*shape, count), np.int32)
  return Scores(numbers, np.zeros(shape, np.int32), ids, np.zeros(ids.shape, np.float32))


def scores_of(scores: Scores, count: int) -> list[Score]:
  """Returns the scores of tokens in a row, with at most `count` likeliest ids that are possible."""
  lists = (np.asarray(x).tolist() for x in (scores.logprobs, scores.ranks, scores.ids[:, :count], scores.of_ids[:, :count]))
  possible = lambda ids, logprobs: [(i, x) for i, x in zip(ids, logprobs, strict=True) if x > REMOVED / 2]
  return [Score(logprob, rank, possible(ids, of_ids)) for logprob, rank, ids, of_ids in zip(*lists, strict=True)]
