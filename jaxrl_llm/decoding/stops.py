"""The rule for when a turn ends, which the sampler and the engine apply at each step on the device.

Stop strings and sequences are data, as the masks of the Shift-And algorithm: a bit for each byte or
id, which is set while the text ends with all of its pattern up to there. So each row can have its
own, and nothing compiles for them. Matching text instead would need the host to decode it.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer, UInt8, UInt32

from jaxrl_llm.types import StopReason

RUNNING = -1
"""Value that stands for the `StopReason` of a sequence that is not done."""

NO_ID = -1
"""Id of a token that was not drawn, and of a stop token that does not exist."""

MAX_IDS, MAX_BYTES = 128, 1024
"""Largest number of stop ids of a request, and of bytes of all its stop strings together."""

_WORD = 32
_BITS_OF_BYTES, _BITS_OF_IDS = 8, 31


class Patterns(NamedTuple):
  """Patterns one after the other, with a bit for each symbol; those of each row by the first axes.

  Attributes:
    planes: Bits of the symbols, the lowest first.
    firsts: First symbol of each pattern.
    lasts: Last symbol of each pattern.
  """

  planes: UInt32[Array | np.ndarray, "*rows bits words"]
  firsts: UInt32[Array | np.ndarray, "*rows words"]
  lasts: UInt32[Array | np.ndarray, "*rows words"]


class Vocabulary(NamedTuple):
  """Bytes of the ids of a vocabulary.

  Attributes:
    starts: Index of the first byte of each id, then twice that of the end: the first of these
      stands for ids beyond the vocabulary.
    data: Bytes of all ids, and one more.
  """

  starts: Int[np.ndarray, " V+2"]
  data: UInt8[np.ndarray, " bytes"]

  def text(self, ids: Iterable[int]) -> bytes:
    """Returns the bytes of ids, none for those beyond the vocabulary."""
    known = (i for i in ids if 0 <= i < len(self.starts) - 2)
    return b"".join(self.data[self.starts[i] : self.starts[i + 1]].tobytes() for i in known)


class StopTable(NamedTuple):
  """What ends a turn: the same for all rows, or for each row by the first axis.

  It is a pytree of NumPy arrays, to be closed over or passed to a jitted function.

  Attributes:
    ids: Stop ids, then `NO_ID`.
    strings: Stop strings, over bytes; None if there are none.
    sequences: Sequences of ids; None if there are none.
    vocabulary: Bytes of the ids, for strings; the same for all rows.
  """

  ids: Integer[Array | np.ndarray, "*rows M"] = np.zeros(0, np.int32)
  strings: Patterns | None = None
  sequences: Patterns | None = None
  vocabulary: Vocabulary | None = None

  @property
  def is_empty(self) -> bool:
    """Whether only limits end turns."""
    return not len(self.ids) and all(x is None for x in self[1:])

  def start(self, *rows: int) -> "Matching":
    """Returns the states of empty turns."""
    empty = lambda patterns: patterns and jnp.zeros((*rows, patterns.firsts.shape[-1]), jnp.uint32)
    return Matching(empty(self.strings), empty(self.sequences))


class Matching(NamedTuple):
  """How much of each pattern the turns end with, in bits of `Patterns`; None without patterns."""

  strings: UInt32[Array | np.ndarray, "*rows words"] | None
  sequences: UInt32[Array | np.ndarray, "*rows words"] | None


def advance_stops(
  table: StopTable,
  matching: Matching,
  reasons: Int[Array, "*rows"],
  tokens: Int[Array, "*rows"],
  *,
  lengths: Int[Array, "*rows"],
  limits: Integer[Array, "*rows"],
  least: Integer[Array, "*rows"] | None = None,
) -> tuple[Matching, Int[Array, "*rows"]]:
  """Feeds each row's drawn token to the rule, which says whether the turn ends with it.

  A stop token comes before a stop string, and that before the limit. A string may begin anywhere in
  the turn and span tokens.

  Args:
    table: What ends the turns.
    matching: States before the token.
    reasons: `RUNNING`, or the `StopReason` of a row that has ended, which keeps it and its state.
    tokens: Drawn tokens.
    lengths: Number of tokens of each turn, this one included.
    limits: Number of tokens at which a turn ends.
    least: Number of tokens before which only the limit ends a turn.

  Returns:
    The states and the reasons after the token.
  """
  is_fed = reasons == RUNNING
  counts = is_fed if least is None else is_fed & (lengths >= least)
  matching, is_match = _advance_matching(table, matching, tokens, is_fed)
  is_stop = jnp.any(tokens[..., None] == jnp.asarray(table.ids), axis=-1)
  now = jnp.where(lengths >= limits, int(StopReason.LENGTH), RUNNING)
  now = jnp.where(is_match & counts, int(StopReason.STRING), now)
  now = jnp.where(is_stop & counts, int(StopReason.TOKEN), now)
  return matching, jnp.where(is_fed, now, reasons)


def _advance_matching(
  table: StopTable, matching: Matching, tokens: Int[Array, "*rows"], is_fed: Bool[Array, "*rows"]
) -> tuple[Matching, Bool[Array, "*rows"]]:
  """Feeds tokens to the patterns and returns whether they complete one."""
  is_match = jnp.zeros(tokens.shape, bool)
  if table.sequences is not None:
    bits, is_match = _feed(table.sequences, matching.sequences, tokens, is_fed)
    matching = matching._replace(sequences=bits)
  if table.strings is None:
    return matching, is_match
  starts, data = map(jnp.asarray, table.vocabulary)
  # Only rows with strings, so that others never wait for a long token.
  is_read = is_fed & jnp.any(table.strings.firsts != 0, axis=-1) & (tokens >= 0) & (tokens < len(starts) - 2)
  ids = jnp.where(is_read, tokens, len(starts) - 2)
  begins, ends = starts[ids], starts[ids + 1]

  def feed(state):
    i, bits, is_match = state
    bits, hits = _feed(table.strings, bits, data[begins + i], begins + i < ends)
    return i + 1, bits, is_match | hits

  longest = jnp.max(ends - begins)
  _, bits, is_match = jax.lax.while_loop(lambda state: state[0] < longest, feed, (0, matching.strings, is_match))
  return matching._replace(strings=bits), is_match


def _feed(
  patterns: Patterns, bits: UInt32[Array, "*rows words"], symbols: Integer[Array, "*rows"], is_fed: Bool[Array, "*rows"]
) -> tuple[UInt32[Array, "*rows words"], Bool[Array, "*rows"]]:
  """Feeds a symbol and returns whether it completes a pattern; rows that are not fed stay.

  bits ← (bits ≪ 1 | firsts) & {symbols of the patterns that equal this one}

  References:
    Baeza-Yates, Gonnet. A new approach to text searching (Communications of the ACM, 1992).
  """
  # The highest bit of a word goes on in the next.
  before = jnp.pad(bits[..., :-1] >> (_WORD - 1), [*[(0, 0)] * (bits.ndim - 1), (1, 0)])
  after = bits << 1 | before | patterns.firsts
  for i in range(patterns.planes.shape[-2]):
    bit = (symbols >> i & 1).astype(jnp.uint32)[..., None]
    after &= patterns.planes[..., i, :] ^ (bit - 1)  # All bits flip where the symbol's bit is 0.
  is_match = is_fed & jnp.any(after & patterns.lasts != 0, axis=-1)
  return jnp.where(is_fed[..., None], after, bits), is_match


def make_stop_table(token_bytes: Sequence[bytes | None], strings: Sequence[str] = (), sequences: Sequence[Sequence[int]] = ()) -> StopTable:
  """Makes the table of strings and sequences that end any row's turns.

  A string matches as soon as the token that completes it is drawn, wherever in the token the string
  begins or ends. UTF-8 is self-synchronizing, so bytes and characters give the same answer.

  Args:
    token_bytes: Bytes of every id of the vocabulary. The strings skip a token without bytes (None),
      such as a special token.
    strings: Texts, each of which ends a turn.
    sequences: Sequences of token ids, each of which ends a turn.

  Raises:
    ValueError: If a string or a sequence is empty, has the wrong type, or cannot be written in
      tokens, or if the strings are too long.

  Example:
    >>> table = make_stop_table([b"a", b"ab", b"b", None], ["aab"])
    >>> feed = lambda matching, t, tokens: advance_stops(table, matching, jnp.full(2, RUNNING), tokens, lengths=t, limits=jnp.full(2, 9))
    >>> matching, _ = feed(table.start(2), jnp.array([1, 1]), jnp.array([0, 1]))  # "a", "ab"
    >>> feed(matching, jnp.array([2, 2]), jnp.array([1, 2]))[1].tolist()  # "aab", "abb"
    [2, -1]

  Note:
    U+FFFD in a stop string matches only its own bytes, not what a decoder writes for invalid UTF-8.
  """
  if isinstance(strings, str | bytes):
    raise ValueError(f"rollout.stop_strings: found {strings!r}, expected a sequence of texts; write ({strings!r},)")
  check_texts("rollout.stop_strings", strings)
  ids = _checked_sequences(sequences, len(token_bytes))
  return StopTable(
    strings=_patterns(tuple(string.encode() for string in strings), _BITS_OF_BYTES) if strings else None,
    sequences=_patterns(tuple(ids), _BITS_OF_IDS) if ids else None,
    vocabulary=make_vocabulary(token_bytes) if strings else None,
  )


def make_vocabulary(token_bytes: Sequence[bytes | None]) -> Vocabulary:
  """Makes the vocabulary of tokens with these bytes."""
  pieces = [token or b"" for token in token_bytes]
  starts = np.cumsum([0, *map(len, pieces), 0], dtype=np.int32)
  return Vocabulary(starts, np.frombuffer(b"".join(pieces) + b"\0", np.uint8))


def stops_of_row(
  ids: Sequence[int] = (), strings: Sequence[str] = (), *, vocabulary: Vocabulary | None, drawn: Sequence[int] = ()
) -> tuple[StopTable, Matching]:
  """Returns one row's part of a table with a row for each request, and the row's state.

  Args:
    ids: Stop ids, at most `MAX_IDS`.
    strings: Stop strings, at most `MAX_BYTES` together.
    vocabulary: Bytes of the ids; None if no row has strings.
    drawn: Ids of the turn so far.
  """
  all_ids = np.full(MAX_IDS, NO_ID, np.int32)
  all_ids[: len(ids)] = ids
  if vocabulary is None:
    return StopTable(all_ids), Matching(None, None)
  encoded, text = tuple(string.encode() for string in strings), vocabulary.text(drawn) if strings else b""
  is_there = [text.endswith(string[:n]) for string in encoded for n in range(1, len(string) + 1)]
  return StopTable(all_ids, _patterns(encoded, _BITS_OF_BYTES, MAX_BYTES)), Matching(_words(np.array(is_there, bool), MAX_BYTES), None)


@functools.lru_cache(maxsize=64)  # Most requests have the strings of others.
def _patterns(sequences: tuple[Sequence[int], ...], num_bits: int, size: int = 0) -> Patterns:
  """Makes the patterns of sequences of symbols, with room for `size` symbols or all."""
  symbols = np.array(list(itertools.chain(*sequences)), np.int64)
  edges, size = np.zeros(len(symbols) + 1, bool), max(size, len(symbols))
  edges[np.cumsum([0, *map(len, sequences)])] = True
  planes = _words(symbols >> np.arange(num_bits)[:, None] & 1, size)
  return Patterns(planes, _words(edges[:-1], size), _words(edges[1:], size))


def _words(bits: Integer[np.ndarray, "*rows bits"] | Bool[np.ndarray, "*rows bits"], size: int) -> UInt32[np.ndarray, "*rows words"]:
  """Packs bits into words, with room for `size` bits."""
  padded = np.zeros((*bits.shape[:-1], -(-size // _WORD) * _WORD), bool)
  padded[..., : bits.shape[-1]] = bits
  return np.packbits(padded, axis=-1, bitorder="little").view("<u4")


def check_texts(name: str, texts: Iterable[Any]) -> None:
  """Checks texts that are to end a response.

  Raises:
    ValueError: If one is empty, no text, or cannot be encoded, or if they are too long together.
      One line, which begins with `name`.
  """
  total = 0
  for text in texts:
    if not isinstance(text, str) or not text:
      raise ValueError(f"{name}: found {text!r}, expected texts of at least one character")
    if any("\ud800" <= character <= "\udfff" for character in text):
      raise ValueError(f"{name}: found {text!r} with a lone surrogate, which UTF-8 cannot encode; remove it")
    total += len(text.encode())
  if total > MAX_BYTES:
    raise ValueError(f"{name}: found {total:,} bytes of UTF-8, expected at most {MAX_BYTES:,} in all texts together")


def _checked_sequences(sequences: Any, num_ids: int) -> list[tuple[int, ...]]:
  for sequence in sequences:
    if isinstance(sequence, str | bytes) or not isinstance(sequence, Sequence) or not sequence:
      raise ValueError(
        f"rollout.stop_strings: found the sequence {sequence!r}, expected a sequence of one or more token ids"
      )
    for i in sequence:
      if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < num_ids:
        raise ValueError(f"rollout.stop_strings: found the token id {i!r} in {list(sequence)}, expected ids from 0 to {num_ids - 1}")
  return [tuple(int(i) for i in sequence) for sequence in sequences]
