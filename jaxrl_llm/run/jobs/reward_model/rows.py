"""Pairs as packed rows.

Both sequences of a pair lie in one row, so that no split of the batch separates them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxrl_llm.learner import packing
from jaxrl_llm.types import TrainBatch


class Pair(NamedTuple):
  """A pair as token ids; each response includes the prompt before it."""

  chosen: list[int]
  rejected: list[int]
  margin: float = 0.0  # How much more reward the chosen response should get.


def pack_pairs(
  pairs: Sequence[Pair], *, row_tokens: int, row_buckets: Sequence[int], num_shards: int = 1,
  own_shards: Sequence[int] | None = None,
) -> tuple[TrainBatch, packing.Layout]:  # fmt: skip
  """Packs pairs into the smallest declared number of rows that holds them.

  In each row, segments 2k − 1 and 2k are the chosen and the rejected sequence of pair k. Only at
  the last token of the chosen one, the mask is 1 and `advantages` holds the margin.

  Args:
    pairs: Pairs of one batch.
    row_tokens: Number of slots in a row.
    row_buckets: Numbers of rows that programs are compiled for.
    num_shards: Number of row shards; see `packing.arrange`.
    own_shards: Those of this process; None for all.

  Returns:
    The rows of this process in host memory, and the layout of the pairs.

  Raises:
    ValueError: If a pair is longer than a row, or the batch needs more rows than the largest
      bucket.

  Example:
    >>> batch, _ = pack_pairs([Pair([7, 8], [7, 9, 9])], row_tokens=6, row_buckets=(1,))
    >>> batch.tokens.tolist(), batch.segments.tolist(), batch.positions.tolist(), batch.mask.tolist()
    ([[7, 8, 7, 9, 9, 0]], [[1, 1, 2, 2, 2, 0]], [[0, 1, 0, 1, 2, 0]],
    [[0.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
  """
  whole = [_whole(pair) for pair in pairs]
  layout = packing.arrange(whole, row_tokens=row_tokens, row_buckets=row_buckets, num_shards=num_shards, own_shards=own_shards)
  batch = packing.pack(whole, layout)
  for row, slots, _, pair in layout.places(pairs):
    number = batch.segments[row, slots[0]]
    lengths = [len(pair.chosen), len(pair.rejected)]
    batch.positions[row, slots] = np.concatenate([np.arange(n) for n in lengths])
    batch.segments[row, slots] = np.repeat([2 * number - 1, 2 * number], lengths)
  return batch._replace(sampler_logprobs=None, prefixes=None), layout


def of_pairs(packed: Float[np.ndarray, "B T"], pairs: Sequence[Pair], layout: packing.Layout) -> Float[np.ndarray, " N"]:
  """Returns a packed array's value at the counted token of each pair, in the order of the pairs.

  The array has the rows of all processes, in host memory.
  """
  values = packing.lift(packed, layout)
  return np.array([x[len(pair.chosen) - 1] for x, pair in zip(values, pairs, strict=True)], np.float32)


def _whole(pair: Pair) -> packing.Trajectory:
  tokens = np.array([*pair.chosen, *pair.rejected], np.int32)
  mask = (np.arange(len(tokens)) == len(pair.chosen) - 1).astype(np.float32)
  return packing.Trajectory(tokens, mask, advantages=np.float32(pair.margin) * mask, sampler_logprobs=np.zeros(len(tokens), np.float32))
