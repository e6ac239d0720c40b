"""The rows of the cache: what each holds, and which of them a request gets. Starts no JAX."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Integer

_EMPTY, _TAKEN = -1, np.iinfo(np.int64).max


class Place(NamedTuple):
  """Place of a request in the cache.

  Attributes:
    row: Row that the request decodes in.
    source: Row with the first tokens of its prompt, which may be the same row.
    shared: Number of those tokens, which need not be computed.
  """

  row: int
  source: int
  shared: int


class CachePool:
  """The rows of the cache, each busy with a request, or idle with the tokens that it has left.

  Args:
    rows: Number of rows.
    columns: Number of columns of a row.
    least: Smallest number of tokens that are worth a copy, unless they are the whole prompt.
    pieces: Number of pieces of as many rows each, one on each of the devices that rows are split
      over. Rows are copied within a piece only.

  Attributes:
    lengths: Number of tokens of each row whose keys and values are in the cache.

  Example:
    >>> pool = CachePool(rows=2, columns=8, least=2)
    >>> pool.place(np.array([5, 6, 7, 8]), "", version=0)
    Place(row=0, source=0, shared=0)
    >>> pool.place(np.array([5, 6, 7, 9]), "", version=0)  # Copied once row 0 has computed it.
    Place(row=1, source=0, shared=3)
  """

  def __init__(self, rows: int, columns: int, *, least: int, pieces: int = 1):
    self.lengths: Int[np.ndarray, " B"] = np.zeros(rows, np.int64)
    self._tokens = np.zeros((rows, columns), np.int32)
    self._planned = np.zeros(rows, np.int64)  # Length once the prompt of a busy row is computed.
    self._busy: Bool[np.ndarray, " B"] = np.zeros(rows, bool)
    self._readers = np.zeros(rows, np.int64)  # Requests that still have to copy from the row.
    self._versions, self._owners = np.zeros(rows, np.int64), np.full(rows, "", object)
    # Rows of the same salt and version have the same number, which is compared faster.
    self._kinds, self._kind_of = np.full(rows, -1, np.int64), {}
    self._new_kinds = itertools.count()
    # Number of leading tokens that were computed as parts of prompts. Steps of decoding round the
    # others differently.
    self._prefilled = np.zeros(rows, np.int64)
    self._ended = np.zeros(rows, np.int64)  # Time at which the row became idle.
    # That time for the rows that a request can get; `_EMPTY` if they hold nothing, else `_TAKEN`.
    self._idle_since = np.full(rows, _EMPTY, np.int64)
    self._time, self._least, self._firsts = 0, least, np.arange(0, rows, rows // pieces)

  def place(self, tokens: Integer[np.ndarray, " n"], salt: str, *, version: int, owner: str | None = "") -> Place | None:
    """Gives a request a row; None if no row is free.

    A row whose tokens all continue in the prompt is taken over as it is. Otherwise the request gets
    an empty row, or the one that has been idle for longest, and copies what another row shares with
    it, in the piece with the longest such part or else with the fewest busy rows. The last token of
    a prompt is never shared, because its logits are needed. Tokens that were drawn, and what
    follows them, are shared with requests of the same owner only; the owner None shares none.
    """
    pieces = self._idle_since.reshape(len(self._firsts), -1)
    rows, num_taken = self._firsts + pieces.argmin(axis=1), np.sum(pieces == _TAKEN, axis=1)
    is_full = num_taken == pieces.shape[1]
    if is_full.all():
      return None
    row, kind, most = int(rows[np.where(is_full, _TAKEN, num_taken).argmin()]), self._kind(salt, version), 0
    source = row
    known = np.flatnonzero((self._kinds == kind) & (self._tokens[:, 0] == tokens[0])) if len(tokens) > 1 else ()
    if len(known):
      shared = self._shared(known, tokens[:-1], owner)
      is_whole = (self._idle_since[known] < _TAKEN) & (shared == self.lengths[known]) & (shared > 0)
      if is_whole.any():
        row = int(known[np.where(is_whole, shared, -1).argmax()])
      elif len(rows) > 1 and (there := np.where(is_full[self._piece(known)], 0, shared)).any():
        row = int(rows[self._piece(int(known[there.argmax()]))])
      shared = np.where(self._piece(known) == self._piece(row), shared, 0)
      own = int(shared[known == row].sum())
      # Of equally long ones, a row that has already computed them.
      best = (2 * shared + (self.lengths[known] >= shared)).argmax()
      source, most = int(known[best]), int(shared[best])
      saved = most - own
      if saved < self._least and not (saved and most == len(tokens) - 1):
        source, most = row, own
    place = Place(row, source, most)
    self._busy[row], self._kinds[row], self._versions[row], self._owners[row] = True, kind, version, owner
    self._prefilled[row] = len(tokens) - 1 if most <= self._prefilled[source] else self._prefilled[source]
    self._tokens[row, : len(tokens) - 1] = tokens[:-1]
    self.lengths[row], self._planned[row] = (most if source == row else 0), len(tokens) - 1
    self._idle_since[row] = _TAKEN
    if source != row:
      self._readers[source] += 1
      self._idle_since[source] = _TAKEN
    return place

  def _kind(self, salt: str, version: int) -> int:
    """Returns the number of the rows with a salt and a version of the weights."""
    if len(self._kind_of) > 4 * len(self._kinds):
      held = set(self._kinds.tolist())
      self._kind_of = {key: kind for key, kind in self._kind_of.items() if kind in held}
    if (salt, version) not in self._kind_of:
      self._kind_of[salt, version] = next(self._new_kinds)
    return self._kind_of[salt, version]

  def _shared(self, rows: Int[np.ndarray, " m"], tokens: Integer[np.ndarray, " n"], owner: str | None) -> Int[np.ndarray, " m"]:
    """Returns how many of the first tokens some rows of their kind hold or are going to hold."""
    differs = np.ones((len(rows), len(tokens) + 1), bool)
    np.not_equal(self._tokens[rows, : len(tokens)], tokens, out=differs[:, :-1])
    held = np.maximum(self._planned[rows], self.lengths[rows])
    is_own = False if owner is None else self._owners[rows] == owner
    held = np.where(is_own, held, np.minimum(held, self._prefilled[rows]))
    return np.minimum(differs.argmax(axis=1), held)

  def _piece(self, rows: Int[np.ndarray, "..."] | int) -> Int[np.ndarray, "..."] | int:
    return rows // (len(self.lengths) // len(self._firsts))

  def _free(self, row: int) -> None:
    """Lets requests have a row, if nothing needs it any more."""
    if not self._busy[row] and not self._readers[row]:
      self._idle_since[row] = self._ended[row] if self.lengths[row] else _EMPTY

  def has_computed(self, place: Place) -> bool:
    """Returns whether the source of a request holds all that it ever will of the shared tokens."""
    return bool(self.lengths[place.source] >= min(place.shared, self._planned[place.source]))

  def copied(self, place: Place) -> int:
    """Notes that a request has copied from its source; returns the number of tokens it got."""
    self._readers[place.source] -= 1
    self._free(place.source)
    self.lengths[place.row] = min(place.shared, self.lengths[place.source])
    return int(self.lengths[place.row])

  def give_up(self, place: Place) -> None:
    """Notes that a request no longer wants to copy from its source."""
    self._readers[place.source] -= 1
    self._free(place.source)
    self.lengths[place.row] = 0

  def add(self, row: int, tokens: Sequence[int] | Integer[np.ndarray, " n"]) -> None:
    """Notes further tokens that a busy row has computed."""
    end = self.lengths[row] + len(tokens)
    self._tokens[row, self.lengths[row] : end] = tokens
    self.lengths[row] = end

  def release(self, row: int, *, version: int) -> None:
    """Makes a row idle, and empties it if it is not of the given version of the weights."""
    self._time += 1
    self._busy[row], self._ended[row] = False, self._time
    if self._versions[row] != version:
      self.lengths[row] = 0
    self._planned[row] = self.lengths[row]
    self._free(row)

  def forget(self, *, version: int) -> None:
    """Empties the idle rows of other versions of the weights."""
    gone = ~self._busy & (self._versions != version)
    self.lengths[gone] = self._planned[gone] = 0
    self._idle_since[gone & (self._readers == 0)] = _EMPTY
