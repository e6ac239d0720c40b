"""Sizes chosen from the data: never too small, reproducible, and without effect on those set."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from jaxrl_llm.config.check import row_problems, size_problems
from jaxrl_llm.config.fields import base
from jaxrl_llm.config.sizes import SIZES, Bounds, Lengths, choose_sizes, describe_sizes, most_rows, open_sizes
from jaxrl_llm.learner.packing import Trajectory, arrange, demonstration
from jaxrl_llm.models.image_slots import Pictures


def config_of(**changes):
  config = base()
  config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
  return config


def sizes_of(config):
  return tuple(config[path.split(".")[0]][path.split(".")[1]] for path in SIZES)


def group(rng, prompt, lengths, *, counts=True):
  """Yields the samples of one prompt, some of whose tokens do not count in the loss."""
  ids = rng.integers(1, 99, prompt)
  for length in lengths:
    mask = np.float32([0] * prompt + [counts and bool(rng.integers(4))] * length)
    yield Trajectory(np.concatenate([ids, rng.integers(1, 99, length)]).astype(np.int32), mask, mask, mask, num_prompt=prompt)


def shows(rng, counts):
  """Returns pictures of a prompt, one of some numbers; None for none."""
  count = int(rng.choice(counts))
  return Pictures(rng.bytes(8), None, None, 0, features=np.zeros(count)) if count else None


@given(
  st.fixed_dictionaries(
    {
      "rollout.num_prompts": st.integers(1, 6), "rollout.group_size": st.integers(2, 9), "rollout.max_new_tokens": st.integers(1, 40),
      "learner.updates_per_rollout": st.integers(1, 2), "learner.rows_per_device": st.one_of(st.none(), st.integers(1, 3)),
      "learner.share_prompts": st.booleans(), "learner.row_tokens": st.one_of(st.none(), st.integers(90, 300)),
    }
  ),
  st.integers(1, 3), st.integers(1, 2), st.sampled_from([16, 128]), st.integers(16, 600), st.data(),
)  # fmt: skip
@pytest.mark.slow
def test_every_mini_batch_fits(changes, shards, context, tile, d_model, data):
  """Holds for all lengths, also if a problem occurs twice in a row or samples do not count."""
  config = base()
  changes["rollout.num_prompts"] *= changes["learner.updates_per_rollout"]
  config.update_from_flattened_dict(changes)
  prompts = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=30))
  shown = data.draw(st.lists(st.integers(2, max(prompts) + config.rollout.max_new_tokens), min_size=1, max_size=20))
  # A prompt holds its pictures' tokens, and may have many small pictures.
  pictures = [(length, data.draw(st.integers(1, length)), 1) for length in prompts] if data.draw(st.booleans()) else []
  config = choose_sizes(config, Lengths(prompts, [5], shown, pictures), Bounds(shards, context, d_model, tile))
  rollout, learner = config.rollout, config.learner
  aligned = config.copy_and_resolve_references()
  aligned.update_from_flattened_dict({"rollout.num_prompts": shards, "eval.batch_prompts": shards})
  given_row = changes["learner.row_tokens"] is not None
  assert given_row or not list(row_problems(aligned, shards, shards, context=context))
  assert not list(size_problems(config, longest_demonstration=max(shown)))

  rng, sequences = np.random.default_rng(data.draw(st.integers(0, 2**31))), []
  counts = [count for _, count, _ in pictures] or [0]
  assert not pictures or rollout.prompt_images == max(counts) <= learner.row_images
  for _ in range(rollout.num_prompts // learner.updates_per_rollout):
    again = bool(sequences) and rng.integers(3) == 0
    shorter = rng.integers(1, rollout.max_new_tokens + 1, rollout.group_size)
    lengths = np.where(rng.random(rollout.group_size) < 0.7, rollout.max_new_tokens, shorter)
    new = list(group(rng, int(rng.choice([max(prompts), *prompts])), lengths))
    if again:
      old = sequences[-1].tokens[: sequences[-1].num_prompt]
      new = [x._replace(tokens=np.concatenate([old, x.tokens[x.num_prompt :]]), num_prompt=len(old)) for x in new]
      new = [x._replace(mask=np.ones(len(x.tokens), np.float32)) for x in new]
      new = [x._replace(advantages=x.mask, sampler_logprobs=x.mask) for x in new]
      new = [x._replace(pictures=sequences[-1].pictures) for x in new]
    else:
      own = shows(rng, counts)
      new = [x._replace(pictures=own) for x in new]
    sequences += new
  packing = dict(row_tokens=learner.row_tokens, num_shards=shards, row_images=learner.row_images)
  sharing = dict(share_prompts=learner.share_prompts, group_size=rollout.group_size)
  layout = arrange(sequences, row_buckets=learner.row_buckets, **sharing, **packing)
  assert layout.shape[0] in learner.row_buckets
  drawn = rng.choice([max(shown), *shown], config.warm_start.batch_size)
  demonstrations = [demonstration([1], [2] * (int(x) - 1), pictures=shows(rng, counts)) for x in drawn]
  assert arrange(demonstrations, row_buckets=config.warm_start.row_buckets, **packing).shape[0] in config.warm_start.row_buckets


def test_the_bound_is_reached_with_and_without_shared_prompts():
  config = config_of(rollout__prompt_buckets=(40,), rollout__max_new_tokens=8, rollout__group_size=16, rollout__num_prompts=16)
  config.update_from_flattened_dict({"learner.updates_per_rollout": 1, "learner.row_tokens": 384})
  rng = np.random.default_rng(0)
  sequences = [x for _ in range(16) for x in group(rng, 40, [8] * 16)]
  rows = lambda shares: arrange(sequences, row_tokens=384, row_buckets=range(1, 99), share_prompts=shares, group_size=16).shape[0]
  assert most_rows(config) == rows(True) == 8  # 16 groups of 168 tokens, two in a row.
  config.learner.share_prompts = False
  assert most_rows(config) == rows(False) == 32  # 256 sequences of 48 tokens, eight in a row.


def test_a_problem_that_occurs_twice_takes_no_more_rows():
  """As one unit of six samples, each of the three pairs of groups would need its own row.

  A part that leaves too much prompt is not split off.
  """
  rng = np.random.default_rng(0)
  sequences = [x for _ in range(3) for x in group(rng, 10, [4] * 6)]
  places = dict(row_tokens=66, row_buckets=range(1, 99), share_prompts=True)
  rows = lambda group_size: arrange(sequences, group_size=group_size, **places).shape[0]
  sizes = {"rollout__prompt_buckets": (10,), "rollout__max_new_tokens": 4, "rollout__group_size": 3, "rollout__num_prompts": 6}
  assert most_rows(config_of(learner__row_tokens=66, learner__updates_per_rollout=1, **sizes)) == rows(3) == 2
  assert rows(None) == 3


def test_samples_that_do_not_count_still_share_their_prompt():
  rng = np.random.default_rng(0)
  sequences = list(group(rng, 30, [5] * 8, counts=False))
  slots = np.concatenate(arrange(sequences, row_tokens=80, row_buckets=(1,), share_prompts=True).slots)
  assert len(set(slots.tolist())) == 30 + 8 * 5
  with pytest.raises(ValueError, match="row_buckets"):
    arrange([x._replace(num_prompt=None) for x in sequences], row_tokens=80, row_buckets=(1,), share_prompts=True)


@pytest.mark.parametrize(
  ("prompts", "held_out", "max_positions", "expected"),
  [
    ([3], [], None, (8,)),
    ([30] * 9, [41], None, (48,)),
    # With 16 prompts of a hundred, five of six batches fit into the narrower bucket.
    ([20] * 99 + [90], [], None, (48, 96)),
    ([20] * 9 + [90], [], None, (96,)),
    ([61], [], 70, (62,)),  # 64 would leave no room for 8 new tokens.
    ([61], [], 68, (61,)),  # Too long for the model; another check refuses it.
  ],
)
def test_prompt_buckets(prompts, held_out, max_positions, expected):
  config = config_of(rollout__max_new_tokens=8, rollout__num_prompts=16)
  assert (
    choose_sizes(config, Lengths(prompts, held_out, [9]), Bounds(max_positions=max_positions)).rollout.prompt_buckets
    == expected
  )


@pytest.mark.parametrize(("new_tokens", "expected"), [(30, 576), (36, 672), (44, 576)])
def test_a_row_is_stretched_to_hold_a_whole_group(new_tokens, expected):
  """A group has 88 + 16 x 36 tokens, of which 576 slots would hold the prompt and 13 responses.

  The other three responses would need a copy of the prompt.
  """
  rollout = dict(rollout__max_new_tokens=new_tokens, rollout__num_prompts=16, rollout__group_size=16, learner__updates_per_rollout=2)
  learner = choose_sizes(config_of(**rollout), Lengths([87, 59], [], [9]), Bounds(d_model=576)).learner
  assert learner.row_tokens == expected and (max(learner.row_buckets) == 8) == (new_tokens < 40)


def test_sizes_that_are_set_stay_and_the_others_suit_them():
  lengths = Lengths([12, 30, 21], [33], [40, 60, 50])
  assert sizes_of(choose_sizes(base(), lengths, Bounds())) == sizes_of(choose_sizes(base(), lengths, Bounds()))
  for path, value in zip(SIZES, ((64, 99), 400, (5, 70), (80,)), strict=True):
    config = config_of(**{path: value})
    complete = choose_sizes(config, lengths, Bounds())
    section, name = path.split(".")
    assert complete[section][name] == value and None not in sizes_of(complete)
    assert not list(size_problems(complete, longest_demonstration=60))
    assert path not in open_sizes(config) and open_sizes(complete) == []
  every = choose_sizes(base(), lengths, Bounds())
  assert choose_sizes(every, Lengths([1]), Bounds(8)) == every


def test_a_row_that_is_too_short_is_refused_without_a_crash():
  config = choose_sizes(config_of(learner__row_tokens=20), Lengths([12], [], [40]), Bounds())
  (line,) = size_problems(config)
  assert "config.learner.row_tokens=20 is below the longest sequence" in line and "raise it to at least 48" in line


def test_a_row_that_is_shorter_than_a_demonstration_is_refused_without_a_crash():
  config = choose_sizes(config_of(learner__row_tokens=80), Lengths([12], [], [40]), Bounds())
  (line,) = size_problems(config, longest_demonstration=113)
  assert "config.learner.row_tokens=80 is below the longest demonstration, 113 tokens" in line and "raise it to at least 113" in line


def test_without_a_warm_start_its_row_buckets_stay_open():
  config = config_of(warm_start__num_steps=0)
  assert open_sizes(config) == list(SIZES[:3])
  assert choose_sizes(config, Lengths([9]), Bounds()).warm_start.row_buckets is None


def test_the_lines_are_overrides():
  asked = config_of(learner__row_tokens=160)
  lengths = Lengths([10] * 999 + [100], [12], [40])
  lines = describe_sizes(asked, choose_sizes(asked, lengths, Bounds()), lengths)
  assert lines[0] == "sizes chosen from the data (prompts have 10 to 100 tokens, responses up to 32):"
  assert lines[1] == "  --config.rollout.prompt_buckets=(56,104)" and "row_tokens" not in "".join(lines)
  assert "1 % of the prompts are longer than 10 tokens" in lines[-1] and "'(16,)'" in lines[-1]
  every = choose_sizes(asked, lengths, Bounds())
  assert describe_sizes(every, every, lengths) == []
  # So is what follows from the memory of the devices.
  asked = ConfigDict(every.to_dict() | {"model": every.model.to_dict() | {"remat": "auto"}})
  assert describe_sizes(asked, every, lengths) == ["chosen for the memory of the devices:", "  --config.model.remat=none"]
