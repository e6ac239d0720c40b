"""Laying sequences of unequal length into rows of one length, so that little is computed on padding."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm.types import TrainBatch


class Trajectory(NamedTuple):
  """One sequence on the host, unpadded: what packing lays into rows.

  Attributes:
    tokens: prompt ids, then response ids.
    mask: 1 on the tokens that count in the loss.
    advantages: advantage of each token; read where the mask is 1. Zeros until they are known.
    sampler_logprobs: the sampler's log-probability of each token; read where the mask is 1.
    routing: the experts that each token visited while it was sampled, -1 where unknown; None where nobody recorded them.
  """

  tokens: Int[np.ndarray, " t"]
  mask: Float[np.ndarray, " t"]
  advantages: Float[np.ndarray, " t"]
  sampler_logprobs: Float[np.ndarray, " t"]
  routing: Int[np.ndarray, "t L K"] | None = None


def demonstration(prompt: Sequence[int], response: Sequence[int]) -> Trajectory:
  """A supervised sequence: the response's tokens count, and no policy has scored them."""
  tokens = np.array([*prompt, *response], np.int32)
  mask = (np.arange(len(tokens)) >= len(prompt)).astype(np.float32)
  return Trajectory(tokens, mask, advantages=mask, sampler_logprobs=np.zeros(len(tokens), np.float32))


def assign_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
  """Packs sequences into rows, first fit by decreasing length.

  Args:
    lengths: of the sequences, in tokens.
    row_tokens: slots of a row.

  Returns:
    The indices of the sequences of each row.

  Raises:
    ValueError: a sequence longer than a row.

  Example:
    >>> assign_rows([5, 3, 7, 2], row_tokens=8)
    [[2], [0, 1], [3]]
  """
  rows: list[list[int]] = []
  room: list[int] = []
  for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    length = lengths[index]
    if length > row_tokens:
      raise ValueError(f"learner.row_tokens={row_tokens} cannot hold a sequence of {length} tokens")
    row = next((r for r, free in enumerate(room) if free >= length), None)
    if row is None:
      row = len(rows)
      rows.append([])
      room.append(row_tokens)
    rows[row].append(index)
    room[row] -= length
  return rows


def places(lengths: Sequence[int], row_tokens: int) -> list[tuple[int, slice]]:
  """Row and slots of each sequence, as `pack` lays them.

  Example:
    >>> places([5, 3, 7], row_tokens=8)
    [(1, slice(0, 5, None)), (1, slice(5, 8, None)), (0, slice(0, 7, None))]
  """
  return list(_places(tuple(lengths), row_tokens))


@functools.lru_cache(maxsize=64)  # A step's mini-batches are packed once and then lifted and laid several times.
def _places(lengths: tuple[int, ...], row_tokens: int) -> tuple[tuple[int, slice], ...]:
  found: list[tuple[int, slice]] = [(0, slice(0, 0))] * len(lengths)
  for row, members in enumerate(assign_rows(lengths, row_tokens)):
    start = 0
    for index in members:
      found[index] = (row, slice(start, start + lengths[index]))
      start += lengths[index]
  return tuple(found)


def lift(packed: Float[np.ndarray, "B T"], lengths: Sequence[int]) -> list[Float[np.ndarray, "..."]]:
  """A packed array's values for each sequence: what `lay` undoes.

  Args:
    packed: an array in the rows of a batch that `pack` made.
    lengths: of the sequences that were packed, in their order.
  """
  return [packed[row, slots] for row, slots in places(lengths, packed.shape[1])]


def lay(values: Sequence[Float[np.ndarray, "..."]], shape: tuple[int, int]) -> Float[np.ndarray, "B T"]:
  """Values of each sequence's tokens in the rows where `pack` put the sequences; zeros elsewhere.

  Args:
    values: an array for each sequence, as long as the sequence.
    shape: of the packed batch.

  Example:
    >>> lay([np.full(2, 5.0), np.full(3, 7.0)], (1, 6)).tolist()
    [[7.0, 7.0, 7.0, 5.0, 5.0, 0.0]]
  """
  packed = np.zeros(shape, np.float32)
  for (row, slots), x in zip(places([len(x) for x in values], shape[1]), values, strict=True):
    packed[row, slots] = x
  return packed


def pack(sequences: Sequence[Trajectory], *, row_tokens: int, row_buckets: Sequence[int]) -> TrainBatch:
  """Packs sequences into the smallest declared number of rows that holds them.

  Args:
    sequences: in any order; which row they land in changes nothing but the waste.
    row_tokens: slots of a row (T).
    row_buckets: the numbers of rows that programs are compiled for.

  Returns:
    A batch in host memory. `old_logprobs` are the sampler's.

  Raises:
    ValueError: more rows needed than the largest bucket.
  """
  rows = assign_rows([len(sequence.tokens) for sequence in sequences], row_tokens)
  num_rows = next((bucket for bucket in sorted(row_buckets) if bucket >= len(rows)), None)
  if num_rows is None:
    raise ValueError(
      f"learner.row_buckets={tuple(row_buckets)}: {len(sequences)} sequences need {len(rows)} rows of {row_tokens} tokens; "
      f"add a bucket of at least {len(rows)}"
    )
  ints = {name: np.zeros((num_rows, row_tokens), np.int32) for name in ("tokens", "positions", "segments")}
  floats = {name: np.zeros((num_rows, row_tokens), np.float32) for name in ("mask", "advantages", "sampler_logprobs")}
  for row, members in enumerate(rows):
    start = 0
    for segment, index in enumerate(members, start=1):
      sequence = sequences[index]
      slots = slice(start, start + len(sequence.tokens))
      ints["tokens"][row, slots] = sequence.tokens
      ints["positions"][row, slots] = np.arange(len(sequence.tokens))
      ints["segments"][row, slots] = segment
      for name, array in floats.items():
        array[row, slots] = getattr(sequence, name)
      start = slots.stop
  return TrainBatch(**ints, **floats, old_logprobs=floats["sampler_logprobs"], routing=_pack_routing(sequences, (num_rows, row_tokens)))


def _pack_routing(sequences: Sequence[Trajectory], shape: tuple[int, int]) -> Int[np.ndarray, "B T L K"] | None:
  if not sequences or sequences[0].routing is None:
    return None
  packed = np.full((*shape, *sequences[0].routing.shape[1:]), -1, np.int16)
  lengths = [len(sequence.tokens) for sequence in sequences]
  for (row, slots), sequence in zip(places(lengths, shape[1]), sequences, strict=True):
    packed[row, slots] = sequence.routing
  return packed


def packing_waste(batches: Sequence[TrainBatch]) -> float:
  """Fraction of the slots of the batches that hold padding."""
  slots = sum(batch.segments.size for batch in batches)
  return 1 - sum(int(np.count_nonzero(batch.segments)) for batch in batches) / slots


def split(sequences: Sequence[Trajectory], num_updates: int) -> list[list[Trajectory]]:
  """The sequences of each optimizer update of a rollout batch; groups stay together, as prompts come in shuffled order.

  Args:
    sequences: G consecutive samples for each prompt.
    num_updates: must divide the number of sequences.
  """
  size = len(sequences) // num_updates
  return [list(sequences[start : start + size]) for start in range(0, len(sequences), size)]
