"""Stops against plain Python, which tests `string in text` after every token."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.stops import advance_stops, make_stop_table

advance_jit = jax.jit(advance_stops)


def first_matches(table, rows):
  """Returns the number of tokens up to each row's first match, or None.

  Also asserts that a match is permanent.
  """
  states = table.start(len(rows))
  history = []
  for tokens in np.array(rows, np.int32).T:
    states, matched = advance_jit(table, states, jnp.asarray(tokens))
    history.append(np.asarray(matched))
  history = np.array(history)
  assert np.all(history[1:] >= history[:-1])
  return [int(column.argmax()) + 1 if column.any() else None for column in history.T]


def holds(ids, sequence):
  return any(tuple(ids[i : i + len(sequence)]) == tuple(sequence) for i in range(len(ids)))


def slow_matches(token_bytes, strings, sequences, rows):
  matches = []
  for row in rows:
    stops = lambda ids: (
      any(s.encode() in b"".join(token_bytes[i] or b"" for i in ids if i < len(token_bytes)) for s in strings)
      or any(holds(ids, sequence) for sequence in sequences)
    )
    matches.append(next((n for n in range(1, len(row) + 1) if stops(row[:n])), None))
  return matches


@pytest.mark.parametrize(
  ("alphabet", "strings"),
  [
    ("ab", ["aab"]),
    ("ab", ["abab", "bbb"]),
    ("ab", ["aabaaab"]),
    ("ab", ["aabaa", "abaab", "bb"]),
    ("ab", ["ab", "xabx", "ab"]),
    ("ab", ["b"]),
    ("abé日", ["é日", "日日a", "aé"]),
    ("éèê", ["éé", "èêè"]),  # These characters share their first byte.
    ("a\n#", ["\n\n", "###", "\n#a"]),
  ],
)
def test_strings_that_tokens_cut_anywhere(alphabet, strings):
  """Tokens are random byte strings that may cut characters; stop strings overlap one another."""
  rng = random.Random(str(strings))
  pool = "".join(rng.choice(alphabet) for _ in range(300)).encode()
  cut = lambda: pool[(i := rng.randrange(len(pool) - 9)) : i + rng.choice([1, 1, 1, 2, 2, 3, 5, 9])]
  token_bytes = [*(cut() for _ in range(20)), None, b"", *(bytes([byte]) for byte in sorted(set(pool)))]
  rows = [[rng.randrange(len(token_bytes) + 2) for _ in range(12)] for _ in range(200)]
  table = make_stop_table(token_bytes, strings)
  matches = first_matches(table, rows)
  assert matches == slow_matches(token_bytes, strings, (), rows)
  assert len(set(matches)) > 2


@pytest.mark.parametrize("sequences", [[(0,)], [(0, 0, 1)], [(0, 1, 0, 1), (2, 2)], [(1, 2), (0, 1, 2, 0), (3,)]])
def test_sequences_of_ids(sequences):
  rng = random.Random(str(sequences))
  rows = [[rng.randrange(6) for _ in range(16)] for _ in range(200)]
  table = make_stop_table([None] * 5, sequences=sequences)
  matches = first_matches(table, rows)
  assert matches == slow_matches([None] * 5, (), sequences, rows)
  assert len(set(matches)) > 2


def test_strings_and_sequences_together():
  rng = random.Random(0)
  token_bytes = [b"a", b"b", b"ba", None]
  rows = [[rng.randrange(4) for _ in range(16)] for _ in range(200)]
  table = make_stop_table(token_bytes, ["abba"], [[3, 3, 0], [2, 2, 2]])
  assert first_matches(table, rows) == slow_matches(token_bytes, ["abba"], [[3, 3, 0], [2, 2, 2]], rows)


def test_tokens_without_bytes_change_nothing():
  table = make_stop_table([b"a", b"b", None], ["ab"])
  assert first_matches(table, [[0, 2, 2, 1], [0, 3, 10**6, 1], [0, -1, -9, 1], [2, 1, 2, 0]]) == [4, 4, 4, None]


def test_the_automaton_is_small():
  """It has one state per proper prefix of a string that contains no other, and one for a match.

  Tokens with the same effect share a class.
  """
  token_bytes = [bytes([i]) for i in range(256)] + [b"abc", b"xxabc", b"cab"]
  (automaton,) = make_stop_table(token_bytes, ["abc", "abd", "zabcz"]).automata
  assert automaton.following.shape == (4, 7) and automaton.following.dtype == automaton.classes.dtype == np.uint8
  assert automaton.classes.shape == (260,)
  # Columns by state: any other byte, "a", "b", "c", "d", "cab" and unknown ids. "abc" itself
  # matches from every state.
  columns = {tuple(column) for column in automaton.following.T.tolist()}
  assert columns == {(0, 0, 0, 3), (1, 1, 1, 3), (0, 2, 0, 3), (0, 0, 3, 3), (2, 2, 3, 3), (0, 1, 2, 3), (3, 3, 3, 3)}


def test_many_states_need_a_wider_type():
  string = "".join(chr(97 + i % 26) for i in range(700))
  table = make_stop_table([string[:699].encode(), string[699:].encode(), b"a"], [string])
  assert table.automata[0].following.dtype == np.uint16
  assert first_matches(table, [[0, 1], [0, 2], [2, 0]]) == [2, None, None]


def test_without_stops_nothing_matches():
  table = make_stop_table([b"a"])
  states, matched = advance_jit(table, table.start(3), jnp.zeros(3, jnp.int32))
  assert states.shape == (3, 0) and not matched.any()


def test_inside_a_loop():
  """States keep their type, so that a `while_loop` can carry them. The table may be closed over."""
  table = make_stop_table([b"a", b"b"], ["aab"], [[1, 1]])
  step = lambda states, tokens: advance_stops(table, states, tokens)
  _, matched = jax.jit(lambda tokens: jax.lax.scan(step, table.start(2), tokens))(jnp.array([[0, 1], [0, 0], [1, 1], [1, 1]]))
  assert matched.tolist() == [[False, False], [False, False], [True, False], [True, True]]


@pytest.mark.parametrize(
  ("strings", "sequences", "message"),
  [
    ([""], (), "rollout.stop_strings: found '', expected texts of at least one character"),
    (["a", b"b"], (), "rollout.stop_strings: found b'b', expected texts"),
    ("ab", (), r"rollout.stop_strings: found 'ab', expected a sequence of texts; write \('ab',\)"),
    (["a\ud800"], (), r"rollout.stop_strings: found 'a\\ud800' with a lone surrogate"),
    ((), [[0], []], r"rollout.stop_strings: found the sequence \[\], expected a sequence of one or more token ids"),
    ((), [3], "rollout.stop_strings: found the sequence 3, expected a sequence of one or more token ids"),
    ((), ["ab"], "rollout.stop_strings: found the sequence 'ab'"),
    ((), [[0, 5]], r"rollout.stop_strings: found the token id 5 in \[0, 5\], expected ids from 0 to 4"),
    ((), [[-1]], "rollout.stop_strings: found the token id -1"),
    ((), [[1.5]], "rollout.stop_strings: found the token id 1.5"),
  ],
)
def test_stops_that_cannot_match_are_refused(strings, sequences, message):
  # Without the type checks that tests add.
  make = getattr(make_stop_table, "__wrapped__", make_stop_table)
  with pytest.raises(ValueError, match=message):
    make([b"a"] * 5, strings, sequences)
