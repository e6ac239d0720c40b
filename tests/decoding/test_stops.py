"""Stops against plain Python, which tests `string in text` after every token."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.stops import MAX_IDS, RUNNING, StopTable, advance_stops, make_stop_table, make_vocabulary, stops_of_row
from jaxrl_llm.types import StopReason

advance_jit = jax.jit(advance_stops)


def reasons_of(table, rows, *, matching=None, lengths=0, limits=10**6, least=None):
  """Returns each row's reason after each token."""
  matching, reasons, history = table.start(len(rows)) if matching is None else matching, jnp.full(len(rows), RUNNING), []
  in_each = lambda value: None if value is None else jnp.broadcast_to(value, len(rows))
  for t, tokens in enumerate(np.array(rows, np.int32).T, 1):
    options = dict(lengths=in_each(lengths + t), limits=in_each(limits), least=in_each(least))
    matching, reasons = advance_jit(table, matching, reasons, jnp.asarray(tokens), **options)
    history.append(np.asarray(reasons))
  return np.array(history).T.tolist()


def first_matches(table, rows, **options):
  """Returns the number of tokens up to each row's first match, or None."""
  return [reasons.index(StopReason.STRING) + 1 if StopReason.STRING in reasons else None for reasons in reasons_of(table, rows, **options)]


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


def test_strings_of_several_words():
  string = "".join(chr(97 + i % 26) for i in range(700))
  table = make_stop_table([string[:699].encode(), string[699:].encode(), b"a"], [string])
  assert table.strings.firsts.shape == (22,) and first_matches(table, [[0, 1], [0, 2], [2, 0]]) == [2, None, None]


def test_each_row_may_have_stops_of_its_own():
  """Rows of one table, in the midst of their turns, against plain Python."""
  rng = random.Random(0)
  cut = lambda: "".join(rng.choice("abé") for _ in range(rng.randrange(1, 40)))
  pieces = [*(cut().encode() for _ in range(20)), b"a", b"b", "é".encode(), None]
  text, own, vocabulary = (lambda ids: b"".join(pieces[i] or b"" for i in ids)), [], make_vocabulary(pieces)
  turns = [[rng.randrange(len(pieces)) for _ in range(9)] for _ in range(40)]
  for turn in turns:  # Parts of what the row draws.
    drawn = text(turn).decode()
    own.append([drawn[(i := rng.randrange(len(drawn))) : i + rng.randrange(2, 80)] for _ in range(rng.randrange(4))])
  parts = [stops_of_row((1, 99), strings, vocabulary=vocabulary, drawn=turn[:3]) for strings, turn in zip(own, turns, strict=True)]
  table, matching = jax.tree.map(lambda *x: np.stack(x), *parts)
  reasons = reasons_of(table._replace(vocabulary=vocabulary), [turn[3:] for turn in turns], matching=matching)
  for strings, turn, given in zip(own, turns, reasons, strict=True):
    expected = RUNNING
    for n in range(4, 10):
      before = len(text(turn[: n - 1]))
      is_match = any(s in text(turn[:n])[max(before - len(s) + 1, 0) :] for s in map(str.encode, strings))
      now = StopReason.TOKEN if turn[n - 1] == 1 else StopReason.STRING if is_match else RUNNING
      expected = now if expected == RUNNING else expected
      assert given[n - 4] == expected
  assert {x[-1] for x in reasons} == {RUNNING, StopReason.TOKEN, StopReason.STRING}


def test_the_order_of_reasons_and_what_counts():
  table = make_stop_table([b"a", b"b", b"c"], ["ab"])._replace(ids=np.array([1, 2], np.int32))
  token, string, length = StopReason.TOKEN, StopReason.STRING, StopReason.LENGTH
  assert reasons_of(table, [[0, 1, 0]], limits=2) == [[RUNNING, token, token]]
  table = table._replace(ids=table.ids[1:])
  assert reasons_of(table, [[0, 1, 2]], limits=2) == [[RUNNING, string, string]]
  assert reasons_of(table, [[0, 0, 1]], limits=2) == [[RUNNING, length, length]]
  # Before a least length a match is passed over; one that ends later counts.
  assert reasons_of(table, [[0, 1, 0, 1], [2, 0, 2, 0]], least=3) == [[RUNNING] * 3 + [string], [RUNNING] * 2 + [token] * 2]
  assert first_matches(table, [[0, 1]], least=2) == [2]


def test_a_row_that_has_ended_keeps_its_state():
  table = make_stop_table([b"a", b"b"], ["ab"])
  at = lambda tokens, reason: advance_jit(
    table, table.start(1), jnp.array([reason]), jnp.array([tokens]), lengths=jnp.array([1]), limits=jnp.array([9])
  )
  assert at(0, RUNNING)[0].strings.any() and not at(0, int(StopReason.LENGTH))[0].strings.any()


def test_without_stops_nothing_matches():
  assert reasons_of(make_stop_table([b"a"]), [[0, 0]]) == [[RUNNING, RUNNING]] and StopTable().is_empty
  vocabulary = make_vocabulary([None])
  table, matching = jax.tree.map(lambda x: x[None], stops_of_row(vocabulary=vocabulary))
  assert reasons_of(table._replace(vocabulary=vocabulary), [[0, 9]], matching=matching) == [[RUNNING, RUNNING]]
  assert table.ids.shape == (1, MAX_IDS)


@pytest.mark.parametrize(
  ("strings", "sequences", "message"),
  [
    (["a" * 1000, "é" * 13], (), "rollout.stop_strings: found 1,026 bytes of UTF-8, expected at most 1,024 in all texts together"),
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
