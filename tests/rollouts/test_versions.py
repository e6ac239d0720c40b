"""Versions of the weights that drew tokens: from conversations to the lag of a packed batch."""

import json

import numpy as np
import pytest

from jaxrl_llm.learner import packing
from jaxrl_llm.learner.needs import needed_by_critic, needed_by_logprobs, needed_by_step, needed_by_warm_start
from jaxrl_llm.rollouts import carried as carried_lib
from jaxrl_llm.rollouts import cutoff, jobs, trajectories, versions
from jaxrl_llm.rollouts.jobs import Conversation, Draws
from jaxrl_llm.text_types import Turn
from jaxrl_llm.types import StopReason
from tests.rollouts.test_batch import TOKENIZER

EXAMPLES = [{"prompt": "12", "answer": "", "level": 1}]
DRAWS = Draws(max_new_tokens=6, prompt_tokens=8)


def conversation(sequence, drawn_by, written=None):
  size = len(drawn_by)
  written = [True] * size if written is None else written
  turns = (Turn("", "", 0.0, size - 1),)
  ids = list(range(65, 65 + size))
  return Conversation(sequence, (7,), ids, [-1.0] * size, written, turns, StopReason.TOKEN, versions=drawn_by)


def rollouts_of(*talks):
  return jobs.to_rollouts(talks, EXAMPLES, TOKENIZER, draws=DRAWS, prompt_buckets=(4,))[0]


def test_rollouts_keep_the_version_of_each_token_that_the_policy_wrote():
  rollouts = rollouts_of(conversation(0, [3, 3, 9, 5], [True, True, False, True]), conversation(1, [5]))
  assert rollouts.versions.dtype == np.int32
  assert rollouts.versions.tolist() == [[3, 3, -1, 5, -1, -1], [5, -1, -1, -1, -1, -1]]
  assert versions.lags(rollouts, 6).tolist() == [[3, 3, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]]
  unknown = rollouts_of(conversation(0, [3])._replace(versions=()), conversation(1, [5])._replace(versions=()))
  assert unknown.versions is None
  assert versions.of_one_version(unknown, 4).versions.tolist() == [[4, -1, -1, -1, -1, -1]] * 2
  with pytest.raises(ValueError, match="conversation 1: found 2 versions of 1 tokens, expected one of each, or none"):
    rollouts_of(conversation(0, [3]), conversation(1, [5])._replace(versions=[5, 5]))


def test_a_version_that_cannot_be_is_an_error():
  both = rollouts_of(conversation(0, [3, 4]), conversation(1, [5])._replace(versions=()))
  with pytest.raises(ValueError, match=r"^rollouts.versions: found -1 at token 0 of sequence 1, expected 0 to 6"):
    versions.lags(both, 6)
  with pytest.raises(ValueError, match=r"^rollouts.versions: found 4 at token 1 of sequence 0, expected 0 to 3"):
    versions.lags(rollouts_of(conversation(0, [3, 4])), 3)
  with pytest.raises(ValueError, match=r"^rollouts.versions: found None"):
    versions.lags(both._replace(versions=None), 6)


def test_metrics_count_tokens():
  rollouts = rollouts_of(conversation(0, [3, 3, 9, 5], [True, True, False, True]), conversation(1, [5]), conversation(2, [6, 6]))
  row = {name.removeprefix("rollout/staleness/"): x for name, x in versions.metrics(rollouts, 6, most=2).items()}
  assert row == {
    "mean": pytest.approx(8 / 6), "max": 3, "min": 0, "partial_ratio": pytest.approx(1 / 3), "max_partial_span": 2,
    "tokens/0": 2, "tokens/1": 2, "tokens/2": 0, "tokens/3": 2,
  }  # fmt: skip


def test_a_cut_and_a_checkpoint_keep_versions():
  talk = cutoff.cut(conversation(0, [3, 3, 9, 5], [True, True, False, True]), 2)
  assert list(talk.versions) == [3, 3, 9]
  groups = carried_lib.join(carried_lib.NO_GROUPS, EXAMPLES, [1], step=4)._replace(conversations=[talk])
  saved = json.loads(json.dumps(carried_lib.to_json(groups)))
  assert list(carried_lib.from_json(saved).conversations[0].versions) == [3, 3, 9]
  del saved["talks"][0]["versions"]
  assert not carried_lib.from_json(saved).conversations[0].versions


def test_the_lag_reaches_the_rows_of_the_update_that_reads_it_and_no_other():
  rollouts = rollouts_of(conversation(0, [3, 3, 9, 5], [True, True, False, True]), conversation(1, [5]))
  sequences = trajectories.trajectories(rollouts, lags=versions.lags(rollouts, 6))
  options = dict(row_tokens=8, row_buckets=(1,), share_prompts=True)
  batch = packing.pack(sequences, packing.arrange(sequences, **options))
  assert batch.lag.tolist() == [[0, 3, 3, 0, 1, 1, 0, 0]] and batch.lag.dtype == np.int32
  assert needed_by_step(batch, frozenset({"lag"}), adaptive_kl=False).lag is batch.lag
  others = [needed_by_step(batch, frozenset(), adaptive_kl=False), needed_by_critic(batch, frozenset())]
  for other in [*others, needed_by_logprobs(batch), needed_by_warm_start(batch)]:
    assert other.lag is None
  without = trajectories.trajectories(rollouts)
  assert packing.pack(without, packing.arrange(without, **options)).lag is None
