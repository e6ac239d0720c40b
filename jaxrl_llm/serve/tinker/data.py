"""What a training call brings: its data, checked and packed into rows of a few sizes."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm.learner.packing import Unit, assign_rows
from jaxrl_llm.messages import Problem
from jaxrl_llm.serve.refusals import Refusal, wrong
from jaxrl_llm.serve.tinker import wire
from jaxrl_llm.serve.tinker.losses import FIELDS, Loss
from jaxrl_llm.types import TrainBatch

# In a program of fewer tokens than the least row a CPU adds otherwise; see `kernels.partial`.
_LEAST_ROW, _COMMON_ROW, _LEAST_TOKENS = 64, 256, 1024
_PADDING = 1.15
_MOST_TARGETS = 128


class TrainingCall(NamedTuple):
  """A call of `forward_backward` or `forward`, as it was sent.

  Attributes:
    model_id: Adapter.
    seq_id: Number of the call among those on the adapter.
    data: Tokens, and arrays by name, of each datum.
    loss_fn: Name of the loss.
    config: Settings of the loss.
    forward_only: Whether no gradient is wanted.
    digest: Hash of all this: a call that is sent again has the same.
  """

  model_id: str
  seq_id: int
  data: list[tuple[list[np.ndarray], dict[str, np.ndarray]]]
  loss_fn: str
  config: dict[str, float | str]
  forward_only: bool
  digest: str


class Datum(NamedTuple):
  """A sequence to train on: after each of its tokens come one or more targets.

  Attributes:
    tokens: Ids.
    targets: Ids that are scored after each token.
    inputs: Arrays that the loss reads, by name.
  """

  tokens: Int[np.ndarray, " n"]
  targets: Int[np.ndarray, "n k"]
  inputs: dict[str, Float[np.ndarray, "n k"]]


class DataRows(NamedTuple):
  """Packed rows.

  Attributes:
    tokens: Token ids.
    positions: Position of each token in its own sequence, from 0.
    segments: Index of each token's sequence within the row, from 1; 0 is padding.
    batch: What the loss reads, with `targets` slots for each token.
  """

  tokens: Int[np.ndarray, "B T"]
  positions: Int[np.ndarray, "B T"]
  segments: Int[np.ndarray, "B T"]
  batch: TrainBatch


class Packed(NamedTuple):
  """DataRows of a call.

  Attributes:
    rows: The rows.
    places: Row and first slot of each datum.
    at_once: Number of rows that a program computes, which divides theirs.
  """

  rows: DataRows
  places: list[tuple[int, int]]
  at_once: int


def read_call(body: bytes) -> TrainingCall:
  """Reads the body of a training call.

  Raises:
    Refusal: If it is no such message.
  """
  call = wire.decode(memoryview(body), wire.TRAINING_CALL)
  data = []
  for datum in call.get("data", []):
    inputs = {name: array for name, array in datum.get("inputs", []) if array is not None}
    data.append(([chunk.get("tokens") for chunk in datum.get("chunks", [])], inputs))
  # The second map has the numbers too; clients of another version send only the first.
  config: dict[str, Any] = {key: value or 0.0 for key, value in call.get("settings", [])}
  config |= {
    key: value.get("number", value.get("text")) for key, value in call.get("settings_and_names", []) if value
  }
  head = (
    call.get("model_id", ""),
    call.get("seq_id", 0),
    call.get("loss_fn", ""),
    config,
    call.get("forward_only", False),
  )
  model_id, seq_id, loss_fn, config, forward_only = head
  hashed = hashlib.sha256(repr((head[:3], sorted(config.items()), forward_only)).encode())
  for chunks, inputs in data:
    for name, array in [*((str(i), x) for i, x in enumerate(chunks)), *sorted(inputs.items())]:
      # Maps have no order on the wire.
      if array is not None:
        hashed.update(f"{name}{array.shape}{array.dtype}".encode() + array.tobytes())
  return TrainingCall(model_id, seq_id, data, loss_fn, config, forward_only, hashed.hexdigest())


def check_data(call: TrainingCall, loss: Loss, *, vocab_size: int, context: int) -> list[Datum]:
  """Checks the data of a call.

  Args:
    call: The call.
    loss: Loss of the call.
    vocab_size: Number of ids.
    context: Largest number of tokens of a datum.

  Raises:
    Refusal: If an array is missing, not read, of another length or not finite, or an id is none.
  """
  if not call.data:
    raise Refusal(400, "data: found no datum, expected at least one", field="data")
  data = [
    _datum(f"data[{i}]", *given, loss, vocab_size=vocab_size, context=context)
    for i, given in enumerate(call.data)
  ]
  if len(widths := {datum.targets.shape[1] for datum in data}) > 1:
    raise wrong("target_tokens", sorted(widths), "as many targets per token in all data of a call")
  return data


def _datum(
  field: str,
  chunks: Sequence[np.ndarray | None],
  inputs: Mapping[str, np.ndarray],
  loss: Loss,
  *,
  vocab_size: int,
  context: int,
) -> Datum:
  if any(chunk is None for chunk in chunks):
    raise Refusal(400, f"{field}.model_input: found a picture or sound, expected tokens alone", field=field)
  tokens = np.concatenate([*chunks, np.zeros(0, np.int32)]).astype(np.int32)
  if not 1 <= len(tokens) <= context:
    raise Refusal(
      400, str(Problem(f"{field}.model_input", f"{len(tokens):,} tokens", f"1 to {context:,}")), field=field
    )
  names = ("target_tokens", *loss.reads)
  for name in names:
    if name not in inputs:
      raise Refusal(
        400, f"{field}.loss_fn_inputs: found no {name!r}, which the loss {loss.name!r} reads", field=field
      )
  if unread := sorted(inputs.keys() - names):
    raise Refusal(
      400,
      f"{field}.loss_fn_inputs: found {unread[0]!r}, which the loss {loss.name!r} does not read",
      field=field,
    )
  targets = inputs["target_tokens"]
  shapes = {name: inputs[name].shape for name in names}
  # Several targets of a token have weights of their own, and nothing else.
  most = _MOST_TARGETS if loss.name == "cross_entropy" else 1
  fits = targets.shape[:1] == tokens.shape and targets.ndim in (1, 2) and 1 <= targets[:1].size <= most
  if not fits or len(set(shapes.values())) > 1:
    named = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    raise Refusal(
      400,
      f"{field}.loss_fn_inputs: found {named}, expected [{len(tokens)}] each, the tokens of model_input",
      field=field,
    )
  for name, ids in (("model_input", tokens), ("target_tokens", targets)):
    if targets.dtype.kind != "i" or ids.min() < 0 or ids.max() >= vocab_size:
      raise Refusal(
        400,
        f"{field}.{name}: found an id that is none, expected whole numbers from 0 to {vocab_size - 1:,}",
        field=field,
      )
  wide = {name: inputs[name].reshape(len(tokens), -1) for name in names}
  for name in loss.reads:
    if not np.isfinite(wide[name]).all():
      raise Refusal(
        400, f"{field}.loss_fn_inputs.{name}: found NaN or an infinity, expected numbers", field=field
      )
  return Datum(
    tokens,
    wide.pop("target_tokens").astype(np.int32),
    {name: x.astype(np.float32) for name, x in wide.items()},
  )


def power_of_two(size: int) -> int:
  """Returns the smallest power of two that is at least as large."""
  return 1 << (size - 1).bit_length()


def _rows_at_once(rows: int, most: int, least: int) -> int:
  """Returns how many rows a program computes: many, but so that few of them are empty.

  Args:
    rows: Number of rows.
    most: Largest result, a power of two.
    least: Number below which empty rows cost less than small programs.

  Example:
    >>> [_rows_at_once(rows, 16, 4) for rows in (1, 3, 16, 20, 21, 33, 100)]
    [1, 4, 16, 4, 8, 4, 16]
  """
  at_once = min(power_of_two(rows), most)
  while at_once > least and at_once > 1 and -(-rows // at_once) * at_once > _PADDING * rows:
    at_once //= 2
  return at_once


def pack(data: Sequence[Datum], loss: Loss, *, budget: int, shards: int, unit: int = 1) -> Packed:
  """Packs data into rows, whose sizes are few, so that few programs are compiled.

  Args:
    data: Checked data.
    loss: The loss that reads them.
    budget: Number of tokens that a program computes at once, a power of two.
    shards: Number of devices that rows are split over.
    unit: Number of slots of which each datum starts at a multiple.
  """
  lengths = [len(datum.tokens) for datum in data]
  rooms = [-(-length // unit) * unit for length in lengths]
  slots = power_of_two(max(*rooms, min(sum(rooms), _COMMON_ROW), _LEAST_ROW))
  packed = assign_rows([Unit(0, (i,), (room,)) for i, room in enumerate(rooms)], slots)
  at_once = _rows_at_once(
    -(-len(packed) // shards), max(budget // slots // shards, 1), _LEAST_TOKENS // slots
  )
  at_once *= shards
  count, width = -(-len(packed) // at_once) * at_once, data[0].targets.shape[1]
  tokens, positions, segments = (np.zeros((count, slots), np.int32) for _ in range(3))
  targets = np.zeros((count, slots, width), np.int32)
  arrays = {FIELDS[name]: np.zeros((count, slots, width), np.float32) for name in loss.reads}
  places = [(0, 0)] * len(data)
  for row, units in enumerate(packed):
    start = 0
    for number, unit in enumerate(units, 1):
      (i,) = unit.members
      here = slice(start, start + lengths[i])
      tokens[row, here], targets[row, here] = data[i].tokens, data[i].targets
      positions[row, here], segments[row, here] = np.arange(lengths[i]), number
      for name, x in data[i].inputs.items():
        arrays[FIELDS[name]][row, here] = x
      places[i], start = (row, start), start + rooms[i]
  spread = lambda x: np.repeat(x, width, axis=1)
  of_loss = {name: x.reshape(count, -1) for name, x in arrays.items()}
  mask = of_loss.pop("mask", spread(segments))
  if "groups" in of_loss:
    numbers = np.unique(of_loss["groups"], return_inverse=True)[1]
    of_loss["groups"] = numbers.reshape(mask.shape).astype(np.int32)
  fields = dict.fromkeys(("advantages", "old_logprobs"), np.zeros(mask.shape, np.float32)) | of_loss
  batch = TrainBatch(
    targets.reshape(count, -1), spread(positions), spread(segments), (mask != 0).astype(np.float32), **fields
  )
  return Packed(DataRows(tokens, positions, segments, batch), places, at_once)
