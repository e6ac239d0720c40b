"""Rewards overlapped with generation: the same batch, graded in parts while the rest is drawn."""

import jax
import numpy as np
import pytest

from jaxrl_llm.config.check import config_problems
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import rollout
from jaxrl_llm.sampler import Finished
from jaxrl_llm.types import Rollouts, StopReason
from tests.rollouts.test_partial import SHORT, assert_same_run
from tests.rollouts.test_rollout import EXAMPLES, TERMS, make_rollouts
from tests.runs import run_here, tiny_config

TOKENIZER = ByteTokenizer()


def rollouts_with(reasons: list[int]) -> Rollouts:
  return make_rollouts()._replace(reasons=np.array(reasons, np.int8))


def parts_of(rollouts: Rollouts, *numbers: list[int]) -> list[Finished]:
  return [Finished(np.array(rows), jax.tree.map(lambda x, rows=rows: x[rows], rollouts), 3 * i) for i, rows in enumerate(numbers)]


def test_parts_of_a_stream_give_the_same_batch():
  """In any order of finishing, each sequence is graded once, with its own example."""
  rollouts, graded = rollouts_with([1, 1, 1, 0]), []
  responses = rollout.completions(rollouts, TOKENIZER.decode)
  whole = batch_lib.assess(rollouts, responses, EXAMPLES, rewards=TERMS)

  def watched(completion, example):
    graded.append((completion.text, example["answer"]))
    return TERMS[0].fn(completion, example)

  terms = [WeightedReward("right", watched), TERMS[1]]
  stream = iter(parts_of(rollouts, [2], [3, 0], [1]))
  drawn, seconds = rollout.follow(stream, EXAMPLES, TOKENIZER, rewards=terms, group_size=2)
  # The last part is graded later: nothing is drawn meanwhile.
  assert graded == [("#9", "9"), ("9999", "9"), ("#2", "2")] and seconds > 0
  assert drawn.graded.failed.tolist() == [None, "pending", None, None]
  batch = batch_lib.assess(drawn.rollouts, drawn.responses, drawn.examples, rewards=terms, graded=drawn.graded)
  assert len(graded) == 4 and graded[-1] == ("#3", "2")
  for one, other in zip(jax.tree.leaves(batch), jax.tree.leaves(whole), strict=True):
    assert np.asarray(one).dtype == np.asarray(other).dtype and np.array_equal(one, other)
  assert batch.completions == whole.completions and batch.group_size == 2


def test_unfinished_responses_are_not_graded():
  rollouts = rollouts_with([1, 1, StopReason.UNFINISHED, 0])
  drawn, _ = rollout.follow(iter(parts_of(rollouts, [2, 3], [0, 1])), EXAMPLES, TOKENIZER, rewards=TERMS, group_size=2)
  assert drawn.graded.failed.tolist() == ["pending", "pending", "pending", None]
  kept = rollout.select(drawn, np.array([2, 3]))
  assert kept.graded.failed.tolist() == ["pending", None] and kept.examples == EXAMPLES[1:]
  assert [response.text for response in kept.responses] == ["#9", "9999"]
  np.testing.assert_array_equal(kept.rollouts.tokens, rollouts.tokens[2:])


@pytest.mark.parametrize(
  "changes",
  [
    pytest.param({}, marks=pytest.mark.exhaustive, id="all rows"),
    pytest.param({"rollout.slots": 8}, marks=pytest.mark.slow, id="few rows"),
    pytest.param({"rollout.prompt_buckets": (7, 9)}, marks=pytest.mark.exhaustive, id="two buckets"),
    pytest.param({"mesh.sampler": 2}, marks=pytest.mark.exhaustive, id="own devices"),
  ],
)
def test_a_streamed_run_is_the_same_run(changes, tmp_path):
  devices = 4 if "mesh.sampler" in changes else 1
  for every in (0, 4):
    config = tiny_config(overrides=SHORT | {"rollout.spare_prompts": 0} | changes | {"rollout.report_every": every})
    assert config_problems(config) == []
    run_here(config, tmp_path / str(every), devices=devices)
  assert_same_run(tmp_path / "0", tmp_path / "4")
