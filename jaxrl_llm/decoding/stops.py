"""Stop strings and sequences, matched on the device token by token with automata.

Matching text instead would need the host to decode it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer

_START = 0


class StopAutomaton(NamedTuple):
  """An automaton over token ids. State 0 is the start; the last state means a match and is final.

  Attributes:
    classes: Class of each token; tokens of one class have the same transition from every state. The
      last entry is for ids beyond the vocabulary.
    following: Next state by state and class.
  """

  classes: Integer[Array | np.ndarray, " V+1"]
  following: Integer[Array | np.ndarray, "states classes"]


class StopTable(NamedTuple):
  """Automata that end a response: one of the strings and one of the sequences, if there are any.

  It is a pytree of NumPy arrays, to be closed over or passed to a jitted function.

  Attributes:
    automata: Automata of the strings and of the sequences.
  """

  automata: tuple[StopAutomaton, ...]

  def start(self, n: int) -> Int[Array, "{n} A"]:
    """Returns the states of n empty responses."""
    return jnp.full((n, len(self.automata)), _START, jnp.int32)


def advance_stops(
  table: StopTable, states: Int[Array, "N A"], tokens: Int[Array, " N"]
) -> tuple[Int[Array, "N A"], Bool[Array, " N"]]:
  """Feeds each row's drawn token to the automata. An id outside the vocabulary has no bytes.

  Returns:
    The new states, and whether each row contains any of the strings or sequences so far. A match is
    permanent.
  """
  columns, matched = [], jnp.zeros(tokens.shape, bool)
  for i, (classes, following) in enumerate(table.automata):
    unknown = len(classes) - 1
    known = (tokens >= 0) & (tokens < unknown)
    column = jnp.asarray(following)[states[:, i], jnp.asarray(classes)[jnp.where(known, tokens, unknown)]].astype(states.dtype)
    matched |= column == len(following) - 1
    columns.append(column)
  return (jnp.stack(columns, axis=1) if columns else states), matched


def make_stop_table(token_bytes: Sequence[bytes | None], strings: Sequence[str] = (), sequences: Sequence[Sequence[int]] = ()) -> StopTable:
  """Builds Aho-Corasick automata on the host.

  The automaton of the strings reads UTF-8 bytes and is then composed into one that reads tokens. It
  matches a string as soon as the token that completes it is drawn, wherever in the token the string
  begins or ends. UTF-8 is self-synchronizing, so bytes and characters give the same answer.

  Args:
    token_bytes: Bytes of every id of the vocabulary. The strings skip a token without bytes (None),
      such as a special token.
    strings: Texts, each of which ends a response.
    sequences: Sequences of token ids, each of which ends a response.

  Raises:
    ValueError: If a string or a sequence is empty, has the wrong type, or cannot be written in
      tokens.

  Example:
    >>> table = make_stop_table([b"a", b"ab", b"b", None], ["aab"])
    >>> states, matched = advance_stops(table, table.start(2), jnp.array([0, 1]))  # "a", "ab"
    >>> advance_stops(table, states, jnp.array([1, 2]))[1].tolist()  # "aab", "abb"
    [True, False]

  References:
    Aho, Corasick. Efficient string matching: an aid to bibliographic search (Communications of the
    ACM, 1975).

  Note:
    U+FFFD in a stop string matches only its own bytes, not what a decoder writes for invalid UTF-8.
  """
  patterns, ids, automata = _checked_strings(strings), _checked_sequences(sequences, len(token_bytes)), []
  if patterns:
    automata.append(_over_tokens(token_bytes, patterns))
  if ids:
    symbols, following = _automaton(ids)
    classes = np.zeros(len(token_bytes) + 1, np.min_scalar_type(len(symbols)))
    classes[list(symbols)] = list(symbols.values())
    automata.append(StopAutomaton(classes, following))
  return StopTable(tuple(automata))


def _checked_strings(strings: Any) -> list[bytes]:
  if isinstance(strings, str | bytes):
    raise ValueError(f"rollout.stop_strings: found {strings!r}, expected a sequence of texts; write ({strings!r},)")
  check_texts("rollout.stop_strings", strings)
  return [string.encode() for string in strings]


def check_texts(name: str, texts: Iterable[Any]) -> None:
  """Checks texts that are to end a response.

  Raises:
    ValueError: If one is empty, no text, or cannot be encoded. One line, which begins with `name`.
  """
  for text in texts:
    if not isinstance(text, str) or not text:
      raise ValueError(f"{name}: found {text!r}, expected texts of at least one character")
    if any("\ud800" <= character <= "\udfff" for character in text):
      raise ValueError(f"{name}: found {text!r} with a lone surrogate, which UTF-8 cannot encode; remove it")


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


def _automaton(patterns: Sequence[tuple[int, ...]]) -> tuple[dict[int, int], Integer[np.ndarray, "states symbols"]]:
  """Builds an Aho-Corasick automaton.

  Returns:
    The patterns' symbols, numbered from 1 (0 is any other symbol), and the state that follows each
    state and symbol.
  """
  holds = lambda long, short: any(long[i : i + len(short)] == short for i in range(len(long) - len(short) + 1))
  # A pattern that contains another is never matched first. Without it, no proper prefix of a
  # pattern ends with a pattern.
  patterns = [p for p in dict.fromkeys(patterns) if not any(p != q and holds(p, q) for q in patterns)]
  symbols = {symbol: i for i, symbol in enumerate(dict.fromkeys(symbol for p in patterns for symbol in p), 1)}
  # The states are the proper prefixes of the patterns, and the match. They are ordered by length,
  # because the transitions of a prefix are derived from those of a shorter one.
  prefixes = sorted({p[:i] for p in patterns for i in range(len(p))}, key=len)
  match = len(prefixes)
  states = {prefix: i for i, prefix in enumerate(prefixes)} | dict.fromkeys(patterns, match)
  children = {prefix: [] for prefix in prefixes}
  for longer in states:
    if longer:
      children[longer[:-1]].append(longer)
  following = np.full((match + 1, len(symbols) + 1), _START, np.min_scalar_type(match))
  following[match] = match
  # The fallback of a prefix is its longest proper suffix that is itself a prefix.
  fallback = [_START] * (match + 1)
  for state, prefix in enumerate(prefixes):
    elsewhere = following[fallback[state]].copy()
    following[state] = elsewhere
    for longer in children[prefix]:
      column = symbols[longer[-1]]
      following[state, column] = states[longer]
      fallback[states[longer]] = elsewhere[column]
  return symbols, following


def _over_tokens(token_bytes: Sequence[bytes | None], patterns: Sequence[bytes]) -> StopAutomaton:
  """Composes the automaton over bytes into one that reads all bytes of a token at once."""
  symbols, following = _automaton([tuple(pattern) for pattern in patterns])
  of_byte = np.zeros(256, np.min_scalar_type(len(symbols)))
  of_byte[list(symbols)] = list(symbols.values())
  read = of_byte[np.frombuffer(b"".join(token or b"" for token in token_bytes), np.uint8)]
  lengths = np.array([len(token or b"") for token in token_bytes], np.int64)
  from_start, pairs, ends = _compose(following, read, lengths)

  # Most tokens lead to one state from every state. `special` tokens do not. Tokens without bytes
  # keep the state.
  num_states = len(following)
  special, where = np.unique(pairs[1], return_inverse=True)
  columns = np.concatenate([np.arange(num_states), from_start[special], [0]]).astype(following.dtype)
  columns = np.tile(columns, (num_states, 1))
  columns[pairs[0], num_states + where] = ends
  columns[:, -1] = np.arange(num_states)
  columns[-1] = num_states - 1
  chosen = np.append(from_start, 0)
  chosen[special] = num_states + np.arange(len(special))
  chosen[np.append(lengths == 0, True)] = columns.shape[1] - 1
  used, chosen = np.unique(chosen, return_inverse=True)
  columns = columns[:, used]
  # View each column as one value of as many bytes: `np.unique(axis=1)` would compare them state by
  # state, which takes seconds.
  _, distinct, same = np.unique(np.ascontiguousarray(columns.T).view(f"V{columns[:, 0].nbytes}"), return_index=True, return_inverse=True)
  return StopAutomaton(same.ravel()[chosen].astype(np.min_scalar_type(len(distinct))), columns[:, distinct])


def _compose(
  following: Integer[np.ndarray, "states symbols"], read: Integer[np.ndarray, "..."], lengths: Integer[np.ndarray, " V"]
) -> tuple[Integer[np.ndarray, " V"], Integer[np.ndarray, "2 pairs"], Integer[np.ndarray, " pairs"]]:
  """Composes transitions over the bytes of each token.

  From any state the path through a token soon joins the one from the start, mostly at its first
  byte. Only pairs that are still apart are followed.

  Returns:
    The state to which each token leads from the start, all pairs of a state and a token that lead
    elsewhere, and where they lead.
  """
  begins = np.cumsum(lengths) - lengths
  active = np.flatnonzero(lengths)
  first = read[begins[active]]
  pairs = [np.zeros((2, 0), np.int64)]
  for symbol in range(1, following.shape[1]):
    differ = np.flatnonzero(following[1:-1, symbol] != following[_START, symbol]) + 1
    tokens = active[first == symbol]
    pairs.append(np.stack([np.repeat(differ, len(tokens)), np.tile(tokens, len(differ))]))
  pairs = np.concatenate(pairs, axis=1)
  from_start, states = np.zeros(len(lengths), np.int64), pairs[0]
  done_pairs, done_states = [pairs[:, :0]], [states[:0]]
  for position in range(int(lengths.max(initial=0))):
    active = active[lengths[active] > position]
    from_start[active] = following[from_start[active], read[begins[active] + position]]
    states = following[states, read[begins[pairs[1]] + position]]
    apart = states != from_start[pairs[1]]
    ended = lengths[pairs[1]] == position + 1
    done_pairs.append(pairs[:, apart & ended])
    done_states.append(states[apart & ended])
    pairs, states = pairs[:, apart & ~ended], states[apart & ~ended]
  return from_start, np.concatenate(done_pairs, axis=1), np.concatenate(done_states)
