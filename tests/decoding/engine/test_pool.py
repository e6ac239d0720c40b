"""Tests of the rows of the cache: which of them a request gets, and what it shares."""

import copy

import numpy as np

from jaxrl_llm.decoding.engine.pool import CachePool, Place

A, B = np.arange(100, 120), np.arange(200, 220)


def ended(pool, tokens, *, salt="", version=0, now=0):
  """Places a request that ends once its prompt is computed."""
  place = pool.place(tokens, salt, version=version)
  if place.source != place.row:
    assert pool.has_computed(place)
    pool.copied(place)
  pool.add(place.row, tokens[pool.lengths[place.row] :].tolist())
  pool.release(place.row, version=now)
  return place


def test_the_row_that_has_been_idle_for_longest_makes_room():
  pool = CachePool(3, 64, least=4)
  rows = [ended(pool, np.arange(start, start + 5)).row for start in (0, 10, 20)]
  again = ended(pool, np.array([0, 1, 2, 3, 4, 5]))  # Row 0 is now the youngest.
  assert rows == [0, 1, 2] and again == Place(0, 0, 5)
  assert [ended(pool, np.arange(start, start + 5)).row for start in (30, 40, 50)] == [1, 2, 0]


def test_a_row_is_taken_over_only_if_nothing_of_it_is_lost():
  pool = CachePool(3, 64, least=4)
  ended(pool, A)
  assert ended(pool, np.append(A[:10], 7)) == Place(1, 0, 10)
  assert ended(pool, np.append(A, 7)) == Place(0, 0, 20)
  # With no other row left, the oldest keeps what is shared.
  ended(pool, B)
  assert ended(pool, np.append(A[:10], 8)) == Place(1, 1, 10)


def test_short_prefixes_are_not_worth_a_copy_unless_they_are_the_prompt():
  pool = CachePool(4, 64, least=4)
  ended(pool, A)
  assert ended(pool, np.append(A[:3], [7, 8])) == Place(1, 1, 0)
  assert ended(pool, A[:4]) == Place(2, 0, 3)


def test_a_request_waits_for_a_prefix_that_is_being_computed():
  pool = CachePool(2, 64, least=4)
  first, second = (pool.place(A, "", version=0) for _ in range(2))
  assert (first, second) == (Place(0, 0, 0), Place(1, 0, 19)) and pool.place(A, "", version=0) is None
  pool.add(0, A[:10].tolist())
  assert not pool.has_computed(second)
  pool.release(0, version=0)  # Aborted half-way.
  assert pool.has_computed(second) and pool.place(B, "", version=0) is None
  assert pool.copied(second) == 10 and pool.place(B, "", version=0) == Place(0, 0, 0)


def test_what_was_drawn_is_shared_with_its_owner_alone():
  pool = CachePool(4, 64, least=4)
  place = pool.place(A[:10], "", version=0, owner="a")
  pool.add(place.row, A.tolist())  # The last 11 of them were drawn.
  pool.release(place.row, version=0)
  shared = {owner: CachePool.place(copy.deepcopy(pool), np.append(A, 7), "", version=0, owner=owner) for owner in "ab"}
  assert shared == {"a": Place(0, 0, 20), "b": Place(1, 0, 9)}
  # Nor with its owner, if that asks for what does not depend on the cache.
  assert copy.deepcopy(pool).place(np.append(A, 7), "", version=0, owner=None) == Place(1, 0, 9)
  # Its owner's continuation, and a copy of it, hold drawn tokens too.
  pool.place(np.append(A, B), "", version=0, owner="a")
  assert pool.place(np.append(A, B), "", version=0, owner="b") == Place(1, 0, 9)
  # The second owner computes them as a prompt, which all may read.
  assert pool.place(np.append(A, B), "", version=0, owner="c") == Place(2, 1, 39)


def test_who_gives_up_frees_the_source():
  pool = CachePool(2, 64, least=4)
  _, second = (pool.place(A, "", version=0) for _ in range(2))
  pool.give_up(second)
  pool.release(1, version=0)
  pool.release(0, version=0)
  assert pool.lengths.tolist() == [0, 0] and pool.place(B, "", version=0) is not None


def test_salts_and_versions_share_nothing():
  pool = CachePool(8, 64, least=4)
  ended(pool, A, salt="x")
  assert ended(pool, A, salt="y").shared == 0 and ended(pool, A, salt="x", version=1, now=1).shared == 0
  busy = pool.place(B, "", version=1)
  pool.add(busy.row, B.tolist())
  pool.forget(version=2)
  assert pool.lengths.tolist() == [0] * busy.row + [20] + [0] * (7 - busy.row)
  assert pool.place(B, "", version=2).shared == 0
  pool.release(busy.row, version=2)
  assert pool.lengths[busy.row] == 0
