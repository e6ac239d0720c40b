"""Packing of sequences into rows of equal length, with little padding and with shared prompts."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm.models import image_slots
from jaxrl_llm.models.image_slots import Pictures, Room
from jaxrl_llm.types import TaughtRows, TrainBatch


class Trajectory(NamedTuple):
  """One unpadded sequence on the host, which packing places in a row.

  Attributes:
    tokens: Prompt ids, then response ids.
    mask: 1 if a token counts in the loss, else 0.
    advantages: Advantage of each token, read if the mask is 1; zeros until known.
    sampler_logprobs: The sampler's log-probability of each token, read if the mask is 1.
    routing: Experts that each token visited during sampling, -1 if unknown; None if not recorded.
    num_prompt: Number of tokens of the prompt. None: those before the first that counts.
    pictures: Pictures of the prompt; None without any.
    group: Number of the prompt that the sequence is a sample of; None if not needed. `pack` numbers
      the prompts of a batch anew.
    replies: 1 if a token is part of an environment's reply, else 0; None if not needed.
    lag: Number of RL steps by which the weights that drew each token lag, 0 for other tokens; None
      if not needed.
  """

  tokens: Int[np.ndarray, " t"]
  mask: Float[np.ndarray, " t"]
  advantages: Float[np.ndarray, " t"]
  sampler_logprobs: Float[np.ndarray, " t"]
  routing: Int[np.ndarray, "t L K"] | None = None
  num_prompt: int | None = None
  pictures: Pictures | None = None
  group: int | None = None
  replies: Float[np.ndarray, " t"] | None = None
  lag: Int[np.ndarray, " t"] | None = None


class Unit(NamedTuple):
  """Sequences that are placed in one row: a shared prompt with its responses, or a single sequence.

  Attributes:
    shared: Number of tokens of the shared prompt; 0 if nothing is shared.
    members: Indices of the sequences.
    lengths: Number of tokens of each sequence without the shared prompt.
    pictures: Number of pictures of the prompt.
  """

  shared: int
  members: tuple[int, ...]
  lengths: tuple[int, ...]
  pictures: int = 0

  @property
  def size(self) -> int:
    """Number of slots that the unit takes."""
    return self.shared + sum(self.lengths)


class Layout(NamedTuple):
  """Places of sequences in the rows of a batch.

  Every process has the same layout, but packs the rows of its own devices alone.

  Attributes:
    shape: Number of rows, and of slots per row.
    rows: Row of each sequence.
    slots: Slot of each token of each sequence, prompt first. Responses that share a prompt have the
      same slots for it.
    segments: Segment of each sequence's own tokens, segment of its shared prompt, and number of
      tokens in that prompt; the last two are 0 without one.
    shares: Whether sequences may share prompts, in which case batches have `prefixes`.
    held: Numbers of the rows that this process packs, in order.
  """

  shape: tuple[int, int]
  rows: list[int]
  slots: list[Int[np.ndarray, " t"]]
  segments: list[tuple[int, int, int]]
  shares: bool
  held: Int[np.ndarray, " B"]

  @property
  def held_shape(self) -> tuple[int, int]:
    """Number of rows that this process packs, and of slots per row."""
    return len(self.held), self.shape[1]

  @property
  def num_used(self) -> int:
    """Number of slots that hold tokens, of all rows."""
    prompts = {(row, prefix): shared for row, (_, prefix, shared) in zip(self.rows, self.segments, strict=True)}
    own = sum(len(slots) - shared for slots, (_, _, shared) in zip(self.slots, self.segments, strict=True))
    return own + sum(prompts.values())

  def places(self, *of_sequences: Sequence[Any]) -> Iterator[tuple]:
    """Yields the place of each sequence in a row of this process, and what belongs to it.

    Args:
      *of_sequences: Sequences with an item for each sequence of the layout.

    Returns:
      The row among those that this process packs, the slots and the segments, then the items.

    Example:
      >>> layout = arrange([demonstration([1], [2])] * 3, row_tokens=2, row_buckets=(4,), num_shards=2, own_shards=[1])
      >>> layout.rows, [(row, slots.tolist(), item) for row, slots, _, item in layout.places("abc")]
      ([0, 2, 1], [(0, [0, 1], 'b')])
    """
    here = {int(row): i for i, row in enumerate(self.held)}
    for row, *place in zip(self.rows, self.slots, self.segments, *of_sequences, strict=True):
      if row in here:
        yield here[row], *place


def demonstration(
  prompt: Sequence[int], response: Sequence[int], written: Sequence[bool] | None = None, *, pictures: Pictures | None = None
) -> Trajectory:
  """Makes a supervised sequence, in which the tokens of the response count.

  Args:
    prompt: Prompt ids.
    response: Response ids.
    written: Whether each token of the response counts; None counts all.
    pictures: Pictures of the prompt; None without any.
  """
  tokens = np.array([*prompt, *response], np.int32)
  mask = np.array([0] * len(prompt) + [1] * len(response) if written is None else [0] * len(prompt) + [*written], np.float32)
  return Trajectory(tokens, mask, advantages=mask, sampler_logprobs=np.zeros(len(tokens), np.float32), pictures=pictures)


def with_prompt(sequence: Trajectory, prompt: Sequence[int] | Int[np.ndarray, " p"]) -> Trajectory:
  """Replaces the prompt of a sequence, for a model that reads another one.

  Recorded routes, pictures, marks of replies and lags belong to the old prompt and are dropped.

  Example:
    >>> other = with_prompt(demonstration([1, 2], [3])._replace(num_prompt=2), [7])
    >>> other.tokens.tolist(), other.mask.tolist(), other.num_prompt
    ([7, 3], [0.0, 1.0], 1)
  """
  length, zeros = sequence.num_prompt, np.zeros(len(prompt), np.float32)
  joined = lambda x: np.concatenate([zeros, x[length:]])
  return Trajectory(
    tokens=np.concatenate([np.asarray(prompt, np.int32), sequence.tokens[length:]]),
    mask=joined(sequence.mask),
    advantages=joined(sequence.advantages),
    sampler_logprobs=joined(sequence.sampler_logprobs),
    num_prompt=len(prompt),
    group=sequence.group,
  )


def units_of(sequences: Sequence[Trajectory], *, share_prompts: bool, group_size: int | None = None) -> list[Unit]:
  """Groups consecutive sequences with the same prompt.

  Args:
    sequences: Sequences in any order.
    share_prompts: Whether to group them; otherwise every sequence is a unit of its own.
    group_size: Largest number of sequences in a unit; None sets no limit.
  """
  shown = lambda index: 0 if sequences[index].pictures is None else sequences[index].pictures.count
  alone = lambda index: Unit(0, (index,), (len(sequences[index].tokens),), shown(index))
  if not share_prompts:
    return [alone(index) for index in range(len(sequences))]

  def prompt(index: int) -> tuple[bytes, bytes]:
    tokens, mask, length, pictures = (getattr(sequences[index], name) for name in ("tokens", "mask", "num_prompt", "pictures"))
    if length is None:
      counted = np.flatnonzero(mask)
      length = counted[0] if len(counted) else 0
    return tokens[:length].tobytes(), b"" if pictures is None else pictures.key

  units = []
  for key, indices in groupby(range(len(sequences)), key=prompt):
    same, shared = tuple(indices), len(key[0]) // sequences[0].tokens.itemsize
    most = group_size or len(same)
    for start in range(0, len(same), most):
      members = same[start : start + most]
      if len(members) == 1 or not shared:
        units += [alone(index) for index in members]
      else:
        units.append(Unit(shared, members, tuple(len(sequences[index].tokens) - shared for index in members), shown(members[0])))
  return units


def assign_rows(units: Sequence[Unit], row_tokens: int, row_images: int | None = None) -> list[list[Unit]]:
  """Packs units into rows by first-fit decreasing.

  A row takes a unit if there is room for its tokens and its pictures.

  A unit that shares a prompt and fits nowhere as a whole is split over rows. Each part brings a
  copy of the prompt into its row, so an existing row takes a part only if its responses are more
  than twice as long as the prompt.

  Args:
    units: Units to pack.
    row_tokens: Number of slots per row.
    row_images: Number of pictures that a row has room for; None for any.

  Raises:
    ValueError: If a sequence is longer than a row, or its prompt has more pictures.

  Example:
    >>> alone = [Unit(0, (i,), (length,)) for i, length in enumerate([5, 3, 7, 2])]
    >>> [[unit.members for unit in row] for row in assign_rows(alone, row_tokens=8)]
    [[(2,)], [(0,), (1,)], [(3,)]]
    >>> [[(unit.members, unit.size) for unit in row] for row in assign_rows([Unit(2, (0, 1, 2), (4, 3, 3))], row_tokens=8)]
    [[((0,), 6)], [((1, 2), 8)]]
  """
  rows: list[list[Unit]] = []
  room = _Room()
  all_places = math.inf if row_images is None else row_images
  for unit in sorted(units, key=lambda unit: -unit.size):
    if unit.pictures > all_places:
      raise ValueError(f"config.learner.row_images: found {row_images}, expected at least {unit.pictures}, the pictures of one prompt")
    if unit.shared + max(unit.lengths) > row_tokens:
      raise ValueError(f"learner.row_tokens={row_tokens} cannot hold a sequence of {unit.shared + max(unit.lengths)} tokens")
    rest: Unit | None = unit
    while rest is not None:
      part, left, row = rest, None, room.first(rest.size, rest.pictures)
      if row is None:
        row, free = room.widest(rest.pictures) if rest.shared else (None, 0)
        part, left = (None, rest) if row is None else _part(rest, free)
        # A new row takes the largest part that fits; for a unit without a shared prompt, that is
        # all of it.
        if part is None or sum(part.lengths) <= 2 * part.shared:
          rows.append([])
          row = room.add(row_tokens, all_places)
          part, left = (rest, None) if rest.size <= row_tokens else _part(rest, row_tokens)
      rows[row].append(part)
      room.take(row, part.size, part.pictures)
      rest = left
  return rows


class _Room:
  """Free slots of rows, and their places for pictures, with searches in logarithmic time.

  A binary tree, in which a node holds the most slots and the most places of the rows below it.
  """

  def __init__(self):
    self._count, self._leaves = 0, 1
    self._slots, self._places = [-1, -1], [-1.0, -1.0]

  def add(self, slots: int, places: float) -> int:
    """Adds a row and returns its number."""
    if self._count == self._leaves:
      kept = list(zip(self._slots, self._places, strict=True))[self._leaves :]
      self._leaves *= 2
      self._slots, self._places = [-1] * (2 * self._leaves), [-1.0] * (2 * self._leaves)
      for row, of_row in enumerate(kept):
        self._set(row, *of_row)
    self._set(self._count, slots, places)
    self._count += 1
    return self._count - 1

  def take(self, row: int, slots: int, places: float) -> None:
    """Takes slots and places of a row."""
    leaf = self._leaves + row
    self._set(row, self._slots[leaf] - slots, self._places[leaf] - places)

  def _set(self, row: int, slots: int, places: float) -> None:
    node = self._leaves + row
    self._slots[node], self._places[node] = slots, places
    while node := node // 2:
      most = max(self._slots[2 * node], self._slots[2 * node + 1]), max(self._places[2 * node], self._places[2 * node + 1])
      if most == (self._slots[node], self._places[node]):
        break  # Nothing changes above either.
      self._slots[node], self._places[node] = most

  def first(self, slots: int, places: float) -> int | None:
    """Returns the first row with room for slots and places; None if there is none."""
    waiting = [1]
    while waiting:
      node = waiting.pop()
      if self._slots[node] < slots or self._places[node] < places:
        continue
      if node >= self._leaves:
        return node - self._leaves
      waiting += (2 * node + 1, 2 * node)
    return None

  def widest(self, places: float) -> tuple[int | None, int]:
    """Returns the first of the rows with the most free slots, of those with room for places."""
    best, most, waiting = None, 0, [1]
    while waiting:
      node = waiting.pop()
      if self._slots[node] < most or self._places[node] < places:
        continue
      if node < self._leaves:
        # The wider half is searched first; of equal ones, the earlier rows.
        waiting += sorted((2 * node, 2 * node + 1), key=lambda child: (self._slots[child], -child))
      elif self._slots[node] > most or best is None or node < best:
        best, most = node, self._slots[node]
    return (None, 0) if best is None else (best - self._leaves, most)


def _part(unit: Unit, room: int) -> tuple[Unit | None, Unit | None]:
  """Splits off the longest responses of a unit that fit into `room` together with their prompt.

  Returns:
    The part that fits and the rest; None for an empty one.
  """
  taken, free = [], room - unit.shared
  for i in sorted(range(len(unit.members)), key=lambda i: -unit.lengths[i]):
    if unit.lengths[i] <= free:
      taken.append(i)
      free -= unit.lengths[i]

  def only(chosen: Sequence[int]) -> Unit | None:
    pick = lambda x: tuple(x[i] for i in chosen)
    return unit._replace(members=pick(unit.members), lengths=pick(unit.lengths)) if chosen else None

  return only(sorted(taken)), only([i for i in range(len(unit.members)) if i not in taken])


def fewest_rows(
  alone: Sequence[Unit], shared: Sequence[Unit] | None, row_tokens: int, row_images: int | None = None
) -> list[list[Unit]]:
  """Packs sequences one by one or with shared prompts, whichever takes fewer rows.

  Args:
    alone: Each sequence as a unit of its own.
    shared: The same sequences with shared prompts; None if they may not share any.
    row_tokens: Number of slots per row.
    row_images: Number of pictures that a row has room for; None for any.

  Raises:
    ValueError: If a sequence is longer than a row, or its prompt has more pictures.
  """
  rows = assign_rows(alone, row_tokens, row_images)
  if shared is None:
    return rows
  with_shared = assign_rows(shared, row_tokens, row_images)
  return with_shared if len(with_shared) <= len(rows) else rows


def arrange(
  sequences: Sequence[Trajectory],
  *,
  row_tokens: int,
  row_buckets: Sequence[int],
  share_prompts: bool = False,
  group_size: int | None = None,
  num_shards: int = 1,
  own_shards: Sequence[int] | None = None,
  row_images: int | None = None,
) -> Layout:
  """Places sequences in the smallest declared number of rows that holds them.

  Args:
    sequences: Sequences in any order; the assignment to rows changes nothing but the padding.
    row_tokens: Number of slots per row (T).
    row_buckets: Numbers of rows that programs are compiled for.
    share_prompts: Whether consecutive sequences with the same prompt store it once; see `units_of`.
    group_size: Largest number of sequences that store it once; None sets no limit.
    num_shards: Number of shards of the rows. Full and empty rows are distributed evenly over them.
    own_shards: Shards that the devices of this process hold, in order; None for all.
    row_images: Number of pictures that a row has room for; None for any.

  Raises:
    ValueError: If a sequence is longer than a row, its prompt has more pictures, or more rows are
      needed than the largest bucket.
  """
  shared = units_of(sequences, share_prompts=True, group_size=group_size) if share_prompts else None
  rows = fewest_rows(units_of(sequences, share_prompts=False), shared, row_tokens, row_images)
  num_rows = next((bucket for bucket in sorted(row_buckets) if bucket >= len(rows)), None)
  if num_rows is None:
    raise ValueError(
      f"learner.row_buckets={tuple(row_buckets)}: {len(sequences)} sequences need {len(rows)} rows of {row_tokens} tokens; "
      f"add a bucket of at least {len(rows)}"
    )
  of_rows, of_slots, segments = ([None] * len(sequences) for _ in range(3))
  per_shard = num_rows // num_shards
  for rank, row in enumerate(sorted(rows, key=lambda row: -sum(unit.size for unit in row))):
    start = segment = 0
    for unit in row:
      prompt = np.arange(start, start + unit.shared)
      prefix = segment + 1 if unit.shared else 0
      start, segment = start + unit.shared, segment + (unit.shared > 0)
      for index, length in zip(unit.members, unit.lengths, strict=True):
        segment += 1
        of_rows[index] = rank % num_shards * per_shard + rank // num_shards
        of_slots[index] = np.concatenate([prompt, np.arange(start, start + length)])
        segments[index] = (segment, prefix, unit.shared)
        start += length
  held = np.arange(num_rows)
  if own_shards is not None:
    held = held.reshape(num_shards, per_shard)[list(own_shards)].reshape(-1)
  return Layout((num_rows, row_tokens), of_rows, of_slots, segments, share_prompts, held)


def arrange_taught(sequences: Sequence[Trajectory], taught: Sequence[Trajectory], **options: Any) -> tuple[Layout, Layout]:
  """Places sequences, and the same ones behind the prompts of a teacher, in the same rows.

  Args:
    sequences: Sequences in any order, each with its `num_prompt`.
    taught: The same responses, with the teacher's prompts.
    **options: Options of `arrange`.

  Returns:
    The places of either.

  Example:
    >>> own = [demonstration([1], [2, 3])._replace(num_prompt=1), demonstration([4], [5])._replace(num_prompt=1)]
    >>> other = [with_prompt(x, [7, 7, 7]) for x in own]
    >>> layouts = arrange_taught(own, other, row_tokens=10, row_buckets=(1,))
    >>> [[slots.tolist() for slots in layout.slots] for layout in layouts]
    [[[0, 1, 2], [3, 4]], [[0, 1, 2, 3, 4], [5, 6, 7, 8]]]
  """
  # A stand-in is as long as the longer of the two, and its prompt is that of one pair of prompts.
  pairs: dict[tuple[bytes, bytes], int] = {}
  longer = []
  for one, other in zip(sequences, taught, strict=True):
    key = tuple(x.tokens[: x.num_prompt].tobytes() for x in (one, other))
    prompt = np.full(max(one.num_prompt, other.num_prompt), pairs.setdefault(key, len(pairs)))
    longer.append(with_prompt(one, prompt))
  layout = arrange(longer, **options)
  return _closed_up(layout, sequences), _closed_up(layout, taught)


def _closed_up(layout: Layout, sequences: Sequence[Trajectory]) -> Layout:
  """Returns a layout with the same rows and segments for sequences with other prompts."""
  slots: list[Any] = [None] * len(sequences)
  segments, ends, prompts = list(layout.segments), dict.fromkeys(layout.rows, 0), {}
  for i in sorted(range(len(sequences)), key=lambda i: layout.segments[i][0]):
    row, (segment, prefix, shared), length = layout.rows[i], layout.segments[i], len(sequences[i].tokens)
    before = np.zeros(0, int)
    if shared:
      if (row, prefix) not in prompts:
        prompts[row, prefix] = np.arange(ends[row], ends[row] + sequences[i].num_prompt)
        ends[row] += sequences[i].num_prompt
      before, segments[i] = prompts[row, prefix], (segment, prefix, sequences[i].num_prompt)
    rest = length - len(before)
    slots[i] = np.concatenate([before, np.arange(ends[row], ends[row] + rest)])
    ends[row] += rest
  return layout._replace(slots=slots, segments=segments)


def pack_taught(sequences: Sequence[Trajectory], layouts: tuple[Layout, Layout], taught: Sequence[Trajectory]) -> TaughtRows:
  """Packs the sequences of a teacher in the places that `arrange_taught` chose for them.

  Args:
    sequences: The policy's sequences.
    layouts: Places of its sequences and of the teacher's.
    taught: The teacher's sequences.
  """
  packed, sources = pack(taught, layouts[1]), np.full(layouts[0].held_shape, -1, np.int32)
  for row, slots, _, one, other, places in layouts[0].places(sequences, taught, layouts[1].slots):
    sources[row, slots[one.num_prompt :]] = places[other.num_prompt - 1 : -1]
  return TaughtRows(packed.tokens, packed.positions, packed.segments, sources, packed.prefixes)


def pack(sequences: Sequence[Trajectory], layout: Layout, room: Room | None = None) -> TrainBatch:
  """Packs sequences into rows in host memory, in the places that `arrange` chose for them.

  The batch has the rows of this process alone, `layout.held`, as `place_tokens` expects them. The
  batch's `old_logprobs` are the sampler's log-probabilities.

  Args:
    sequences: Sequences.
    layout: Their places.
    room: Room for the pictures of prompts; None if there are none.

  Raises:
    ValueError: If a row has more pictures than there is room for.
  """
  shape = layout.held_shape
  ints = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segments", "prefixes", "groups")}
  floats = {name: np.zeros(shape, np.float32) for name in ("mask", "advantages", "sampler_logprobs")}
  if sequences and sequences[0].replies is not None:
    floats["replies"] = np.zeros(shape, np.float32)
  lag = np.zeros(shape, np.int32) if sequences and sequences[0].lag is not None else None
  prompts: dict[int | None, int] = {}
  for sequence in sequences:
    prompts.setdefault(sequence.group, len(prompts) + 1)
  routing = None
  if sequences and sequences[0].routing is not None:
    routing = np.full((*shape, *sequences[0].routing.shape[1:]), -1, np.int16)
  for row, slots, (segment, prefix, shared), sequence in layout.places(sequences):
    ints["tokens"][row, slots] = sequence.tokens
    ints["positions"][row, slots] = np.arange(len(slots))
    own = np.arange(len(slots)) >= shared
    ints["segments"][row, slots] = np.where(own, segment, prefix)
    ints["prefixes"][row, slots] = np.where(own, prefix, 0)
    ints["groups"][row, slots] = prompts[sequence.group]
    for name, array in floats.items():
      array[row, slots] = getattr(sequence, name)
    if routing is not None:
      routing[row, slots] = sequence.routing
    if lag is not None:
      lag[row, slots] = sequence.lag
  if not layout.shares:
    ints["prefixes"] = None
  if not sequences or sequences[0].group is None:
    ints["groups"] = None
  batch = TrainBatch(**ints, **floats, old_logprobs=floats["sampler_logprobs"], routing=routing, lag=lag)
  return batch if room is None else _with_pictures(batch, sequences, layout, room)


def _with_pictures(batch: TrainBatch, sequences: Sequence[Trajectory], layout: Layout, room: Room) -> TrainBatch:
  """Adds the pictures of the prompts, once for all sequences that share a prompt."""
  positions, images = np.repeat(batch.positions[..., None], 3, axis=-1), image_slots.blank(room.shapes(*layout.held_shape))
  first, used = {}, [0] * len(positions)
  for row, slots, _, sequence in layout.places(sequences):
    pictures = sequence.pictures
    if pictures is None:
      continue
    positions[row, slots], own = pictures.span(0, len(slots))
    # Sequences that share a prompt begin at the same slot.
    if (row, slots[0]) not in first:
      first[row, slots[0]] = used[row]
      if used[row] + pictures.count > room.pictures:
        needed = used[row] + pictures.count
        raise ValueError(f"config.learner.row_images: found {room.pictures}, expected at least {needed} for the pictures of a row")
      image_slots.put(images, row, used[row], pictures)
      used[row] += pictures.count
    images.slots[row, slots] = np.where(own < 0, -1, own + first[row, slots[0]] * room.tokens)
  return batch._replace(positions=positions, images=images)


def lift(packed: Float[np.ndarray, "B T"], layout: Layout) -> list[Float[np.ndarray, "..."]]:
  """Returns the values of each sequence from a packed array, including those of its prompt.

  Inverse of `lay` in a single process. The array has the rows of all processes.
  """
  return [packed[row, slots] for row, slots in zip(layout.rows, layout.slots, strict=True)]


def lay(values: Sequence[Float[np.ndarray, "..."]], layout: Layout) -> Float[np.ndarray, "B T"]:
  """Packs the values of each sequence's tokens as `pack` packs the sequences; zeros elsewhere.

  It packs the rows of this process alone.
  Each array is as long as its sequence; the values of a shared prompt must be equal.

  Example:
    >>> sequences = [demonstration([1], [2]), demonstration([3], [4, 5])]
    >>> layout = arrange(sequences, row_tokens=6, row_buckets=(1,))
    >>> lay([np.full(2, 5.0), np.full(3, 7.0)], layout).tolist()
    [[7.0, 7.0, 7.0, 5.0, 5.0, 0.0]]
  """
  packed = np.zeros(layout.held_shape, np.float32)
  for row, slots, _, x in layout.places(values):
    packed[row, slots] = x
  return packed


def packing_waste(layouts: Sequence[Layout]) -> float:
  """Returns the fraction of the slots of all rows that hold padding."""
  return 1 - sum(layout.num_used for layout in layouts) / sum(math.prod(layout.shape) for layout in layouts)


def prompts_saved(layouts: Sequence[Layout]) -> float:
  """Returns the fraction of all sequences' tokens that packing saves by sharing prompts."""
  tokens = sum(len(slots) for layout in layouts for slots in layout.slots)
  return 1 - sum(layout.num_used for layout in layouts) / max(tokens, 1)


def split(sequences: Sequence[Any], num_updates: int) -> list[list[Any]]:
  """Splits a rollout batch into the sequences of each optimizer update, or what belongs to each.

  `num_updates` must divide their number. Groups of consecutive samples stay together; their prompts
  come in shuffled order.
  """
  size = len(sequences) // num_updates
  return [list(sequences[start : start + size]) for start in range(0, len(sequences), size)]
