"""Rows of the updates of a pod's RL step, from lengths alone."""

import numpy as np
import pytest

from experiments.pod import lengths, packed
from jaxrl_llm.config.fields import base
from jaxrl_llm.learner import packing


def config_of(**changes):
  config = base()
  config.rollout.update(prompt_buckets=(40,), num_prompts=12, group_size=4)
  config.learner.update(dict(row_tokens=256, row_buckets=(8, 64, 16, 24), updates_per_rollout=3) | changes)
  return config


def sequences_of(part, prompt, rng):
  """Yields sequences with responses of the given lengths and a prompt for each group."""
  for group in part:
    ids = rng.integers(1, 99, prompt)
    for length in group:
      mask = np.float32([0] * prompt + [1] * length)
      tokens = np.concatenate([ids, rng.integers(1, 99, length)]).astype(np.int32)
      yield packing.Trajectory(tokens, mask, mask, mask, num_prompt=prompt)


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("mean", [20, 150])
def test_lengths_alone_give_the_rows_of_the_packer(share_prompts, mean):
  config, rng = config_of(share_prompts=share_prompts), np.random.default_rng(0)
  drawn = lengths.draw(rng, mean, num_prompts=12, group_size=4, budget=200)
  updates = packed.updates_of(config, drawn)
  assert len(updates) == 3
  for update, part in zip(updates, drawn.reshape(3, 4, 4), strict=True):
    options = dict(row_tokens=256, share_prompts=share_prompts, group_size=4)
    sequences = list(sequences_of(part, 40, rng))
    layout = packing.arrange(sequences, row_buckets=config.learner.row_buckets, **options)
    batch = packing.pack(sequences, layout)
    used = np.any(batch.segments, axis=1)
    assert update == (used.sum(), layout.shape[0], np.count_nonzero(batch.segments), batch.segments.size)
    assert packed.padding([update]) == pytest.approx(packing.packing_waste([layout]))


def test_the_longest_prompt_needs_most_rows():
  drawn = lengths.draw(np.random.default_rng(0), 60, num_prompts=12, group_size=4, budget=200)
  rows = [sum(x.rows for x in packed.updates_of(config_of(), drawn, prompt_tokens=size)) for size in (5, 20, None)]
  assert rows[0] < rows[1] < rows[2]


def test_buckets_that_are_too_small_are_named():
  with pytest.raises(ValueError, match=r"config.learner.row_buckets: found \(2,\), expected a bucket of at least 1\d for the lengths"):
    packed.updates_of(config_of(row_buckets=(2,)), np.full((12, 4), 200))
