"""Laying sequences of unequal length into rows of one length: little is computed on padding, and a prompt once for all of its responses."""

from collections.abc import Sequence
from itertools import groupby
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


class Unit(NamedTuple):
  """Sequences that lie together in one row: a prompt, once, and responses to it; or one sequence.

  Attributes:
    shared: tokens of the prompt; 0 where nothing is shared, as in a sequence by itself.
    members: numbers of the sequences.
    lengths: tokens of each of them that are its own.
  """

  shared: int
  members: tuple[int, ...]
  lengths: tuple[int, ...]

  @property
  def size(self) -> int:
    """Slots that it takes."""
    return self.shared + sum(self.lengths)


class Layout(NamedTuple):
  """Where sequences lie in the rows of a batch.

  Attributes:
    shape: rows and slots of a row.
    rows: the row of each sequence.
    slots: the slot of each token of each sequence, prompt first. Responses that share a prompt name the same slots for it.
    segments: of each sequence the segment of its own tokens, that of its prompt, and how many tokens that has; 0 and 0 where it is alone.
    shares: whether any sequences may share a prompt: batches have `prefixes` then.
  """

  shape: tuple[int, int]
  rows: list[int]
  slots: list[Int[np.ndarray, " t"]]
  segments: list[tuple[int, int, int]]
  shares: bool


def demonstration(prompt: Sequence[int], response: Sequence[int], written: Sequence[bool] | None = None) -> Trajectory:
  """A supervised sequence: the response's tokens count, or those that are marked as written; and no policy has read them."""
  tokens = np.array([*prompt, *response], np.int32)
  mask = np.array([0] * len(prompt) + [1] * len(response) if written is None else [0] * len(prompt) + [*written], np.float32)
  return Trajectory(tokens, mask, advantages=mask, sampler_logprobs=np.zeros(len(tokens), np.float32))


def units_of(sequences: Sequence[Trajectory], *, share_prompts: bool) -> list[Unit]:
  """Sequences by what they may share: consecutive ones whose tokens before the first counted one are the same.

  Without `share_prompts` every sequence is left by itself.
  """
  alone = lambda index: Unit(0, (index,), (len(sequences[index].tokens),))
  if not share_prompts:
    return [alone(index) for index in range(len(sequences))]

  def prompt(index: int) -> bytes:
    counted = np.flatnonzero(sequences[index].mask)
    return sequences[index].tokens[: counted[0] if len(counted) else 0].tobytes()

  found = []
  for key, group in groupby(range(len(sequences)), key=prompt):
    members, shared = tuple(group), len(key) // sequences[0].tokens.itemsize
    if len(members) == 1 or not shared:
      found += [alone(index) for index in members]
    else:
      found.append(Unit(shared, members, tuple(len(sequences[index].tokens) - shared for index in members)))
  return found


def assign_rows(units: Sequence[Unit], row_tokens: int) -> list[list[Unit]]:
  """Packs units into rows, first fit by decreasing size. One that shares a prompt and fits nowhere whole is split over rows.

  A part of a group brings a copy of the prompt into its row, so it is taken only where its responses are longer than that.

  Raises:
    ValueError: a sequence longer than a row.

  Example:
    >>> alone = [Unit(0, (i,), (length,)) for i, length in enumerate([5, 3, 7, 2])]
    >>> [[unit.members for unit in row] for row in assign_rows(alone, row_tokens=8)]
    [[(2,)], [(0,), (1,)], [(3,)]]
    >>> [[(unit.members, unit.size) for unit in row] for row in assign_rows([Unit(2, (0, 1, 2), (4, 3, 3))], row_tokens=8)]
    [[((0,), 6)], [((1, 2), 8)]]
  """
  rows: list[list[Unit]] = []
  room: list[int] = []

  def put(unit: Unit, row: int) -> None:
    rows[row].append(unit)
    room[row] -= unit.size

  for unit in sorted(units, key=lambda unit: -unit.size):
    if unit.shared + max(unit.lengths) > row_tokens:
      raise ValueError(f"learner.row_tokens={row_tokens} cannot hold a sequence of {unit.shared + max(unit.lengths)} tokens")
    rest: Unit | None = unit
    while rest is not None:
      row = next((r for r, free in enumerate(room) if free >= rest.size), None)
      if row is not None:
        put(rest, row)
        break
      widest = int(np.argmax(room)) if room else -1
      part, left = _part(rest, room[widest] if room else 0)
      # A new row takes the largest part that it holds; of a unit that shares nothing that is all of it.
      if part is None or sum(part.lengths) <= 2 * part.shared:
        rows.append([])
        room.append(row_tokens)
        widest = len(rows) - 1
        part, left = _part(rest, row_tokens)
      put(part, widest)
      rest = left
  return rows


def _part(unit: Unit, room: int) -> tuple[Unit | None, Unit | None]:
  """The longest responses of a unit that fit into a room with their prompt, and the others."""
  taken, free = [], room - unit.shared
  for i in sorted(range(len(unit.members)), key=lambda i: -unit.lengths[i]):
    if unit.lengths[i] <= free:
      taken.append(i)
      free -= unit.lengths[i]

  def only(chosen: Sequence[int]) -> Unit | None:
    pick = lambda x: tuple(x[i] for i in chosen)
    return Unit(unit.shared, pick(unit.members), pick(unit.lengths)) if chosen else None

  return only(sorted(taken)), only([i for i in range(len(unit.members)) if i not in taken])


def arrange(
  sequences: Sequence[Trajectory], *, row_tokens: int, row_buckets: Sequence[int], share_prompts: bool = False, num_shards: int = 1
) -> Layout:
  """Places of sequences in the smallest declared number of rows that holds them.

  Args:
    sequences: in any order; which row they land in changes nothing but the waste.
    row_tokens: slots of a row (T).
    row_buckets: the numbers of rows that programs are compiled for.
    share_prompts: whether consecutive sequences of one prompt hold it once; see `units_of`.
    num_shards: pieces that the rows are split into. Full and empty rows are dealt out evenly to them.

  Raises:
    ValueError: a sequence longer than a row, or more rows needed than the largest bucket.
  """
  rows = assign_rows(units_of(sequences, share_prompts=False), row_tokens)
  if share_prompts:
    shared = assign_rows(units_of(sequences, share_prompts=True), row_tokens)
    rows = shared if len(shared) <= len(rows) else rows
  num_rows = next((bucket for bucket in sorted(row_buckets) if bucket >= len(rows)), None)
  if num_rows is None:
    raise ValueError(
      f"learner.row_buckets={tuple(row_buckets)}: {len(sequences)} sequences need {len(rows)} rows of {row_tokens} tokens; "
      f"add a bucket of at least {len(rows)}"
    )
  found: list = [None] * len(sequences)
  per_shard = num_rows // num_shards
  for rank, row in enumerate(sorted(rows, key=lambda row: -sum(unit.size for unit in row))):
    start = segment = 0
    for unit in row:
      prompt = np.arange(start, start + unit.shared)
      prefix = segment + 1 if unit.shared else 0
      start, segment = start + unit.shared, segment + (unit.shared > 0)
      for index, length in zip(unit.members, unit.lengths, strict=True):
        segment += 1
        slots = np.concatenate([prompt, np.arange(start, start + length)])
        found[index] = (rank % num_shards * per_shard + rank // num_shards, slots, (segment, prefix, unit.shared))
        start += length
  rows, slots, segments = (list(x) for x in zip(*found, strict=True)) if found else ([], [], [])
  return Layout((num_rows, row_tokens), rows, slots, segments, share_prompts)


def pack(sequences: Sequence[Trajectory], layout: Layout) -> TrainBatch:
  """Sequences in the rows of the layout that `arrange` made for them: a batch in host memory, whose `old_logprobs` are the sampler's."""
  ints = {name: np.zeros(layout.shape, np.int32) for name in ("tokens", "positions", "segments", "prefixes")}
  floats = {name: np.zeros(layout.shape, np.float32) for name in ("mask", "advantages", "sampler_logprobs")}
  routing = None
  if sequences and sequences[0].routing is not None:
    routing = np.full((*layout.shape, *sequences[0].routing.shape[1:]), -1, np.int16)
  for sequence, row, slots, (segment, prefix, shared) in zip(sequences, layout.rows, layout.slots, layout.segments, strict=True):
    ints["tokens"][row, slots] = sequence.tokens
    ints["positions"][row, slots] = np.arange(len(slots))
    own = np.arange(len(slots)) >= shared
    ints["segments"][row, slots] = np.where(own, segment, prefix)
    ints["prefixes"][row, slots] = np.where(own, prefix, 0)
    for name, array in floats.items():
      array[row, slots] = getattr(sequence, name)
    if routing is not None:
      routing[row, slots] = sequence.routing
  if not layout.shares:
    ints["prefixes"] = None
  return TrainBatch(**ints, **floats, old_logprobs=floats["sampler_logprobs"], routing=routing)


def lift(packed: Float[np.ndarray, "B T"], layout: Layout) -> list[Float[np.ndarray, "..."]]:
  """A packed array's values for each sequence, its prompt's included: what `lay` undoes."""
  return [packed[row, slots] for row, slots in zip(layout.rows, layout.slots, strict=True)]


def lay(values: Sequence[Float[np.ndarray, "..."]], layout: Layout) -> Float[np.ndarray, "B T"]:
  """Values of each sequence's tokens in the rows where `pack` puts the sequences; zeros elsewhere.

  Each array is as long as its sequence; those of sequences that share a prompt agree about it.

  Example:
    >>> sequences = [demonstration([1], [2]), demonstration([3], [4, 5])]
    >>> layout = arrange(sequences, row_tokens=6, row_buckets=(1,))
    >>> lay([np.full(2, 5.0), np.full(3, 7.0)], layout).tolist()
    [[7.0, 7.0, 7.0, 5.0, 5.0, 0.0]]
  """
  packed = np.zeros(layout.shape, np.float32)
  for row, slots, x in zip(layout.rows, layout.slots, values, strict=True):
    packed[row, slots] = x
  return packed


def packing_waste(batches: Sequence[TrainBatch]) -> float:
  """Fraction of the slots of the batches that hold padding."""
  slots = sum(batch.segments.size for batch in batches)
  return 1 - sum(int(np.count_nonzero(batch.segments)) for batch in batches) / slots


def prompts_saved(sequences: Sequence[Trajectory], batches: Sequence[TrainBatch]) -> float:
  """Fraction of the tokens of all sequences that is computed once for several of them, in the batches that they were packed into."""
  tokens = sum(len(sequence.tokens) for sequence in sequences)
  return 1 - sum(int(np.count_nonzero(batch.segments)) for batch in batches) / max(tokens, 1)


def split(sequences: Sequence[Trajectory], num_updates: int) -> list[list[Trajectory]]:
  """The sequences of each optimizer update of a rollout batch, whose number `num_updates` divides.

  Groups of consecutive samples stay together, as prompts come in shuffled order.
  """
  size = len(sequences) // num_updates
  return [list(sequences[start : start + size]) for start in range(0, len(sequences), size)]
