"""Packing loses, invents and overfills nothing, and the bound on its rows holds."""

import math
from operator import itemgetter

import chex
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.learner.packing import (
  Trajectory,
  Unit,
  _part,
  arrange,
  arrange_taught,
  assign_rows,
  demonstration,
  lay,
  lift,
  pack,
  pack_taught,
  packing_waste,
  prompts_saved,
  split,
  units_of,
  with_prompt,
)
from tests.batches import pack_rows

FIELDS = ("tokens", "mask", "advantages", "sampler_logprobs")


def make_sequences(lengths):
  """Makes sequences in which every token is a different number, so that any mix-up is detected."""
  sequences, start = [], 1
  for length in lengths:
    ids = np.arange(start, start + length)
    sequences.append(
      Trajectory(ids.astype(np.int32), (ids % 3 > 0).astype(np.float32), np.float32(ids + 0.25), np.float32(-ids - 0.5))
    )
    start += length
  return sequences


def rows_of(lengths, row_tokens):
  """Returns the indices of the sequences of each row if no prompt is shared."""
  rows = assign_rows([Unit(0, (i,), (length,)) for i, length in enumerate(lengths)], row_tokens)
  return [[index for unit in row for index in unit.members] for row in rows]


def make_groups(groups):
  """Makes sequences from groups `(prompt tokens, response tokens of each)`.

  Every token is a different number, except for those of a shared prompt.
  """
  sequences, start = [], 1
  for prompt, responses in groups:
    shared, start = np.arange(start, start + prompt), start + prompt
    for length in responses:
      ids, start = np.concatenate([shared, np.arange(start, start + length)]), start + length
      mask = (np.arange(len(ids)) >= prompt).astype(np.float32)
      sequences.append(Trajectory(ids.astype(np.int32), mask, np.float32(ids + 0.25) * mask, np.float32(-ids - 0.5) * mask))
  return sequences


GROUPS = st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 8), min_size=1, max_size=5)), max_size=6)


@given(GROUPS, st.integers(1, 4))
def test_a_shared_prompt_is_the_same_prompt(groups, num_shards):
  """Each sequence can be read back from segments, prefixes and positions alone."""
  sequences = make_groups(groups)
  layout = arrange(sequences, row_tokens=16, row_buckets=(48,), share_prompts=True, num_shards=num_shards)
  batch = pack(sequences, layout)
  by_tokens = {}
  for row in range(48):
    for segment in set(batch.segments[row][batch.mask[row] > 0].tolist()):
      own = np.flatnonzero(batch.segments[row] == segment)
      assert np.all(np.diff(own) == 1)
      (prefix,) = set(batch.prefixes[row, own].tolist())
      before = np.flatnonzero(batch.segments[row] == prefix) if prefix else own[:0]
      assert np.all(before < own[0]) and not batch.mask[row, before].any() and not batch.prefixes[row, before].any()
      slots = np.concatenate([before, own])
      np.testing.assert_array_equal(batch.positions[row, slots], np.arange(len(slots)))
      by_tokens[tuple(batch.tokens[row, slots].tolist())] = {
        field: getattr(batch, field)[row, slots] for field in FIELDS
      }
  assert len(by_tokens) == len(sequences)
  for sequence in sequences:
    for field in FIELDS:
      np.testing.assert_array_equal(by_tokens[tuple(sequence.tokens.tolist())][field], getattr(sequence, field))
  for field in ("advantages", "sampler_logprobs"):
    lifted = lift(getattr(batch, field), layout)
    for x, sequence in zip(lifted, sequences, strict=True):
      np.testing.assert_array_equal(x, getattr(sequence, field))
    np.testing.assert_array_equal(lay(lifted, layout), getattr(batch, field))


def test_sharing_saves_the_prompts():
  sequences = make_groups([(6, (2, 3, 4)), (5, (1, 1)), (3, (2,))])
  layout = arrange(sequences, row_tokens=16, row_buckets=(2,), share_prompts=True)
  shared = pack(sequences, layout)
  assert np.count_nonzero(shared.segments) == (6 + 9) + (5 + 2) + (3 + 2)
  np.testing.assert_allclose(prompts_saved([layout]), (2 * 6 + 5) / sum(len(s.tokens) for s in sequences))
  assert pack_rows(sequences, row_tokens=16, row_buckets=(4,)).prefixes is None


def test_different_prompts_are_not_shared():
  sequences = make_groups([(3, (2, 2))])
  sequences[1].tokens[0] += 100
  assert units_of(sequences, share_prompts=True) == units_of(sequences, share_prompts=False)
  assert units_of([demonstration([], [1]), demonstration([], [1])], share_prompts=True) == [Unit(0, (0,), (1,)), Unit(0, (1,), (1,))]


def test_a_group_too_large_for_a_row_brings_its_prompt_into_the_next():
  (unit,) = units_of(make_groups([(4, (6, 5, 5, 3))]), share_prompts=True)
  rows = assign_rows([unit], 16)
  assert [[(part.members, part.size) for part in row] for row in rows] == [[((0, 1), 15)], [((2, 3), 12)]]


def test_full_and_empty_rows_are_distributed_over_the_shards():
  layout = arrange(make_sequences([8, 8, 8, 8, 8]), row_tokens=8, row_buckets=(8,), num_shards=4)
  assert np.bincount(np.array(layout.rows) // 2, minlength=4).tolist() == [2, 1, 1, 1]


@given(st.lists(st.integers(1, 12), max_size=20))
def test_every_token_is_placed_once_with_all_its_values(lengths):
  sequences = make_sequences(lengths)
  layout = arrange(sequences, row_tokens=12, row_buckets=(20,))
  batch = pack(sequences, layout)
  by_first_token = {}
  for row in range(20):
    ids = batch.segments[row]
    real = ids[ids > 0]
    # Sequences follow one another, numbered from 1; then comes padding.
    assert np.all(ids[len(real) :] == 0) and np.all(np.diff(real) >= 0)
    assert sorted(set(real.tolist())) == list(range(1, len(set(real.tolist())) + 1))
    for segment in set(real.tolist()):
      here = ids == segment
      np.testing.assert_array_equal(batch.positions[row, here], np.arange(here.sum()))
      by_first_token[batch.tokens[row, here][0]] = {field: getattr(batch, field)[row, here] for field in FIELDS}
  assert len(by_first_token) == len(sequences)
  for sequence in sequences:
    for field in FIELDS:
      np.testing.assert_array_equal(by_first_token[sequence.tokens[0]][field], getattr(sequence, field))
  padding = batch.segments == 0
  for field in (*FIELDS, "positions", "old_logprobs"):
    assert np.all(getattr(batch, field)[padding] == 0)
  np.testing.assert_array_equal(batch.old_logprobs, batch.sampler_logprobs)
  assert {x.dtype.name for x in batch[:3]} == {"int32"} and {x.dtype.name for x in batch[3:7]} == {"float32"}
  np.testing.assert_allclose(packing_waste([layout]), 1 - sum(lengths) / 240)


@given(st.lists(st.integers(1, 16), max_size=40), st.integers(16, 40))
def test_rows_hold_every_sequence_once_and_are_never_overfull(lengths, row_tokens):
  rows = rows_of(lengths, row_tokens)
  assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
  assert all(row and sum(lengths[i] for i in row) <= row_tokens for row in rows)
  # First fit: the longest sequence of a row fitted into no earlier row when it was placed.
  for later in range(len(rows)):
    opener = rows[later][0]
    for earlier in range(later):
      before = [i for i in rows[earlier] if (-lengths[i], i) < (-lengths[opener], opener)]
      assert sum(lengths[i] for i in before) + lengths[opener] > row_tokens


def first_fit_by_scanning(units, row_tokens, row_images):
  """Packs as `assign_rows` does, but looks at all rows for each unit."""
  rows, most = [], math.inf if row_images is None else row_images
  free = lambda row: row_tokens - sum(unit.size for unit in row)
  places = lambda row: most - sum(unit.pictures for unit in row)
  for unit in sorted(units, key=lambda unit: -unit.size):
    while unit is not None:
      with_places = [row for row in rows if places(row) >= unit.pictures]
      row = next((row for row in with_places if free(row) >= unit.size), None)
      part, left = unit, None
      if row is None:
        row = max(with_places, key=free, default=None)
        part, left = _part(unit, 0 if row is None else free(row))
        if part is None or sum(part.lengths) <= 2 * part.shared:
          row = []
          rows.append(row)
          part, left = _part(unit, row_tokens)
      row.append(part)
      unit = left
  return rows


UNITS = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 2)), max_size=60)


@given(UNITS, st.booleans())
def test_the_first_row_with_room_is_found_as_by_a_scan(drawn, limits_pictures):
  """Units that share no prompt have one member, and of those that do some are split over rows."""
  units, row_images = [], 3 if limits_pictures else None
  for i, (shared, lengths, pictures) in enumerate(drawn):
    own = lengths if shared else lengths[:1]
    units.append(Unit(shared, tuple((i, k) for k in range(len(own))), tuple(own), pictures))
  rows = assign_rows(units, 24, row_images)
  assert rows == first_fit_by_scanning(units, 24, row_images)


@given(st.integers(1, 16), st.integers(0, 40), st.data())
def test_the_bound_on_the_number_of_rows(longest, extra, data):
  """A row that rejects a sequence has row_tokens // longest others, so only the last has fewer."""
  row_tokens = longest + extra
  lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=60))
  assert len(rows_of(lengths, row_tokens)) <= -(-len(lengths) // (row_tokens // longest))


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_rows_have_room_for_their_pictures(row_images, prompt_images, data):
  """The bound on the number of rows counts as many sequences as have room for their pictures."""
  row_images = max(row_images, prompt_images)
  shown = data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, prompt_images)), min_size=1, max_size=40))
  rows = assign_rows([Unit(0, (i,), (length,), count) for i, (length, count) in enumerate(shown)], 16, row_images)
  assert sorted(i for row in rows for unit in row for i in unit.members) == list(range(len(shown)))
  assert all(sum(unit.pictures for unit in row) <= row_images for row in rows)
  assert len(rows) <= -(-len(shown) // min(16 // 5, row_images // prompt_images))


def test_each_part_of_a_group_brings_its_pictures_into_its_row():
  rows = assign_rows([Unit(2, (0, 1, 2), (4, 3, 3), 1), Unit(0, (3,), (2,), 1)], 10, 1)
  assert [[unit.members for unit in row] for row in rows] == [[(0, 1)], [(2,)], [(3,)]]
  with pytest.raises(ValueError, match="^config.learner.row_images: found 1, expected at least 2, the pictures of one prompt"):
    assign_rows([Unit(0, (0,), (4,), 2)], 10, 1)


def test_the_bound_is_reached():
  assert len(rows_of([5] * 7, 14)) == 4 == -(-7 // (14 // 5))


def test_packing_by_hand():
  assert rows_of([5, 3, 7, 2, 8, 1], 8) == [[4], [2, 5], [0, 1], [3]]
  assert rows_of([], 8) == []


@pytest.mark.parametrize(("num_sequences", "num_rows"), [(0, 2), (1, 2), (2, 2), (3, 4), (4, 4), (5, 9)])
def test_the_smallest_bucket_that_fits_is_taken(num_sequences, num_rows):
  batch = pack_rows(make_sequences([8] * num_sequences), row_tokens=10, row_buckets=(9, 2, 4))
  assert batch.tokens.shape == (num_rows, 10)


def test_sequences_that_do_not_fit_are_refused_with_a_fix():
  with pytest.raises(ValueError, match="learner.row_tokens=8 cannot hold a sequence of 9 tokens"):
    rows_of([3, 9], 8)
  message = r"learner.row_buckets=\(1, 2\): 3 sequences need 3 rows of 8 tokens; add a bucket of at least 3"
  with pytest.raises(ValueError, match=message):
    pack_rows(make_sequences([8, 8, 7]), row_tokens=8, row_buckets=(1, 2))


def test_waste_counts_all_batches():
  layouts = [arrange(make_sequences(lengths), row_tokens=8, row_buckets=(1,)) for lengths in ([4, 4], [2])]
  assert packing_waste(layouts) == 6 / 16
  assert packing_waste([arrange([], row_tokens=8, row_buckets=(1,))]) == 1


@pytest.mark.parametrize("share_prompts", [False, True])
def test_each_process_packs_the_rows_of_its_shards(share_prompts):
  """Rows and slots, taught ones included, are those of one process that packs them all."""
  own = [x._replace(num_prompt=5) for x in make_groups([(5, (2, 3, 4)), (5, (1, 1)), (5, (2,)), (5, (4, 3))])]
  taught = [with_prompt(x, np.arange(4) + x.tokens[0]) for x in own]
  options = dict(row_tokens=12, row_buckets=(12,), num_shards=4, share_prompts=share_prompts)
  make = lambda **shards: arrange_taught(own, taught, **options, **shards)
  whole = make()
  expected = (pack(own, whole[0]), pack_taught(own, whole, taught), lay([x.sampler_logprobs for x in own], whole[0]))
  for shards in ((0, 2), (3,), (0, 1, 2, 3)):
    layouts = make(own_shards=shards)
    rows = [3 * shard + i for shard in shards for i in range(3)]
    assert layouts[0].held.tolist() == rows and layouts[0].rows == whole[0].rows
    assert (layouts[0].num_used, packing_waste(layouts)) == (np.count_nonzero(expected[0].segments), packing_waste(whole))
    packed = (pack(own, layouts[0]), pack_taught(own, layouts, taught), lay([x.sampler_logprobs for x in own], layouts[0]))
    chex.assert_trees_all_equal(packed, jax.tree.map(itemgetter(rows), expected))


def test_minibatches_are_consecutive_parts():
  sequences = make_sequences([3, 5, 2, 4, 1, 6])
  batches = [pack_rows(part, row_tokens=8, row_buckets=(2,)) for part in split(sequences, 3)]
  tokens = [set(batch.tokens[batch.segments > 0].tolist()) for batch in batches]
  assert tokens == [set(np.concatenate([s.tokens for s in sequences[i : i + 2]]).tolist()) for i in (0, 2, 4)]


def test_a_demonstration_counts_its_response():
  sequence = demonstration([5, 6], [7, 8, 9])
  assert sequence.tokens.tolist() == [5, 6, 7, 8, 9] and sequence.tokens.dtype == np.int32
  assert sequence.mask.tolist() == sequence.advantages.tolist() == [0, 0, 1, 1, 1]
  assert not sequence.sampler_logprobs.any()


@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_rows_of_a_teacher_hold_the_same_responses_behind_its_prompts(share_prompts):
  """Each counted token is predicted from its predecessor behind the other prompt."""
  rng, own, other = np.random.default_rng(5), [], []
  for group in range(6):
    prompts = [rng.integers(1, 90, rng.integers(2, 9)).astype(np.int32) for _ in range(2)]
    for _ in range(3):
      whole = np.concatenate([prompts[0], rng.integers(100, 190, rng.integers(1, 7)).astype(np.int32)])
      mask = np.float32(np.arange(len(whole)) >= len(prompts[0]))
      own.append(Trajectory(whole, mask, 0 * mask, -mask, num_prompt=len(prompts[0]), group=group + 1))
      other.append(with_prompt(own[-1], prompts[1]))
  # Problems may differ though a teacher reads the same of both.
  own[3] = with_prompt(own[3], [77, 78])
  layouts = arrange_taught(own, other, row_tokens=40, row_buckets=(4, 8, 16), share_prompts=share_prompts, group_size=3)
  batch, taught = pack(own, layouts[0]), pack_taught(own, layouts, other)
  assert taught.tokens.shape == batch.tokens.shape and layouts[0].rows == layouts[1].rows
  assert np.array_equal(taught.sources >= 0, batch.mask > 0)
  for one, seen, row, slots in zip(own, other, layouts[0].rows, layouts[0].slots, strict=True):
    assert np.array_equal(batch.tokens[row, slots], one.tokens)
    places = taught.sources[row, slots[one.num_prompt :]]
    before = np.arange(seen.num_prompt - 1, len(seen.tokens) - 1)
    assert np.array_equal(taught.tokens[row, places], seen.tokens[before]) and np.array_equal(taught.positions[row, places], before)
  slots = [(row, slot) for row, own_slots in zip(layouts[1].rows, layouts[1].slots, strict=True) for slot in own_slots]
  assert len(set(slots)) == np.count_nonzero(taught.segments)
